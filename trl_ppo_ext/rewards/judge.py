"""Language models that judge completions, behind any OpenAI-compatible chat endpoint."""

import json
import re
import warnings
from typing import Any

from .base import RewardError, ScoringBatch
from .http import Failure, HttpClient, checked_url, excerpt, finite_number

# The 8 of "8/10", "8 / 10" and "8 out of 10"; neither a part of 1,000 nor of 1.2.3
NUMBER = r"(?<![\w.,/])(?<!/ )(?<!out of )[-+]?\d+(?:\.\d+)?(?!\d|[.,]\d)"


class JudgeError(RewardError):
    """Raised, or given in place of a score, by [`Judge`] when its server gives no usable score.

    The text names the judge, the server, how often it was asked, and the cause.
    """


class Judge:
    r"""A language model that reads a rubric, a prompt and a completion, and answers with a number.

    Works with every server that has `/chat/completions` as OpenAI's API has it: vLLM, SGLang, llama.cpp, TGI, hosted
    ones. The score is the last match of `pattern` in the answer; an answer that was cut off, without a match, or with
    a number outside `score_range` is a failure of that completion, never a score.

    Args:
        url (`str`): The API's base address, such as `http://localhost:8000/v1`.
        model (`str`): Model name that the server knows.
        prompt_template (`str`): The rubric, with `{completion}`, usually `{prompt}`, and, if wanted, names of the
            dataset's columns in braces. Other braces stay as they are, and what is put in is never interpreted. Ask
            for a last line like `Score: <1 to 10>`.
        name (`str`, *optional*): Name in metrics and errors; the last part of the model's name by default.
        api_key_env (`str`, *optional*): Environment variable that holds the key, sent as a bearer token.
        pattern (`str`, *optional*): Regular expression of the number, which is its first group, or all of it; such
            as `r"Score:\s*(-?[\d.]+)"`. By default any number; the 8 in `8/10`.
        score_range (`tuple[float, float]`, *optional*): Least and greatest score that is accepted.
        concurrency (`int`, *optional*, defaults to 32): Requests under way at a time, for each process of the run.
        timeout (`float`, *optional*, defaults to 60.0): Seconds for one attempt.
        max_retries (`int`, *optional*, defaults to 4): Attempts after the first.
        temperature (`float`, *optional*, defaults to 0.0): The judge's; `None` leaves it to the server.
        max_tokens (`int`, *optional*, defaults to 1024): Longest answer; `None` leaves it to the server.
        extra_body (`dict`, *optional*): Further fields of the request, such as `max_completion_tokens`. It is kept
            with the judge: no secrets here.
        system_prompt (`str`, *optional*): A system message before the rubric.

    Raises:
        `ValueError`: If an argument cannot be used, or the key's variable is missing.

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
            raise ValueError(
                "`prompt_template` has no `{completion}`: the judge would not see what it scores. Add it."
            )
        fixed = {"model", "messages", "stream", "n"} & set(extra_body or {})
        if fixed:
            raise ValueError(f"`extra_body` must not set {', '.join(sorted(fixed))}: the judge sets it, or needs it.")
        if score_range is not None and not score_range[0] < score_range[1]:
            raise ValueError(f"`score_range` must be (least, greatest), got {score_range!r}.")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`pattern` {pattern!r} is no regular expression: {error}.") from None
        address = str(checked_url(url)).rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.client = HttpClient(address, api_key_env, concurrency, timeout, max_retries)
        self.name = name or model.rstrip("/").split("/")[-1]
        self.prompt_template = prompt_template
        self.score_range = score_range
        self.system_prompt = system_prompt
        limits = {"temperature": temperature, "max_tokens": max_tokens}
        self.options = {"model": model} | {key: value for key, value in limits.items() if value is not None}
        self.options |= extra_body or {}

    def __repr__(self) -> str:
        key = self.client.api_key_env
        return (
            f"Judge(url={self.client.url!r}, model={self.options['model']!r}, name={self.name!r}, api_key_env={key!r})"
        )

    def score(self, batch: ScoringBatch) -> list[float | JudgeError]:
        """Ask the judge about every completion, `concurrency` at a time."""
        bodies = [self._body(batch, row) for row in range(len(batch))]
        try:
            answers = self.client.post_all(bodies, self._read)
        except ValueError as error:
            raise JudgeError(f"The judge `{self.name}` cannot be asked: {error}") from None
        return [
            JudgeError(f"The judge `{self.name}` at {self.client.host} {answer}.")
            if isinstance(answer, Failure)
            else answer
            for answer in answers
        ]

    def _body(self, batch: ScoringBatch, row: int) -> dict:
        values = {column: str(entries[row]) for column, entries in batch.columns.items()}
        values |= {"prompt": readable(batch.prompts[row]), "completion": readable(batch.completions[row], False)}
        messages = [{"role": "user", "content": fill(self.prompt_template, values)}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return {**self.options, "messages": messages}

    def _read(self, answer: Any, _: dict) -> float:
        """The score in a chat completion; the text of a `ValueError` is the cause of a failure."""
        try:
            choice = answer["choices"][0]
            text = readable_content(choice["message"]["content"])
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"it answered {excerpt(repr(answer))}, which is no chat completion") from None
        reason = choice.get("finish_reason")
        if reason in ("length", "content_filter"):  # the last number of half an answer may be anything
            remedy = "; raise `max_tokens`, or ask for a shorter answer" if reason == "length" else ""
            raise ValueError(f'its answer was cut off (finish_reason="{reason}"){remedy}: {excerpt(text)}')
        matches = list(self.pattern.finditer(text))
        if not matches:
            raise ValueError(f"its answer has no match of `pattern` {self.pattern.pattern!r}: {excerpt(text)!r}")
        try:
            score = finite_number(matches[-1][1 if self.pattern.groups else 0])
        except ValueError as error:
            raise ValueError(f"its answer's score cannot be used: {error}: {excerpt(text)!r}") from None
        if self.score_range is not None and not self.score_range[0] <= score <= self.score_range[1]:
            raise ValueError(f"its answer's score {score:g} lies outside `score_range` {self.score_range}")
        return score


def fill(template: str, values: dict[str, str]) -> str:
    """Put values in place of `{name}`, in one pass: what is put in is not looked at again."""
    unknown = set(re.findall(r"\{([A-Za-z_]\w+)\}", template)) - set(values)
    if unknown:
        warnings.warn(
            f"`prompt_template` has {', '.join(f'{{{name}}}' for name in sorted(unknown))}, which is neither prompt, "
            f"completion nor a column of the dataset ({', '.join(sorted(values))}); it is sent as it stands.",
            stacklevel=4,
        )
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def readable(text: Any, with_roles: bool = True) -> str:
    """A prompt or a completion as a person would read it."""
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
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content or [])
