"""PPO's loss from plain tensors, and the minibatches of a rollout."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from runs_of_tiny import rollout, token_scores
from tiny import config

from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.modeling import TokenScores
from trl_ppo_ext.ppo.metrics import Metrics
from trl_ppo_ext.ppo.rollouts import cut, micro_batches
from trl_ppo_ext.ppo.updates import Updates, loss_denominators, ppo_loss, set_apart

CLIP = {"cliprange": (0.2, 0.3)}
VARIANTS = {
    "policy only": {},
    "dual clip": {"dual_clip": 1.5},
    "sequence ratio": {"ratio_level": "sequence"},
    "values": {"vf_coef": 0.5},
    "clipped values": {"vf_coef": 0.5, "cliprange_value": 0.2},
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
    "k3": {"kl_estimator": "k3"},
    "exact KL": {"kl_estimator": "exact"},
}
AGGREGATIONS = ["token", "sequence_mean", "sequence_sum"]


def alone(x):
    return x


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(
        one, torch.as_tensor(other, dtype=one.dtype), rtol=tolerance, atol=tolerance
    )


def gradients(loss, scores):
    inputs = [x for x in scores if x is not None]
    return torch.autograd.grad(loss, inputs, allow_unused=True)


# ---- the loss ----


def loss_by_hand(scores, rollout, settings, aggregation):
    """The definitions of the papers, one token at a time."""
    sequences = []
    for row in range(len(rollout)):
        places = [(row, t) for t in rollout.response_mask[row].nonzero()[:, 0].tolist()]
        log_ratios = [scores.logprobs[place] - rollout.old_logprobs[place] for place in places]
        level = settings.get("ratio_level", "token")
        starts = {"token": list(range(len(places))), "sequence": [0]}[level]
        spans = [log_ratios[start:end] for start, end in itertools.pairwise([*starts, len(places)])]
        log_ratios = [sum(span) / len(span) for span in spans for _ in span]
        losses = []
        for place, log_ratio in zip(places, log_ratios):
            ratio = log_ratio.exp()
            advantage = rollout.advantages[place]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
            if "dual_clip" in settings and advantage < 0:
                surrogate = torch.maximum(surrogate, settings["dual_clip"] * advantage)
            value = scores.values[place]
            old_value = rollout.old_values[place]
            target = rollout.targets[place]
            bound = settings.get("cliprange_value", math.inf)
            clipped = old_value + (value - old_value).clamp(-bound, bound)
            error = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
            d = scores.logprobs[place] - rollout.ref_logprobs[place]
            kls = {
                "k1": d,
                "k2": d**2 / 2,
                "k3": (-d).exp() - 1 + d,
                "exact": scores.kls[place],
                None: 0 * d,
            }
            kl = kls[settings.get("kl_estimator")]
            bonus = 0.1 * scores.entropies[place]
            losses.append(
                -surrogate + settings.get("vf_coef", 0) * error / 2 + rollout.kl_coef * kl - bonus
            )
        if losses:
            sequences.append(torch.stack(losses))
    if aggregation == "token":
        return torch.cat(sequences).mean()
    return torch.stack(
        [x.mean() if aggregation == "sequence_mean" else x.sum() for x in sequences]
    ).mean()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_equal_those_by_hand(variant, aggregation):
    batch = rollout(kl_coef=0.3)
    settings = VARIANTS[variant]
    scores = token_scores(batch)
    again = token_scores(batch)
    loss, _ = ppo_loss(scores, batch, **CLIP, **settings, aggregation=aggregation, entropy_coef=0.1)
    expected = loss_by_hand(again, batch, settings, aggregation)
    close(loss, expected)
    for gradient, wanted in zip(gradients(loss, scores), gradients(expected, again)):
        gradient, wanted = (torch.zeros(()) if x is None else x for x in (gradient, wanted))
        close(
            gradient * torch.ones_like(batch.advantages), wanted * torch.ones_like(batch.advantages)
        )


def test_loss_at_ratio_one_is_minus_the_mean_advantage():
    batch = rollout()
    mask = batch.response_mask
    tokens = batch.response_mask.sum()
    scores = TokenScores(batch.old_logprobs.clone().requires_grad_())
    loss, metrics = ppo_loss(scores, batch, **CLIP)
    close(loss, -batch.advantages[mask].mean())
    close(gradients(loss, scores)[0], (-batch.advantages / tokens).masked_fill(~mask, 0))
    assert (metrics["ratio/mean"] == 1).all() and not metrics["approx_kl"].any()
    assert not metrics["clip_ratio/region_mean"].any()


def test_loss_of_exact_values_is_the_policy_loss():
    batch = rollout()
    scores = token_scores(batch)._replace(values=batch.targets, entropies=None, kls=None)
    loss, metrics = ppo_loss(scores, batch, **CLIP, vf_coef=10.0)
    close(loss, ppo_loss(scores._replace(values=None), batch, **CLIP)[0])
    assert not metrics["loss/value"].any()


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_loss_and_gradient_ignore_masked_tokens(fill):
    batch = rollout(kl_coef=0.3)
    settings = CLIP | {"vf_coef": 0.5, "kl_estimator": "k3", "entropy_coef": 0.1}
    scores = token_scores(batch)
    loss, _ = ppo_loss(scores, batch, **settings)
    filled = {
        name: x.masked_fill(~batch.response_mask, fill)
        for name, x in batch.tensors.items()
        if x.ndim > 1
    }
    filled = type(batch)(
        batch.sequences, **(filled | {"response_mask": batch.response_mask}), kl_coef=0.3
    )
    other, _ = ppo_loss(scores, filled, **settings)
    close(other, loss)


@pytest.mark.parametrize("sizes", [[6], [3, 3], [1, 5], [1] * 6])
@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "constant"])
def test_micro_batches_add_up_to_the_loss_of_their_step(aggregation, sizes):
    batch = rollout(rows=6, kl_coef=0.3)
    settings = CLIP | {"vf_coef": 0.5, "kl_estimator": "k2"}
    settings["aggregation"] = "sequence_sum" if aggregation == "constant" else aggregation
    scores = token_scores(batch)
    (denominator,) = loss_denominators(
        batch.response_mask, torch.arange(6)[None], aggregation, 7, alone
    )
    whole, _ = ppo_loss(scores, batch, denominator, **settings)
    if aggregation != "constant":
        close(whole, ppo_loss(scores, batch, **settings)[0])
    parts = []
    for rows in torch.randperm(6, generator=torch.Generator().manual_seed(0)).split(sizes):
        part = batch.rows(rows)
        width = part.response_mask.shape[1]
        own = scores.map(lambda x, rows=rows, width=width: x[rows, :width])
        parts.append(ppo_loss(own, part, denominator, **settings)[0])
    close(sum(parts), whole)
    for gradient, expected in zip(gradients(sum(parts), scores), gradients(whole, scores)):
        if expected is not None:
            close(gradient, expected)


def test_metrics_by_hand():
    ratios = torch.tensor([[1.5, 0.5, 1.0, 4.0]], dtype=torch.float64)
    batch = rollout(lengths=[4])
    batch = type(batch)(
        batch.sequences,
        response_mask=torch.ones(1, 4, dtype=torch.bool),
        old_logprobs=torch.zeros_like(ratios),
        ref_logprobs=torch.full_like(ratios, -1),
        advantages=torch.tensor([[1.0, -1.0, 1.0, -2.0]], dtype=torch.float64),
        old_values=torch.tensor([[0.0, 2.0, 0.0, 0.0]], dtype=torch.float64),
        targets=torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64),
        kl_coef=1e-9,  # without a coefficient the KL is not computed
    )
    scores = TokenScores(
        ratios.log(), values=torch.tensor([[1.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    )
    settings = {"dual_clip": 3.0, "vf_coef": 0.1, "cliprange_value": 0.5, "kl_estimator": "k1"}
    _, metrics = ppo_loss(scores, batch, **CLIP, **settings)
    expected = {
        "loss/policy": [-1.3, 0.8, -1.0, 6.0],  # the last one by the dual clip
        "loss/value": [3.125, 0.0, 0.5, 0.0],
        "value/clip_ratio": [1, 0, 0, 0],
        "loss/kl": [1 + math.log(ratio) for ratio in (1.5, 0.5, 1.0, 4.0)],
        "ratio/mean": [1.5, 0.5, 1.0, 4.0],
        "ratio/max": [1.5, 0.5, 1.0, 4.0],
        "clip_ratio/low_mean": [0, 1, 0, 0],
        "clip_ratio/high_mean": [1, 0, 0, 0],
        "clip_ratio/region_mean": [1, 1, 0, 0],
        "clip_ratio/dual_mean": [0, 0, 0, 1],
        "approx_kl": [ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.0, 4.0)],
    }
    assert metrics.keys() == expected.keys()
    for name, values in expected.items():
        close(metrics[name].double(), [values], 1e-8)


# ---- denominators and schedule ----

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]).bool()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [4, 2, 5]),
        ("sequence_mean", [2, 1, 2]),
        ("sequence_sum", [2, 1, 2]),
        ("constant", [20, 10, 20]),
    ],
)
def test_denominators_count_tokens_or_completions_per_step(aggregation, expected):
    rows = torch.tensor([[0, 1], [2, 3], [3, 0]])  # of three steps
    assert loss_denominators(MASK, rows, aggregation, 10, alone).tolist() == expected
    summed = loss_denominators(MASK, rows, aggregation, 10, lambda x: x + 1)
    assert summed.tolist() == [count + 1 for count in expected]  # over ranks


PLAN = BatchPlan(2, gradient_accumulation_steps=2, num_mini_batches=2, num_ppo_epochs=3)


# ---- updates ----


@pytest.fixture
def build(tmp_path):
    def build(plan=PLAN, **settings):
        return Updates(config(tmp_path, **settings), plan, Metrics(), alone)

    return build


def test_updates_resume_with_minibatches_cut_differently(build):
    """Other minibatches raise an error."""
    updates = build()
    updates.start(rollout(rows=8), 0)
    again = build(BatchPlan(4, num_mini_batches=2, num_ppo_epochs=3))
    again.resume(updates.in_progress(1), 1)
    assert again.rows.shape == (6, 4) and torch.equal(again.rows, updates.rows)
    with pytest.raises(ValueError, match=r"\(6, 4\) .*, not of \(2, 4\); resume with the saved"):
        build(BatchPlan(4, num_mini_batches=2)).resume(updates.in_progress(1), 1)


def test_first_epoch_has_the_micro_batches_that_were_scored(build):
    """Else the first ratios would not be exactly 1; also if another role has the longest rows."""
    updates = build()
    batch = rollout(rows=8)
    lengths = torch.tensor([1, 3, 9, 2, 1, 40, 30, 20])
    longer = {
        "critic_prompt_ids": torch.ones(8, 40, dtype=torch.long),
        "critic_prompt_lengths": lengths,
    }
    batch = replace(batch, sequences=replace(batch.sequences, **longer))
    updates.start(batch, 0)
    learned = [
        x.rollout.sequences.critic_prompt_lengths.tolist()
        for x in itertools.islice(updates.micro_batches, 4)
    ]
    args = replace(updates.args, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert learned == [lengths[rows].tolist() for rows in micro_batches(args, batch.sequences)]


class Policy(torch.nn.Module):
    """Scores that do not depend on the tokens."""

    def __init__(self, log_ratio=0.0):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.tensor(log_ratio, dtype=torch.float64))

    def forward(self, sequences, temperature, with_entropy=False, with_kl=False, with_values=True):
        logprobs = self.rollout.old_logprobs + self.shift
        return TokenScores(logprobs, values=torch.zeros_like(logprobs))


def learn(updates, policy, steps=None):
    """Compute the losses of micro-batches, and if each optimizer step is taken."""
    losses = []
    taken = []
    for number, micro_batch in enumerate(
        itertools.islice(updates.micro_batches, steps and 2 * steps)
    ):
        policy.rollout = micro_batch.rollout
        losses.append(updates.loss(policy, micro_batch))
        if number % 2:
            taken.append(updates.may_step())
    return losses, taken


def test_updates_log_the_metrics_of_their_losses(build):
    updates = build(vf_coef=0.0)
    batch = rollout(rows=8)
    updates.start(batch, 0)
    losses, taken = learn(updates, Policy())
    assert taken == [True] * 6
    mean = -batch.advantages[batch.response_mask].mean()
    close(
        sum(losses[:4]) * 1.0,
        sum(-batch.advantages[r][batch.response_mask[r]].mean() for r in (slice(4), slice(4, 8))),
    )
    logged = updates.metrics.compute(alone, alone)
    assert logged["loss/policy"] == pytest.approx(mean.item(), rel=1e-5)
    assert logged["ratio/mean"] == logged["ratio/max"] == 1
    assert logged["stopped_early"] == logged["empty_steps"] == 0
    assert "approx_kl" not in logged  # it is measured after the rollout's last step


@pytest.mark.parametrize(("target", "taken"), [(None, True), (0.2, True), (0.1, False)])
def test_updates_stop_above_target_kl(build, target, taken):
    """A log-ratio of 0.5 is a KL of e^0.5 − 1.5 = 0.149.

    The first step begins at the policy that sampled.
    """
    updates = build(target_kl=target)
    updates.start(rollout(rows=8), 0)
    assert learn(updates, Policy(0.5), steps=2)[1] == [True, taken]
    assert updates.stopped_early != taken
    logged = updates.metrics.compute(alone, alone)
    assert logged["stopped_early"] == (not taken) / 2


class PolicyOfRows(torch.nn.Module):
    """Policy that has made the tokens of each completion of a rollout more likely by another
    factor."""

    def __init__(self, batch, log_ratios):
        super().__init__()
        self.batch = batch
        self.log_ratios = log_ratios
        self.scored = []

    def forward(self, sequences, temperature, with_values):
        width = sequences.completion_ids.shape[1]
        last = self.batch.sequences.prompt_ids[:, -1].tolist()  # another one in each row
        rows = [last.index(x) for x in sequences.prompt_ids[:, -1].tolist()]
        self.scored.append(rows)
        assert not torch.is_grad_enabled() and not with_values
        return TokenScores(self.batch.old_logprobs[rows, :width] + self.log_ratios[rows, None])


def measured(build, batch, log_ratios, plan=PLAN, **settings):
    """What is logged of a policy that has moved, and the rows that it was run on."""
    updates = build(plan, **settings)
    policy = PolicyOfRows(batch, log_ratios)
    updates.start(batch, 0)
    updates.measure(policy)
    return updates.metrics.compute(alone, alone), policy.scored


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_measured_kl_is_that_of_the_moved_policy(build, num_mini_batches):
    """A log-ratio of 0.5 is a KL of e^0.5 − 1.5 = 0.149."""
    plan = BatchPlan(
        2, gradient_accumulation_steps=4 // num_mini_batches, num_mini_batches=num_mini_batches
    )
    logged, scored = measured(build, rollout(rows=8), torch.full((8,), 0.5), plan)
    assert logged == pytest.approx(
        {"approx_kl": math.exp(0.5) - 1.5, "ratio/max": math.exp(0.5)}, rel=1e-5
    )
    assert scored == [[0, 1], [2, 3], [4, 5], [6, 7]]  # eight, in micro-batches


def test_large_rollouts_measure_every_eighth_row(build):
    plan = BatchPlan(4, num_mini_batches=20)
    batch = rollout(rows=80)
    updates = build(plan)
    rows = []
    updates.start(batch, 0)
    updates._measure_rows = lambda policy, part: rows.append(part.old_logprobs[:, 0])
    updates.measure(None)
    index = torch.arange(4, 80, 8)
    assert [len(x) for x in rows] == [4, 4, 2] and torch.equal(
        torch.cat(rows), batch.old_logprobs[index, 0]
    )


def test_measured_rows_have_tokens_that_the_policy_learns_from(build):
    batch = rollout(rows=8)
    log_ratios = torch.arange(8) / 8
    policy_mask = batch.response_mask.clone()
    policy_mask[[0, 1, 2, 4]] = False
    policy_mask[3, 1:] = False  # one token of three
    logged, scored = measured(build, replace(batch, policy_mask=policy_mask), log_ratios)
    assert scored == [[3, 3], [5, 5], [6, 6], [7, 7]]  # as many forwards as on other ranks
    kls = torch.tensor([math.exp(x / 8) - 1 - x / 8 for x in (3, 5, 6, 7)])
    counts = policy_mask[[3, 5, 6, 7]].sum(1)
    assert logged["approx_kl"] == pytest.approx(
        ((kls * counts).sum() / counts.sum()).item(), rel=1e-5
    )
    assert logged["ratio/max"] == pytest.approx(math.exp(7 / 8), rel=1e-5)


def test_rank_without_tokens_runs_all_forwards_and_logs_no_kl(build):
    batch = rollout(rows=8)
    nothing = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    logged, scored = measured(build, nothing, torch.ones(8))
    assert logged == {} and len(scored) == 4


@pytest.mark.parametrize(
    ("level", "log_ratio"), [("token", 0.875 + 0.8), ("sequence", 0.875 + 0.8 / 4)]
)
def test_measured_ratio_is_that_of_the_loss(build, level, log_ratio):
    """A token of four moved by 0.8 more than the others."""
    batch = rollout(rows=8, lengths=[4] * 8)
    log_ratios = torch.arange(8) / 8
    policy = PolicyOfRows(batch, log_ratios)
    shifted = replace(batch, old_logprobs=batch.old_logprobs - 0.8 * (torch.arange(4) == 1))
    updates = build(importance_sampling_level=level)
    updates.start(shifted, 0)
    updates.measure(policy)
    assert updates.metrics.compute(alone, alone)["ratio/max"] == pytest.approx(
        math.exp(log_ratio), rel=1e-5
    )


def test_updates_take_no_step_without_a_token(build):
    updates = build()
    batch = rollout(rows=8)
    batch.response_mask[:4] = False
    updates.start(batch, 0)
    losses, taken = learn(updates, Policy(), steps=2)
    assert taken == [False, True] and losses[0] == losses[1] == 0
    assert updates.metrics.compute(alone, alone)["empty_steps"] == 1


def test_updates_without_a_token_of_the_policy_spare_it(build):
    updates = build()
    batch = rollout(rows=8)
    policy_mask = batch.response_mask.clone()
    policy_mask[:4] = False
    updates.start(replace(batch, policy_mask=policy_mask), 0)
    trained = []
    for micro_batch in itertools.islice(updates.micro_batches, 4):
        Policy.rollout = micro_batch.rollout
        updates.loss(Policy(), micro_batch)
        trained.append((updates.may_step(), updates.trains_policy(0)))
    assert trained == [(True, False), (True, False), (True, True), (True, True)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_policy_mask_hides_tokens_from_the_policy_only(build, aggregation):
    """Policy and critic have means of their own, over the whole optimizer step."""
    batch = rollout(rows=8, kl_coef=0.3)
    policy_mask = batch.response_mask.clone()
    scores = token_scores(batch)
    policy_mask[[1, 2, 6]] = False
    masked = replace(batch, policy_mask=policy_mask)
    settings = {"loss_aggregation": aggregation, "vf_coef": 0.5}
    updates = build(**settings, kl_placement="loss", kl_estimator="k2", entropy_coef=0.1)
    loss_of = partial(ppo_loss, **updates.loss_settings)
    loss, _ = loss_of(scores, masked)
    of_policy, _ = loss_of(scores._replace(values=None), replace(batch, response_mask=policy_mask))
    blank = replace(batch, advantages=0 * batch.advantages, kl_coef=0.0)
    gae_with_critic, _ = loss_of(scores._replace(entropies=None), blank)
    close(loss, of_policy + gae_with_critic)

    updates.start(masked, 0)
    for step in updates.rows:
        parts = []
        for rows in cut(step, batch.sequences.lengths, 2):
            micro_batch = next(updates.micro_batches)
            width = micro_batch.rollout.response_mask.shape[1]
            own = scores.map(lambda x, rows=rows, width=width: x[rows, :width])
            parts.append(updates.loss(lambda *_, own=own: own, micro_batch))
        of_step = scores.map(lambda x, step=step: x[step])
        close(sum(parts), loss_of(of_step, masked_rows(masked, step))[0])
    logged = updates.metrics.compute(alone, alone)
    tokens = batch.response_mask
    value = 0.5 * (scores.values - batch.targets) ** 2
    assert logged["loss/value"] == pytest.approx(value[tokens].mean().item(), rel=1e-5)
    assert logged["ratio/mean"] == pytest.approx(
        (scores.logprobs - batch.old_logprobs).exp()[policy_mask].mean().item()
    )


def masked_rows(batch, rows):
    """Rows of a rollout with all their padding."""
    return replace(batch, **{name: x[rows] for name, x in batch.tensors.items()})


def test_value_weights_scale_the_value_loss_only():
    batch = rollout()
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0])[:, None]
    scores = token_scores(batch)._replace(entropies=None)
    loss, metrics = ppo_loss(scores, replace(batch, value_weights=weights), **CLIP, vf_coef=0.5)
    plain, plain_metrics = ppo_loss(scores, batch, **CLIP, vf_coef=0.5)
    close(metrics["loss/value"], weights * plain_metrics["loss/value"])
    clipped = ppo_loss(scores, batch, **CLIP, vf_coef=0.5, cliprange_value=0.1)[1][
        "value/clip_ratio"
    ]
    weighted = ppo_loss(
        scores, replace(batch, value_weights=weights), **CLIP, vf_coef=0.5, cliprange_value=0.1
    )[1]
    assert clipped.any() and torch.equal(weighted["value/clip_ratio"], weights * clipped)
    difference = (
        0.5 * (metrics["loss/value"] - plain_metrics["loss/value"])[batch.response_mask].mean()
    )
    close(loss - plain, difference)


def test_parameters_are_set_apart_in_groups_with_their_own_rate():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    groups = [{"params": [a, b], "weight_decay": 0.1}, {"params": [c], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    set_apart(optimizer, {"b": b, "c": c}, 1e-2)
    settings = {
        id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
    }
    assert settings == {id(a): (1e-3, 0.1), id(b): (1e-2, 0.1), id(c): (1e-2, 0.0)}
    # without a rate of their own, in as many groups
    optimizer = torch.optim.AdamW([a, b, c], lr=1e-3)
    set_apart(optimizer, {"b": b, "c": c}, None)
    assert [(len(x["params"]), x["lr"]) for x in optimizer.param_groups] == [(1, 1e-3), (2, 1e-3)]
