"""The probe on tasks with known answers, against independent recomputations, and what the command prints."""

import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import WORDS, config, llama, tokenizer
from transformers import BitsAndBytesConfig

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands import probe as module
from trl_ppo_ext.commands.probe import gradient_variances, probe, ridge_values, verdict


@pytest.fixture(autouse=True)
def few_gradients(monkeypatch):
    monkeypatch.setattr(module, "GRADIENTS", 20)


def task(output_dir, reward, rows=28, **kwargs):
    """Trainer of a task with this many prompts of one word."""
    sizes = {"per_device_train_batch_size": 64, "num_mini_batches": 1, "max_completion_length": 6}
    args = config(output_dir, **sizes | {"kl_coef": 0.0, "critic": "side"} | kwargs)
    dataset, model = Dataset.from_dict({"prompt": WORDS[:rows]}), llama()
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


# ---- constructed tasks ----


def test_equal_scores_of_a_prompt_leave_nothing_to_learn(tmp_path):
    result = probe(task(tmp_path, of_prompt))
    assert result["explained_variance"] < 0.3 and result["gradient_variance"]["rloo"] < 1e-6
    assert result["groups_without_signal"] == 1 and "nothing to learn" in result["verdict"]
    assert result["completions"] == 256 and result["num_generations"] == 8 and result["prompts"] == 28


def test_noisy_scores_of_the_prompt_take_a_group_baseline(tmp_path):
    result = probe(task(tmp_path, noisy_prompt))
    assert result["groups_without_signal"] == 0
    assert result["gradient_variance"]["rloo"] < 0.5
    assert 'take `critic="none", advantage_estimator="rloo"`' in result["verdict"]


def test_rewards_known_from_states_take_a_critic(tmp_path):
    result = probe(task(tmp_path, of_last_token, gamma=0.3))  # without discount, most of a return is the future's
    assert result["explained_variance"] > 0.6
    assert result["gradient_variance"]["side"] < 0.7 < result["gradient_variance"]["rebn"] == 1
    assert 'take `critic="side"`' in result["verdict"]


def test_noise_is_explained_by_nothing(tmp_path):
    result = probe(task(tmp_path, noise))
    assert result["explained_variance"] < 0.1
    assert result["gradient_variance"]["side"] == pytest.approx(1, abs=0.1)
    assert result["gradient_variance"]["rloo"] > 1
    assert "critic_kwargs" in result["verdict"] and "rebn" in result["verdict"]


def test_equal_returns_have_no_relative_variance(tmp_path):
    result = probe(task(tmp_path, lambda prompts, **kwargs: [0.7] * len(prompts), rows=1), completions=32)
    assert set(result["gradient_variance"].values()) == {None} and "nothing to learn" in result["verdict"]
    assert result["explained_variance"] == 0
    assert json.loads((tmp_path / "probe.json").read_text()) == result


def test_task_of_one_prompt_is_measured_over_completions(tmp_path):
    result = probe(task(tmp_path, of_last_token, rows=1, gamma=0.3), completions=64)
    assert result["prompts"] == 1 and result["explained_variance"] > 0.8


# ---- against independent recomputations ----


