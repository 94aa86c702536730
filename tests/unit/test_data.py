"""Prompts become token ids, and every rollout gets its prompts, from datasets and from streams."""

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset, IterableDataset, arrow_dataset, fingerprint
from tiny import (
    CHAT_TEMPLATE,
    WORDS,
    byte_tokenizer,
    config,
    length_reward,
    llama,
    prompts,
    tokenizer,
)
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from transformers.utils import logging

from trl_ppo_ext import PPOTrainer, data
from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.data import (
    PROMPT_IDS,
    PromptError,
    RolloutSampler,
    Rows,
    StreamedRows,
    row_template_kwargs,
    weighted_rows,
    with_prompts,
)
from trl_ppo_ext.text import encode_completed

CHATS = [
    [{"role": "user", "content": "w1 w2"}],
    [
        {"role": "system", "content": "w3"},
        {"role": "user", "content": "w4"},
        {"role": "assistant", "content": "w5 w6"},
        {"role": "user", "content": "w7"},
    ],
]


def chat_tokenizer(template=CHAT_TEMPLATE):
    return tokenizer([*WORDS, "system", "user", "assistant"], template)


def tokenize_prompts(
    rows, of, name, longest, context=None, template_kwargs=None, vocab_size=None, **settings
):
    args = {"max_prompt_length": None, "overlong_prompts": "error", "other_prompts": {}} | settings
    args = SimpleNamespace(max_completion_length=longest, **args)
    return data.tokenize_prompts(rows, of, name, args, context, template_kwargs, vocab_size)


def dataset(*entries, **columns):
    return Dataset.from_dict({"prompt": list(entries), **columns})


def streamed(rows):
    return rows.to_iterable_dataset()


both_kinds = pytest.mark.parametrize(
    "kind", [lambda rows: rows, streamed], ids=["dataset", "stream"]
)


# ---- tokenizing ----


@both_kinds
def test_text_prompts_become_ids_and_keep_other_columns(kind):
    rows = kind(dataset("w0 w1", "w5", target=[7, 8]))
    first, second = tokenize_prompts(rows, tokenizer(), "train_dataset", 4)
    # words follow four special tokens
    assert first == {"prompt": "w0 w1", "target": 7, PROMPT_IDS: [4, 5]}
    assert second == {"prompt": "w5", "target": 8, PROMPT_IDS: [9]}


def test_formatted_datasets_give_plain_lists():
    rows = dataset("w0 w1", "w5", target=[7, 8]).with_format("torch")
    tokenized = tokenize_prompts(rows, tokenizer(), "train_dataset", 4)
    assert tokenized[0] == {"prompt": "w0 w1", "target": 7, PROMPT_IDS: [4, 5]}


def test_tokens_cached_by_another_version_are_not_read(monkeypatch):
    # see conftest.py
    monkeypatch.setattr(arrow_dataset, "update_fingerprint", fingerprint.update_fingerprint)
    rows = dataset("w0 w1")
    words = tokenizer()

    def cache_key(**others):
        return tokenize_prompts(rows, words, "train_dataset", 4, **others)._fingerprint

    before = cache_key()
    assert cache_key() == cache_key(learning_rate=1e-3) == before
    monkeypatch.setattr("trl_ppo_ext.data.__version__", "0.0.0")
    assert cache_key() != before


@both_kinds
def test_chat_prompts_get_the_template_and_the_opening(kind):
    policy_tokenizer = chat_tokenizer()
    tokenized = list(tokenize_prompts(kind(dataset(*CHATS)), policy_tokenizer, "train_dataset", 4))
    assert [policy_tokenizer.decode(row[PROMPT_IDS]) for row in tokenized] == [
        "<bos> user w1 w2 <bos> assistant",
        "<bos> system w3 <bos> user w4 <bos> assistant w5 w6 <bos> user w7 <bos> assistant",
    ]
    assert tokenized[1]["prompt"] == CHATS[1]


