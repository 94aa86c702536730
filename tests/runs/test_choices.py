"""The algorithmic choices as the trainer wires them, each recomputed by hand from plain models in float64."""

import copy
import gc
import json
import math
import statistics
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import SPECIAL, WORDS, config, llama, tokenizer
from transformers import TrainerCallback

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.data.supervised import PTXError

LONGEST, TEMPERATURE, GROUP = 10, 0.8, 4
FEW_WORDS = WORDS[:8]  # so that completions end
# two epochs of one minibatch each, and unclipped gradients: the second step is off policy, and recomputed
SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_mini_batches": 1,
    "num_ppo_epochs": 2,
    "max_steps": 2,
    "max_completion_length": LONGEST,
    "temperature": TEMPERATURE,
    "learning_rate": 2e-2,
    "max_grad_norm": 0.0,
    "cliprange_value": None,
}
NO_CRITIC = {"critic": "none", "num_generations": GROUP}


@pytest.fixture(scope="module", autouse=True)
def without_what_was_imported():
    """Accelerate collects garbage before every run: a second less each."""
    gc.freeze()
    yield
    gc.unfreeze()


# ---- a run, and all that it did ----


def base():
    return llama(vocab_size=len(SPECIAL + FEW_WORDS))


def questions(rows=16):
    return Dataset.from_dict({"prompt": [" ".join(FEW_WORDS[row % 4 : row % 4 + 1 + row % 5]) for row in range(rows)]})


def varied_reward(completion_ids, **kwargs):
    """Scores that differ between completions of one length."""
    return [0.5 * len(ids) + ids[0] % 5 for ids in completion_ids]


def trained(built):
    return {n: p.detach().clone() for n, p in built.actor_critic.named_parameters() if p.requires_grad}


class Step(NamedTuple):
    """An optimizer step: its micro-batches, the gradient, and the state before and after it."""

    micro_batches: list
    gradient: dict
    before: dict
    after: dict
    momentum_before: list
    momentum_after: list


class Collection(NamedTuple):
    """A rollout, where it comes from, and the weights that sampled it."""

    rollout: object
    samples: object
    coefficients: object
    weights: dict


class Record(TrainerCallback):
    """Writes down every rollout and every optimizer step of a trainer."""

    def __init__(self, built):
        self.built, self.collections, self.steps, self.pending = built, [], [], []
        self.collect, self.compute_loss = built.collector.collect, built.compute_loss
        built.collector.collect, built.compute_loss = self._collect, self._compute_loss
        built.add_callback(self)

    def _collect(self, *args):
        weights = trained(self.built)
        self.collections.append(Collection(*self.collect(*args), weights))
        return self.collections[-1][:3]

    def _compute_loss(self, model, inputs, **kwargs):
        self.pending.append(inputs)
        return self.compute_loss(model, inputs, **kwargs)

    def _momentum(self):
        return copy.deepcopy(self.built.optimizer.state_dict()["state"])

    def on_pre_optimizer_step(self, *args, **kwargs):
        named = self.built.actor_critic.named_parameters()
        gradient = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self.begun = self.pending, gradient, trained(self.built), self._momentum()
        self.pending = []

    def on_step_end(self, *args, **kwargs):
        micro_batches, gradient, before, momentum = self.begun
        self.steps.append(Step(micro_batches, gradient, before, trained(self.built), momentum, self._momentum()))


def build(output_dir, model=None, reward_funcs=varied_reward, ptx_dataset=None, **settings):
    """A trainer with a record of what it will do."""
    built = PPOTrainer(
        model or base(),
        reward_funcs,
        config(output_dir, **SETTINGS | settings),
        questions(),
        processing_class=tokenizer(FEW_WORDS),
        ptx_dataset=ptx_dataset,
    )
    return built, Record(built)


def run(output_dir, **settings):
    built, record = build(output_dir, **settings)
    built.train()
    return built, record