def definitions(rewards, size, gamma, values):
    """Advantages of a list of completions, from their definitions."""
    returns = [[sum(gamma**k * x for k, x in enumerate(row[t:])) for t in range(len(row))] for row in rewards]
    found = {name: [] for name in ("reinforce", "rebn", "rloo", "side")}
    for i, row in enumerate(rewards):
        others = [x for j, other in enumerate(returns) if j != i for x in other]
        group = [sum(rewards[j]) for j in range(i // size * size, i // size * size + size) if j != i]
        found["reinforce"].append([sum(row)] * len(row))
        found["rebn"].append([x - sum(others) / len(others) for x in returns[i]])
        found["rloo"].append([sum(row) - sum(group) / len(group)] * len(row))
        found["side"].append([x - value for x, value in zip(returns[i], values[i])])
    return found


@pytest.mark.parametrize("critic", ["head", "none"])
def test_advantages_follow_their_definitions(tmp_path, monkeypatch, critic):
    seen, captured = [], {}

    def reward(prompts, completion_ids, **kwargs):
        rewards = [[random.gauss(1, 1) for _ in ids] for ids in completion_ids]
        seen.extend(zip(prompts, rewards))
        return rewards

    def values_of(states, returns, folds):
        captured["folds"] = folds
        return returns.sin()

    monkeypatch.setattr(module, "ridge_values", values_of)
    monkeypatch.setattr(
        module, "gradient_variances", lambda *given: captured.update(given[3]) or dict.fromkeys(given[3], 1.0)
    )
    discount = {"gamma": 0.9, "lam": 0.5} if critic == "head" else {"num_generations": 4}
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
    returns = [[sum(gamma**k * x for k, x in enumerate(row[t:])) for t in range(len(row))] for row in rewards]
    values = [np.sin(row).tolist() for row in returns]
    for name, rows in definitions(rewards, size, gamma, values).items():
        for got, expected in zip(captured[name], rows, strict=True):
            expected = [*expected, *[0.0] * (len(got) - len(expected))]
            torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=1e-4)
    targets = np.concatenate(returns)
    share = 1 - np.var(targets - np.sin(targets)) / np.var(targets)
    assert result["explained_variance"] == pytest.approx(share, abs=1e-4)
    fold_of = {}  # no prompt is in two folds
    tokens = [text for text, row in zip(texts, rewards) for _ in row]
    for text, fold in zip(tokens, captured["folds"].tolist(), strict=True):
        assert fold_of.setdefault(text, fold) == fold
    assert set(fold_of.values()) == set(range(4))


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_ridge_is_the_closed_form_with_the_least_error(signal):
    """Here as least squares on data with rows added for the penalty."""
    generator = np.random.default_rng(0)
    x, folds = generator.normal(size=(80, 12)), generator.integers(0, 4, 80)
    x[:, 0] = 1
    y = signal * x @ generator.normal(size=12) + generator.normal(size=80) + 50
    x, y = x.astype(np.float32), y.astype(np.float32)
    predictions, errors = {}, {}
    for ridge in module.RIDGES:
        predictions[ridge] = np.zeros(80)
        for fold in range(4):
            train, test = folds != fold, folds == fold
            strength = ridge * np.square(x[train].astype(float)).sum(0).mean()
            added = np.sqrt(strength) * np.eye(12)[1:]  # not for the bias
            inputs, targets = np.concatenate([x[train], added]), np.concatenate([y[train], np.zeros(11)])
            predictions[ridge][test] = x[test] @ np.linalg.lstsq(inputs, targets, rcond=None)[0]
        errors[ridge] = np.square(y - predictions[ridge]).sum()
    best = min(errors, key=errors.get)
    values = ridge_values(*map(torch.from_numpy, (x, y, folds)))
    np.testing.assert_allclose(values.numpy(), predictions[best], rtol=1e-5)
    assert (best < 1) == bool(signal)  # without a signal, hardly more than the mean


def test_gradient_variance_is_the_trace_of_the_covariance(tmp_path):
    run = task(tmp_path, noise, per_device_train_batch_size=4)
    for parameter in run.actor_critic.policy_parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)  # a new adapter has no gradient by its first matrix
    rollouts = [rollout for rollout, _ in module.held_out_rollouts(run, 8)]
    advantages = {"a": torch.randn(8, 6), "b": torch.randn(8, 6)}
    chosen = [0, 3, 5, 6, 7]
    variances = gradient_variances(run, rollouts, chosen, advantages)
    for name, table in advantages.items():
        gradients = []
        for row in chosen:
            sequences = rollouts[row // 4].sequences.rows(torch.tensor([row % 4]))
            prompt = int(sequences.prompt_lengths)
            logits = run.model(input_ids=sequences.input_ids).logits[0, prompt - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, sequences.completion_ids[0][:, None])[:, 0]
            run.model.zero_grad()
            (logprobs * table[row, : len(logprobs)]).sum().backward()
            parameters = run.actor_critic.policy_parameters().values()
            gradients.append(torch.cat([x.grad.flatten() for x in parameters]).double())
        assert variances[name] == pytest.approx(float(torch.stack(gradients).var(0).sum()), rel=1e-4)


# ---- the verdict ----


@pytest.mark.parametrize(
    "side, rloo, setting",
    [
        (0.5, 0.6, 'take `critic="side"`'),
        (0.8, 1.1, 'take `critic="side"`'),
        (0.95, 2.0, 'advantage_estimator="rebn"`'),  # less than a tenth
        (0.5, 0.5, 'advantage_estimator="rloo"`'),
    ],
)
def test_verdict_follows_its_rule(side, rloo, setting):
    assert setting in verdict({"side": side, "rloo": rloo}, 0.9)
    assert "nothing to learn" in verdict({"side": side, "rloo": rloo}, 1.0)


# ---- the run and the command ----


def test_run_is_not_changed(tmp_path):
    run = task(tmp_path, noise, critic="head", kl_coef=0.1, kl_target=1.0, normalize_rewards=True)
    weights = {name: x.clone() for name, x in run.actor_critic.state_dict().items()}
    state, seed, settings = run.run_state, torch.get_rng_state(), dict(vars(run.args))
    probe(run, completions=32)
    assert run.run_state == state and dict(vars(run.args)) == settings
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(torch.equal(x, weights[name]) for name, x in run.actor_critic.state_dict().items())
    assert all(x.grad is None for x in run.actor_critic.parameters()) and run.state.global_step == 0


@pytest.mark.parametrize("kind", ["4-bit base", "critic that reads the answer"])
def test_every_kind_of_run_can_be_probed(tmp_path, kind):
    settings = {"per_device_train_batch_size": 32, "num_mini_batches": 1}
    rows = [{"prompt": word, "answer": f"{word} w1"} for word in WORDS[:8]]
    dataset, model, options = Dataset.from_list(rows), llama(hidden_size=64), {}
    if kind == "4-bit base":
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
        options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    else:
        settings |= {"critic": "adapter", "critic_prompt": "answer"}
    args = config(tmp_path / "run", **settings)
    result = probe(PPOTrainer(model, noise, args, dataset, processing_class=tokenizer(), **options), completions=32)
    assert result["prompts"] == 4 and all(variance > 0.1 for variance in result["gradient_variance"].values())


def test_unusable_probes_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Only 0 of 64 completions have a score"):
        probe(task(tmp_path, lambda prompts, **kwargs: [None] * len(prompts)), completions=32)
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
max_completion_length: 4
"""


def test_command_prints_table_and_verdict(there, tmp_path, capsys):
    (there / "run.yaml").write_text(RUN)
    out = tmp_path / "out"
    assert cli.main(["probe", "--config", "run.yaml", "--completions", "16", "--output_dir", str(out)]) == 0
    printed = capsys.readouterr().out.rstrip()
    result = json.loads((out / "probe.json").read_text())
    assert "16 completions of 8 prompts; all scores are equal in " in printed and "of the groups of 2" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert all([name, f"{variance:.2f}"] in rows for name, variance in result["gradient_variance"].items())
    assert f"{result['explained_variance']:.2f}" in printed
    assert printed.endswith(result["verdict"])
    assert [path.name for path in out.iterdir() if path.name != ".lock"] == ["probe.json"]
