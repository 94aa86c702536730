"""What is sampled, and what is said about it: the results of [`Experience`]."""

from typing import NamedTuple

from torch import Tensor

from .rewards import Scored, ScoringBatch
from .rollout import Rollout, Sequences


class TokenScores(NamedTuple):
    """What policy, reference and critic say about sampled tokens: `[batch, response]`, 0 at padding.

    Args:
        logprobs (`Tensor`): Log-probabilities under the policy.
        ref_logprobs (`Tensor`): Log-probabilities under the reference.
        entropies (`Tensor`): Entropies of the policy, in nats.
        values (`Tensor`, *optional*): Values, if there is a critic.
        kls (`Tensor`, *optional*): Exact KL at each position, in nats, if it is what the reward is charged with.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    entropies: Tensor
    values: Tensor | None = None
    kls: Tensor | None = None


class Samples(NamedTuple):
    """Completions of a batch of prompts, with all that is said about them.

    Args:
        sequences ([`Sequences`]): Token ids.
        stopped (`Tensor` of shape `[batch]`): Whether each completion ended by itself.
        batch ([`ScoringBatch`]): What the rewards were given.
        scored ([`Scored`]): What the rewards gave.
        monitored (`Tensor` of shape `[batch, monitors]`): What the monitored rewards gave.
        extra (`dict[str, list]`): Columns that reward functions added to the table of completions.
        tokens ([`TokenScores`]): What policy, reference and critic said.
        left_out (`Tensor` of shape `[batch]`, *optional*):
            Completions about which that was not finite: they are not usable. `None` if there are none on any process.
    """

    sequences: Sequences
    stopped: Tensor
    batch: ScoringBatch
    scored: Scored
    monitored: Tensor
    extra: dict[str, list]
    tokens: TokenScores
    left_out: Tensor | None = None


class Coefficients(NamedTuple):
    """Coefficients that stay the same for a rollout and its updates.

    Args:
        kl (`float`): Coefficient of the KL penalty.
        entropy (`float`): Coefficient of the entropy bonus.
    """

    kl: float
    entropy: float


class Collected(NamedTuple):
    """A rollout and where it comes from.

    Args:
        rollout ([`Rollout`]): What is learned from.
        samples ([`Samples`]): What was sampled.
        coefficients ([`Coefficients`]): Coefficients of its loss.
    """

    rollout: Rollout
    samples: Samples
    coefficients: Coefficients
