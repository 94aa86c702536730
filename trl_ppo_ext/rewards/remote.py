"""Rewards that a server computes from batches of prompts and completions."""

from typing import Any

from .base import RewardError, ScoringBatch
from .http import Failure, HttpClient, checked_url, excerpt, finite_number


class RemoteRewardError(RewardError):
    """Raised, or given in place of a score, by [`RemoteReward`] when its server gives no usable score.

    The text names the reward, the server, how often it was asked, and the cause.
    """


class RemoteReward:
    """A server that takes `{"prompts": [...], "completions": [...]}` and answers `{"scores": [...]}`.

    A score is a number, or null where the reward does not apply. Prompts and completions are sent as the dataset has
    them: text, or chat messages. `trl-ppo serve-reward MODEL` is such a server.

    Args:
        url (`str`): Address to post to; an address without a path gets `/score`.
        name (`str`, *optional*): Name in metrics and errors; the host by default.
        api_key_env (`str`, *optional*): Environment variable that holds the server's key.
        batch_size (`int`, *optional*, defaults to 32): Completions in one request. A request that fails, fails them
            all.
        concurrency (`int`, *optional*, defaults to 4): Requests under way at a time.
        timeout (`float`, *optional*, defaults to 60.0): Seconds for one attempt.
        max_retries (`int`, *optional*, defaults to 4): Attempts after the first.

    Raises:
        `ValueError`: If an argument cannot be used, or the key's variable is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        api_key_env: str | None = None,
        batch_size: int = 32,
        concurrency: int = 4,
        timeout: float = 60.0,
        max_retries: int = 4,
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"`batch_size` must be a whole number of at least 1, got {batch_size!r}.")
        parsed = checked_url(url)
        address = str(parsed.copy_with(path="/score")) if parsed.path in ("", "/") else url
        self.client = HttpClient(address, api_key_env, concurrency, timeout, max_retries)
        self.name = name or parsed.host
        self.batch_size = batch_size

    def __repr__(self) -> str:
        return f"RemoteReward(url={self.client.url!r}, name={self.name!r}, api_key_env={self.client.api_key_env!r})"

    def score(self, batch: ScoringBatch) -> list[float | RemoteRewardError | None]:
        """Score completions in parts of `batch_size`, sent together."""
        parts = [slice(start, start + self.batch_size) for start in range(0, len(batch), self.batch_size)]
        bodies = [{"prompts": batch.prompts[part], "completions": batch.completions[part]} for part in parts]
        try:
            answers = self.client.post_all(bodies, _scores)
        except ValueError as error:
            raise RemoteRewardError(f"The remote reward `{self.name}` cannot be asked: {error}") from None
        scores: list[float | RemoteRewardError | None] = []
        for body, answer in zip(bodies, answers):
            scores += self._part(answer, len(body["completions"]))
        return scores

    def _part(self, answer: list | Failure, expected: int) -> list[float | RemoteRewardError | None]:
        if isinstance(answer, Failure):
            return [self._error(str(answer)) for _ in range(expected)]
        return [self._checked(score, index) for index, score in enumerate(answer)]

    def _checked(self, score: Any, index: int) -> float | RemoteRewardError | None:
        if score is None:
            return None
        try:
            if isinstance(score, str):
                raise ValueError(f"{excerpt(repr(score))} is text; the server must give a number or null")
            return finite_number(score)
        except ValueError as error:
            return self._error(f"gave no usable score for entry {index} of a request: {error}")

    def _error(self, what: str) -> RemoteRewardError:
        return RemoteRewardError(f"The remote reward `{self.name}` at {self.client.host} {what}.")


def _scores(answer: Any, body: dict) -> list:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise ValueError(f'it answered {excerpt(repr(answer))}, not {{"scores": [...]}}')
    if len(scores) != len(body["completions"]):
        raise ValueError(f"it gave {len(scores)} scores for {len(body['completions'])} completions")
    return scores