@both_kinds
def test_prompts_may_fill_the_context_minus_the_completion(kind):
    fits = "w1 w2 w3"
    too_long = "w1 w2 w3 w4"
    list(tokenize_prompts(kind(dataset(fits)), tokenizer(), "train_dataset", 5, context=8))
    message = r"Row 1 of `train_dataset`.* 4 tokens.*context of 8 .*max_completion_length=5 leaves 3\. Set `overlong_"
    with pytest.raises(PromptError, match=message):
        list(
            tokenize_prompts(
                kind(dataset(fits, too_long)), tokenizer(), "train_dataset", 5, context=8
            )
        )


@both_kinds
@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (dataset(CHATS[0], []), {}, r"Row 1 .*prompt is empty.*drop it"),
        (dataset("w1", None), {}, r"Row 1 .*text or a list of chat messages, got None"),
        (dataset([3, 4]), {}, r"Row 0 .*text or a list of chat messages, got \[3, 4\]"),
        (
            dataset("w1", "w9"),
            {"vocab_size": 12},
            r"Row 1 .* token 'w9' with id 13, but the model has 12 tokens",
        ),
        (dataset("w1"), {"context": 4}, r"max_completion_length=4 .*context of 4 tokens; lower it"),
        (
            dataset("w1", completions=["x"]),
            {},
            r"`train_dataset` has a column 'completions', but reward functions",
        ),
        (
            Dataset.from_dict({"x": ["w1"], "y": ["w2"]}),
            {},
            r"\"prompt\".*\['x', 'y'\].*rename_column",
        ),
    ],
)
def test_unusable_prompts_raise_with_their_row(kind, rows, settings, message):
    with pytest.raises(PromptError, match=message):
        list(tokenize_prompts(kind(rows), chat_tokenizer(), "train_dataset", 4, **settings))


def test_unusable_datasets_raise():
    transformed = dataset("w1")
    transformed.set_transform(lambda batch: batch)
    for rows, message in (
        (dataset(*CHATS), r"Row 0 .*no chat template; set `tokenizer.chat_template`"),
        (dataset(), r"`train_dataset` is empty.*at least one prompt"),
        (transformed, r"`train_dataset` has a transform .*use `dataset.map`"),
    ):
        with pytest.raises(PromptError, match=message):
            tokenize_prompts(rows, tokenizer(), "train_dataset", 4)
    with pytest.raises(TypeError, match=r"`eval_dataset` must be .*a list of dicts, got list"):
        tokenize_prompts(["w1"], tokenizer(), "eval_dataset", 4)


TOOLS = [{"type": "function", "function": {"name": "w8"}}]
TOOL_CALL = {"type": "function", "function": {"name": "w8", "arguments": {}}}


@both_kinds
def test_tools_and_template_kwargs_of_a_row_reach_the_template(kind):
    template = "{% for x in tools or [] %}{{ x['function']['name'] }} {% endfor %}" + CHAT_TEMPLATE
    policy_tokenizer = chat_tokenizer(template + "{% if thinking %}{{ 'w9' }}{% endif %}")
    columns = {
        "tools": [None, TOOLS],
        "chat_template_kwargs": [{"thinking": True}, {"thinking": False}],
    }
    rows = dataset(CHATS[0], CHATS[0], **columns)
    given = tokenize_prompts(
        kind(rows), policy_tokenizer, "train_dataset", 4, None, {"thinking": False}
    )
    one, two = [row[PROMPT_IDS] for row in given]
    assert (one[-1], two[0]) == (13, 12) and one[:-1] == two[1:]


