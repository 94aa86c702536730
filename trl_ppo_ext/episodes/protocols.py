"""Plain environments: text in, text and a reward out, as in Gymnasium, without tool calls."""

import inspect
import math
from collections.abc import Callable
from typing import Any

from ..concurrency import called
from ..redaction import shortened
from .chat import encodable
from .tools import Answer


class TextEnvironment:
    """Environment with `reset(row, seed)` and `step(text)`, or those of Gymnasium."""

    tools: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def __init__(self, instance: Any):
        self.instance = instance
        # Gymnasium's `reset(*, seed, options)` returns a second value, the info
        self.is_gymnasium = "options" in inspect.signature(instance.reset).parameters

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        """First observation."""
        if not self.is_gymnasium:
            return await called(self.instance.reset, row, seed)
        observation, _ = await called(self.instance.reset, seed=seed, options=row)
        return observation

    async def respond(self, message: dict[str, Any], place: Any) -> Answer:
        """Step with the text of a turn."""
        result = await called(self.instance.step, message["content"])
        if not (isinstance(result, tuple) and len(result) in (3, 5)):
            raise ValueError(
                "`step` must return (observation, reward, done), or Gymnasium's (observation, reward, terminated, "
                f"truncated, info), got {shortened(repr(result)[:200])}."
            )
        observation, reward, done, *rest = result
        truncated = bool(rest) and bool(rest[0]) and not done
        if not math.isfinite(reward):
            raise ValueError(f"`step` must return a finite reward, got {reward}.")
        ends = bool(done) or truncated
        if not (isinstance(observation, str) or ends):
            raise ValueError(f"`step` must return an observation that is text, got {type(observation).__name__}.")
        # after a limit, the critic reads it
        messages = [{"role": "user", "content": encodable(observation)}] if isinstance(observation, str) else []
        return Answer(messages, float(reward), ends, truncated)


def openenv(
    client: Callable[[], Any], action: Callable[[str], Any], text: Callable[[Any], str], name: str = "OpenEnv"
) -> type:
    """
    Make an `environment_factory` of a client of OpenEnv, asynchronous or synchronous.

    `reset` of the client gets the columns of the row other than the prompt, and the seed of the episode if the row has
    none.

    Args:
        client (`Callable`):
            Makes a client, such as `partial(EchoEnv, base_url="http://localhost:8000")`, once per episode of a batch.
        action (`Callable`):
            Makes an action of the text of a turn.
        text (`Callable`):
            Makes text for the policy of an observation.
        name (`str`, *optional*, defaults to `"OpenEnv"`):
            Name of the class, and so of its reward in the logs.

    Returns:
        `type`: The class of a plain environment.
    """

    class OpenEnv:
        def __init__(self) -> None:
            self.client = client()

        async def reset(self, row: dict[str, Any], seed: int) -> str:
            columns = {name: x for name, x in row.items() if name != "prompt"}
            return text((await called(self.client.reset, **{"seed": seed} | columns)).observation)

        async def step(self, said: str) -> tuple[str, float, bool]:
            result = await called(self.client.step, action(said))
            return text(result.observation), result.reward or 0.0, result.done

    OpenEnv.__name__ = name
    return OpenEnv
