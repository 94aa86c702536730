"""Whole runs of the default algorithm against [`plain_ppo`], and of its reductions to other critics
and to none.

The oracle begins at the same weights, and gets what reward functions get: token IDs, and their
rewards. A hook on the base shows which completions an optimizer step learns from, since minibatches
are drawn at random.
"""

import copy
import statistics
from dataclasses import fields

import plain_ppo
import pytest
import torch
from datasets import Dataset
from tiny import SPECIAL, WORDS, llama, nested, tokenizer
from torch import nn
from transformers import TrainerCallback

from trl_ppo_ext import PPOConfig, PPOTrainer

EOS = 1
LONGEST = 10
FEW_WORDS = WORDS[:8]  # so that completions end
# three rollouts of two minibatches of two micro-batches, for four epochs
STEPS_PER_ROLLOUT = 8
SIZES = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 4,
    "max_steps": 3 * STEPS_PER_ROLLOUT,
    "max_completion_length": LONGEST,
    "learning_rate": 4e-3,  # so that ratios leave the clip's region
    "target_kl": None,
    "kl_coef": 0.05,
    "adam_epsilon": 1e-3,  # a smaller one amplifies the rounding of small gradients
}
RUNS = {
    "default, seed 1": {"seed": 1},
    "default, seed 2": {"seed": 2},
    "default, seed 4": {"seed": 4},
    "decoupled lambdas": {"lam": 0.7, "lam_critic": 0.98, "gamma": 0.97, "dual_clip": 1.2},
    "plain values": {
        "normalize_values": False,
        "max_grad_norm": 0.3,
        "weight_decay": 0.1,
        "kl_coef": 0.3,
    },
    "head": {"critic": "head", "lam_critic": 1.0, "max_grad_norm": 0.3},
    "entropy bonus": {"entropy_coef": 0.1},
    "adapter": {"critic": "adapter", "critic_learning_rate": 2e-3},
    # six prompts of two completions each: those of another group could not stand in for them
    "none": {"critic": "none", "num_generations": 2, "shuffle_dataset": False},
}
OF_STEPS = {
    "policy loss": "loss/policy",
    "value loss": "loss/value",
    "low": "clip_ratio/low_mean",
    "high": "clip_ratio/high_mean",
    "dual": "clip_ratio/dual_mean",
    "distance": "approx_kl",
    "norm of policy": "grad_norm",
    "norm of critic": "value/grad_norm",
}


def questions(rows=24):
    """Six prompts of different lengths; no prompt with a completion is another prompt with
    another completion."""
    prompts = [" ".join([FEW_WORDS[row], *FEW_WORDS[: row % 4]]) for row in range(6)]
    return Dataset.from_dict({"prompt": [prompts[row % 6] for row in range(rows)]})


def token_scores(ids):
    return [3.0 * (token % 3) - 2.0 for token in ids]


def score(ids):
    return 0.5 * len(ids) + ids[0] % 5


class Watch(TrainerCallback):
    """Prompts and completions of each rollout, and their concatenations in each optimizer step."""

    def __init__(self):
        self.rollouts = []
        self.steps = []
        self.forwards = []

    def per_token(self, prompts, completion_ids, **kwargs):
        self.rollouts.append(list(zip(tokenizer(FEW_WORDS)(prompts)["input_ids"], completion_ids)))
        return [token_scores(ids) for ids in completion_ids]

    def at_the_end(self, completion_ids, **kwargs):
        return [score(ids) for ids in completion_ids]

    def forward(self, module, args, kwargs):
        if torch.is_grad_enabled():
            rows = args[0][0].tensor_split(kwargs["packed"].starts[1:-1].tolist())
            self.forwards.append(tuple(tuple(ids.tolist()) for ids in rows))

    def on_pre_optimizer_step(self, *args, **kwargs):
        # a critic with an adapter has a second forward of the same rows
        self.steps.append(
            [row for micro_batch in dict.fromkeys(self.forwards) for row in micro_batch]
        )
        self.forwards = []


def linear(layer):
    plain = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
    plain.load_state_dict({"weight": layer.weight.double(), "bias": layer.bias.double()})
    return plain


def plain_models(model, critic):
    """Policy, reference and critic of a trainer in float64, made of layers of torch,
    transformers and PEFT."""
    policy = copy.deepcopy(model.policy).double()
    body = None
    head = None
    reference = copy.deepcopy(policy)
    reference.base_model.disable_adapter_layers()
    if critic != "none":
        head = linear(model.value_head)
    if critic == "side":
        head = plain_ppo.SideNetwork(linear(model.value_head.first), head)
    if critic == "adapter":
        body = copy.deepcopy(policy)
        body.set_adapter(model.critic_adapter)
        policy.set_adapter(model.policy_adapter)
    return plain_ppo.Models(policy, reference, head, body)


def run(output_dir, settings):
    """Train; return the trainer, what was watched, and the oracle's models before training."""
    watch = Watch()
    plain = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    built = PPOTrainer(
        llama(vocab_size=len(SPECIAL + FEW_WORDS)),
        [watch.per_token, watch.at_the_end],
        PPOConfig(str(output_dir), logging_steps=1, **nested(plain | settings)),
        questions(),
        processing_class=tokenizer(FEW_WORDS),
        callbacks=[watch],
    )
    models = plain_models(built.model, built.args.critic)
    built.model.policy.get_base_model().model.register_forward_pre_hook(
        watch.forward, with_kwargs=True
    )
    built.train()
    return built, watch, models


def mean(rows):
    return statistics.mean(x for row in rows for x in row)


