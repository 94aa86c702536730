"""Tools and environments with TRL's interface: functions that the policy calls, and a class of such functions."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ..concurrency import called

_NOT_TOOLS = ("reset", "get_reward")


class StepResult(str):
    """Text that a tool returns, with a reward for the turn that called it.

    Args:
        text (`str`): Text for the policy.
        reward (`float`, *optional*): Reward of the turn, which enters at its last token.
        done (`bool`, *optional*, defaults to `False`): Whether the episode ends.
    """

    reward: float | None
    done: bool

    def __new__(cls, text: str, reward: float | None = None, done: bool = False) -> "StepResult":
        """Make text with a reward."""
        result = super().__new__(cls, text)
        result.reward, result.done = reward, done
        return result


class Answer(NamedTuple):
    """Answer of an environment to a turn of the policy."""

    messages: list[dict[str, Any]] = []  # noqa: RUF012 (never changed)
    reward: float | None = None
    done: bool = False
    truncated: bool = False  # ended by a limit of the environment, not by a final state
    failed: list[bool] = []  # noqa: RUF012 per tool call


def tools_of(instance: Any) -> list[Callable]:
    """Methods of an environment that are tools."""
    # of the class: `getmembers` of an instance evaluates properties
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in _NOT_TOOLS and not name.startswith("_")]


class ToolEnvironment:
    """Tools of a run, and those of an environment if there is one."""

    def __init__(self, instance: Any, tools: list[Callable]):
        self.instance = instance
        self.tools = {tool.__name__: tool for tool in [*tools, *([] if instance is None else tools_of(instance))]}

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        """First observation, which is appended to the prompt."""
        return None if self.instance is None else await called(self.instance.reset, **row)

    async def respond(self, message: dict[str, Any]) -> Answer:
        """Call the tools of a message, in its order; coroutines run together."""
        calls = message.get("tool_calls")
        if not calls:
            return Answer(done=True)
        started = []
        for call in calls:
            tool = self.tools.get(call.get("function", call).get("name"))
            started.append(asyncio.ensure_future(self._called(call, tool)))
            if not inspect.iscoroutinefunction(tool):  # one may need what another has done
                await started[-1]
        results = await asyncio.gather(*started)
        names = [call.get("function", call).get("name", "unknown") for call in calls]
        rewards = [text.reward for text, _ in results if isinstance(text, StepResult) and text.reward is not None]
        return Answer(
            [{"role": "tool", "name": name, "content": str.__str__(text)} for name, (text, _) in zip(names, results)],
            sum(rewards) if rewards else None,
            any(isinstance(text, StepResult) and text.done for text, _ in results),
            failed=[failed for _, failed in results],
        )

    async def _called(self, call: dict[str, Any], tool: Callable | None) -> tuple[str, bool]:
        """Text of a tool's result, and whether the call failed; the policy reads errors, as in TRL."""
        try:
            if call.get("type") != "function":
                raise ValueError(f"Unsupported tool call type: {call.get('type')}")
            if tool is None:
                raise ValueError(f"Tool {call['function']['name']} not found.")
            result = await called(tool, **call["function"]["arguments"])
            return result if isinstance(result, StepResult) else str(result), False
        except Exception as error:
            return str({"error": str(error)}), True
