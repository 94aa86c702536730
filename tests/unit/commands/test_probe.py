"""The probe on tasks with known answers, against independent recomputations, and what the
command prints."""

import json
import random
from itertools import accumulate

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import WORDS, config, llama, tokenizer
from transformers import BitsAndBytesConfig

from trl_ppo_ext import PPOTrainer, ppo_math
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.rewards.prefixes import PrefixScores
from trl_ppo_ext.sequences import Sequences
from trl_ppo_ext.tools import probe as module
from trl_ppo_ext.tools.probe import (
    LAMBDAS,
    agreements,
    gradient_sketches,
    probe,
    ridge_values,
    verdict,
)

ESTIMATORS = [*(f"lam={lam:g}" for lam in LAMBDAS), "rebn", "rloo", "grpo"]


def task(output_dir, reward, rows=28, **kwargs):
    """Trainer of a task with this many prompts of one word."""
    sizes = {"per_device_train_batch_size": 64, "num_mini_batches": 1, "max_completion_length": 6}
    args = config(output_dir, **sizes | {"kl_coef": 0.0, "critic": "side"} | kwargs)
    dataset = Dataset.from_dict({"prompt": WORDS[:rows]})
    model = llama()
    model.get_input_embeddings().weight.data *= 10  # so that states are linear in their token
    return PPOTrainer(model, reward, args, dataset, processing_class=tokenizer())


def of_prompt(prompts, **kwargs):
    """Unrelated to the states: nothing is learned from other prompts."""
    return [random.Random(prompt).gauss(0, 3) for prompt in prompts]


def noise(prompts, **kwargs):
    return [random.gauss(0, 1) for _ in prompts]


def noisy_prompt(prompts, **kwargs):
    return [x + y for x, y in zip(of_prompt(prompts), noise(prompts))]


def of_last_token(completion_ids, **kwargs):
    """At each token for the one before, which the state has read."""
    return [[0.0] + [float(token % 2) for token in ids[:-1]] for ids in completion_ids]


def of_each_token(completion_ids, **kwargs):
    return [[float(token % 2) + random.gauss(0, 1) for token in ids] for ids in completion_ids]


# ---- constructed tasks ----


def test_equal_scores_of_a_prompt_leave_nothing_to_learn(tmp_path):
    result = probe(task(tmp_path, of_prompt))
    assert result["explained_variance"] < 0.3 and result["agreement"]["rloo"] is None
    assert result["groups_without_signal"] == 1 and "nothing to learn" in result["verdict"]
    assert (
        result["completions"] == 256 and result["num_generations"] == 8 and result["prompts"] == 28
    )


class Walk:
    """Reward model whose score of a prefix is the best forecast of the last one."""

    name = "walk"
    level = "token"

    def score(self, batch):
        return [self.walk(ids) for ids in batch.completion_ids]

    def walk(self, ids):
        places = accumulate(1.0 if token % 2 else -1.0 for token in ids)
        return PrefixScores(0.0, list(enumerate(places)))


def test_probe_tells_what_scores_of_prefixes_foresee(tmp_path):
    trainer = task(tmp_path, Walk(), stop_token_ids=[31], max_completion_length=12)
    assert 0.3 < probe(trainer)["foreseen"]["walk"] < 0.7
    assert probe(task(tmp_path / "noise", noise))["foreseen"] == {}


def test_noisy_token_rewards_take_a_critic_with_a_low_lambda(tmp_path):
    result = probe(task(tmp_path, of_each_token), completions=1024)
    agreement = {name: values[0] for name, values in result["agreement"].items()}
    assert (
        agreement["lam=0"] > agreement["lam=0.95"] > agreement["rloo"]
        and agreement["lam=1"] > agreement["grpo"]
    )
    assert all(low <= mean <= high for mean, low, high in result["agreement"].values())
    assert "A critic pays, with `lam` near 0" in result["verdict"]
    assert json.loads((tmp_path / "probe.json").read_text()) == result


def test_noise_is_explained_by_nothing_and_cannot_be_told(tmp_path):
    result = probe(task(tmp_path, noise))
    assert result["explained_variance"] < 0.1
    assert "too few to tell" in result["verdict"]


def test_equal_returns_have_no_agreement(tmp_path):
    result = probe(
        task(tmp_path, lambda prompts, **kwargs: [0.7] * len(prompts), rows=1), completions=32
    )
    assert result["agreement"]["rloo"] is None and "nothing to learn" in result["verdict"]
    assert result["explained_variance"] == 0