def logged(built, name):
    """A metric over the run, where it was logged."""
    return [entry[name] for entry in built.state.log_history if name in entry]


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def apart(one, other):
    """Largest difference of two sets of weights."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


# ---- plain models, one sequence at a time without padding ----


class Plain:
    """Policy, reference and value head of a trainer as plain models in float64.

    Args:
        built: The trainer.
        weights: What the trained weights were; by default they are what they are.
    """

    def __init__(self, built, weights=None):
        self.module = copy.deepcopy(built.actor_critic).double()
        self.module.load_state_dict({k: x.double() for k, x in (weights or {}).items()}, strict=False)
        self.policy, self.head = self.module.policy, self.module.value_head
        self.reference = copy.deepcopy(self.policy)
        if built.actor_critic.reference_adapter is None:
            self.reference.base_model.disable_adapter_layers()
        else:
            self.reference.set_adapter(built.actor_critic.reference_adapter)

    @staticmethod
    def ids(sequences, row):
        start = sequences.prompt_ids.shape[1] - int(sequences.prompt_lengths[row])
        end = int(sequences.completion_lengths[row])
        prompt, completion = sequences.prompt_ids[row, start:], sequences.completion_ids[row, :end]
        return torch.cat([prompt, completion])[None], completion, len(prompt)

    def vocabulary(self, sequences, row, reference=False):
        """Log-probabilities over the vocabulary at each token of a completion."""
        ids, _, prompt = self.ids(sequences, row)
        with torch.set_grad_enabled(not reference):
            logits = (self.reference if reference else self.policy)(input_ids=ids).logits
        return (logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)

    def logprobs(self, sequences, row, reference=False):
        completion = self.ids(sequences, row)[1]
        return self.vocabulary(sequences, row, reference).gather(1, completion[:, None])[:, 0]

    def values(self, sequences, row):
        ids, _, prompt = self.ids(sequences, row)
        hidden = self.policy(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        return self.head(hidden[0, prompt - 1 : -1])[:, 0]

    def kls(self, sequences, row, estimator):
        """KL from the reference at each token."""
        if estimator == "exact":
            ours, theirs = self.vocabulary(sequences, row), self.vocabulary(sequences, row, reference=True)
            return torch.stack([sum(p.exp() * (p - q) for p, q in zip(*both)) for both in zip(ours, theirs)])
        difference = self.logprobs(sequences, row) - self.logprobs(sequences, row, reference=True)
        return {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}[estimator]

    def gradient(self, loss):
        self.module.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}


def assert_same_gradient(got, wanted):
    """Within the rounding of float32."""
    assert wanted.keys() <= got.keys()
    differences = [got[name].double() - wanted.get(name, 0.0) for name in got]
    difference = math.sqrt(sum((x**2).sum().item() for x in differences))
    size = math.sqrt(sum((x**2).sum().item() for x in wanted.values()))
    assert difference < 2e-4 * size, f"{difference / size:.1e} apart"


# ---- PPO's loss by hand ----


class ByHand(NamedTuple):
    """What the loss is made of, in words; the defaults are those of the config."""

    aggregation: str = "token"
    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf
    whole_sequence: bool = False
    value_clip: float = math.inf
    kl: str | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def policy(self, ratio, advantage, counts):
        """Case by case: gain no more from likelier good tokens than `high`, nor from rarer bad ones than `low`."""
        counts["tokens"] += 1
        if advantage > 0:
            counts["high"] += int(ratio > 1 + self.high)
            return -advantage * (ratio if ratio < 1 + self.high else 1 + self.high)
        counts["low"] += int(ratio < 1 - self.low)
        counts["dual"] += int(ratio > self.dual)
        if ratio > self.dual:
            return -advantage * self.dual
        return -advantage * (ratio if ratio > 1 - self.low else 1 - self.low)

    def value(self, value, old, target, counts):
        """Half the squared error, or that of the clipped step where it is larger."""
        error = (value - target) ** 2 / 2
        if abs(value - old) > self.value_clip:
            clipped = (old + math.copysign(self.value_clip, value - old) - target) ** 2 / 2
            counts["value"] += int(clipped > error)
            return clipped if clipped > error else error
        return error

    def completion(self, plain, rollout, row, counts):
        """Loss of each token of a completion."""
        sequences = rollout.sequences
        log_p = plain.logprobs(sequences, row)
        log_ratio = log_p - rollout.old_logprobs[row, : len(log_p)].double()
        if self.whole_sequence:
            log_ratio = (log_ratio.sum() / len(log_ratio)).repeat(len(log_ratio))
        losses = [
            self.policy(ratio, advantage.item(), counts)
            for ratio, advantage in zip(log_ratio.exp(), rollout.advantages[row])
        ]
        if plain.head is not None:
            olds, targets = rollout.old_values[row].double(), rollout.returns[row].double()
            values = zip(plain.values(sequences, row), olds, targets)
            losses = [x + 0.1 * self.value(*of_token, counts) for x, of_token in zip(losses, values)]
        if self.kl is not None:
            kls = plain.kls(sequences, row, self.kl)
            losses = [x + self.kl_coef * kl for x, kl in zip(losses, kls)]
        if self.entropy_coef:
            distributions = plain.vocabulary(sequences, row)
            losses = [x + self.entropy_coef * (p.exp() * p).sum() for x, p in zip(losses, distributions)]
        return losses

    def loss(self, plain, micro_batches):
        """Loss of an optimizer step, and the share of tokens that each clip held."""
        counts: Counter = Counter()
        completions = [
            self.completion(plain, rollout, row, counts)
            for rollout in (batch.rollout for batch in micro_batches)
            for row in range(len(rollout))
            if rollout.response_mask[row].any()
        ]
        tokens = counts.pop("tokens")
        sums = [sum(losses) for losses in completions]
        loss = {
            "token": sum(sums) / tokens,
            "sequence_mean": sum(x / len(losses) for x, losses in zip(sums, completions)) / len(completions),
            "sequence_sum": sum(sums) / len(completions),
            "constant": sum(sums) / len(completions) / LONGEST,
        }[self.aggregation]
        return loss, {name: count / tokens for name, count in counts.items()}


def check_step(built, step, by_hand):
    """The gradient of an optimizer step; returns its loss and the shares of its clips."""
    plain = Plain(built, step.before)
    loss, shares = by_hand.loss(plain, step.micro_batches)
    assert_same_gradient(step.gradient, plain.gradient(loss))
    return loss.item(), shares


def check_last_step(built, record, by_hand):
    """The same, and what was logged of it."""
    loss, shares = check_step(built, record.steps[-1], by_hand)
    log = built.state.log_history[len(record.steps) - 1]
    assert log["loss"] == pytest.approx(loss, abs=2e-4)
    names = {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/dual_mean": "dual"}
    for metric, name in (names | {"value/clip_ratio": "value"}).items():
        assert log.get(metric, 0) == pytest.approx(shares.get(name, 0)), metric
    assert log["clip_ratio/region_mean"] == pytest.approx(shares.get("low", 0) + shares.get("high", 0))
    return loss, shares


SEQUENCES = {"importance_sampling_level": "sequence", "cliprange": 0.05}
IN_LOSS = {"kl_placement": "loss", "kl_coef": 0.3}
LOSSES = {
    "ppo": ({}, ByHand()),
    "cliprange_high": ({"cliprange": 0.1, "cliprange_high": 0.4}, ByHand(low=0.1, high=0.4)),
    "dual_clip": ({"dual_clip": 1.3}, ByHand(dual=1.3)),
    "cliprange_value": ({"cliprange_value": 0.2}, ByHand(value_clip=0.2)),
    "sequence": (SEQUENCES, ByHand(low=0.05, high=0.05, whole_sequence=True)),
    "gspo": (NO_CRITIC | SEQUENCES, ByHand("sequence_mean", low=0.05, high=0.05, whole_sequence=True)),
    "entropy_coef": ({"entropy_coef": 0.3}, ByHand(entropy_coef=0.3)),
    "negative entropy_coef": ({"entropy_coef": -0.3}, ByHand(entropy_coef=-0.3)),
    "grpo by default": (NO_CRITIC, ByHand("sequence_mean")),
    "dr_grpo by default": (NO_CRITIC | {"advantage_estimator": "dr_grpo"}, ByHand("constant")),
    "rloo by default": (NO_CRITIC | {"advantage_estimator": "rloo"}, ByHand("sequence_sum")),
    "reinforce by default": (NO_CRITIC | {"advantage_estimator": "reinforce"}, ByHand("sequence_sum")),
    "k1 in the loss": (IN_LOSS | {"kl_estimator": "k1"}, ByHand(kl="k1", kl_coef=0.3)),
    "k2 in the loss": (IN_LOSS | {"kl_estimator": "k2"}, ByHand(kl="k2", kl_coef=0.3)),
    "k3 in the loss": (IN_LOSS | {"kl_estimator": "k3"}, ByHand(kl="k3", kl_coef=0.3)),
    "exact in the loss": (IN_LOSS | {"kl_estimator": "exact"}, ByHand(kl="exact", kl_coef=0.3)),
}


@pytest.mark.parametrize("choice", LOSSES)
def test_an_off_policy_step_has_the_gradient_the_loss_and_the_clips_of_its_choice(tmp_path, choice):
    settings, by_hand = LOSSES[choice]
    _, shares = check_last_step(*run(tmp_path, **settings), by_hand)
    telling = {"high"} if "reinforce" in choice else {"low", "high"}  # all scores are positive
    telling |= {"dual"} if by_hand.dual < math.inf else set()
    telling |= {"value"} if by_hand.value_clip < math.inf else set()
    assert all(0 < shares[name] < 1 for name in telling), shares


@pytest.mark.parametrize("aggregation", ["token", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("size, accumulation", [(8, 1), (3, 2), (2, 4)])
def test_a_step_has_one_gradient_however_it_is_cut_into_micro_batches(tmp_path, aggregation, size, accumulation):
    """With completions of different lengths, and some that are masked."""
    built, record = run(
        tmp_path,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        loss_aggregation=aggregation,
        mask_truncated_completions=True,
    )
    step = record.steps[-1]
    lengths = torch.cat([batch.rollout.response_mask.sum(1) for batch in step.micro_batches])
    assert len(step.micro_batches) == accumulation and len(lengths.unique()) > 2 and not lengths.all()
    check_step(built, step, ByHand(aggregation))


# ---- where the KL goes ----


def token_rewards(collection):
    """With γ = λ = 1 a return is the sum of the rewards from its token on."""
    returns = collection.rollout.returns.double()
    return returns - torch.nn.functional.pad(returns[:, 1:], (0, 1))


def check_token_rewards(built, collection, estimator, kl_coef):
    """The score at the last token, and the KL penalty at every one; the largest penalty."""
    plain, sequences = Plain(built, collection.weights), collection.rollout.sequences
    ids, cut_off = collection.samples.batch.completion_ids, built.args.missing_eos_penalty or 0
    scores = [score - cut_off * (of_row[-1] != 1) for score, of_row in zip(varied_reward(ids), ids)]
    penalties = []
    for row, (score, rewards) in enumerate(zip(scores, token_rewards(collection))):
        kls = plain.kls(sequences, row, estimator).detach() * kl_coef
        wanted = -kls
        wanted[-1] += score
        torch.testing.assert_close(rewards[: len(kls)], wanted, rtol=0, atol=1e-5)
        assert not rewards[len(kls) :].any()
        penalties.extend(kls.abs().tolist())
    return max(penalties)


RETURNS_ARE_SUMS = {"lam": 1.0, "gamma": 1.0, "max_steps": 4}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
def test_in_the_reward_every_token_is_charged_with_its_kl(tmp_path, estimator):
    built, record = run(tmp_path, kl_estimator=estimator, kl_coef=0.3, missing_eos_penalty=1.5, **RETURNS_ARE_SUMS)
    assert check_token_rewards(built, record.collections[0], estimator, 0.3) < 1e-12  # a fresh adapter
    assert check_token_rewards(built, record.collections[1], estimator, 0.3) > 1e-3
    check_step(built, record.steps[-1], ByHand())  # and the loss knows nothing of it


def test_in_the_loss_no_token_is_charged_in_its_reward(tmp_path):
    built, record = run(tmp_path, kl_estimator="k2", kl_placement="loss", kl_coef=0.3, **RETURNS_ARE_SUMS)
    assert check_token_rewards(built, record.collections[1], "k2", 0.0) == 0
    check_step(built, record.steps[-1], ByHand(kl="k2", kl_coef=0.3))


def test_in_both_the_exact_kl_is_charged_in_reward_and_loss(tmp_path):
    built, record = run(tmp_path, kl_estimator="exact", kl_placement="both", kl_coef=0.3, **RETURNS_ARE_SUMS)
    assert check_token_rewards(built, record.collections[1], "exact", 0.3) > 1e-3
    check_step(built, record.steps[-1], ByHand(kl="exact", kl_coef=0.3))


def adapted():
    """A model with an adapter that has learned something."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base(), lora)


