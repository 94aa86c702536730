"""Advantages without a critic: a completion's return against the others sampled for the same prompt.

Groups are `group_size` consecutive rows. A completion that failed (`counts` is `False`) is left out of its group and
has advantage 0, whatever its score holds; so have the members of a group in which fewer than two completions count.
"""

import torch
from torch import Tensor


def _deviations(scores: Tensor, counts: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Differences from the group's mean, `[groups, group_size]`, and the members that count, `[groups, 1]`."""
    if scores.ndim != 1 or scores.shape != counts.shape:
        shapes = {"scores": tuple(scores.shape), "counts": tuple(counts.shape)}
        raise ValueError(f"These tensors must have one shape [batch], got {shapes}.")
    if group_size < 1 or len(scores) % group_size:
        raise ValueError(
            f"{len(scores)} completions cannot be cut into groups of {group_size}: the batch must be a multiple of "
            "`group_size` (at least 1), with all completions of a prompt in consecutive rows."
        )
    scores, counts = scores.reshape(-1, group_size), counts.bool().reshape(-1, group_size)
    # relative to a member: equal scores are then exactly 0 from their mean, which a rounded mean would not give, and
    # GRPO would blow the rounding up
    lowest = scores.masked_fill(~counts, torch.inf).amin(1, keepdim=True)
    above = (scores - lowest).masked_fill(~counts, 0)
    members = counts.sum(1, keepdim=True)
    mean = above.sum(1, keepdim=True) / members.clamp(min=1)
    return (above - mean).masked_fill(~counts, 0), members


def grpo_advantages(scores: Tensor, counts: Tensor, group_size: int) -> Tensor:
    r"""GRPO: (Rᵢ − mean) / (std + 1e-4) over the group, with Bessel's correction, as in TRL's `GRPOTrainer`.

    Args:
        scores (`Tensor` of shape `[batch]`): Return of each completion.
        counts (`Tensor` of shape `[batch]`): `False` where a completion failed.
        group_size (`int`): Completions of a prompt, in consecutive rows.

    Returns:
        `Tensor` of shape `[batch]`: Advantage of each completion.

    Raises:
        ValueError: If the batch is no multiple of `group_size`, or the shapes differ.

    Source: https://huggingface.co/papers/2402.03300
    """
    deviations, members = _deviations(scores, counts, group_size)
    variance = (deviations**2).sum(1, keepdim=True) / (members - 1).clamp(min=1)
    return (deviations / (variance.sqrt() + 1e-4)).reshape(-1)


def dr_grpo_advantages(scores: Tensor, counts: Tensor, group_size: int) -> Tensor:
    r"""Dr. GRPO: Rᵢ − mean over the group; not divided by the deviation, so no question counts more than another.

    Args:
        scores (`Tensor` of shape `[batch]`): Return of each completion.
        counts (`Tensor` of shape `[batch]`): `False` where a completion failed.
        group_size (`int`): Completions of a prompt, in consecutive rows.

    Returns:
        `Tensor` of shape `[batch]`: Advantage of each completion.

    Raises:
        ValueError: If the batch is no multiple of `group_size`, or the shapes differ.

    Source: https://huggingface.co/papers/2503.20783
    """
    deviations, _ = _deviations(scores, counts, group_size)
    return deviations.reshape(-1)


def rloo_advantages(scores: Tensor, counts: Tensor, group_size: int) -> Tensor:
    r"""RLOO: Rᵢ − mean over the other members of the group, an unbiased baseline.

    Args:
        scores (`Tensor` of shape `[batch]`): Return of each completion.
        counts (`Tensor` of shape `[batch]`): `False` where a completion failed.
        group_size (`int`): Completions of a prompt, in consecutive rows.

    Returns:
        `Tensor` of shape `[batch]`: Advantage of each completion.

    Raises:
        ValueError: If the batch is no multiple of `group_size`, or the shapes differ.

    Source: https://huggingface.co/papers/2402.14740
    """
    deviations, members = _deviations(scores, counts, group_size)
    # Rᵢ − (ΣR − Rᵢ)/(n − 1) = n/(n − 1)·(Rᵢ − mean)
    return (deviations * members / (members - 1).clamp(min=1)).reshape(-1)
