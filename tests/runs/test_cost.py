"""Cost of one PPO step, counted exactly: forwards, projected tokens, largest tensors."""

from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from runs_of_tiny import micro_batches_of, rollouts_of
from tiny import config, length_reward, llama, prompts, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.modeling import logprobs as fused
from trl_ppo_ext.ppo.rollouts import score_tokens

VOCABULARY = 2048  # so that anything over the vocabulary is larger than anything else
CHUNK = 5  # rows of logits at a time


aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.equal.default,
}


class Largest(TorchDispatchMode):
    """Elements of the largest tensor of an operation, and reads of numbers in the trunk, by
    phase of the step."""

    def __init__(self):
        super().__init__()
        self.phase = ""
        self.in_trunk = False
        self.elements = Counter()
        self.reads = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_masked = function is aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        self.reads[self.phase] += self.in_trunk and (function in READS or is_masked)
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if (
                isinstance(x, torch.Tensor)
                and not x.is_meta
                and function is not torch.ops.aten.t.default
            ):
                known = x.untyped_storage().data_ptr() in self.parameters
                self.elements[self.phase] = max(
                    self.elements[self.phase], 0 if known else x.numel()
                )
        return out


@pytest.fixture
def step(tmp_path, monkeypatch):
    """Run one PPO step and count."""

    def run(implementation="sdpa", measures=True, **settings):
        monkeypatch.setitem(fused.CHUNK_LOGITS, "cpu", CHUNK * VOCABULARY)
        trainer = PPOTrainer(
            llama(VOCABULARY, attn_implementation=implementation),
            length_reward,
            config(tmp_path, **{"num_ppo_epochs": 1, "num_mini_batches": 1} | settings),
            prompts(),
            processing_class=tokenizer([f"w{i}" for i in range(VOCABULARY - 4)]),
        )
        trainer.args.max_steps = trainer.plan.optimizer_steps
        return Counted(trainer, monkeypatch, measures)

    return run


class Counted:
    """A trainer whose one step has been run, with what was counted."""

    def __init__(self, trainer, monkeypatch, measures):
        self.forwards = Counter()
        self.computed = Counter()
        self.projected = Counter()
        self.logits = []
        self.largest = Largest()
        self.largest.parameters = {
            x.untyped_storage().data_ptr() for x in trainer.actor_critic.parameters()
        }
        self.trainer = trainer
        trainer.actor_critic.prepare_forwards()  # once per run, on four tokens
        trainer.actor_critic.prepare_forwards = lambda: None
        self.rollouts = rollouts_of(trainer)
        self.micro_batches = micro_batches_of(trainer)
        self.count(trainer, monkeypatch)
        with self.largest if measures else nullcontext():
            trainer.train()

    def count(self, trainer, monkeypatch):
        actor_critic = trainer.actor_critic
        base = actor_critic.policy.get_base_model()
        actor_critic.trunk.register_forward_pre_hook(self.begin_forward, with_kwargs=True)
        actor_critic.trunk.register_forward_hook(
            lambda *args: setattr(self.largest, "in_trunk", False)
        )
        base.get_output_embeddings().register_forward_hook(
            lambda m, a, out: self.logits.append(tuple(out.shape))
        )
        original = fused._Projection.log_softmax

        def log_softmax(projection, hidden, out):
            self.projected[self.largest.phase] += len(hidden)
            return original(projection, hidden, out)

        monkeypatch.setattr(fused._Projection, "log_softmax", log_softmax)
        counted = {
            "score_responses": "score_tokens",
            "reference_logprobs": "score_tokens",
        }
        for name, phase in counted.items():
            monkeypatch.setattr(actor_critic, name, self.within(phase, getattr(actor_critic, name)))
        generator = trainer.components.player.generator
        generator.generate = self.within("generate", generator.generate)
        trainer.compute_loss = self.within("loss", trainer.compute_loss)
        trainer.updates.measure = self.within("measure", trainer.updates.measure)

    def begin_forward(self, module, args, kwargs):
        self.forwards[self.largest.phase] += 1
        self.computed[self.largest.phase] += (args[0] if args else kwargs["input_ids"]).numel()
        self.largest.in_trunk = True

    def within(self, phase, function):
        def wrapped(*args, **kwargs):
            with nullcontext() if self.largest.phase else self.phase(phase):
                return function(*args, **kwargs)

        return wrapped

    @contextmanager
    def phase(self, name):
        before = self.largest.phase
        self.largest.phase = name
        yield
        self.largest.phase = before

    @property
    def sequences(self):
        return self.rollouts[0][0].sequences