def check_kls(built, sequences):
    with torch.no_grad():
        outputs = built.actor_critic(sequences, TEMPERATURE, with_kl=True)
    plain, largest = Plain(built), 0.0
    for row in range(len(sequences)):
        wanted = plain.kls(sequences, row, "exact").detach()
        torch.testing.assert_close(outputs.kls[row, : len(wanted)].double(), wanted, rtol=1e-4, atol=2e-6)
        assert not outputs.kls[row, len(wanted) :].any()
        largest = max(largest, wanted.max().item())
    return largest


@pytest.mark.parametrize("model", [base, adapted], ids=["base", "frozen adapter"])
def test_the_exact_kl_is_the_sum_over_the_vocabulary_from_adapter_to_reference(tmp_path, model):
    built, record = build(tmp_path, model=model(), max_steps=4)
    started = trained(built)
    built.train()
    assert check_kls(built, record.collections[0].rollout.sequences) > 1e-2
    built.actor_critic.load_state_dict(started, strict=False)
    assert check_kls(built, record.collections[0].rollout.sequences) < 1e-12


# ---- the end of a rollout's updates ----

EARLY = {
    "num_mini_batches": 2,
    "num_ppo_epochs": 3,
    "max_steps": 18,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "weight_decay": 0.1,
}


def moved(built, step):
    """Mean over a minibatch's tokens of k3 from the policy that sampled."""
    plain, total, tokens = Plain(built, step.before), 0.0, 0
    for rollout in (batch.rollout for batch in step.micro_batches):
        for row in range(len(rollout)):
            log_p = plain.logprobs(rollout.sequences, row).detach()
            log_ratio = log_p - rollout.old_logprobs[row, : len(log_p)].double()
            total += (log_ratio.exp() - 1 - log_ratio).sum().item()
            tokens += len(log_p)
    return total / tokens


