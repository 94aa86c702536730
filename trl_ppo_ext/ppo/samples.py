"""What is sampled, and what is said about it: the results of [`Experience`]."""

from typing import NamedTuple

from torch import Tensor

from ..rewards import Scored, ScoringBatch
from ..sequences import Rollout, Sequences


class TokenScores(NamedTuple):
    """What policy, reference and critic say about sampled tokens: `[batch, response]`, 0 at padding."""

    logprobs: Tensor  # log-probabilities under the policy
    ref_logprobs: Tensor  # log-probabilities under the reference
    entropies: Tensor  # entropies of the policy, in nats
    values: Tensor | None = None  # values, if there is a critic
    kls: Tensor | None = None  # exact KL at each position, in nats, if it is what the reward is charged with


class Samples(NamedTuple):
    """Completions of a batch of prompts, with all that is said about them."""

    sequences: Sequences  # token ids
    stopped: Tensor  # [batch] Whether each completion ended by itself
    batch: ScoringBatch  # what the rewards were given
    scored: Scored  # what the rewards gave
    monitored: Tensor  # [batch, monitors] What the monitored rewards gave
    extra: dict[str, list]  # columns that reward functions added to the table of completions
    tokens: TokenScores  # what policy, reference and critic said
    left_out: Tensor | None = None  # [batch]


class Coefficients(NamedTuple):
    """Coefficients that stay the same for a rollout and its updates."""

    kl: float  # coefficient of the KL penalty
    entropy: float  # coefficient of the entropy bonus


class Collected(NamedTuple):
    """A rollout and where it comes from."""

    rollout: Rollout  # what is learned from
    samples: Samples  # what was sampled
    coefficients: Coefficients  # coefficients of its loss
