"""The invariants of the training loop."""

import copy
import itertools
import json
import math

import bitsandbytes as bnb
import pytest
import torch
from runs_of_tiny import micro_batches_of, rollouts_of, trainer, weights
from tiny import CHAT_TEMPLATE, LOGIT_MAPS, config, llama, prompts, tokenizer, with_mapped_logits
from transformers import BitsAndBytesConfig, TrainerCallback

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.modeling import logprobs
from trl_ppo_ext.ppo.updates import MicroBatch
from trl_ppo_ext.rewards import ClassifierReward


class Steps(TrainerCallback):
    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        roles = model.policy_parameters(), model.critic_parameters()
        norms = [
            torch.nn.utils.get_total_norm([x.grad for x in role.values()]).item() for role in roles
        ]
        self.norms.append(max(norms))


# ---- how often what is seen


@pytest.mark.parametrize(
    "accumulation, minibatches, epochs", list(itertools.product((1, 2), (1, 3), (1, 2)))
)
def test_steps_are_rollouts_times_epochs_times_minibatches(
    tmp_path, accumulation, minibatches, epochs
):
    """And each is clipped, and every completion is seen exactly `num_ppo_epochs` times."""
    steps = Steps()
    built = trainer(
        tmp_path,
        callbacks=[steps],
        dataset=prompts(2 * 2 * accumulation * minibatches),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=minibatches,
        num_ppo_epochs=epochs,
        num_train_epochs=1,
        max_steps=-1,
        max_grad_norm=1e-3,
    )
    rollouts = rollouts_of(built)
    seen = micro_batches_of(built)
    built.train()
    assert len(rollouts) == 2
    assert built.state.global_step == len(steps.norms) == 2 * epochs * minibatches
    assert max(steps.norms) <= 1e-3 * (1 + 1e-3)
    for number, (rollout, _) in enumerate(rollouts):
        size = len(rollout)
        assert size == 2 * accumulation * minibatches
        of_rollout = seen[number * len(seen) // 2 : (number + 1) * len(seen) // 2]
        rows = [tuple(row.tolist()) for batch in of_rollout for row in batch.rollout.old_logprobs]
        trimmed = [tuple(x for x in row if x) for row in rows]
        wanted = [tuple(x for x in row.tolist() if x) for row in rollout.old_logprobs]
        assert sorted(trimmed) == sorted(wanted * epochs)


def test_first_minibatch_has_ratio_one_and_no_kl_bit_for_bit(tmp_path):
    for dtype, bf16 in ((torch.float32, False), (torch.bfloat16, True)):
        sizes = {"num_mini_batches": 2, "max_steps": 1, "gradient_accumulation_steps": 2}
        built = trainer(tmp_path, llama(dtype=dtype), **sizes, bf16=bf16)
        built.train()
        log = built.state.log_history[0]
        assert log["kl"] == log["kl_per_completion"] == 0
        assert log["ratio/mean"] == log["ratio/max"] == 1
        assert log["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("family", LOGIT_MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_cap_or_scale_logits_train(tmp_path, family, dtype):
    settings = {
        "num_ppo_epochs": 1,
        "max_steps": 2,
        "bf16": dtype == torch.bfloat16,
        "kl_estimator": "exact",
    }
    built = trainer(tmp_path, with_mapped_logits(family).to(dtype), entropy_coef=0.01, **settings)
    before = weights(built)
    built.train()
    first, second, _ = built.state.log_history
    assert first["kl"] == 0 and first["ratio/mean"] == first["ratio/max"] == 1
    assert second["approx_kl"] > 0 and second["ratio/max"] > 1
    assert all(math.isfinite(x["grad_norm"]) for x in (first, second))
    assert any(
        not torch.equal(x, before[name]) for name, x in weights(built).items() if "lora_B" in name
    )


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_first_ratio_is_one_with_an_exact_kl_in_several_chunks(tmp_path, monkeypatch, placement):
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "cpu", 2 * 32)  # of two tokens
    built = trainer(
        tmp_path, kl_estimator="exact", kl_placement=placement, num_mini_batches=2, max_steps=1
    )
    built.train()
    log = built.state.log_history[0]
    assert log["kl"] == 0 and log["ratio/mean"] == log["ratio/max"] == 1


def test_first_epoch_of_every_rollout_starts_with_ratio_one(tmp_path):
    built = trainer(tmp_path, num_mini_batches=2, max_steps=8)
    ratios = []
    compute_loss = built.compute_loss

    def recording(model, inputs, **kwargs):
        with torch.no_grad():
            logprobs = built.actor_critic(inputs.rollout.sequences).logprobs
            ratios.append((logprobs - inputs.rollout.old_logprobs).abs().max().item())
        return compute_loss(model, inputs, **kwargs)

    built.compute_loss = recording
    built.train()
    assert ratios[0] == ratios[4] == 0
    assert all(ratio > 0 for ratio in ratios[1:4] + ratios[5:])


# ---- what the loss depends on


def gradient_of(built, rollout, rows):
    """Accumulate the gradient of one optimizer step, cut into micro-batches of these rows."""
    built.actor_critic.zero_grad()
    tokens = rollout.policy_tokens.sum(), rollout.response_mask.sum()
    loss = sum(
        built.compute_loss(built.actor_critic, MicroBatch(rollout.rows(r), 0, *tokens))
        for r in rows
    )
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in built.actor_critic.named_parameters() if p.grad is not None
    }