def test_a_penalty_is_learned_from_where_scores_are_equal(tmp_path):
    """Some completions end, the others pay for it."""
    run = task(tmp_path, lambda prompts, **_: [0.7] * len(prompts), missing_eos_penalty=1.0, rows=4)
    result = probe(run)
    assert result["groups_without_signal"] < 1 and result["agreement"]["rloo"] is not None
    assert "nothing to learn" not in result["verdict"]


@pytest.mark.parametrize("critic", ["side", "none"])
def test_completions_that_the_policy_does_not_learn_from_are_left_out(tmp_path, critic):
    ends = []

    def reward(completion_ids, **kwargs):
        ends.extend(ids[-1] == tokenizer().eos_token_id for ids in completion_ids)
        return [random.random() for _ in completion_ids]

    settings = {"critic": critic, "num_generations": 8 if critic == "none" else 1}
    run = task(tmp_path, reward, mask_truncated_completions=True, **settings)
    assert probe(run)["completions"] == sum(ends) < 256 == len(ends)


def test_completions_that_end_are_compared_with_those_that_a_limit_cut(tmp_path):
    """As in a run, where the others of the prompt tell that an end earns more."""
    eos = tokenizer().eos_token_id
    groups = {"critic": "none", "num_generations": 8, "mask_truncated_completions": True}
    run = task(
        tmp_path,
        lambda completion_ids, **_: [float(ids[-1] == eos) for ids in completion_ids],
        **groups,
    )
    result = probe(run)
    assert result["groups_without_signal"] < 0.5 and "nothing to learn" not in result["verdict"]


def test_completion_is_compared_with_one_that_teaches_nothing():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    tokens = torch.ones(2, 2).bool()
    mask = torch.tensor([[1, 1], [0, 0]]).bool()
    returns = ppo_math.gae(rewards, 0 * rewards, tokens, 1.0, 1.0)[1]
    turns = tokens.long()
    found = module.Task((), (), 2, tokens, mask, turns, rewards, returns, 1.0, "token")
    advantages = found.advantages(torch.zeros(4))
    assert advantages["rloo"].tolist() == [[1, 1], [0, 0]]
    assert advantages["grpo"][0].min() > 0.5


def test_rounding_of_sums_is_no_advantage():
    rewards = torch.tensor([[0.1, 0.2, -0.3], [-0.3, 0.1, 0.2]])
    assert rewards.sum(1).unique().numel() == 2
    every = torch.ones(2, 3).bool()
    returns = ppo_math.gae(rewards, 0 * rewards, every, 1.0, 1.0)[1]
    turns = every.long()
    found = module.Task((), (), 2, every, every, turns, rewards, returns, 1.0, "token")
    advantages = found.advantages(torch.zeros(6))
    assert not advantages["grpo"].any() and not advantages["rloo"].any()


def test_a_prompt_of_another_scale_does_not_hide_what_others_teach():
    rewards = torch.zeros(8, 3)
    rewards[:2, -1] = 1e6
    rewards[2::2, -1] = 1.0
    every = torch.ones(8, 3).bool()
    returns = ppo_math.gae(rewards, 0 * rewards, every, 1.0, 1.0)[1]
    turns = every.long()
    found = module.Task((), (), 2, every, every, turns, rewards, returns, 1.0, "token")
    assert found.groups_without_signal() == 0.25


def test_equal_groups_are_told_where_a_run_drops_them(tmp_path):
    groups = {"critic": "none", "num_generations": 8, "drop_equal_groups": True}
    result = probe(task(tmp_path, of_prompt, **groups))
    assert result["groups_without_signal"] == 1 and "nothing to learn" in result["verdict"]


def test_rollouts_smaller_than_a_group_are_enough(tmp_path):
    run = task(tmp_path, of_each_token, per_device_train_batch_size=4)
    assert probe(run, completions=4)["completions"] == 8


def test_task_of_one_prompt_is_measured_over_completions(tmp_path):
    result = probe(task(tmp_path, of_last_token, rows=1, gamma=0.3), completions=64)
    assert result["prompts"] == 1 and result["explained_variance"] > 0.8


# ---- against independent recomputations ----


