"""The supervised loss of recipes/supervised_loss.py: its gradient, its rows, and resumed runs."""

import math
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
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
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.data import encode

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from supervised_loss import PTXTrainer, tokenize

EOS = 1
COEFFICIENT = 0.7
# updates that are ended early have no gradient
SETTINGS = {"max_grad_norm": 0.0, "learning_rate": 1e-2, "max_steps": 3, "target_kl": None}
PAIRS = [
    {
        "prompt": " ".join(WORDS[n : n + 1 + n % 2]),
        "completion": f" {' '.join(WORDS[n : n + 1 + n % 5])}",
    }
    for n in range(13)
]


class Steps(TrainerCallback):
    """Weights and gradient of the policy before each optimizer step."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        policy = model.policy_parameters()
        self.seen.append(
            [
                {name: y.clone() for name, y in x.items()}
                for x in (
                    {name: x.detach() for name, x in policy.items()},
                    {name: x.grad for name, x in policy.items()},
                )
            ]
        )


def build(output_dir, kind=PTXTrainer, reward=length_reward, ptx=None, **settings):
    if kind is PTXTrainer:
        supervised = {"ptx_dataset": Dataset.from_list(PAIRS), "ptx_coef": COEFFICIENT}
    else:
        supervised = {}
    steps = Steps()
    args = config(output_dir, **SETTINGS | settings)
    built = kind(
        llama(),
        reward,
        args,
        prompts(),
        processing_class=tokenizer(),
        callbacks=[steps],
        **supervised | (ptx or {}),
    )
    return built, steps.seen


def run(*args, **kwargs):
    built, seen = build(*args, **kwargs)
    built.train()
    return built, seen


def rows_of_step(step, count, seed=42):
    """Numbers of the rows of an optimizer step: a permutation per pass."""
    size = len(PAIRS)
    passes = [
        torch.randperm(size, generator=torch.Generator().manual_seed(seed + n)).tolist()
        for n in range(20)
    ]
    return [row for order in passes for row in order][step * count : (step + 1) * count]


def nll_gradient(built, weights, numbers):
    """Gradient of transformers' loss of a causal language model, with labels at the completions'
    tokens only."""
    policy = built.model.policy
    encode = tokenizer()
    rows = [
        (
            encode(PAIRS[n]["prompt"])["input_ids"],
            [*encode(PAIRS[n]["completion"])["input_ids"], EOS],
        )
        for n in numbers
    ]
    longest = max(len(prompt + completion) for prompt, completion in rows)
    padding = [longest - len(prompt + completion) for prompt, completion in rows]
    ids = torch.tensor(
        [prompt + completion + [0] * n for (prompt, completion), n in zip(rows, padding)]
    )
    labels = [
        [-100] * len(prompt) + completion + [-100] * n
        for (prompt, completion), n in zip(rows, padding)
    ]
    mask = torch.tensor([[1] * (longest - n) + [0] * n for n in padding])
    parameters = built.model.policy_parameters()
    with torch.no_grad():
        for name, x in parameters.items():
            x.copy_(weights[name])
    loss = policy(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)).loss
    return loss.item(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))


def distance(one, other):
    difference = math.sqrt(
        sum((one[name] - other[name]).double().pow(2).sum().item() for name in other)
    )
    return difference / math.sqrt(sum(x.double().pow(2).sum().item() for x in other.values()))


@pytest.mark.parametrize("size, accumulation", [(4, 1), (2, 2)])
@pytest.mark.parametrize("aggregation", ["token", "sequence_sum"])
def test_gradient_without_advantages_is_that_of_transformers(
    tmp_path, aggregation, size, accumulation
):
    """In every optimizer step, for any micro-batches: the divisor counts the tokens of the whole
    step."""
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    nothing = {
        "critic": "none",
        "num_generations": 4,
        "kl_coef": 0.0,
        "target_kl": None,
        "loss_aggregation": aggregation,
    }
    equal = lambda completion_ids, **kwargs: [1.0] * len(completion_ids)  # noqa: E731
    built, steps = build(tmp_path, reward=equal, max_steps=6, **sizes | nothing)
    built.train()
    logged = [log["loss/ptx"] for log in built.state.log_history if "loss/ptx" in log]
    assert len(steps) == 6
    for step, (weights, gradient) in enumerate(steps):
        nll, expected = nll_gradient(built, weights, rows_of_step(step, 4))
        assert distance(gradient, {name: COEFFICIENT * x for name, x in expected.items()}) < 1e-4
        assert logged[step] == pytest.approx(nll, rel=1e-4)


def test_loss_and_gradient_add_to_those_of_ppo(tmp_path):
    (one, with_rows), (other, without) = (
        run(tmp_path / kind.__name__, kind) for kind in (PTXTrainer, PPOTrainer)
    )
    (weights, gradient), (same, plain) = with_rows[0], without[0]
    assert all(torch.equal(x, same[name]) for name, x in weights.items())
    nll, expected = nll_gradient(one, weights, rows_of_step(0, 4))
    added = {name: x - plain[name] for name, x in gradient.items()}
    assert distance(added, {name: COEFFICIENT * x for name, x in expected.items()}) < 1e-3
    losses = [x.state.log_history[0]["loss"] for x in (one, other)]
    assert losses[0] - losses[1] == pytest.approx(COEFFICIENT * nll, abs=2e-4)


def test_coefficient_of_zero_changes_nothing(tmp_path):
    _, with_rows = run(tmp_path / "one", ptx={"ptx_coef": 0.0})
    _, without = run(tmp_path / "other", PPOTrainer)
    for (weights, _), (same, _) in zip(with_rows, without, strict=True):
        assert all(torch.equal(x, same[name]) for name, x in weights.items())


@pytest.mark.parametrize("saved", [1, 2], ids=["within a rollout", "between rollouts"])
def test_run_resumes_bit_for_bit(tmp_path, saved):
    saving = {
        "save_strategy": "steps",
        "save_steps": 1,
        "num_ppo_epochs": 1,
        "max_steps": 5,
        "target_kl": 0.05,
    }
    (whole, one), (again, other) = (build(tmp_path / name, **saving) for name in ("whole", "again"))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{saved}"))
    assert len(other) == len(one) - saved
    for ours, theirs in zip(one[saved:], other, strict=True):
        for x, y in zip(ours, theirs):
            assert all(torch.equal(x[name], y[name]) for name in x)


# ---- rows


def drawn(built, process_index, num_processes, steps):
    """Learned tokens of a process, by step."""
    vars(built.plan).update(
        vars(BatchPlan(4, num_mini_batches=2, num_ppo_epochs=2, num_processes=num_processes))
    )
    state = built.accelerator.state
    index = state.process_index
    state.process_index = process_index
    try:
        found = []
        for step in steps:
            built.draw(step)
            found.append([ids for batch in built.ptx_batches for ids in batch.input_ids.tolist()])
        return found
    finally:
        state.process_index = index


def test_rows_are_a_permutation_per_pass_over_all_processes(tmp_path):
    built, _ = build(tmp_path)
    for num_processes in (1, 2, 3):
        taken = []
        parts = [drawn(built, index, num_processes, range(6)) for index in range(num_processes)]
        for step in range(6):
            taken += [[token for token in ids if token] for part in parts for ids in part[step]]
        count = 4 * num_processes
        encode = tokenizer()
        expected = [row for step in range(6) for row in rows_of_step(step, count)]
        texts = [PAIRS[row]["prompt"] + PAIRS[row]["completion"] for row in expected]
        assert taken == [[*encode(text)["input_ids"], EOS] for text in texts]


def test_draw_leaves_the_random_state_of_the_run(tmp_path):
    built, _ = build(tmp_path)
    before = torch.get_rng_state()
    built.draw(7)
    assert torch.equal(torch.get_rng_state(), before)


# ---- tokens


def test_text_is_learned_from_its_second_token_to_an_eos():
    assert tokenize({"text": "w0 w1 w2"}, tokenizer(), 64) == {
        "prompt_ids": [4],
        "completion_ids": [5, 6, EOS],
    }
    assert tokenize({"text": "w0 w1 <eos>"}, tokenizer(), 64)["completion_ids"] == [5, EOS]


def test_completion_is_learned_and_cut():
    row = {"prompt": "w0 w1", "completion": " w2 w3"}
    assert tokenize(row, tokenizer(), 64) == {"prompt_ids": [4, 5], "completion_ids": [6, 7, EOS]}
    assert tokenize(row, tokenizer(), 3) == {"prompt_ids": [4, 5], "completion_ids": [6]}


def test_chat_ends_as_its_template_ends_it():
    chat = tokenizer([*WORDS, "user", "assistant"], CHAT_TEMPLATE)
    user, assistant = (
        {"role": role, "content": text} for role, text in (("user", "w1 w2"), ("assistant", "w3"))
    )
    ids = [2, 32, 5, 6, 2, 33, 7]
    assert tokenize({"messages": [user, assistant]}, chat, 64) == {
        "prompt_ids": ids[:1],
        "completion_ids": ids[1:],
    }
    row = {"prompt": [user], "completion": [assistant]}
    assert tokenize(row, chat, 64) == {"prompt_ids": ids[:6], "completion_ids": ids[6:]}


def test_chat_is_rendered_as_prompts_of_the_run_are():
    chat = byte_tokenizer("qwen3")
    user = {"role": "user", "content": "hi"}
    row = {"prompt": [user], "completion": [{"role": "assistant", "content": "yo"}]}
    settings = {"enable_thinking": False}
    found = tokenize(row, chat, 256, settings)
    assert found["prompt_ids"] == encode([user], chat, settings)
    assert chat.decode(found["completion_ids"]) == "yo<|im_end|>\n"


def test_tokens_that_merge_over_the_prompts_end_are_learned():
    vocabulary = {
        token: index for index, token in enumerate(["<pad>", "<eos>", "a", "b", "c", "ab"])
    }
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    letters = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    found = tokenize({"prompt": "ca", "completion": "bc"}, letters, 64)
    assert found == {"prompt_ids": [4], "completion_ids": [5, 4, EOS]}


@pytest.mark.parametrize(
    "row, length", [({"text": "w0 w1"}, 1), ({"prompt": "w0 w1", "completion": " w2"}, 2)]
)
def test_row_without_a_token_to_learn_raises(row, length):
    with pytest.raises(ValueError, match="No token to learn after the first"):
        tokenize(row, tokenizer(), length)


@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "at least one row"),
        (
            Dataset.from_list([{"text": "w1"}]).to_iterable_dataset(),
            "got IterableDataset; of a str",
        ),
        ([{"content": "w1 w2"}], "needs the columns .*got .'content'"),
        ([{"prompt": "w1 w2"}], "needs the columns 'prompt' and 'completion'"),
        ([{"text": "w1 w2"}, {"text": None}], "must have text or messages"),
    ],
)
def test_unusable_rows_are_refused_before_the_run(tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        build(tmp_path, ptx={"ptx_dataset": rows})