def test_tools_of_a_row_beside_those_of_the_trainer_are_said_to_be_dropped(caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    logging.get_logger("trl_ppo_ext").warning_once.cache_clear()
    given = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    assert row_template_kwargs({"tools": TOOLS}, given) == given
    assert row_template_kwargs({"chat_template_kwargs": {"tools": TOOLS}}, given) == given
    assert "The tools of a row are not shown" in caplog.text


@both_kinds
def test_template_kwargs_of_a_row_may_be_json(kind):
    policy_tokenizer = chat_tokenizer(CHAT_TEMPLATE + "{% if thinking %}{{ 'w9' }}{% endif %}")
    texts = ['{"thinking": true}', '{"thinking": false}', "null", "", None]
    rows = dataset(*[CHATS[0]] * len(texts), chat_template_kwargs=texts)
    given = tokenize_prompts(kind(rows), policy_tokenizer, "train_dataset", 4)
    thinking, *others = [row[PROMPT_IDS] for row in given]
    assert thinking[-1] == 13 and others == [thinking[:-1]] * 4


@both_kinds
@pytest.mark.parametrize(
    ("entries", "got"),
    [
        (["{}", "{thinking"], r"'\{thinking' \(str\)"),
        (["{}", '["thinking"]'], "a list"),
        (["{}", "3"], r"3 \(int\)"),
        ([[], ["thinking"]], "a list"),
    ],
)
def test_wrong_template_kwargs_of_a_row_name_the_row(kind, entries, got):
    rows = dataset(CHATS[0], CHATS[0], chat_template_kwargs=entries)
    message = rf"Row 1 of `train_dataset`: `chat_template_kwargs` must be .*got {got}; use"
    with pytest.raises(PromptError, match=message):
        list(tokenize_prompts(kind(rows), chat_tokenizer(), "train_dataset", 4))


def test_message_without_content_needs_tool_calls():
    called = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    template = CHAT_TEMPLATE.replace("m['content']", "(m['content'] or '')")
    chat = [{"role": "user", "content": "w1"}, called, {"role": "tool", "content": "w2"}]
    rows = streamed(Dataset.from_list([{"prompt": chat}]))
    assert list(tokenize_prompts(rows, chat_tokenizer(template), "train_dataset", 4))
    for silent in (called | {"tool_calls": None}, {"role": "user", "content": None}):
        with pytest.raises(
            PromptError, match=r"Row 0 .*Message 1 must be .*\"content\" that are text"
        ):
            list(
                tokenize_prompts(
                    dataset([chat[0], silent]), chat_tokenizer(template), "train_dataset", 4
                )
            )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% "
        "endfor %}{% endfor %}",
        # as Llama 3: it would write Python code
        "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}",  # it raises
        # as Qwen 3: it writes nothing
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% endif %}"
        "{% endfor %}",
    ],
)
def test_parts_of_a_message_are_read_by_any_template(template):
    def ids_of(*parts):
        rows = dataset([{"role": "user", "content": list(parts)}])
        return tokenize_prompts(rows, chat_tokenizer(template), "train_dataset", 4)[0][PROMPT_IDS]

    assert ids_of({"type": "text", "text": "w1"}, {"type": "text", "text": " w2"}) == [5, 6]
    with pytest.raises(
        PromptError, match=r"Row 0 .*of the type 'text' .*not supported\), got .*'cat.png'"
    ):
        ids_of(
            {"type": "text", "text": "w1", "image": None},
            {"type": "image", "image": "cat.png", "text": None},
        )


def test_message_of_the_assistant_at_the_end_is_continued():
    parts = [{"type": "text", "text": "w"}, {"type": "text", "text": "1"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "w2 w3"}]
    policy_tokenizer = chat_tokenizer()
    [row] = tokenize_prompts([{"prompt": chat}], policy_tokenizer, "train_dataset", 4)
    assert policy_tokenizer.decode(row[PROMPT_IDS]) == "<bos> user w1 <bos> assistant w2 w3"
    answer = [{"role": "assistant", "content": " w4"}]
    texts = [
        policy_tokenizer.decode(encode_completed(x, answer, policy_tokenizer))
        for x in (chat, chat[:1])
    ]
    assert texts == ["<bos> user w1 <bos> assistant w2 w3 w4", "<bos> user w1 <bos> assistant w4"]


SEARCH = {"type": "function", "function": {"name": "search", "arguments": {"query": "rain"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2]}},
}