@pytest.fixture(scope="module")
def off_policy(tmp_path_factory):
    """A trainer some steps away from the rollout it collected, so that ratios, clips and values
    are not trivial."""
    built = trainer(
        tmp_path_factory.mktemp("off_policy"),
        per_device_train_batch_size=8,
        num_mini_batches=1,
        num_ppo_epochs=4,
        max_steps=4,
        entropy_coef=0.01,
        learning_rate=2e-2,
        mask_truncated_completions=True,
        max_completion_length=12,
        critic="head",  # whose loss trains the policy's adapter, too
    )
    rollouts = rollouts_of(built)
    built.train()
    rollout = rollouts[0][0]
    lengths = rollout.sequences.completion_lengths
    assert (
        lengths.min() < lengths.max()
        and rollout.policy_mask.any()
        and not rollout.policy_mask.any(1).all()
    )
    return built, rollout


@pytest.mark.parametrize(
    "cut",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[r] for r in range(8)],
        [[7, 6, 5, 4, 3, 2, 1, 0]],
        [[3, 1, 6], [0, 2, 4, 5, 7]],
    ],
    ids=["halves", "single rows", "another order", "uneven"],
)
def test_loss_and_gradient_do_not_depend_on_how_the_step_is_cut(off_policy, cut):
    built, rollout = off_policy
    loss, gradient = gradient_of(built, rollout, [torch.arange(8)])
    other_loss, other = gradient_of(built, rollout, [torch.tensor(rows) for rows in cut])
    assert other_loss == pytest.approx(loss, rel=1e-5)
    scale = max(g.abs().max() for g in gradient.values())
    for name, expected in gradient.items():
        torch.testing.assert_close(other[name], expected, rtol=1e-4, atol=1e-6 * scale.item())


def test_padding_ids_do_not_matter(off_policy):
    built, rollout = off_policy
    _, expected = gradient_of(built, rollout, [torch.arange(8)])
    sequences = copy.copy(rollout.sequences)
    padded = torch.where(sequences.completion_mask, sequences.completion_ids, 9)
    object.__setattr__(sequences, "completion_ids", padded)
    other = copy.copy(rollout)
    object.__setattr__(other, "sequences", sequences)
    _, gradient = gradient_of(built, other, [torch.arange(8)])
    assert all(torch.equal(gradient[name], expected[name]) for name in expected)


# ---- where rewards enter


def test_missing_eos_is_penalized(tmp_path):
    built = trainer(
        tmp_path,
        reward_funcs=lambda completions, **kwargs: [3.0] * len(completions),
        missing_eos_penalty=0.5,
        kl_coef=0.0,
        max_completion_length=12,
        per_device_train_batch_size=16,
        max_steps=1,
    )
    rollouts = rollouts_of(built)
    built.train()
    samples = rollouts[0][1]
    ended = torch.tensor([ids[-1] == 1 for ids in samples.batch.completion_ids])
    assert 0 < ended.sum() < len(ended)
    assert torch.equal(samples.stopped, ended)
    objective = torch.where(ended, 3.0, 2.5).mean().item()
    assert built.state.log_history[0]["objective"] == pytest.approx(objective)


