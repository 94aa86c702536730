"""Rewards over HTTP: language models that judge completions, and servers that score batches."""

import json
import re
import warnings
from typing import Any

from .base import RewardError, ScoringBatch, finite_number
from .http import HttpClient, checked_url, excerpt

# The 8 of "8/10", "8 / 10" and "8 out of 10"; not a part of 1,000 or 1.2.3
NUMBER = r"(?<![\w.,/])(?<!/ )(?<!out of )[-+]?\d+(?:\.\d+)?(?!\d|[.,]\d)"


class JudgeError(RewardError):
    """Raised or returned by [`Judge`]; names the judge, the server, the number of attempts and the cause."""


class RemoteRewardError(RewardError):
    """Raised or returned by [`RemoteReward`]; names the reward, the server, the number of attempts and the cause."""


class Judge:
    r"""Language model that reads a rubric, a prompt and a completion, and answers with a number.

    Works with every server that has OpenAI's `/chat/completions`: vLLM, SGLang, llama.cpp, TGI, hosted ones. The
    score is the last match of `pattern` in the answer. An answer that is truncated, has no match, or has a number
    outside `score_range` is a failure of that completion.

    Args:
        url (`str`):
            Base address of the API, e.g. `http://localhost:8000/v1`.
        model (`str`):
            Model name on the server.
        prompt_template (`str`):
            Rubric with `{completion}`, usually `{prompt}`, and optionally dataset columns in braces. Other braces
            are kept, and inserted text is never interpreted. Ask for a last line like `Score: <1 to 10>`.
        name (`str`, *optional*):
            Name in metrics and errors. Defaults to the last part of `model`.
        api_key_env (`str`, *optional*):
            Environment variable that holds the key, sent as a bearer token.
        pattern (`str`, *optional*):
            Regular expression of the number, which is its first group or the whole match, e.g.
            `r"Score:\s*(-?[\d.]+)"`. Matches any number by default; the 8 in `8/10`.
        score_range (`tuple[float, float]`, *optional*):
            Least and greatest accepted score.
        concurrency (`int`, *optional*, defaults to `32`):
            Simultaneous requests per process of the run.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds per attempt.
        max_retries (`int`, *optional*, defaults to `4`):
            Attempts after the first.
        temperature (`float`, *optional*, defaults to `0.0`):
            Temperature of the judge. `None` leaves it to the server.
        max_tokens (`int`, *optional*, defaults to `1024`):
            Longest answer. `None` leaves it to the server.
        extra_body (`dict`, *optional*):
            Further fields of the request, e.g. `max_completion_tokens`. Do not pass secrets.
        system_prompt (`str`, *optional*):
            System message before the rubric.

    Raises:
        `ValueError`: If an argument is invalid, or the variable of the key is not set.

    Example:
        ```python
        Judge(
            "http://localhost:8000/v1",
            "Qwen/Qwen3-8B",
            "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nRate the answer. End with `Score: <1 to 10>`.",
            pattern=r"Score:\s*([\d.]+)",
            score_range=(1, 10),
        )
        ```
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt_template: str,
        *,
        name: str | None = None,
        api_key_env: str | None = None,
        pattern: str = NUMBER,
        score_range: tuple[float, float] | None = None,
        concurrency: int = 32,
        timeout: float = 60.0,
        max_retries: int = 4,
        temperature: float | None = 0.0,
        max_tokens: int | None = 1024,
        extra_body: dict[str, Any] | None = None,
        system_prompt: str | None = None,
    ):
        if "{completion}" not in prompt_template:
            raise ValueError("`prompt_template` must contain `{completion}`, which the judge scores; add it.")
        fixed = {"model", "messages", "stream", "n"} & set(extra_body or {})
        if fixed:
            raise ValueError(f"`extra_body` must not set {', '.join(sorted(fixed))}: the judge sets it.")
        if score_range is not None and not score_range[0] < score_range[1]:
            raise ValueError(f"`score_range` must be (least, greatest), got {score_range!r}.")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {pattern!r}: {error}.") from None
        address = str(checked_url(url)).rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.client = HttpClient(address, api_key_env, concurrency, timeout, max_retries)
        self.name = name or model.rstrip("/").split("/")[-1]
        self.prompt_template = prompt_template
        self.score_range = score_range
        self.system_prompt = system_prompt
        limits = {"temperature": temperature, "max_tokens": max_tokens}
        self.options = {"model": model} | {key: value for key, value in limits.items() if value is not None}
        self.options |= extra_body or {}

    def score(self, batch: ScoringBatch) -> list[float | JudgeError]:
        """Score each completion with one request."""
        bodies = [self._body(batch, row) for row in range(len(batch))]
        return self.client.post_all(
            bodies, self._read, lambda cause: JudgeError(f"The judge `{self.name}` at {self.client.host} {cause}.")
        )

    def _body(self, batch: ScoringBatch, row: int) -> dict:
        values = {column: str(entries[row]) for column, entries in batch.columns.items()}
        values |= {"prompt": readable(batch.prompts[row]), "completion": readable(batch.completions[row], False)}
        messages = [{"role": "user", "content": fill(self.prompt_template, values)}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return {**self.options, "messages": messages}

    def _read(self, answer: Any, _: dict) -> float:
        """Return the score of a chat completion."""
        try:
            choice = answer["choices"][0]
            text = readable_content(choice["message"]["content"])
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"it answered {excerpt(repr(answer))}, which is not a chat completion") from None
        reason = choice.get("finish_reason")
        if reason in ("length", "content_filter"):  # the last number of half an answer may be anything
            remedy = "; raise `max_tokens`, or ask for a shorter answer" if reason == "length" else ""
            raise ValueError(f'its answer was truncated (finish_reason="{reason}"){remedy}: {excerpt(text)}')
        matches = list(self.pattern.finditer(text))
        if not matches:
            raise ValueError(f"its answer has no match of `pattern` {self.pattern.pattern!r}: {excerpt(text)!r}")
        score = finite_number(matches[-1][1 if self.pattern.groups else 0])
        if score is None:
            raise ValueError(f"its answer's score must be a finite number: {excerpt(text)!r}")
        if self.score_range is not None and not self.score_range[0] <= score <= self.score_range[1]:
            raise ValueError(f"its answer's score {score:g} is outside `score_range` {self.score_range}")
        return score


class RemoteReward:
    """Server that takes `{"prompts": [...], "completions": [...]}` and answers `{"scores": [...]}`.

    A score is a number, or null if the reward does not apply. Prompts and completions are sent as in the dataset:
    text or chat messages. `trl-ppo serve-reward MODEL` starts such a server.

    Args:
        url (`str`):
            Address to post to. An address without a path gets `/score`.
        name (`str`, *optional*):
            Name in metrics and errors. Defaults to the host.
        api_key_env (`str`, *optional*):
            Environment variable that holds the key of the server, sent as a bearer token.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions per request. All of them fail if the request fails.
        concurrency (`int`, *optional*, defaults to `4`):
            Simultaneous requests per process of the run.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds per attempt.
        max_retries (`int`, *optional*, defaults to `4`):
            Attempts after the first.

    Raises:
        `ValueError`: If an argument is invalid, or the variable of the key is not set.
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
            raise ValueError(f"`batch_size` must be an integer of at least 1, got {batch_size!r}.")
        parsed = checked_url(url)
        address = str(parsed.copy_with(path="/score")) if parsed.path in ("", "/") else url
        self.client = HttpClient(address, api_key_env, concurrency, timeout, max_retries)
        self.name = name or parsed.host
        self.batch_size = batch_size

    def score(self, batch: ScoringBatch) -> list[float | RemoteRewardError | None]:
        """Score completions in requests of `batch_size`."""
        parts = [slice(start, start + self.batch_size) for start in range(0, len(batch), self.batch_size)]
        bodies = [{"prompts": batch.prompts[part], "completions": batch.completions[part]} for part in parts]
        answers = self.client.post_all(bodies, self._read, self._error)
        return [
            score
            for body, answer in zip(bodies, answers)
            for score in (answer if isinstance(answer, list) else [answer] * len(body["completions"]))
        ]

    def _read(self, answer: Any, body: dict) -> list[float | RemoteRewardError | None]:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise ValueError(f'it answered {excerpt(repr(answer))}, not {{"scores": [...]}}')
        if len(scores) != len(body["completions"]):
            raise ValueError(f"it returned {len(scores)} scores for {len(body['completions'])} completions")
        for index, score in enumerate(scores):
            if score is not None and (type(score) not in (int, float) or finite_number(score) is None):
                scores[index] = self._error(
                    f"returned {excerpt(repr(score))} for entry {index} of a request; a score must be a finite "
                    "number, or null if the reward does not apply"
                )
        return scores

    def _error(self, cause: str) -> RemoteRewardError:
        return RemoteRewardError(f"The remote reward `{self.name}` at {self.client.host} {cause}.")


def fill(template: str, values: dict[str, str]) -> str:
    """Replace `{name}` by values in one pass, so that inserted text is not interpreted."""
    unknown = set(re.findall(r"\{([A-Za-z_]\w+)\}", template)) - set(values)
    if unknown:
        warnings.warn(
            f"`prompt_template` has {', '.join(f'{{{name}}}' for name in sorted(unknown))}, which is not prompt, "
            f"completion or a column of the dataset ({', '.join(sorted(values))}); it is sent unchanged.",
            stacklevel=4,
        )
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def readable(text: Any, with_roles: bool = True) -> str:
    """Return a prompt or a completion as plain text."""
    if isinstance(text, str):
        return text
    turns = []
    for message in text:
        said = readable_content(message.get("content"))
        if message.get("tool_calls"):
            said = f"{said}\n{json.dumps(message['tool_calls'], ensure_ascii=False, default=str)}".strip()
        turns.append(f"{str(message['role']).capitalize()}: {said}" if with_roles else said)
    return "\n\n".join(turns)


def readable_content(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content or [])
