"""Supervised rows of PPO-ptx: learned tokens, and the rows of each rollout."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny import CHAT_TEMPLATE, WORDS, llama, tokenizer
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from trl_ppo_ext.data.prompts import PROMPT_IDS, PromptError
from trl_ppo_ext.data.supervised import PTXSampler, tokenize_ptx
from trl_ppo_ext.ppo.batch_plan import BatchPlan

EOS = 1
USER, ASSISTANT = 32, 33  # words follow four special tokens
BOS = 2
MESSAGES = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
CHAT_IDS = [BOS, USER, 5, 6, BOS, ASSISTANT, 7]


def chat_tokenizer(template=CHAT_TEMPLATE):
    return tokenizer([*WORDS, "user", "assistant"], template)


def pairs_of_letters():
    """Letters, of which a and b merge."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "a", "b", "c", "ab"])}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def enclosing_tokenizer():
    """Puts BOS before and EOS after every text."""
    enclosing = tokenizer()
    enclosing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return enclosing


def rows(*entries, **columns):
    """Rows of a form: texts, pairs of prompt and completion, or the columns as they are."""
    if columns:
        return Dataset.from_dict(columns)
    if isinstance(entries[0], tuple):
        return Dataset.from_list([{"prompt": prompt, "completion": completion} for prompt, completion in entries])
    return Dataset.from_dict({"text": list(entries)})


def tokenized(dataset, policy_tokenizer=None, max_length=64, **kwargs):
    result = tokenize_ptx(dataset, policy_tokenizer or tokenizer(), max_length, **kwargs)
    assert set(result.column_names) == {PROMPT_IDS, "completion_ids"}
    return [(row[PROMPT_IDS], row["completion_ids"]) for row in result]


# ---- learned tokens ----


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    logging.Logger.warning_once.cache_clear()
    return caplog


def test_text_is_learned_from_its_second_token_to_eos():
    assert tokenized(rows("w0 w1 w2", "w3")) == [([4], [5, 6, EOS]), ([7], [EOS])]


def test_completion_is_learned_to_eos_and_its_prompt_is_not():
    assert tokenized(rows(("w0 w1", " w2 w3"), ("w4", " w5"))) == [([4, 5], [6, 7, EOS]), ([8], [9, EOS])]


def test_eos_is_not_added_twice():
    assert tokenized(rows("w0 w1 <eos>")) == [([4], [5, EOS])]
    assert tokenized(rows(("w0", " w1<eos>"))) == [([4], [5, EOS])]
    assert tokenized(rows(("w0 <eos>", " w1"))) == [([4, EOS], [5, EOS])]  # one within is none at the end


def test_tokenizer_with_eos_ends_only_the_completion(warnings):
    assert tokenized(rows(("w0 w1", " w2")), enclosing_tokenizer()) == [([BOS, 4, 5], [6, EOS])]
    assert tokenized(rows("w0"), enclosing_tokenizer()) == [([BOS], [4, EOS])]
    assert "PTX" not in warnings.text


def test_tokenizer_without_eos_adds_none():
    endless = tokenizer()
    endless.eos_token = None
    assert tokenized(rows("w0 w1"), endless) == [([4], [5])]


def test_messages_are_learned_from_the_second_token():
    assert tokenized(rows(messages=[MESSAGES]), chat_tokenizer()) == [(CHAT_IDS[:1], CHAT_IDS[1:])]


def test_chat_completion_is_learned_after_the_opening():
    assert tokenized(rows((MESSAGES[:1], MESSAGES[1:])), chat_tokenizer()) == [(CHAT_IDS[:6], CHAT_IDS[6:])]


def test_template_without_the_opening_moves_the_boundary(warnings):
    opening_with_a_thought = CHAT_TEMPLATE.replace("'<bos> assistant '", "'<bos> assistant w9 '")
    found = tokenized(rows((MESSAGES[:1], MESSAGES[1:])), chat_tokenizer(opening_with_a_thought))
    assert "All tokens from the first difference" in warnings.text
    assert found == [(CHAT_IDS[:6], CHAT_IDS[6:])]