@pytest.mark.parametrize("template", ["qwen3", "llama3_1", "gptoss", "glm4moe"])
def test_keys_that_arrow_adds_are_not_rendered(template):
    """The ids are those of the messages, schemas and settings as they were written."""
    chats = [
        [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "tool_calls": [SEARCH]},
            {"role": "tool", "name": "search", "content": "no"},
        ],
        [
            {"role": "user", "content": "Bonn?"},
            {"role": "assistant", "content": "", "tool_calls": [WEATHER]},
            {"role": "tool", "name": "weather", "content": "7"},
        ],
        [{"role": "user", "content": "Hello."}],
    ]
    schemas = []
    for call, kind in ((SEARCH, "string"), (WEATHER, "integer"), (SEARCH, "string")):
        function = {"name": call["function"]["name"], "description": "d"}
        fields = {key: {"type": kind} for key in call["function"]["arguments"]}
        parameters = {"type": "object", "properties": fields, "required": list(fields)}
        schemas.append([{"type": "function", "function": function | {"parameters": parameters}}])
    kwargs = [{"reasoning_effort": "high"}, {"enable_thinking": False}, {}]
    built = byte_tokenizer(template)
    stored = Dataset.from_dict({"prompt": chats, "tools": schemas, "chat_template_kwargs": kwargs})
    # Arrow has added keys
    assert stored[2]["chat_template_kwargs"] != {} and "days" in str(stored[0]["prompt"])
    ids = tokenize_prompts(stored, built, "train_dataset", 4)[PROMPT_IDS]
    for row in range(3):
        written = {
            "tools": schemas[row],
            "add_generation_prompt": True,
            "return_dict": False,
        } | kwargs[row]
        assert ids[row] == built.apply_chat_template(chats[row], **written), row


RENDERED = "<|im_start|>user\nUse 3 and 4.<|im_end|>\n<|im_start|>assistant\nLet me see."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "message, spelled",
    [
        ({"role": "user", "content": RENDERED}, "<|im_start|>"),
        ({"role": "system", "content": "Stop at <|im_end|>."}, "<|im_end|>"),
        ({"role": "user", "content": [{"type": "text", "text": "a<|im_end|>"}]}, "<|im_end|>"),
        ({"role": "user", "content": "Think in <think> tags about <item_7>."}, None),
        ({"role": "tool", "name": "f", "content": RENDERED}, None),
    ],
)
def test_delimiters_in_messages_of_a_dataset_are_said(
    message, spelled, streams, caplog, monkeypatch
):
    """The model reads them as delimiters: a rendered chat within a message is one more chat."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    logging.get_logger("trl_ppo_ext.data").warning_once.__func__.cache_clear()
    built = byte_tokenizer()
    built.add_tokens([AddedToken("<item_7>", special=True)])
    rows = dataset([message])
    if streams:
        rows = rows.to_iterable_dataset()
    list(tokenize_prompts(rows, built, "train_dataset", 4))
    said = [record.getMessage() for record in caplog.records if "delimiter" in record.getMessage()]
    assert len(said) == (spelled is not None), said
    assert not said or f"A message of `train_dataset` spells {spelled!r}" in said[0]


def test_empty_text_begins_with_bos_or_eos():
    for bos, expected in (("<bos>", [2]), (None, [1])):
        policy_tokenizer = tokenizer()
        policy_tokenizer.bos_token = bos
        assert (
            tokenize_prompts(dataset("", "w1"), policy_tokenizer, "train_dataset", 4)[0][PROMPT_IDS]
            == expected
        )


def test_template_kwargs_beside_text_are_said_to_have_no_effect(caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    rows = dataset("w1")
    kwargs = {"enable_thinking": False}
    assert tokenize_prompts(rows, tokenizer(), "train_dataset", 4, None, kwargs)[0][PROMPT_IDS] == [
        5
    ]
    assert "`chat_template_kwargs` has no effect on prompts of text" in caplog.text


class Tasks(torch.utils.data.Dataset):
    """Rows with entries of different types, as those of reasoning-gym."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        entry = {
            "answer": str(index),
            "metadata": [{"size": 3}, {"word": "w1", "size": "large"}][index],
        }
        return {"prompt": f"w{index}", "item": entry}


