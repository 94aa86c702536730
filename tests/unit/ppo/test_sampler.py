"""A sampler that is not the policy is noticed in the first rollout."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, write_completions
from tiny import config
from transformers.utils import logging

from trl_ppo_ext.modeling import TokenScores
from trl_ppo_ext.modeling import actor_critic as actor_critic_module
from trl_ppo_ext.ppo import rollouts as rollouts_module
from trl_ppo_ext.ppo.guards import SamplerComparison, SamplerError
from trl_ppo_ext.ppo.metrics import Metrics
from trl_ppo_ext.sequences import Sequences

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
LOGPROBS = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -1.5, -3.0]])


def compared(tmp_path, sampler_logprobs, ref_logprobs=None, dtype=torch.float32, **settings):
    filtered = {"top_p", "top_k", "min_p", "repetition_penalty"} & settings.keys()
    settings = {
        "generation_backend": "vllm",
        "vllm_importance_sampling_correction": not filtered,
    } | settings
    comparison = SamplerComparison(config(tmp_path, **settings), dtype, lambda x: x)
    tokens = TokenScores(LOGPROBS, torch.ones_like(LOGPROBS), ref_logprobs=ref_logprobs)
    metrics = Metrics()
    return comparison.weights(tokens, sampler_logprobs, MASK, metrics), metrics.compute(
        lambda x: x, lambda x: x
    )


def test_differences_are_logged_over_sampled_tokens_and_weigh(tmp_path):
    away = torch.tensor([[0.002, -0.004, 9.0], [0.0, 0.0, 0.004]])
    weights, logged = compared(
        tmp_path, LOGPROBS - away, vllm_importance_sampling_mode="token_truncate"
    )
    torch.testing.assert_close(weights, away.masked_fill(~MASK, 0).exp())
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(0.01 / 5, rel=1e-4)
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(0.004, rel=1e-3)
    ratios = away[MASK].exp()
    share = (ratios.sum() ** 2 / (ratios**2).mean() / len(ratios) ** 2).item()
    assert logged["sampling/importance_sampling_ratio/effective_share"] == pytest.approx(
        share, rel=1e-6
    )
    plain, logged = compared(tmp_path, LOGPROBS - away, vllm_importance_sampling_correction=False)
    assert plain is None and not any("importance" in name for name in logged)


def test_token_ratios_are_the_default_of_rollouts_sampled_ahead(tmp_path):
    args = config(tmp_path, use_vllm=True, vllm_mode="server", overlap_rollouts=True)
    comparison = SamplerComparison(args, torch.float32, lambda x: x)
    assert comparison.corrects
    log_ratios = torch.tensor([[0.5, -0.7, 0.0], [-0.2, 0.1, 2.0]])
    weights = comparison.weights(
        TokenScores(log_ratios, torch.ones_like(log_ratios)),
        torch.zeros(2, 3),
        MASK,
        Metrics(),
        is_ahead=True,
    )
    torch.testing.assert_close(weights, log_ratios.exp().clamp(max=3).masked_fill(~MASK, 1))


@pytest.mark.parametrize(
    "away, dtype, settings, ends",
    [
        (0.005, torch.float32, {}, False),
        (0.02, torch.float32, {}, True),
        (-0.02, torch.float32, {}, True),
        (0.02, torch.bfloat16, {}, False),
        (0.2, torch.bfloat16, {}, True),
        (0.2, torch.bfloat16, {"vllm_max_logp_difference": 0.3}, False),
        (0.02, torch.float32, {"vllm_max_logp_difference": 0.015}, True),
        (math.nan, torch.float32, {}, True),
        (0.3, torch.float32, {"top_p": 0.7}, False),  # filters raise log-probs, by at most −log 0.7
        (0.4, torch.float32, {"top_p": 0.7}, True),
        (-0.02, torch.float32, {"top_p": 0.7}, True),
        (-0.02, torch.float32, {"top_k": 5}, True),
        (9.0, torch.float32, {"repetition_penalty": 1.1}, False),
        (0.2, torch.float32, {"repetition_penalty": 1.1, "vllm_max_logp_difference": 0.1}, True),
    ],
)
def test_difference_beyond_rounding_ends_the_run(tmp_path, away, dtype, settings, ends):
    if not ends:
        compared(tmp_path, LOGPROBS + away, dtype=dtype, **settings)
        return
    with pytest.raises(
        SamplerError, match=r"differ by .* nats per token in this rollout.*another base .*an older"
    ):
        compared(tmp_path, LOGPROBS + away, dtype=dtype, **settings)


def filtered(logprobs, top_p=1.0, top_k=0, min_p=0.0):
    """Log-probs of the distribution that vLLM samples from, `[rows, vocabulary]`."""
    if min_p:
        logprobs = logprobs.masked_fill(
            logprobs < logprobs.amax(-1, keepdim=True) + math.log(min_p), -math.inf
        )
    ranked, order = logprobs.log_softmax(-1).sort(descending=True)
    if top_k:
        ranked[:, top_k:] = -math.inf
    probs = ranked.softmax(-1)
    ranked[probs.cumsum(-1) - probs >= top_p] = -math.inf
    return ranked.gather(-1, order.argsort()).log_softmax(-1)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.9},
        {"top_p": 0.5},
        {"top_k": 31},
        {"top_k": 10},
        {"min_p": 0.1},
        {"top_p": 0.9, "top_k": 20},
    ],
)
@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
def test_filtered_sampler_passes_only_with_the_policys_weights(tmp_path, filters, scale):
    """Of another base, whose log-probs differ by about a nat, whatever the entropy."""
    torch.manual_seed(0)
    logits = scale * torch.randn(512, 32)
    others = torch.randn(512, 32)
    policy = logits.log_softmax(-1)
    mask = torch.ones(512, 1).bool()
    args = config(tmp_path, generation_backend="vllm", **filters)
    comparison = SamplerComparison(args, torch.float32, lambda x: x)
    for sampled_from, ends in ((policy, False), ((logits + others).log_softmax(-1), True)):
        sampler = filtered(sampled_from, **filters)
        ids = torch.multinomial(sampler.exp(), 1)
        tokens = TokenScores(policy.gather(-1, ids), -(policy.exp() * policy).sum(-1, keepdim=True))
        if ends:
            with pytest.raises(SamplerError, match="beyond what filters explain"):
                comparison.weights(tokens, sampler.gather(-1, ids), mask, Metrics())
        else:
            comparison.weights(tokens, sampler.gather(-1, ids), mask, Metrics())
            assert (
                comparison._unexplained(tokens.logprobs, tokens, sampler.gather(-1, ids), mask)
                < 1e-6
            )


def test_error_says_that_the_adapter_is_not_applied(tmp_path):
    reference = LOGPROBS - 0.5
    with pytest.raises(
        SamplerError, match="It sampled from the reference: the policy's adapter is not applied"
    ):
        compared(tmp_path, reference + 0.001, reference)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("noise, step", [(0.0, 1e-5), (0.03, 0.02), (0.03, 0.1)])
def test_stale_adapter_ends_the_run_and_the_policys_does_not(tmp_path, noise, step, is_ahead):
    """A stale one is that of the last rollout, even if it differs by less than rounding in 16 bits.
    With overlap, both are a rollout older."""
    torch.manual_seed(0)
    built = trainer(tmp_path).actor_critic
    args = config(tmp_path, use_vllm=True, vllm_mode="server", overlap_rollouts=is_ahead)
    comparison = SamplerComparison(args, torch.bfloat16, lambda x: x)
    ids = [[3, 5, 4], [6]] * 6, [list(range(3, 15)), list(range(6, 30))] * 6
    batch = Sequences.from_token_ids(*ids, 0, "cpu")
    rounds = []

    def check(age):
        now = built(batch, with_entropy=True).map(torch.Tensor.detach)
        rounds.append(now.logprobs + noise * torch.randn_like(now.logprobs))
        if age < len(rounds):
            sampled = rounds[-1 - age]
        else:
            sampled = rounds[0]
        comparison.compare_with_last_adapter(
            built, batch, now, sampled, batch.completion_mask, is_ahead and len(rounds) > 1
        )

    for _ in range(50):
        check(int(is_ahead))
        for x in built.policy_parameters().values():
            x.data += step * torch.randn_like(x)
    with pytest.raises(
        SamplerError, match=r"fit the adapter of the rollout before|samples with an older adapter"
    ):
        check(1 + is_ahead)


@pytest.mark.parametrize("settings, ends", [({}, True), ({"vllm_max_logp_difference": 1.0}, False)])
def test_old_adapter_must_fit_better_over_many_tokens_to_raise(tmp_path, settings, ends):
    """With `vllm_max_logp_difference` it is accepted."""
    torch.manual_seed(0)
    built = trainer(tmp_path).actor_critic
    args = config(tmp_path, generation_backend="vllm", **settings)
    comparison = SamplerComparison(args, torch.bfloat16, lambda x: x)
    ids = [[3, 5, 4], [6]] * 4, [list(range(3, 15)), list(range(6, 30))] * 4
    batch = Sequences.from_token_ids(*ids, 0, "cpu")
    mask = batch.completion_mask
    before = built(batch, with_entropy=True).map(torch.Tensor.detach)
    comparison.compare_with_last_adapter(built, batch, before, before.logprobs, mask)
    first = comparison.policies
    for x in built.policy_parameters().values():
        x.data += 0.1 * torch.randn_like(x)
    now = built(batch, with_entropy=True).map(torch.Tensor.detach)
    sampled = now.logprobs.clone()
    # the sampler is far off at one token, by chance in the direction of the old adapter
    change = (before.logprobs - now.logprobs).masked_fill(~mask, 0)
    sampled.flatten()[change.abs().argmax()] += 1000 * change.flatten()[change.abs().argmax()]
    comparison.compare_with_last_adapter(built, batch, now, sampled, mask)
    assert len(comparison.policies) == comparison.kept  # each is a copy on the device
    comparison.policies = first
    with (
        pytest.raises(SamplerError, match="fit the adapter of the rollout before")
        if ends
        else nullcontext()
    ):
        comparison.compare_with_last_adapter(built, batch, now, before.logprobs, mask)


@pytest.mark.parametrize("limit", [{}, {"vllm_max_logp_difference": 0.05}])
def test_overlapped_rollout_is_compared_with_the_earlier_policy(tmp_path, limit):
    """The policy before the last updates."""
    built = trainer(tmp_path).actor_critic
    args = config(tmp_path, use_vllm=True, vllm_mode="server", overlap_rollouts=True, **limit)
    comparison = SamplerComparison(args, torch.float32, lambda x: x)
    batch = Sequences.from_token_ids(
        [[3, 5, 4], [6]], [list(range(3, 15)), list(range(6, 30))], 0, "cpu"
    )
    mask = batch.completion_mask
    before = built(batch, with_entropy=True).map(torch.Tensor.detach)
    comparison.compare_with_last_adapter(built, batch, before, before.logprobs, mask)
    for x in built.policy_parameters().values():
        x.data += 0.3 * torch.randn_like(x)
    now = built(batch, with_entropy=True).map(torch.Tensor.detach)
    with pytest.raises(SamplerError, match="nats per token in this rollout"):
        comparison.weights(now, before.logprobs, mask, Metrics())
    ratio = comparison.weights(now, before.logprobs, mask, Metrics(), is_ahead=True)
    assert (ratio[mask] != 1).all()  # the correction is on
    saved = list(comparison.policies)
    comparison.compare_with_last_adapter(built, batch, now, before.logprobs, mask, is_ahead=True)
    comparison.policies = saved
    with pytest.raises(SamplerError, match="nats per token in this rollout"):
        comparison.compare_with_last_adapter(
            built, batch, now, before.logprobs - 0.1, mask, is_ahead=True
        )


def test_weights_multiply_the_advantages_of_a_rollout(tmp_path, monkeypatch):
    def advantages(shift, corrects):
        settings = {
            "vllm_importance_sampling_correction": corrects,
            "vllm_max_logp_difference": 9.0,
        }
        args = config(
            tmp_path,
            generation_backend="vllm",
            vllm_importance_sampling_mode="token_truncate",
            **settings,
        )
        built = trainer(tmp_path, max_steps=1, seed=4)
        played = []
        player = built.components.player
        score_tokens = rollouts_module.score_tokens
        built.components = replace(
            built.components, sampler=SamplerComparison(args, torch.float32, lambda x: x)
        )
        play = player.play
        player.play = lambda *given: played.append(play(*given)) or played[-1]

        def scored(*given, **kwargs):  # the sampler's log-probs are those of the policy, shifted
            tokens = score_tokens(*given, **kwargs)
            for episode, row in zip(played[-1], tokens.logprobs):
                episode.logprobs = (row[: len(episode.completion_ids)] - shift).tolist()
            return tokens

        monkeypatch.setattr(rollouts_module, "score_tokens", scored)
        rollouts = rollouts_of(built)
        built.train()
        return rollouts[0][0].advantages

    plain = advantages(0.5, corrects=False)
    assert plain.abs().sum() > 0
    torch.testing.assert_close(advantages(0.5, corrects=True), math.exp(0.5) * plain)


# ---- transformers ----


def drawn(tmp_path, **settings):
    """A trainer whose policy is far from its base, and its rollouts."""
    built = trainer(tmp_path, max_steps=1, per_device_train_batch_size=16, **settings)
    torch.manual_seed(1)
    for x in built.actor_critic.policy_parameters().values():
        torch.nn.init.normal_(x, std=0.2)
    return built, rollouts_of(built)


MEAN = "sampling/sampling_logp_difference/mean"
MAX = "sampling/sampling_logp_difference/max"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2},
        {"stop_token_ids": list(range(12, 32))},
    ],
)
def test_policy_samples_from_what_it_is_scored_by(tmp_path, caplog, settings):
    built, _ = drawn(tmp_path, **settings)
    built.train()
    logged = built.state.log_history[0]
    assert 0 < logged[MEAN] <= logged[MAX] < 1e-4 and "Sampling and scoring" not in caplog.text


def test_wrong_lora_scale_in_sampling_is_logged_at_its_size(tmp_path, monkeypatch, caplog):
    add_product = actor_critic_module._add_product

    def doubled(base, down, up, scale, *others):
        return add_product(base, down, up, 2 * scale, *others)

    monkeypatch.setattr(actor_critic_module, "_add_product", doubled)
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    built, rollouts = drawn(tmp_path, learning_rate=0.0)
    built.train()
    [(rollout, _)] = rollouts
    for name, x in built.actor_critic.policy_parameters().items():
        x.data *= 2 if "lora_B" in name else 1
    sampled_by = built.actor_critic(rollout.sequences).logprobs
    expected = (sampled_by - rollout.old_logprobs).abs()[rollout.response_mask].mean().item()
    assert built.state.log_history[0][MEAN] == pytest.approx(expected, rel=1e-3) and expected > 0.01
    assert "Sampling and scoring differ by more than rounding" in caplog.text


def test_completions_of_others_are_not_compared(tmp_path):
    built, _ = drawn(tmp_path)
    write_completions(built, lambda prompts: [[5, 6, 1]] * len(prompts))
    built.train()
    assert MEAN not in built.state.log_history[0]