def test_tokens_merged_across_the_boundary_are_learned(warnings):
    found = tokenized(rows(("ca", "bc"), ("a", "bc")), pairs_of_letters())
    assert warnings.text.count("tokens merge") == 1
    assert found == [([4], [5, 4, EOS]), ([5], [4, EOS])]  # but never the first token


def test_boundary_between_tokens_does_not_warn(warnings):
    assert tokenized(rows(("ab", "c")), pairs_of_letters()) == [([5], [4, EOS])]
    assert tokenized(rows((MESSAGES[:1], MESSAGES[1:])), chat_tokenizer())
    assert "PTX" not in warnings.text


def test_template_arguments_and_tools_reach_the_template():
    template = (
        CHAT_TEMPLATE + "{% if thinking %}w9 {% endif %}{% for tool in tools or [] %}{{ tool.name }} {% endfor %}"
    )
    plain, thinking, own, tools = (
        tokenized(rows(messages=[MESSAGES], **columns), chat_tokenizer(template), chat_template_kwargs=kwargs)[0][1]
        for columns, kwargs in [
            ({}, None),
            ({}, {"thinking": True}),
            ({"chat_template_kwargs": [{"thinking": False}]}, {"thinking": True}),
            ({"tools": ['[{"name": "w5"}, {"name": "w6"}]']}, None),
        ]
    )
    assert thinking == [*plain, 13]
    assert own == plain
    assert tools == [*plain, 9, 10]


def test_longer_rows_are_truncated_at_the_right():
    assert tokenized(rows("w0 w1 w2 w3", "w0 w1", "w0"), max_length=3) == [
        ([4], [5, 6]),
        ([4], [5, EOS]),
        ([4], [EOS]),
    ]
    assert tokenized(rows(("w0 w1", " w2 w3")), max_length=3) == [([4, 5], [6])]
    assert tokenized(rows(messages=[MESSAGES]), chat_tokenizer(), max_length=4) == [(CHAT_IDS[:1], CHAT_IDS[1:4])]


def test_other_columns_and_formats_do_not_matter():
    dataset = rows(text=["w0 w1"] * 2, note=[1, 2], prompt_ids=["x", "y"]).with_format("numpy")
    assert tokenized(dataset) == [([4], [5, EOS])] * 2


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(rows("w0 w1 w2 w3 w4 w5 w6", "w3 <eos>"), id="text"),
        pytest.param(rows(("w0 w1", " w2 w3 w4 w5 w6"), ("w4", " w5<eos>")), id="prompt and completion"),
        pytest.param(rows((MESSAGES[:1], MESSAGES[1:]), (MESSAGES[:1], MESSAGES[1:] * 2)), id="chat completion"),
        pytest.param(rows(messages=[MESSAGES, MESSAGES * 2]), id="messages"),
    ],
)
def test_rows_equal_those_of_sft(dataset, tmp_path):
    args = SFTConfig(str(tmp_path), max_length=8, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True)
    trainer = SFTTrainer(llama(34), args, train_dataset=dataset, processing_class=chat_tokenizer())
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(dataset))])
    for index, (prompt_ids, completion_ids) in enumerate(tokenized(dataset, chat_tokenizer(), 8)):
        real = batch["labels"][index] != -100
        real[0] = False  # nothing predicts the first token
        assert batch["input_ids"][index][real].tolist() == completion_ids
        assert batch["input_ids"][index].tolist()[: len(prompt_ids + completion_ids)] == prompt_ids + completion_ids