def test_map_style_dataset_of_torch_keeps_its_rows():
    rows = tokenize_prompts(Tasks(), tokenizer(), "train_dataset", 4)
    assert list(rows) == [Tasks()[index] | {PROMPT_IDS: [4 + index]} for index in range(2)]


def test_text_and_chat_in_one_column_raise():
    def rows():
        yield from ({"prompt": "w1"}, {"prompt": CHATS[0]})

    mixed = tokenize_prompts(
        IterableDataset.from_generator(rows), chat_tokenizer(), "train_dataset", 4
    )
    with pytest.raises(PromptError, match=r"Row 1 .*all text or all chat messages"):
        list(mixed)


def adding(single):
    """A tokenizer that adds special tokens to every text."""
    policy_tokenizer = tokenizer()
    policy_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return policy_tokenizer


def test_text_gets_one_bos_and_no_eos():
    for single, text, expected in (
        ("<bos> $A <eos>", "w0 w1", [2, 4, 5]),
        ("<bos> $A <eos>", "<bos> w0 w1", [2, 4, 5]),
        ("<bos> $A", "w0 <eos>", [2, 4, 1]),  # of the text
        ("$A", "<bos> w0", [2, 4]),
    ):
        rows = tokenize_prompts(dataset(text), adding(single), "train_dataset", 4)
        assert rows[0][PROMPT_IDS] == expected, (single, text)


# ---- prompts that are too long ----


@both_kinds
def test_overlong_prompts_are_truncated_from_the_left(kind):
    rows = kind(dataset("w0 w1 w2", "w3", "w4 w5 w6", "w7 w8", target=[0, 1, 2, 3]))

    def rest(overlong, max_prompt_length=2, context=None):
        settings = {"max_prompt_length": max_prompt_length, "overlong_prompts": overlong}
        tokenized = tokenize_prompts(rows, tokenizer(), "train_dataset", 4, context, **settings)
        return [(row["target"], row[PROMPT_IDS]) for row in tokenized]

    assert rest("truncate") == [(0, [5, 6]), (1, [7]), (2, [9, 10]), (3, [11, 12])]
    assert rest("truncate", None, 6) == rest("truncate")  # what the context leaves
    assert len(rest("error", 3)) == 4
    with pytest.raises(
        PromptError,
        match=r"Row 0 .*3 tokens, but max_prompt_length=2.*`overlong_prompts='truncate'`",
    ):
        rest("error")


# ---- rollouts of prompts ----


def plan(prompts_, generations=1, repeats=1):
    """Plan with one micro-batch per epoch, so that a rollout is repeated once per epoch."""
    return BatchPlan(prompts_ * generations, num_ppo_epochs=repeats, num_generations=generations)


