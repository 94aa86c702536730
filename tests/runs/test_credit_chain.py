"""The chain from rewards to advantages: what is in it, and how a variant of one's own enters it."""

from unittest.mock import patch

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, write_completions

from trl_ppo_ext import trainer as trainer_module

GROUPS = {"critic": "none", "num_generations": 4}
# settings: names of the chain's steps, in order
CHAINS = [
    ({}, "estimate_by_critic keep_counted_tokens divide_by_unit_of_returns"),
    (
        {"mask_truncated_completions": True, "whiten_rewards": True, "entropy_coef": 0.01},
        "mask_truncated whiten_rewards estimate_by_critic keep_counted_tokens "
        "divide_by_unit_of_returns measure_unit_of_entropy",
    ),
    (
        {"advantage_level": "turn", "whiten_advantages": True},
        "reward_turns estimate_by_critic spread_over_turns whiten_advantages",
    ),
    (
        GROUPS | {"kl_coef": 0.0, "drop_equal_groups": True, "top_entropy_quantile": 0.2},
        "drop_equal_groups compare_in_groups keep_counted_tokens keep_high_entropies",
    ),
    (
        GROUPS | {"kl_coef": 0.0, "multi_objective_aggregation": "normalize_then_sum"},
        "compare_objectives_in_groups keep_counted_tokens",
    ),
    (
        {"critic": "none", "advantage_estimator": "rebn"},
        "sum_rewards_to_go keep_counted_tokens whiten_advantages",
    ),
]


def name_of(step):
    return getattr(step, "func", step).__name__


@pytest.mark.parametrize(("settings", "names"), CHAINS)
def test_chain_has_the_steps_of_the_settings_and_no_other(tmp_path, settings, names):
    built = trainer(tmp_path, **settings)
    assert [name_of(step) for step in built.credit] == names.split()


def test_groups_that_differ_in_units_of_their_rewards_are_kept(tmp_path):
    """A cut completion with a score of 1 and a penalty of 1 is no 0 if scores are normalized."""

    def paid(completion_ids, **kwargs):
        return [float(1 not in ids) for ids in completion_ids]

    settings = {
        "critic": "none",
        "num_generations": 2,
        "kl_coef": 0.0,
        "drop_equal_groups": True,
        "missing_eos_penalty": 1.0,
        "max_completion_length": 3,
        "max_steps": 1,
    }
    for is_normalized in (False, True):
        built = trainer(
            tmp_path / str(is_normalized),
            reward_funcs=paid,
            normalize_rewards=is_normalized,
            **settings,
        )
        write_completions(
            built, lambda prompts: [[5, 6, 7] if n % 2 else [5, 1] for n in range(len(prompts))]
        )
        seen = rollouts_of(built)
        built.train()
        assert seen[0][0].response_mask.any() == is_normalized


def only_even_rows(samples, credit, run):
    """Step that takes the advantages of every second completion away."""
    rows = torch.arange(len(credit.advantages), device=credit.advantages.device)
    return credit._replace(advantages=credit.advantages * (rows % 2 == 0)[:, None]), run


def test_step_from_outside_changes_what_is_learned(tmp_path):
    """And nothing else: the next run of the same seed collects the same first rollout."""
    first = trainer(tmp_path / "first", max_steps=4)
    second = trainer(tmp_path / "second", max_steps=4)
    second.credit.append(only_even_rows)
    collected = [rollouts_of(run) for run in (first, second)]
    for run in (first, second):
        run.train()
    plain, changed = (rollouts[0][0] for rollouts in collected)
    assert torch.equal(plain.sequences.completion_ids, changed.sequences.completion_ids)
    assert torch.equal(plain.targets, changed.targets)
    assert torch.equal(changed.advantages[::2], plain.advantages[::2])
    assert plain.advantages[1::2].any() and not changed.advantages[1::2].any()


def test_steps_change_nothing_in_place(tmp_path):
    """A step returns the next credit; what it was given stays."""
    built = trainer(tmp_path, max_steps=1, mask_truncated_completions=True, whiten_rewards=True)
    built.credit = [unchanged(step) for step in built.credit]
    built.train()


def unchanged(step):
    def compared(samples, credit, run):
        tensors = {name: x for name, x in credit._asdict().items() if isinstance(x, torch.Tensor)}
        before = {name: x.clone() for name, x in tensors.items()}
        result = step(samples, credit, run)
        for name, x in tensors.items():
            assert torch.equal(x, before[name]), (name_of(step), name)
        return result

    return compared


@pytest.mark.parametrize("critic", ["side", "head", "adapter"])
def test_collecting_changes_no_weight_and_no_buffer(tmp_path, critic):
    """Also in the first rollout, to which a new critic is fitted."""
    built = trainer(tmp_path, max_steps=4, critic=critic, max_completion_length=8)
    changed = []
    collect = trainer_module.collect

    def compared(components, *args):
        tensors = components.actor_critic.state_dict()
        before = {name: x.clone() for name, x in tensors.items()}
        result = collect(components, *args)
        after = components.actor_critic.state_dict()
        changed.append([name for name, x in before.items() if not torch.equal(after[name], x)])
        return result

    with patch.object(trainer_module, "collect", compared):
        built.train()
    assert changed and not any(changed)
    if critic == "side":
        assert built.actor_critic.value_head.first_fit.any()