def explained(pairs):
    """Share of the outcomes' variance that the values explain."""
    errors = [outcome - value for outcome, value in pairs]
    return 1 - statistics.variance(errors) / statistics.variance(outcome for outcome, _ in pairs)


def deviations(pairs):
    """Outcomes and values less their means."""
    means = [statistics.mean(x) for x in zip(*pairs)]
    return [tuple(x - mean for x, mean in zip(pair, means)) for pair in pairs]


def metrics_of_rollout(samples, is_fitted):
    """Metrics of a rollout, to which the critic was fitted or not, under the names of the log."""
    metrics = {
        "reward": statistics.mean(sum(sample.scores_at_tokens()) for sample in samples),
        "objective": statistics.mean(sum(sample.rewards) for sample in samples),
        "kl": mean(sample.old.k1.tolist() for sample in samples),
        "entropy": mean(sample.old.entropies.tolist() for sample in samples),
        "completions/clipped_ratio": statistics.mean(sample.truncated for sample in samples),
    }
    if samples[0].values:
        pairs = [list(zip(sample.outcomes, sample.explains)) for sample in samples]
        metrics["value/explained_variance"] = (
            0.0 if is_fitted else explained([x for row in pairs for x in row])
        )
        # each token is a place: without what the position alone explains
        at = [[row[t] for row in pairs if len(row) > t] for t in range(LONGEST)]
        centered = [deviation for column in at for deviation in deviations(column)]
        metrics["value/explained_variance_without_clock"] = (
            0.0 if is_fitted else explained(centered)
        )
    return metrics


def train_plainly(models, watch, s):
    """Train as the trainer did; return what it should have logged at each step."""
    logs = []
    for number, rows in enumerate(watch.rollouts):
        samples = [
            plain_ppo.Sample(*row, score(row[1]), row[1][-1] != EOS, token_scores(row[1]))
            for row in rows
        ]
        by_ids = {(*sample.prompt, *sample.ids): sample for sample in samples}
        steps = watch.steps[STEPS_PER_ROLLOUT * number :][:STEPS_PER_ROLLOUT]
        minibatches = [[by_ids[row] for row in step] for step in steps]
        # eight completions at equal distances
        measured = [samples[(2 * i + 1) * len(samples) // 16] for i in range(8)]
        s, metrics = plain_ppo.iterate(models, samples, s, minibatches, measured)
        named = [
            {OF_STEPS[name]: x for name, x in of_step.items() if name in OF_STEPS}
            for of_step in metrics
        ]
        is_fitted = number == 0 and models.first_fit is not None
        logs += [named[0] | metrics_of_rollout(samples, is_fitted), *named[1:]]
    return logs


def trained_weights(built, models):
    """Weights of the trainer beside those of the oracle."""
    trained = dict(built.model.policy.named_parameters())
    pairs = {
        name: (trained[name], x) for name, x in models.policy.named_parameters() if x.requires_grad
    }
    if models.critic_body is not None:
        pairs |= {
            name: (trained[name], x)
            for name, x in models.critic_body.named_parameters()
            if x.requires_grad
        }
    if models.value_head is not None:
        plain = {
            name.removeprefix("output."): x for name, x in models.value_head.named_parameters()
        }
        pairs |= {
            f"value_head.{name}": (built.model.value_head.get_parameter(name), x)
            for name, x in plain.items()
        }
    return {name: tuple(x.detach().double() for x in pair) for name, pair in pairs.items()}


@pytest.mark.parametrize("name", RUNS)
def test_run_is_that_of_plain_ppo(tmp_path, name):
    settings = SIZES | RUNS[name]
    built, watch, models = run(tmp_path, settings)
    names = {field.name for field in fields(plain_ppo.Settings)}
    s = plain_ppo.Settings(**{key: x for key, x in settings.items() if key in names})
    start = {name: x.clone() for name, (_, x) in trained_weights(built, models).items()}
    expected = train_plainly(models, watch, s)
    logs = built.state.log_history[: s.max_steps]

    for step, (log, metrics) in enumerate(zip(logs, expected, strict=True), 1):
        logged = {name: log.get(name) for name in metrics}
        assert logged == pytest.approx(metrics, rel=1e-6, abs=1e-6), f"step {step}"
    weights = trained_weights(built, models)
    differences = {name: float((x - plain).abs().max()) for name, (x, plain) in weights.items()}
    assert max(differences.values()) < 1e-6, differences
    # the comparison can fail
    moved = {name: float((x - start[name]).abs().max()) for name, (x, _) in weights.items()}
    assert min(moved.values()) > 1e-5, moved
    shares = [max(log[f"clip_ratio/{name}_mean"] for log in logs) for name in ("low", "high")]
    assert min(shares) > 0 and (
        s.dual_clip == 2 or max(log["clip_ratio/dual_mean"] for log in logs) > 0
    )
    assert (
        0
        < statistics.mean(
            logs[step]["completions/clipped_ratio"] for step in range(0, 24, STEPS_PER_ROLLOUT)
        )
        < 1
    )
    assert any(log["grad_norm"] > s.max_grad_norm for log in logs)


def test_settings_of_plain_ppo_have_the_defaults_of_the_config(tmp_path):
    s = plain_ppo.Settings()
    args = PPOConfig(str(tmp_path), use_cpu=True)
    own = {
        "lam_critic": args.critic_options.lam,
        "lam_length_alpha": args.critic_options.lam_length_alpha,
    }
    values = {
        field.name: own.get(field.name) or getattr(args, field.name, None) for field in fields(s)
    }
    assert values == vars(s) | {"critic_learning_rate": None}