# ---- unusable data ----


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        pytest.param(rows("w1", ""), r"Row 1 .*text must not be empty.*; drop the row", id="empty text"),
        pytest.param(rows("w1", " \n"), r"Row 1 .*text must not be empty", id="blank text"),
        pytest.param(rows("w1", None), r"Row 1 .*text must not be empty.*got \[None\]", id="missing text"),
        pytest.param(
            rows(("w1", " w2"), ("w1", "")), r"Row 1 .*prompt and completion must not", id="empty completion"
        ),
        pytest.param(rows(("", "w2")), r"Row 0 .*must not be empty", id="empty prompt"),
        pytest.param(rows((None, "w2")), r"Row 0 .*must not be empty", id="missing prompt"),
        pytest.param(rows(("w1", MESSAGES[1:])), r"all text or all chat messages, got", id="mixed"),
        pytest.param(rows((MESSAGES[:1], "w1")), r"all text or all chat messages, got", id="mixed too"),
        pytest.param(rows(messages=[MESSAGES, []]), r"Row 1 .*messages must not be empty", id="empty messages"),
        pytest.param(rows(messages=[[{"content": "w1"}]]), r"must be text or a list of chat", id="no role"),
        pytest.param(rows(messages=[[{"role": "user", "content": None}]]), r"\"content\" that are text", id="no text"),
        pytest.param(rows(question=["w1"], note=["w2"]), r"needs .*\"text\".*got \['note', 'question'\]", id="none"),
        pytest.param(rows(prompt=["w1"]), r'needs the columns "prompt" and "completion", or', id="half"),
        pytest.param(
            rows(text=["w1"], messages=[MESSAGES]),
            r"only one .*select_columns\(\['me",
            id="several",
        ),
        pytest.param(rows(text=[]), r"dataset is empty; pass at least one row", id="no rows"),
        pytest.param(rows("w1").to_iterable_dataset(), r"Dataset.from_list\(list\(stream.take\(n\)\)\)", id="stream"),
        pytest.param(DatasetDict(train=rows("w1")), r'got DatasetDict.*dataset\["train"\]', id="splits"),
        pytest.param([{"text": "w1"}], r"got list; use `Dataset.from_list\(rows\)`", id="list"),
    ],
)
def test_unusable_data_raises_with_its_row_and_a_remedy(dataset, message):
    with pytest.raises(PromptError, match=message):
        tokenize_ptx(dataset, chat_tokenizer(), 64)


def test_errors_count_rows_over_the_whole_dataset():
    with pytest.raises(PromptError, match="Row 2500 of the PTX dataset"):
        tokenize_ptx(rows(*["w1"] * 2500, ""), tokenizer(), 64)


def test_messages_need_a_chat_template():
    with pytest.raises(PromptError, match=r"Row 0 .*no chat template; set `tokenizer.chat_template`"):
        tokenize_ptx(rows(messages=[MESSAGES]), chat_tokenizer(None), 64)


def test_errors_of_the_template_are_quoted():
    picky = chat_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match=r"Row 0 .*\(roles must alternate\) for"):
        tokenize_ptx(rows(messages=[MESSAGES]), picky, 64)


def test_too_long_prompt_raises_with_its_lengths():
    fits, too_long = ("w1 w2 w3", " w4"), ("w1 w2 w3 w4", " w5")
    assert tokenized(rows(fits), max_length=4) == [([5, 6, 7], [8])]
    with pytest.raises(PromptError) as caught:
        tokenize_ptx(rows(fits, too_long), tokenizer(), 4)
    for part in ("Row 1", "prompt has 4 tokens", "max_length=4", "2 tokens of its completion", "above 4"):
        assert part in str(caught.value)


def test_row_of_one_token_raises():
    endless = tokenizer()
    endless.eos_token = None
    with pytest.raises(PromptError, match=r"Row 1 .*none to learn after the first 1; drop or lengthen it"):
        tokenize_ptx(rows("w0 w1", "w0"), endless, 64)


def test_template_without_the_completion_raises():
    silent = chat_tokenizer("{{ '<bos> ' + messages[0]['content'] }}")
    with pytest.raises(PromptError, match="none to learn"):
        tokenize_ptx(rows((MESSAGES[:1], MESSAGES[1:])), silent, 64)


def test_length_without_room_to_learn_raises():
    with pytest.raises(PromptError, match=r"max_length=1 leaves none"):
        tokenize_ptx(rows("w0 w1"), tokenizer(), 1)


# ---- rows of a rollout ----