def definitions(rewards, size, gamma, values):
    """Advantages of a list of completions, from their definitions."""
    returns = [
        [sum(gamma**k * x for k, x in enumerate(row[t:])) for t in range(len(row))]
        for row in rewards
    ]
    found = {name: [] for name in ESTIMATORS}
    for i, row in enumerate(rewards):
        others = [x for j, other in enumerate(returns) if j != i for x in other]
        group = [
            sum(rewards[j]) for j in range(i // size * size, i // size * size + size) if j != i
        ]
        found["rebn"].append([x - sum(others) / len(others) for x in returns[i]])
        found["rloo"].append([sum(row) - sum(group) / len(group)] * len(row))
        scores = [sum(rewards[j]) for j in range(i // size * size, i // size * size + size)]
        found["grpo"].append(
            [(sum(row) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-4)] * len(row)
        )
        deltas = [
            x + gamma * after - v for x, v, after in zip(row, values[i], [*values[i][1:], 0.0])
        ]
        for lam in LAMBDAS:
            sums = [
                sum((gamma * lam) ** k * x for k, x in enumerate(deltas[t:]))
                for t in range(len(row))
            ]
            found[f"lam={lam:g}"].append(sums)
    return found


@pytest.mark.parametrize("critic", ["head", "none"])
def test_advantages_follow_their_definitions(tmp_path, monkeypatch, critic):
    seen = []
    captured = {}

    def reward(prompts, completion_ids, **kwargs):
        rewards = [[random.gauss(1, 1) for _ in ids] for ids in completion_ids]
        seen.extend(zip(prompts, rewards))
        return rewards

    def values_of(states, returns, folds):
        captured["folds"] = folds
        return returns.sin()

    monkeypatch.setattr(module, "ridge_values", values_of)
    sketches = module.gradient_sketches
    monkeypatch.setattr(
        module, "gradient_sketches", lambda *given: captured.update(given[2]) or sketches(*given)
    )
    if critic == "head":
        discount = {"gamma": 0.9, "lam": 0.5}
    else:
        discount = {"num_generations": 4, "top_entropy_quantile": 0.5}
    sizes = {"per_device_train_batch_size": 12, "generation_batch_size": 12}
    run = task(tmp_path, reward, rows=7, critic=critic, **discount, **sizes)
    if critic == "head":
        torch.nn.init.normal_(run.actor_critic.value_head.weight)  # its values must not matter
    result = probe(run, completions=40)
    size, gamma = (8, 0.9) if critic == "head" else (4, 1.0)
    seen = seen[: len(seen) // size * size]  # rollouts of 12
    texts, rewards = zip(*seen)
    for start in range(0, len(texts), size):
        assert len(set(texts[start : start + size])) == 1
    returns = [
        [sum(gamma**k * x for k, x in enumerate(row[t:])) for t in range(len(row))]
        for row in rewards
    ]
    values = [np.sin(row).tolist() for row in returns]
    for name, rows in definitions(rewards, size, gamma, values).items():
        for got, expected in zip(captured[name], rows, strict=True):
            expected = [*expected, *[0.0] * (len(got) - len(expected))]
            torch.testing.assert_close(
                got, torch.tensor(expected, dtype=got.dtype), atol=1e-4, rtol=1e-4
            )
    targets = np.concatenate(returns)
    share = 1 - np.var(targets - np.sin(targets)) / np.var(targets)
    assert result["explained_variance"] == pytest.approx(share, abs=1e-4)
    fold_of = {}  # no prompt is in two folds
    tokens = [text for text, row in zip(texts, rewards) for _ in row]
    for text, fold in zip(tokens, captured["folds"].tolist(), strict=True):
        assert fold_of.setdefault(text, fold) == fold
    assert set(fold_of.values()) == set(range(4))


def test_with_turns_gamma_and_lambda_are_those_of_turns():
    turns = torch.tensor([[1, 1, 0, 2, 2, 2], [1, 0, 2, 3, 3, 0]])
    mask = turns > 0
    rewards = torch.randn(2, 6).masked_fill(~mask, 0)
    values = torch.randn(2, 6).masked_fill(~mask, 0)
    gamma = 0.9
    tasks = {}
    for level in ("turn", "both"):
        per_turn = module.per_step(gamma, level, turns)
        returns = ppo_math.gae(rewards, torch.zeros(2, 6), mask, per_turn, 1.0)[1]
        tasks[level] = module.Task((), (), 2, mask, mask, turns, rewards, returns, per_turn, level)
    found = {level: task.advantages(values[mask]) for level, task in tasks.items()}
    for row, starts in enumerate([[0, 3], [0, 2, 3]]):
        paid = [rewards[row, turns[row] == n + 1].sum() for n in range(len(starts))]
        after = [*values[row, starts][1:], 0.0]
        deltas = [x + gamma * y - v for x, y, v in zip(paid, after, values[row, starts])]
        for lam in LAMBDAS:
            for number, start in enumerate(starts):
                exact = sum((gamma * lam) ** k * x for k, x in enumerate(deltas[number:]))
                own = turns[row] == number + 1
                of_turn = found["turn"][f"lam={lam:g}"][row]
                torch.testing.assert_close(of_turn[own], exact.expand(int(own.sum())))
                torch.testing.assert_close(found["both"][f"lam={lam:g}"][row, start], exact)
    for name in ("rebn", "rloo", "grpo"):
        first = ppo_math.turn_starts(turns)[1]
        spread = found["both"][name].gather(1, first) * mask
        torch.testing.assert_close(found["turn"][name], spread)


def test_completions_beyond_the_last_whole_group_are_left_out(tmp_path):
    run = task(tmp_path, of_each_token, per_device_train_batch_size=12)
    assert probe(run, completions=50)["completions"] == 56  # of 60


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_ridge_is_the_closed_form_with_the_least_error(signal):
    """Here as least squares on data with rows added for the penalty."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 12))
    folds = generator.integers(0, 4, 80)
    x[:, 0] = 1
    y = signal * x @ generator.normal(size=12) + generator.normal(size=80) + 50
    x = x.astype(np.float32)
    y = y.astype(np.float32)
    predictions = {}
    errors = {}
    for ridge in module.RIDGES:
        predictions[ridge] = np.zeros(80)
        for fold in range(4):
            train = folds != fold
            test = folds == fold
            strength = ridge * np.square(x[train].astype(float)).sum(0).mean()
            added = np.sqrt(strength) * np.eye(12)[1:]  # not for the bias
            inputs = np.concatenate([x[train], added])
            targets = np.concatenate([y[train], np.zeros(11)])
            predictions[ridge][test] = x[test] @ np.linalg.lstsq(inputs, targets, rcond=None)[0]
        errors[ridge] = np.square(y - predictions[ridge]).sum()
    best = min(errors, key=errors.get)
    values = ridge_values(*map(torch.from_numpy, (x, y, folds)))
    np.testing.assert_allclose(values.numpy(), predictions[best], rtol=1e-5)
    assert (best < 1) == bool(signal)  # without a signal, hardly more than the mean


def test_sketches_keep_products_of_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SKETCH", 384)
    run = task(tmp_path, noise, per_device_train_batch_size=4, temperature=0.7)
    rollouts = [rollout for rollout, _ in module.held_out_rollouts(run, 8)]
    tables = {"a": torch.randn(7, 6), "b": torch.randn(7, 6)}
    weight = run.actor_critic.policy.get_output_embeddings().weight.detach()
    exact = []
    for row in range(7):
        sequences = rollouts[row // 4].sequences.rows(torch.tensor([row % 4]))
        start = int(sequences.prompt_lengths) - 1
        outputs = run.actor_critic.policy(
            input_ids=sequences.packed.input_ids[None], output_hidden_states=True
        )
        states = outputs.hidden_states[-1][0, start:-1].detach()
        layer = torch.eye(len(weight.T), requires_grad=True)  # a linear layer on the last states
        logprobs = (
            (states @ layer @ weight.T / 0.7)
            .log_softmax(-1)
            .gather(1, sequences.completion_ids[0][:, None])
        )
        objectives = [logprobs[:, 0] @ table[row, : len(logprobs)] for table in tables.values()]
        exact.append(
            torch.stack(
                [torch.autograd.grad(x, layer, retain_graph=True)[0].flatten() for x in objectives]
            )
        )
    exact = torch.stack(exact).flatten(0, 1)
    sketched = gradient_sketches(run, rollouts, tables).flatten(0, 1)
    products = sketched @ sketched.T
    expected = exact @ exact.T
    assert torch.corrcoef(torch.stack([products.flatten(), expected.flatten()]))[0, 1] > 0.99
    torch.testing.assert_close(products.diagonal(), expected.diagonal(), rtol=0.2, atol=0)


def test_sketches_read_advantages_at_sampled_tokens_only(tmp_path):
    run = task(tmp_path, noise, per_device_train_batch_size=2)
    sampled = [[1, 1, 0, 2], [1, 0, 0, 2]]  # an environment wrote the others
    sequences = Sequences.from_token_ids(
        [[5, 6], [7]], [[8, 9, 10, 11], [9, 8, 7, 6]], 0, "cpu", sampled=sampled
    )
    nothing = torch.zeros(2, 4)
    rollout = Rollout(sequences, sequences.completion_mask, nothing, nothing)
    tables = {str(place): torch.eye(4)[place].expand(2, 4) for place in range(4)}
    sizes = gradient_sketches(run, [rollout], tables).norm(dim=2)
    assert (sizes > 0).tolist() == [[bool(turn) for turn in row] for row in sampled]


def test_agreement_is_the_cosine_with_the_expected_gradient():
    """Unbiased gradients with much noise, the same with less, and others that are biased."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(50, generator=generator)
    count = 600
    noise = torch.randn(count, 50, generator=generator)
    biased = exact + 3 * torch.randn(50, generator=generator)
    gradients = torch.stack([exact + 4 * noise, exact + noise, biased.expand(count, 50)], 1)
    each = torch.arange(count)
    found = agreements(gradients, each, each, exact=1, rollout=16, in_groups=3 * [False])
    means = torch.stack(
        [exact.norm() / (exact.norm() ** 2 + 50 * size**2 / 16).sqrt() for size in (4, 1)]
    )
    torch.testing.assert_close(found[:2, 0].float(), means, rtol=0.1, atol=0)
    cosine = torch.nn.functional.cosine_similarity(biased, exact, dim=0)
    assert found[2, 0].item() == pytest.approx(cosine.item(), abs=0.03)
    low, high = found[0, 1:].quantile(torch.tensor([0.05, 0.95]).double())
    assert low < found[0, 0] < high < low + 0.2


def test_agreement_comes_from_pairs_without_a_common_prompt():
    few = torch.randn(5, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    blocks = torch.tensor([3, 3, 0, 1, 1])
    pairs = [(i, j) for i in range(5) for j in range(5) if blocks[i] != blocks[j]]
    product, length, square = (
        np.mean([float(few[i, a] @ few[j, b]) for i, j in pairs])
        for a, b in ((0, 1), (1, 1), (0, 0))
    )
    own = np.mean([float(few[i, 0] @ few[i, 0]) for i in range(5)])
    value = product / (own / 16 + 15 / 16 * square) ** 0.5 / length**0.5
    found = agreements(few, blocks, blocks, exact=1, rollout=16, in_groups=2 * [False])
    assert found[0, 0].item() == pytest.approx(value, rel=1e-6)


def test_gradients_of_a_prompt_agree_less_with_those_of_all():
    """Prompts differ in their gradients, so groups hold less than as many prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts, size, features, rollout = 400, 4, 30, 16
    exact = torch.ones(features)
    of_prompts = exact + 2 * torch.randn(prompts, 1, features, generator=generator)
    noise = 3 * torch.randn(prompts, size, features, generator=generator)
    gradients = (of_prompts + noise).flatten(0, 1)[:, None].repeat(1, 2, 1)
    number = torch.arange(prompts).repeat_interleave(size)
    found = agreements(gradients, number, number, 0, rollout, in_groups=[False, True])
    variances = [(4 + 9) / rollout, (4 * size + 9) / rollout]
    expected = [(1 + variance) ** -0.5 for variance in variances]
    torch.testing.assert_close(found[:, 0].tolist(), expected, rtol=0.05, atol=0)

    # of each group only two completions count
    counts = torch.arange(prompts * size) % size < 2
    found = agreements(gradients[counts], number[counts], number[counts], 0, 8, [False, True])
    expected = [(1 + (4 * n + 9) / 8) ** -0.5 for n in (1, 2)]
    torch.testing.assert_close(found[:, 0].tolist(), expected, rtol=0.05, atol=0)


# ---- the verdict ----


@pytest.mark.parametrize(
    "critic, rebn, said",
    [
        (0.6, 0.3, "A critic pays, with `lam` near 0.5: it needs 25% of the completions"),
        (
            0.3,
            0.6,
            'so take `critic="none", advantage_estimator="rebn"`: it needs 25% of the completions',
        ),
        (0.45, 0.46, "No difference"),
    ],
)
def test_verdict_follows_the_interval_of_the_difference(critic, rebn, said):
    noise = 0.05 * torch.randn(401, generator=torch.Generator().manual_seed(0)).double()
    noise[0] = 0
    found = {name: torch.full((401,), 0.2).double() for name in ESTIMATORS}
    found |= {"lam=0.5": critic + noise, "rebn": rebn - noise}
    assert said in verdict(found, 0.9)
    assert "nothing to learn" in verdict(found, 1.0)
    found["rloo"] = found["rloo"].where(torch.arange(401) % 4 > 0, torch.nan)
    assert "too few to tell" in verdict(found, 0.9)


# ---- the run and the command ----


def test_run_is_not_changed(tmp_path):
    run = task(tmp_path, noise, critic="head", kl_coef=0.1, kl_target=1.0, normalize_rewards=True)
    weights = {name: x.clone() for name, x in run.actor_critic.state_dict().items()}
    state = run.run_state
    seed = torch.get_rng_state()
    settings = dict(vars(run.args))
    probe(run, completions=32)
    assert run.run_state == state and dict(vars(run.args)) == settings
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(torch.equal(x, weights[name]) for name, x in run.actor_critic.state_dict().items())
    assert all(x.grad is None for x in run.actor_critic.parameters()) and run.state.global_step == 0


@pytest.mark.parametrize("kind", ["4-bit base", "critic that reads the answer"])
def test_every_kind_of_run_can_be_probed(tmp_path, kind):
    settings = {"per_device_train_batch_size": 32, "num_mini_batches": 1}
    rows = [{"prompt": word, "answer": f"{word} w1"} for word in WORDS[:8]]
    dataset = Dataset.from_list(rows)
    model = llama(hidden_size=64)
    options = {}
    if kind == "4-bit base":
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
        options = {
            "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        }
    else:
        settings |= {"critic": "adapter", "critic_prompt": "answer"}
    args = config(tmp_path / "run", **settings)
    result = probe(
        PPOTrainer(model, noise, args, dataset, processing_class=tokenizer(), **options),
        completions=32,
    )
    assert result["prompts"] == 4 and list(result["agreement"]) == ESTIMATORS


def test_unusable_probes_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Only 0 of 64 completions have a score"):
        probe(task(tmp_path, lambda prompts, **kwargs: [None] * len(prompts)), completions=32)
    distilled = task(tmp_path, None, reference_prompt="prompt", kl_coef=1.0)
    with pytest.raises(ValueError, match="`trl-ppo probe` needs a reward"):
        probe(distilled)
    run = task(tmp_path, noise)
    monkeypatch.setattr(run, "is_deepspeed_enabled", True)
    with pytest.raises(ValueError, match="needs one process"):
        probe(run)


RUN = """
model_name_or_path: policy
dataset_name: prompts.jsonl
reward_funcs: [cli_rewards.length]
use_cpu: true
bf16: false
report_to: none
disable_tqdm: true
push_to_hub: true
hub_model_id: me/policy
num_generations: 2
per_device_train_batch_size: 16
num_mini_batches: 1
max_completion_length: 4
"""


def test_probe_of_nothing_is_refused(there, capsys):
    (there / "run.yaml").write_text(RUN)
    assert cli.main(["probe", "--config", "run.yaml", "--completions", "0"])
    assert "`completions` must be above 0, got 0" in capsys.readouterr().err


def test_command_prints_table_and_verdict(there, tmp_path, capsys):
    (there / "run.yaml").write_text(RUN)
    out = tmp_path / "out"
    assert (
        cli.main(["probe", "--config", "run.yaml", "--completions", "16", "--output_dir", str(out)])
        == 0
    )
    printed = capsys.readouterr().out.rstrip()
    result = json.loads((out / "probe.json").read_text())
    assert (
        "16 completions of 8 prompts; all earn the same in " in printed
        and "of the groups of 2" in printed
    )
    assert (
        "(1; noise: 0), with 90 % intervals\nHalf the agreement takes four times the completions. "
        "lam=... has a critic" in printed
    )
    rows = [line.split() for line in printed.splitlines()]
    for name, values in result["agreement"].items():
        mean, low, high = (f"{x:.2f}" for x in values or (0, 0, 0))
        assert (
            [name, mean, low, "to", high] if values else [name, *"cannot be told".split()]
        ) in rows
    assert f"{result['explained_variance']:.2f}" in printed
    assert printed.endswith(result["verdict"])
    assert [path.name for path in out.iterdir() if path.name != ".lock"] == ["probe.json"]