def sampler(rows, prompts_, generations, repeats, shuffle=True, seed=0, epoch=0):
    sizes = plan(prompts_, generations, repeats)
    steps = -(-rows // prompts_) * sizes.optimizer_steps  # of an epoch
    return RolloutSampler(rows, sizes, shuffle, seed, lambda: (epoch * steps, (epoch + 1) * steps))


def test_sampler_order_depends_only_on_seed_and_epoch():
    def order(**kwargs):
        return list(sampler(30, 6, 1, 1, **kwargs))

    assert order(seed=3, epoch=2) == order(seed=3, epoch=2)
    assert order(epoch=0) != order(epoch=1)
    assert order(seed=0) != order(seed=1)
    assert order(shuffle=False) == list(range(30)) == order(shuffle=False, epoch=5)
    state = torch.manual_seed(1).get_state()
    first = order()
    assert torch.equal(torch.get_rng_state(), state)  # the global generator neither moves ...
    torch.manual_seed(2)
    assert order() == first  # ... nor draws


def test_sampler_takes_its_epoch_from_the_steps_so_far():
    sizes = plan(6, repeats=2)
    progress = [0, 100]
    built = RolloutSampler(30, sizes, True, 0, lambda: progress)
    first = list(built)
    progress[0] = 9  # within the last of five rollouts, two steps each
    assert list(built) == first
    progress[0] = 10
    assert list(built) != first
    progress[0] = 100
    assert list(built) == []  # the run is over


def test_reading_the_rows_of_a_large_rollout_is_fast(monkeypatch):
    """512 completions of 250 tokens, micro-batches of 8, four epochs: 256 batches are asked for,
    and pinned."""
    rows = Dataset.from_dict({PROMPT_IDS: [list(range(250))] * 512, "prompt": ["w1 " * 250] * 512})
    sizes = BatchPlan(8, gradient_accumulation_steps=64, num_ppo_epochs=4)
    pins = []
    monkeypatch.setattr(Rows, "pin_memory", lambda self: pins.append(self) or self)
    loader = DataLoader(
        range(512), 512, sampler=RolloutSampler(512, sizes, True, 0), collate_fn=Rows
    )
    start = time.perf_counter()
    batches = [send_to_device(pin_memory(batch), torch.device("cpu")) for batch in loader]
    numbers = sorted(set(batches[0]))
    read = rows.__getitems__(numbers)
    assert time.perf_counter() - start < 0.2
    assert len(batches) == len(pins) == sizes.micro_steps == 256 and all(
        batch == batches[0] for batch in batches
    )
    assert numbers == list(range(512)) and len(read) == 512


# ---- curricula ----


def drawn(weights, prompts_, generations=1, seed=0, played=None):
    played = torch.zeros(2, len(weights), dtype=torch.float64) if played is None else played
    return weighted_rows(
        lambda episodes, scores: weights, played, plan(prompts_, generations), seed
    )


@pytest.mark.parametrize("weights", [[1.0, 0.0, 3.0, 0.5, 2.5, 0.0], np.arange(40), torch.ones(12)])
def test_rows_are_drawn_as_often_as_their_weights(weights):
    share = torch.as_tensor(weights).double() / sum(weights)
    counts = torch.stack(
        [
            torch.tensor(drawn(weights, 12, seed=n)).bincount(minlength=len(share))
            for n in range(400)
        ]
    )
    assert ((counts - 12 * share).abs() < 1).all()  # rounded up or down, in every rollout
    torch.testing.assert_close(counts.double().mean(0), 12 * share, rtol=0, atol=0.1)


def test_largest_random_number_draws_the_last_row(monkeypatch):
    """In single precision it would end beyond it."""
    monkeypatch.setattr(
        torch,
        "rand",
        lambda size, dtype=torch.float32, **kwargs: torch.tensor(1 - 2.0**-24, dtype=dtype),
    )
    assert sorted(drawn(torch.ones(512), 512)) == list(range(512))


def test_neighboring_rows_are_drawn_independently():
    """Rows of two environments alternate; no rollout has one of them only."""
    parities = [sum(row % 2 for row in drawn(torch.ones(64), 16, seed=seed)) for seed in range(100)]
    assert min(parities) > 0 and max(parities) < 16 and 7 < sum(parities) / 100 < 9


def test_drawn_rows_depend_only_on_weights_and_seed():
    state = torch.get_rng_state()
    first = drawn(torch.arange(30), 8, seed=1)
    torch.manual_seed(5)
    assert drawn(torch.arange(30), 8, seed=1) == first != drawn(torch.arange(30), 8, seed=2)
    assert drawn(torch.arange(30), 8, 2, seed=1) == [row for row in first for _ in range(2)]
    torch.set_rng_state(state)


def test_curriculum_gets_episodes_and_mean_scores():
    played = torch.tensor([[0.0, 4.0, 2.0], [0.0, 3.0, -1.0]], dtype=torch.float64)

    def learnable(episodes, scores):
        assert (episodes.tolist(), scores.tolist()) == ([0, 4, 2], [0, 0.75, -0.5])
        episodes += 1  # of a copy
        return [0, 0, 1]

    assert weighted_rows(learnable, played, plan(2), 0) == [2, 2] and played[0, 0] == 0


@pytest.mark.parametrize(
    "weights", [[1.0, 1.0], [1.0, -1.0, 1.0], [0, 0, 0], [1.0, math.nan, 1.0], [math.inf, 1, 1]]
)
def test_wrong_weights_of_a_curriculum_raise(weights):
    with pytest.raises(
        ValueError,
        match=r"`curriculum` must return a weight of at least 0 for each of the 3 rows, .*got",
    ):
        weighted_rows(lambda *_: weights, torch.zeros(2, 3), plan(2), 0)


# ---- streams ----


def stream_of(rows, prompts_):
    return StreamedRows(streamed(Dataset.from_dict({"row": list(range(rows))})), prompts_)


def test_stream_equals_the_unshuffled_sampler():
    for rows, prompts_ in itertools.product([1, 2, 5, 12, 13], [1, 4, 6]):
        stream = stream_of(rows, prompts_)
        expected = list(sampler(rows, prompts_, 1, 1, shuffle=False))
        for epoch in range(2):
            numbers = range(epoch * len(expected), (epoch + 1) * len(expected))
            read = [row["row"] for row in stream.__getitems__(list(numbers))]
            assert read == expected, (rows, prompts_, epoch)


def test_stream_skips_rows_of_finished_rollouts():
    """A resumed run starts at a later number; ranks read only their own numbers."""
    stream = stream_of(10, 5)
    assert [row["row"] for row in stream.__getitems__([3, 4, 7])] == [3, 4, 7]
    assert [row["row"] for row in stream.__getitems__([8, 13])] == [8, 3]


def test_shuffled_stream_changes_its_order_per_epoch():
    rows = streamed(Dataset.from_dict({"row": list(range(30))})).shuffle(seed=0, buffer_size=30)
    once, again = (
        [row["row"] for row in StreamedRows(rows, 6).__getitems__(list(range(60)))]
        for _ in range(2)
    )
    assert once == again and once[:30] != once[30:]
    assert sorted(once[:30]) == sorted(once[30:]) == list(range(30))


def test_prompts_of_later_rows_of_a_stream_are_kept():
    rows = [{"level": 0}, {"level": 1, "prompt": "w1"}]
    stream = with_prompts(IterableDataset.from_generator(lambda: iter(rows)), tokenizer(), 2)
    assert [row["prompt"] for row in stream] == [tokenizer().bos_token, "w1"]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(streamed(prompts()).filter(lambda row: False), id="columns known"),
        pytest.param(IterableDataset.from_generator(lambda: iter(())), id="columns unknown"),
    ],
)
def test_empty_stream_raises(rows):
    with pytest.raises(PromptError, match="at least one prompt"):
        StreamedRows(tokenize_prompts(rows, tokenizer(), "train_dataset", 4), 3).__getitems__([0])


@both_kinds
def test_trainer_batch_holds_the_row_numbers_of_a_rollout(tmp_path, kind):
    sizes = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
    }
    sizes |= {"num_ppo_epochs": 2, "num_generations": 2}
    args = config(tmp_path, **sizes, shuffle_dataset=False, max_steps=12)
    rows = prompts(16)
    trainer = PPOTrainer(llama(), length_reward, args, kind(rows), processing_class=tokenizer())
    trainer.state.max_steps = args.max_steps
    batches = list(trainer.get_train_dataloader())
    # 16 prompts, 6 in a rollout; 2 epochs × 2 minibatches × 2 micro-batches
    assert len(batches) == 3 * 8
    for position, batch in enumerate(batches):
        rollout = position // 8
        expected = [(6 * rollout + k) for k in range(6) for _ in range(2)]
        assert [number % 16 for number in batch] == [number % 16 for number in expected]
        if position % 8 == 0:
            unique = sorted(set(batch))
            read = trainer._train_rows.__getitems__(unique)
            assert [row["prompt"] for row in read] == [
                rows[number % 16]["prompt"] for number in unique
            ]