def test_rewards_get_columns_and_are_weighted(tmp_path):
    seen = []

    def first(prompts, completions, target, trainer_state, **kwargs):
        seen.append((prompts, target, trainer_state.global_step))
        return [1.0] * len(prompts)

    def second(completion_ids, **kwargs):
        return [None if len(ids) > 4 else 10.0 for ids in completion_ids]

    built = trainer(
        tmp_path, reward_funcs=[first, second], reward_weights=[2.0, 0.1], shuffle_dataset=False
    )
    rollouts = rollouts_of(built)
    built.train()
    table = prompts()
    assert seen[0] == (list(table["prompt"][:8]), list(table["target"][:8]), 0)
    for samples in (samples for _, samples in rollouts):
        short = torch.tensor([len(ids) <= 4 for ids in samples.batch.completion_ids])
        assert torch.equal(samples.scored.totals, torch.where(short, 3.0, 2.0))
    assert built.state.log_history[0]["rewards/first/mean"] == 1


# ---- data


def test_streaming_dataset_trains_with_max_steps(tmp_path):
    built = trainer(tmp_path, dataset=prompts(10).to_iterable_dataset(), max_steps=12)
    rollouts = rollouts_of(built)
    built.train()
    assert built.state.global_step == 12 and len(rollouts) == 3
    texts = list(prompts(10)["prompt"])
    assert [p for _, s in rollouts for p in s.batch.prompts] == (texts + texts[:6] + texts)[:24]


@pytest.mark.parametrize("streams", [False, True])
def test_workers_of_the_dataloader_change_nothing(tmp_path, streams):
    workers = {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 2,
    }
    ends = []
    for settings in ({}, workers):
        dataset = prompts(8).to_iterable_dataset() if streams else prompts(8)
        built = trainer(tmp_path, dataset=dataset, max_steps=8, **settings)
        built.train()  # two epochs
        ends.append(weights(built))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_chat_prompts_reach_rewards_as_messages(tmp_path):
    dataset = prompts(8).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions))
        return [0.0] * len(prompts)

    built = trainer(
        tmp_path,
        dataset=dataset,
        reward_funcs=reward,
        processing_class=tokenizer(chat_template=CHAT_TEMPLATE),
    )
    built.train()
    prompt, completion = seen[0]
    assert prompt[0]["role"] == "user" and completion[0]["role"] == "assistant"
    assert isinstance(completion[0]["content"], str)


# ---- evaluation and logging


def test_trainers_used_in_turn_do_not_change_each_other(tmp_path):
    """Nor does a config, or what is drawn, between the constructor and `train()`."""
    alone, first, second = (trainer(tmp_path / f"{n}", max_steps=2) for n in range(3))
    alone.train()
    other = trainer(tmp_path / "other", seed=7, bf16=True, max_steps=2)
    other.train()
    first.train()
    torch.rand(3)
    config(tmp_path / "config", per_device_train_batch_size=2)
    second.evaluate(prompts(2))
    second.train()
    assert first.accelerator.mixed_precision == "no"
    expected = weights(alone)
    for built in (first, second):
        assert all(torch.equal(x, expected[name]) for name, x in weights(built).items())


def test_evaluation_logs_the_same_metrics_and_trains_nothing(tmp_path):
    sets = {"a": prompts(5), "b": prompts(3)}
    built = trainer(tmp_path, eval_dataset=sets, per_device_eval_batch_size=4)
    before = weights(built)
    metrics = built.evaluate()
    assert all(torch.equal(before[name], weight) for name, weight in weights(built).items())
    for name in (
        "reward",
        "kl",
        "entropy",
        "rewards/length_reward/mean",
        "completions/mean_length",
    ):
        assert f"eval_a_{name}" in metrics and f"eval_b_{name}" in metrics
    assert metrics["eval_a_reward"] == pytest.approx(metrics["eval_a_completions/mean_length"])
    built.train()
    assert not any("eval" in name for entry in built.state.log_history[1:] for name in entry)


def test_callback_that_evaluates_leaves_the_logs_of_training(tmp_path):
    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            built.evaluate()

    built = trainer(tmp_path, eval_dataset=prompts(3), callbacks=[Evaluates()])
    built.train()
    logs = built.state.log_history
    steps = list(range(1, built.state.max_steps + 1))
    assert [row["step"] for row in logs if "loss" in row] == steps
    assert [row["step"] for row in logs if "eval_reward" in row] == steps