def stayed(step):
    """Whether nothing moved: neither weights nor Adam's moments and counts."""
    before, after = step.momentum_before, step.momentum_after
    adam = before.keys() == after.keys() and all(same_bits(before[key], after[key]) for key in before)
    return same_bits(step.before, step.after) and adam


def check_early_end(built, record, target):
    """Steps are taken up to the first minibatch that has moved further, and none from there on; how many it were."""
    taken, per_rollout = [], EARLY["num_mini_batches"] * EARLY["num_ppo_epochs"]
    for number, (step, log) in enumerate(zip(record.steps, built.state.log_history)):
        if number % per_rollout == 0:
            ended = False
            taken.append(0)
        if not ended:
            far = moved(built, step)
            assert log["approx_kl"] == pytest.approx(far, rel=1e-2, abs=1e-7)
            ended = far > target
        else:
            assert not step.micro_batches and "approx_kl" not in log
        assert stayed(step) == ended == bool(log["stopped_early"]) == (log["grad_norm"] == 0)
        taken[-1] += not ended
    return taken


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_grad_norm": 1.0}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}],
    ids=["unclipped", "clipped", "accumulated"],
)
def test_once_a_minibatch_has_moved_further_than_target_kl_nothing_moves_until_the_next_rollout(tmp_path, settings):
    built, record = run(tmp_path, target_kl=0.02, **EARLY | settings)
    taken = check_early_end(built, record, 0.02)
    assert len(record.collections) == len(taken) == 3
    assert len(set(taken)) > 1 and all(1 < steps < 6 for steps in taken), taken
    assert built.state.global_step == len(record.steps) == EARLY["max_steps"]
    rates = logged(built, "learning_rate")
    assert rates == pytest.approx([5e-3 * (1 - step / 18) for step in range(18)])


@pytest.mark.parametrize(
    "max_grad_norm",
    [1.0, 0.0],
)
def test_a_gradient_scaler_hears_nothing_of_a_step_that_is_not_taken(tmp_path, max_grad_norm):
    """With fp16 it would otherwise refuse the next one: "unscale_() has already been called"."""
    built, record = build(tmp_path, target_kl=0.02, **EARLY | {"max_grad_norm": max_grad_norm, "max_steps": 6})
    heard = []
    built.accelerator.unscale_gradients = lambda *args: heard.append(built.state.global_step)
    built.train()
    taken = [number for number, step in enumerate(record.steps) if not stayed(step)]
    assert len(taken) < 6 and set(heard) == set(taken)


def test_the_first_step_of_a_rollout_is_taken_whatever_target_kl_is(tmp_path):
    built, record = run(tmp_path, target_kl=1e-9, **EARLY)
    assert check_early_end(built, record, 1e-9) == [1, 1, 1]


def test_a_huge_target_kl_is_none(tmp_path):
    (_, one), (_, other) = (run(tmp_path, target_kl=target, **EARLY | {"max_steps": 6}) for target in (None, 1e9))
    assert all(same_bits(*both) for both in zip((s.after for s in one.steps), (s.after for s in other.steps)))