def numbered(count):
    """Rows that carry their number in their first token, and in their length."""
    return Dataset.from_list(
        [{PROMPT_IDS: [100 + row] * (1 + row % 2), "completion_ids": [row] * (1 + row % 3)} for row in range(count)]
    )


def sampler(count=12, rows_per_process=3, process_index=0, num_processes=1, seed=0):
    plan = BatchPlan(rows_per_process, num_processes=num_processes)
    args = SimpleNamespace(process_index=process_index, prompt_seed=seed, device="cpu")
    return PTXSampler(numbered(count) if isinstance(count, int) else count, plan, args, pad_token_id=0)


def drawn(source, rollouts):
    """The numbers of the rows of each rollout."""
    return [[int(row) - 100 for row in source.draw(rollout).prompt_ids[:, -1]] for rollout in rollouts]


def flat(lists):
    return [row for each in lists for row in each]


def test_no_row_repeats_before_all_are_drawn():
    for rows_per_process, num_processes in ((3, 1), (5, 1), (2, 3), (4, 2)):
        sources = [sampler(12, rows_per_process, index, num_processes) for index in range(num_processes)]
        taken = [row for rollout in range(30) for source in sources for row in drawn(source, [rollout])[0]]
        passes = [taken[start : start + 12] for start in range(0, len(taken) - 11, 12)]
        assert all(sorted(each) == list(range(12)) for each in passes)
        assert len({tuple(each) for each in passes}) == len(passes)  # every pass in another order


def test_each_pass_is_the_permutation_of_its_seed():
    taken = flat(drawn(sampler(10, 4, seed=7), range(5)))
    for number in range(2):
        expected = torch.randperm(10, generator=torch.Generator().manual_seed(7 + number)).tolist()
        assert taken[10 * number : 10 * number + 10] == expected


def test_processes_share_the_draw_of_one_process():
    whole = drawn(sampler(11, 6), range(8))
    for num_processes in (2, 3):
        sources = [sampler(11, 6 // num_processes, index, num_processes) for index in range(num_processes)]
        assert [flat(parts) for parts in zip(*(drawn(source, range(8)) for source in sources))] == whole


def test_draw_depends_only_on_seed_and_rollout():
    forwards, backwards = drawn(sampler(), range(9)), drawn(sampler(), reversed(range(9)))
    assert forwards == backwards[::-1]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert drawn(sampler(), [5]) == forwards[5:6]
    assert torch.equal(torch.get_rng_state(), before)  # nor does it disturb the run's own draws
    assert drawn(sampler(seed=1000), range(9)) != forwards


@pytest.mark.parametrize("count", [1, 3, 4])
def test_small_dataset_is_drawn_evenly(count):
    for taken in drawn(sampler(count, 8), range(4)):
        assert len(taken) == 8
        assert max(map(taken.count, range(count))) - min(map(taken.count, range(count))) <= 1 + (8 % count > 0)
    whole = flat(drawn(sampler(count, 8), range(3)))
    assert [whole.count(row) for row in range(count)] == [math.ceil(24 / count)] * count


def test_draw_has_the_tokens_of_its_rows():
    source = sampler(6, 6)
    found, dataset = source.draw(0), numbered(6)
    for position, row in enumerate(drawn(source, [0])[0]):
        prompt, completion = found.prompt_lengths[position], found.completion_lengths[position]
        assert found.prompt_ids[position, -prompt:].tolist() == dataset[row][PROMPT_IDS]
        assert found.completion_ids[position, :completion].tolist() == dataset[row]["completion_ids"]
        assert (found.prompt_ids[position, :-prompt] == 0).all()
        assert (found.completion_ids[position, completion:] == 0).all()


def test_tokenized_rows_can_be_drawn():
    dataset = tokenize_ptx(rows("w0 w1", "w2 w3"), tokenizer(), 64)
    found = sampler(dataset, rows_per_process=2).draw(0)
    assert sorted(found.input_ids.tolist()) == [[4, 5, EOS], [6, 7, EOS]]