def test_evaluation_runs_in_even_batches_of_at_most_a_rollout(tmp_path):
    # which changes nothing
    built = trainer(tmp_path, dataloader_drop_last=True)
    sizes = []
    assert built.plan.completions_per_process == built.args.eval_batch_size == 8
    generate = built.components.player.generator.generate
    built.components.player.generator.generate = lambda prompts, *args: (
        sizes.append(len(prompts)) or generate(prompts, *args)
    )
    for rows in (5, 8, 9, 17):
        metrics = built.evaluate(prompts(rows))
        assert metrics["eval_reward"] == metrics["eval_completions/mean_length"]
    assert sizes == [5, 8, 5, 4, 6, 6, 5]


def test_evaluate_accepts_a_new_dataset(tmp_path):
    metrics = trainer(tmp_path).evaluate(prompts(3))
    assert metrics["eval_reward"] == metrics["eval_completions/mean_length"]


def test_metrics_of_the_design_are_logged(tmp_path):
    built = trainer(tmp_path, num_mini_batches=1, num_ppo_epochs=1)
    built.train()
    wanted = (
        "reward reward_std rewards/length_reward/mean kl entropy clip_ratio/low_mean "
        "clip_ratio/high_mean clip_ratio/region_mean completions/mean_length "
        "completions/min_length completions/max_length completions/clipped_ratio num_tokens "
        "loss/policy loss/value value/explained_variance value/clip_ratio value/grad_norm "
        "ratio/mean ratio/max approx_kl kl_coef time/generate time/score time/forward time/update "
        "tokens_per_second"
    ).split()
    assert set(wanted) <= built.state.log_history[0].keys()
    assert all(isinstance(value, int | float) for value in built.state.log_history[0].values())
    json.dumps(built.state.log_history)


# ---- what must not move


def numbers(name, module):
    """Weights as numbers: bitsandbytes may lay the bytes of 4-bit weights out anew for its
    kernel."""
    if isinstance(module, bnb.nn.Linear4bit):
        layout = getattr(module.weight.quant_state, "packing_format_for_cpu", False)
        assert not layout, f"{name} is packed: its bytes cannot be read"
        yield (
            f"{name}.weight",
            bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state),
        )
    else:
        yield from (
            (f"{name}.{key}", p)
            for key, p in module.named_parameters(recurse=False)
            if not p.requires_grad
        )


def frozen_numbers(*models):
    modules = [
        (f"{i}.{name}", m) for i, model in enumerate(models) for name, m in model.named_modules()
    ]
    return {key: weight.detach().clone() for name, m in modules for key, weight in numbers(name, m)}


@pytest.mark.parametrize("nf4", [False, True])
def test_base_and_reward_model_never_change(tmp_path, nf4):
    base = llama(hidden_size=64)
    classifier = llama(classifier=True, hidden_size=64, seed=3)
    for name, model in (("base", base), ("reward", classifier)):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    if nf4:
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        quantization = None
    args = config(tmp_path / "run", max_steps=4)
    built = PPOTrainer(
        str(tmp_path / "base"),
        str(tmp_path / "reward"),
        args,
        prompts(),
        quantization_config=quantization,
    )
    (reward_model,) = built.reward_funcs
    for module in reward_model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # so that its bytes stay readable
    before = frozen_numbers(built.actor_critic, reward_model)
    started = weights(built)
    built.train()
    after = frozen_numbers(built.actor_critic, reward_model)
    assert before.keys() == after.keys() and sum("proj" in key for key in before) == 28
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    for name, weight in weights(built).items():
        assert not torch.equal(started[name], weight), name


def test_four_bit_reward_model_scores_the_same_after_training(tmp_path):
    llama(classifier=True, hidden_size=64, seed=3).save_pretrained(tmp_path / "reward")
    tokenizer().save_pretrained(tmp_path / "reward")
    built = trainer(tmp_path / "run", reward_funcs=str(tmp_path / "reward"), max_steps=4)
    rollouts = rollouts_of(built)
    built.train()
    first = rollouts[0][1]
    again = ClassifierReward(*built.reward_funcs, tokenizer()).score(first.batch)
    assert first.scored.rewards[:, 0].tolist() == again