# ---- coefficients that are steered ----


def test_kl_coef_follows_zieglers_rule_from_the_kl_that_is_logged(tmp_path):
    built, record = run(tmp_path, kl_coef=0.2, kl_target=0.5, kl_horizon=40, lam=1.0, max_steps=12)
    coefficient, errors = 0.2, []
    coefficients, kls = logged(built, "kl_coef"), logged(built, "kl_per_completion")
    for used, kl, collection in zip(coefficients, kls, record.collections, strict=True):
        assert used == pytest.approx(coefficient) == pytest.approx(collection.coefficients.kl)
        errors.append(kl / 0.5 - 1)
        coefficient *= 1 + max(-0.2, min(0.2, errors[-1])) * 8 / 40
    assert min(errors) < -0.2 and max(errors) > 0.2, errors
    last = record.collections[-1]  # was charged with its own coefficient
    assert check_token_rewards(built, last, "k1", last.coefficients.kl) > 1e-3


def test_kl_coef_is_steered_by_all_completions_that_count_also_by_truncated_ones(tmp_path):
    """What is left out of the update was sampled all the same, and is in the KL that is logged."""
    built, record = run(
        tmp_path,
        reward_funcs=failing_reward,
        reward_on_error="skip",
        max_reward_failures=1.0,
        mask_truncated_completions=True,
        kl_target=0.75,
        kl_horizon=40,
        kl_coef=0.2,
        max_completion_length=5,
        per_device_train_batch_size=16,
        max_steps=6,
    )
    coefficient, telling, kls = 0.2, [], logged(built, "kl_per_completion")
    for (_, samples, used, _), kl in zip(record.collections, kls, strict=True):
        assert used.kl == pytest.approx(coefficient, rel=1e-5)
        usable = samples.scored.usable
        coefficient *= 1 + max(-0.2, min(0.2, kl / 0.75 - 1)) * int(usable.sum()) / 40
        if abs(kl / 0.75 - 1) < 0.2 and not usable.all():
            telling.append(int((usable & ~samples.stopped).sum()))
    assert any(telling), (telling, kls)


@pytest.mark.parametrize("coefficient", [0.0, 0.007])
def test_entropy_coef_rises_below_its_target_falls_above_and_applies_only_where_it_is_needed(tmp_path, coefficient):
    target = 2.25
    built, record = run(tmp_path, entropy_coef=coefficient, entropy_target=target, max_steps=12)
    used, entropies = logged(built, "entropy_coef"), logged(built, "entropy")
    for of_rollout, entropy, collection in zip(used, entropies, record.collections, strict=True):
        coefficient = coefficient + 0.005 if entropy < target else max(coefficient - 0.005, 0)
        assert of_rollout == pytest.approx(coefficient if entropy < target else 0)
        assert of_rollout == pytest.approx(collection.coefficients.entropy)
    assert entropies[0] > target > entropies[1] and max(used) > 0 and entropies[-1] > target, entropies
    highest = used.index(max(used))
    check_step(built, record.steps[2 * highest + 1], ByHand(entropy_coef=used[highest]))
    check_step(built, record.steps[-1], ByHand())


@pytest.mark.parametrize("saved", [6, 7, 8], ids=["between rollouts", "within one", "after its updates ended"])
def test_a_run_with_every_choice_that_has_a_state_goes_on_bit_for_bit(tmp_path, saved):
    def begin(name):
        return build(
            tmp_path / name,
            ptx_dataset=supervised(),
            kl_coef=0.2,
            kl_target=1.0,
            kl_horizon=40,
            entropy_target=2.3,
            entropy_coef=0.01,
            target_kl=0.1,
            ema_decay=0.8,
            num_ppo_epochs=3,
            max_steps=12,
            save_strategy="steps",
            save_steps=saved,
        )

    (whole, one), (again, other) = begin("whole"), begin("again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{saved}"))
    assert logged(whole, "stopped_early")[6:9] == [0, 1, 1]
    state = json.loads((tmp_path / "whole" / f"checkpoint-{saved}" / "ppo_state.json").read_text())
    following = one.collections[math.ceil(saved / 3)].coefficients.kl
    assert state["kl_coef"]["value"] == following == other.collections[0].coefficients.kl != 0.2
    assert state["entropy_coef"]["coefficient"] != 0.01
    assert same_bits(whole.averaged_policy.state_dict(), again.averaged_policy.state_dict())
    drawn = []
    for ours, theirs in zip(one.steps[saved:], other.steps, strict=True):
        assert same_bits(ours.after, theirs.after)
        batches = [[rows(batch.ptx) for batch in step.micro_batches] for step in (ours, theirs)]
        assert batches[0] == batches[1]
        drawn.extend(batches[0])
    assert drawn[0] != drawn[-1]
    timed = ("time/", "tokens_per_second", "train_", "epoch")
    for logs in zip(whole.state.log_history, again.state.log_history, strict=True):
        kept = [{key: value for key, value in log.items() if not key.startswith(timed)} for log in logs]
        assert kept[0] == kept[1]


# ---- advantages with a critic ----