SHAPES = [
    {},
    {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    {"num_ppo_epochs": 3},
    {"num_mini_batches": 2, "num_generations": 4},
]
# of a micro-batch, in scoring and in an update
EXTRA_FORWARDS = {"head": (2, 1), "adapter": (3, 2), "none": (2, 1)}


@pytest.mark.parametrize("settings", SHAPES, ids=str)
@pytest.mark.parametrize("critic", EXTRA_FORWARDS)
def test_step_takes_the_fewest_forwards_and_projections(step, critic, settings):
    """One for the prompts and one per sampled token; then policy, reference and critic adapter once
    per micro-batch.

    Only sampled tokens reach the vocabulary: once each for policy and reference, and once per
    epoch; while sampling, only the newest position.
    """
    if critic == "none":
        settings = {"num_generations": 4} | settings
    counted = step(measures=False, critic=critic, **settings)
    plan, (scoring, update) = counted.trainer.plan, EXTRA_FORWARDS[critic]
    micro_batches = plan.num_mini_batches * plan.gradient_accumulation_steps
    assert counted.forwards["generate"] == 1 + int(counted.sequences.completion_lengths.max())
    assert counted.forwards["score_tokens"] == scoring * micro_batches
    assert counted.forwards["loss"] == update * micro_batches * plan.num_ppo_epochs
    tokens = int(counted.sequences.completion_lengths.sum())
    # at most eight completions show how far the updates have moved the policy
    assert counted.forwards["measure"] == -(
        -min(8, plan.completions_per_process) // plan.micro_batch_size
    )
    assert 0 < counted.projected.pop("measure") <= tokens
    assert counted.projected == {"score_tokens": 2 * tokens, "loss": plan.num_ppo_epochs * tokens}
    assert {shape[1:] for shape in counted.logits} == {(1, VOCABULARY)}


def test_exact_kl_in_the_reward_reads_the_reference_once(step):
    counted = step(measures=False, critic="head", kl_estimator="exact")
    roles = counted.trainer.components
    sequences = counted.sequences
    assert counted.forwards["score_tokens"] == 2 * counted.trainer.plan.num_mini_batches
    for weight in roles.actor_critic.policy_parameters().values():
        torch.nn.init.normal_(weight, std=0.1)  # no longer its reference
    scores = score_tokens(roles, sequences)
    assert (scores.logprobs - scores.ref_logprobs).abs().max() > 0.01
    torch.testing.assert_close(
        scores.ref_logprobs, roles.actor_critic.reference_logprobs(sequences), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("placement", ["reward", "loss", "both"])
def test_step_without_a_kl_penalty_skips_the_reference(step, placement):
    if placement == "both":
        estimator = "exact"
    else:
        estimator = "k1"
    counted = step(measures=False, kl_coef=0.0, kl_placement=placement, kl_estimator=estimator)
    plan = counted.trainer.plan
    assert counted.forwards["score_tokens"] == counted.forwards["loss"] == plan.micro_steps
    assert not {"kl", "kl_per_completion", "loss/kl"} & counted.trainer.state.log_history[0].keys()


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_no_tensor_is_larger_than_a_chunk_of_logits(step, settings):
    counted = step(**settings, critic="head", entropy_coef=0.01)  # a side network is larger
    assert (
        counted.largest.elements["score_tokens"]
        == counted.largest.elements["loss"]
        == CHUNK * VOCABULARY
    )
    assert counted.largest.elements["generate"] == len(counted.sequences) * VOCABULARY
    assert counted.largest.elements[""] < CHUNK * VOCABULARY  # backward, optimizer, metrics


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_trunk_computes_only_real_tokens_without_host_reads(step, implementation):
    """With SDPA; otherwise rows are padded on the right, in micro-batches of about the same
    length."""
    counted = step(
        implementation,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=2,
        num_ppo_epochs=3,
    )
    real = sum(int(x.rollout.sequences.lengths.sum()) for x in counted.micro_batches)
    is_packed = implementation == "sdpa"
    assert (counted.computed["loss"] == real) == is_packed and counted.computed["loss"] < 1.3 * real
    # 3 epochs
    assert counted.computed["score_tokens"] / 2 == pytest.approx(
        counted.computed["loss"] / 3, rel=0.1
    )
    for phase in ("score_tokens", "loss"):
        assert counted.largest.reads[phase] == (0 if is_packed else counted.forwards[phase])