def advantages_by_hand(collection, lam, gamma, scores, kl_coef):
    """GAE's sum written out, Âₜ = Σₗ (γλ)ˡ·δₜ₊ₗ, for every completion; `lam` is a function of its length."""
    rollout, advantages, values = collection.rollout, [], []
    for row, score in enumerate(scores):
        n = int(rollout.sequences.completion_lengths[row])
        of_row = (x[row, :n].double() for x in (rollout.old_values, rollout.old_logprobs, rollout.ref_logprobs))
        v, old, ref = (x.tolist() for x in of_row)
        rewards = [-kl_coef * (p - q) for p, q in zip(old, ref)]
        rewards[-1] += score
        deltas = [rewards[t] + gamma * (v[t + 1] if t + 1 < n else 0) - v[t] for t in range(n)]
        decay = gamma * lam(n)
        advantages.append([sum(decay ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])
        values.append(v)
    return advantages, values


LAMBDAS = {
    "lam": ({}, lambda n: 0.9, lambda n: 0.9),
    "lam_critic": ({"lam_critic": 0.5}, lambda n: 0.9, lambda n: 0.5),
    "lam_critic of 1": ({"lam_critic": 1.0}, lambda n: 0.9, lambda n: 1.0),
    "lam_length_alpha": ({"lam_length_alpha": 0.3}, lambda n: max(0, 1 - 1 / (0.3 * n)), lambda n: 0.9),
    "both": ({"lam_length_alpha": 0.3, "lam_critic": 1.0}, lambda n: max(0, 1 - 1 / (0.3 * n)), lambda n: 1.0),
}


@pytest.mark.parametrize("choice", LAMBDAS)
def test_policy_and_critic_have_the_advantages_and_returns_of_their_own_lambda(tmp_path, choice):
    settings, lam, lam_critic = LAMBDAS[choice]
    settings = settings | {"lam": 0.9, "gamma": 0.95, "kl_coef": 0.2, "whiten_advantages": False}
    _, record = run(tmp_path, max_steps=3, **settings)
    collection = record.collections[1]  # with values that are not 0
    scores = varied_reward(collection.samples.batch.completion_ids)
    wanted, _ = advantages_by_hand(collection, lam, 0.95, scores, 0.2)
    towards, values = advantages_by_hand(collection, lam_critic, 0.95, scores, 0.2)
    assert collection.rollout.old_values.abs().max() > 0.1
    for row, advantages in enumerate(wanted):
        n = len(advantages)
        got, returns = (x[row].double() for x in (collection.rollout.advantages, collection.rollout.returns))
        torch.testing.assert_close(got[:n], torch.tensor(advantages).double(), rtol=1e-4, atol=1e-4)
        targets = torch.tensor([a + v for a, v in zip(towards[row], values[row])]).double()
        torch.testing.assert_close(returns[:n], targets, rtol=1e-4, atol=1e-4)
        assert not got[n:].any() and not returns[n:].any()


def test_a_lam_critic_like_lam_is_none(tmp_path):
    (_, one), (_, other) = (run(tmp_path, lam=0.9, lam_critic=lam, max_steps=4) for lam in (None, 0.9))
    assert same_bits(one.steps[-1].after, other.steps[-1].after)


def whitened(rows):
    flat = [x for row in rows for x in row]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    return [[(x - mean) / deviation for x in row] for row in rows]


@pytest.mark.parametrize("whiten", [None, True, False])
def test_advantages_are_whitened_over_the_tokens_that_count_unless_told_otherwise(tmp_path, whiten):
    _, record = run(tmp_path, mask_truncated_completions=True, whiten_advantages=whiten, max_steps=3, kl_coef=0.0)
    collection = record.collections[1]
    rollout, ids = collection.rollout, collection.samples.batch.completion_ids
    raw, _ = advantages_by_hand(collection, lambda n: 0.95, 1.0, varied_reward(ids), 0.0)
    counted = [row for row in range(8) if ids[row][-1] == 1]
    assert 1 < len(counted) < 8 and rollout.response_mask.any(1).nonzero()[:, 0].tolist() == counted
    wanted = [raw[row] for row in counted] if whiten is False else whitened([raw[row] for row in counted])
    got = [rollout.advantages[row, : len(ids[row])].tolist() for row in counted]
    for of_row, wanted_of_row in zip(got, wanted, strict=True):
        assert of_row == pytest.approx(wanted_of_row, rel=1e-3, abs=1e-4)
    assert not rollout.advantages[~rollout.response_mask].any()


# ---- advantages without a critic ----


def baselined(name, scores):
    """Advantages of the completions of one prompt."""
    if len(scores) < 2 and name != "reinforce":
        return [0.0] * len(scores)
    mean = statistics.mean(scores)
    return {
        "grpo": lambda: [(x - mean) / (statistics.stdev(scores) + 1e-4) for x in scores],
        "dr_grpo": lambda: [x - mean for x in scores],
        "rloo": lambda: [x - statistics.mean(scores[:i] + scores[i + 1 :]) for i, x in enumerate(scores)],
        "reinforce": lambda: scores,
    }[name]()


def check_group_advantages(built, collection, name, scores, kl_coef, masked=()):
    """`scores` are None where a completion is skipped; `masked` rows count for the others, and learn nothing."""
    rollout, plain = collection.rollout, Plain(built, collection.weights)
    wanted = [0.0] * len(scores)
    for start in range(0, len(scores), GROUP):
        members = [row for row in range(start, start + GROUP) if scores[row] is not None]
        kls = [plain.kls(rollout.sequences, row, "k1").sum().item() for row in members]
        advantages = baselined(name, [scores[row] - kl_coef * kl for row, kl in zip(members, kls)])
        for row, advantage in zip(members, advantages):
            wanted[row] = advantage
    for row, advantage in enumerate(wanted):
        n = int(rollout.sequences.completion_lengths[row])
        counts = scores[row] is not None and row not in masked
        assert rollout.response_mask[row].sum() == (n if counts else 0)
        of_tokens = rollout.advantages[row].tolist()
        assert of_tokens[:n] == pytest.approx([advantage if counts else 0.0] * n, rel=1e-3, abs=1e-4)
        assert len(set(of_tokens[:n])) == 1 and not any(of_tokens[n:])
    return wanted


ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_a_critic_a_completion_is_compared_with_its_group_kl_and_all(tmp_path, estimator):
    built, record = run(tmp_path, advantage_estimator=estimator, kl_coef=0.5, max_steps=3, **NO_CRITIC)
    collection = record.collections[1]
    assert len(set(collection.samples.batch.prompts)) == 2
    scores = varied_reward(collection.samples.batch.completion_ids)
    wanted = check_group_advantages(built, collection, estimator, scores, 0.5)
    if estimator != "reinforce":
        sums = [sum(wanted[start : start + GROUP]) for start in (0, GROUP)]
        assert sums == pytest.approx([0, 0], abs=1e-9) and max(wanted) > 0.5
    assert all(step.gradient.keys() == step.before.keys() for step in record.steps)
    assert not any("value" in name for name in record.steps[0].before)


def failing_reward(completion_ids, **kwargs):
    """No number for some, not even a finite one for others."""
    odd = {2: float("nan"), 3: "n/a", 4: float("inf")}
    return [odd.get(ids[0] % 5, score) for ids, score in zip(completion_ids, varied_reward(completion_ids))]


def optional_reward(completion_ids, **kwargs):
    return [None if len(ids) > 3 else 2.0 for ids in completion_ids]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_skipped_completions_are_left_out_of_their_group_and_of_the_step(tmp_path, estimator):
    built, record = run(
        tmp_path,
        reward_funcs=[failing_reward, optional_reward],
        advantage_estimator=estimator,
        reward_on_error="skip",
        max_reward_failures=1.0,
        kl_coef=0.5,
        max_steps=4,
        per_device_train_batch_size=16,
        **NO_CRITIC,
    )
    for collection in record.collections:
        ids = collection.samples.batch.completion_ids
        scores = [
            None if of_row[0] % 5 in (2, 3, 4) else score + (2.0 if len(of_row) <= 3 else 0.0)
            for of_row, score in zip(ids, varied_reward(ids))
        ]
        skipped = [sum(score is None for score in scores[start : start + GROUP]) for start in range(0, 16, GROUP)]
        assert len(set(skipped)) > 1
        check_group_advantages(built, collection, estimator, scores, 0.5)
    check_step(built, record.steps[-1], ByHand(built.args.loss_aggregation))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_truncated_completions_are_masked_in_the_loss_and_count_in_their_group(tmp_path, estimator):
    built, record = run(
        tmp_path, advantage_estimator=estimator, mask_truncated_completions=True, max_steps=4, kl_coef=0.5, **NO_CRITIC
    )
    collection = record.collections[1]
    ids = collection.samples.batch.completion_ids
    cut_off = [row for row in range(8) if ids[row][-1] != 1]
    assert 0 < len(cut_off) < 8 and all(len(ids[row]) == LONGEST for row in cut_off)
    check_group_advantages(built, collection, estimator, varied_reward(ids), 0.5, masked=cut_off)
    check_step(built, record.steps[-1], ByHand(built.args.loss_aggregation))


# ---- supervised rows beside the rollout ----


def supervised(rows=20):
    prompts = [" ".join(FEW_WORDS[row % 3 : row % 3 + 1 + row % 2]) for row in range(rows)]
    completions = [" " + " ".join(FEW_WORDS[(row + k) % 8] for k in range(1 + row % 7)) for row in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def rows(sequences):
    """Token ids of each row's prompt and completion."""
    split = [(Plain.ids(sequences, row)[0][0], Plain.ids(sequences, row)[2]) for row in range(len(sequences))]
    return [(ids[:prompt].tolist(), ids[prompt:].tolist()) for ids, prompt in split]


def mean_nll(plain, drawn):
    """transformers' own loss of a causal language model, with labels at the completions' tokens alone."""
    longest = max(len(prompt + completion) for prompt, completion in drawn)
    spaces = [[0] * (longest - len(prompt + completion)) for prompt, completion in drawn]
    ids = torch.tensor([prompt + completion + space for (prompt, completion), space in zip(drawn, spaces)])
    labels = [
        [-100] * len(prompt) + completion + [-100] * len(space) for (prompt, completion), space in zip(drawn, spaces)
    ]
    mask = torch.tensor([[1] * (longest - len(space)) + space for space in spaces])
    return plain.policy(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)).loss


@pytest.mark.parametrize("size, accumulation", [(8, 1), (2, 4)])
@pytest.mark.parametrize("choice", ["token", "sequence_sum"])
def test_supervised_rows_add_the_gradient_of_transformers_own_loss(tmp_path, choice, size, accumulation):
    built, record = run(
        tmp_path,
        ptx_dataset=supervised(),
        ptx_coef=0.7,
        loss_aggregation=choice,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
    )
    encode = tokenizer(FEW_WORDS)
    dataset = [
        (encode(row["prompt"])["input_ids"], [*encode(row["completion"])["input_ids"], 1]) for row in supervised()
    ]
    step = record.steps[-1]
    drawn = [row for batch in step.micro_batches for row in rows(batch.ptx)]
    assert len(drawn) == 8 and all(row in dataset for row in drawn)
    plain = Plain(built, step.before)
    ppo, nll = ByHand(choice).loss(plain, step.micro_batches)[0], mean_nll(plain, drawn)
    assert_same_gradient(step.gradient, plain.gradient(ppo + 0.7 * nll))
    assert logged(built, "loss/ptx")[-1] == pytest.approx(nll.item(), rel=1e-4)
    assert logged(built, "loss")[-1] == pytest.approx((ppo + 0.7 * nll).item(), abs=2e-4)


def test_supervised_rows_with_coefficient_zero_change_nothing(tmp_path):
    (_, one), (_, other) = (run(tmp_path, max_steps=4, ptx_coef=0.0, ptx_dataset=x) for x in (None, supervised()))
    assert all(same_bits(*both) for both in zip((s.after for s in one.steps), (s.after for s in other.steps)))


def test_supervised_rows_are_cut_to_their_longest_length(tmp_path):
    _, record = run(tmp_path, ptx_dataset=supervised(), ptx_max_length=4)
    lengths = [len(prompt + completion) for prompt, completion in rows(record.steps[0].micro_batches[0].ptx)]
    assert max(lengths) == 4 and min(lengths) >= 2


def test_supervised_rows_that_do_not_fit_are_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(PTXError, match=r"Row 1 of the PTX dataset: its prompt has 2 tokens"):
        build(tmp_path, ptx_dataset=supervised(), ptx_max_length=2)
    with pytest.raises(PTXError, match=r"Row 0 .*is empty"):
        build(tmp_path, ptx_dataset=Dataset.from_dict({"text": [""]}))
    with pytest.raises(PTXError, match="needs the columns"):
        build(tmp_path, ptx_dataset=questions())


# ---- the moving average ----


def of_policy(weights):
    return {name: x for name, x in weights.items() if "lora" in name}


def evaluations_of(built):
    """Record what an evaluation samples."""
    seen, evaluate = [], built.collector.evaluate

    def recording(*args):
        seen.append(evaluate(*args))
        return seen[-1]

    built.collector.evaluate = recording
    return seen


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaged")
    built, record = build(folder, ema_decay=0.7, max_steps=4, target_kl=0.05, num_ppo_epochs=4)
    start = trained(built)
    built.train()
    built.save_model()
    assert any(stayed(step) for step in record.steps)  # the average goes on over steps that are not taken
    average = {name: 0.7**4 * x.double() for name, x in of_policy(start).items()}
    for number, step in enumerate(record.steps, 1):
        average = {name: x + 0.3 * 0.7 ** (4 - number) * step.after[name].double() for name, x in average.items()}
    return built, folder, average


def test_the_averaged_policy_has_its_closed_form_over_all_steps(averaged):
    built, _, average = averaged
    got = {f"policy.{name}": x.double() for name, x in built.averaged_policy.state_dict().items()}
    assert got.keys() == average.keys() and apart(got, average) < 1e-6
    assert apart(of_policy(trained(built)), average) > 1e-3


def test_the_averaged_policy_is_saved_as_a_plain_adapter(averaged):
    built, folder, average = averaged
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        policy, mean = (
            PeftModel.from_pretrained(base(), path)(input_ids=ids).logits for path in (folder, folder / "ema")
        )
        by_hand = Plain(built, average).policy(input_ids=ids).logits
        torch.testing.assert_close(built.actor_critic.policy.eval()(input_ids=ids).logits, policy)
    torch.testing.assert_close(mean.double(), by_hand, rtol=0, atol=1e-5)
    assert (mean - policy).abs().max() > 1e-3


def test_within_swapped_the_average_is_evaluated_and_the_policy_comes_back(averaged):
    built, _, average = averaged
    seen, before = evaluations_of(built), trained(built)
    with built.averaged_policy.swapped():
        metrics = built.evaluate(questions(8))
    assert same_bits(trained(built), before)
    sequences = seen[0].sequences
    mean, policy = (
        sum(plain.kls(sequences, row, "k1").sum().item() for row in range(8)) / 8
        for plain in (Plain(built, average), Plain(built))
    )
    assert metrics["eval_kl_per_completion"] == pytest.approx(mean, rel=1e-3)
    assert abs(mean - policy) > 1e-2


# ---- one run after the other ----


@pytest.mark.parametrize("is_trainable", [True, False])
def test_the_adapter_of_one_run_is_start_and_reference_of_the_next(tmp_path, is_trainable):
    first, _ = run(tmp_path / "first", max_steps=4)
    first.save_model()
    loaded = PeftModel.from_pretrained(base(), tmp_path / "first", is_trainable=is_trainable)
    second, record = run(tmp_path / "second", model=loaded, max_steps=4, kl_coef=0.5, lam=1.0)
    assert logged(second, "kl")[0] == logged(second, "kl_per_completion")[0] == 0
    assert logged(second, "kl")[1] != 0
    policy = Plain(first)
    for collection in record.collections:
        rollout = collection.rollout
        for row in range(len(rollout)):
            wanted = policy.logprobs(rollout.sequences, row).detach()
            got = rollout.ref_logprobs[row, : len(wanted)].double()
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(record.collections[0].rollout.old_logprobs, record.collections[0].rollout.ref_logprobs)
    assert check_token_rewards(second, record.collections[1], "k1", 0.5) > 1e-3
    assert apart(record.collections[0].weights, record.steps[-1].after) > 1e-3
