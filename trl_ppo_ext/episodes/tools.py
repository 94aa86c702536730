"""Tools and environments with TRL's interface: functions that the policy calls, and a class of such functions."""

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..concurrency import called
from .chat import encodable

_NOT_TOOLS = ("reset", "get_reward", "hidden_state")


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

    messages: list[dict[str, Any]] = []  # noqa: RUF012 (never changed); without any, the policy has ended the episode
    reward: float | None = None
    done: bool = False
    truncated: bool = False  # ended by a limit of the environment, not by a final state
    failed: list[bool] = []  # noqa: RUF012 per tool call


class ToolEnvironment:
    """Tools of a run, and those of an environment if there is one."""

    def __init__(self, instance: Any, tools: list[Callable]):
        self.instance = instance
        # of the class: `getmembers` of an instance evaluates properties
        members = [] if instance is None else inspect.getmembers(type(instance), inspect.isfunction)
        names = [name for name, _ in members if name not in _NOT_TOOLS and not name.startswith("_")]
        methods = [getattr(instance, name) for name in names]
        self.tools = {tool.__name__: tool for tool in [*tools, *methods]}
        self.with_state = {tool.__name__ for tool in methods}

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        """First observation, which is appended to the prompt."""
        return None if self.instance is None else await called(self.instance.reset, **row)

    async def respond(self, message: dict[str, Any], place: Any) -> Answer:
        """Call the tools of a message, in its order; coroutines run together."""
        calls = message.get("tool_calls")
        if not calls:
            return Answer()
        started = []
        for number, call in enumerate(calls):
            name = call.get("function", call).get("name")
            tool = self.tools.get(name)
            answer = place.answer(f"call {number}", partial(self._called, call, tool), name in self.with_state)
            started.append(asyncio.ensure_future(answer))
            if not inspect.iscoroutinefunction(tool):  # one may need what another has done
                await started[-1]
        answers = await asyncio.gather(*started)
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        return Answer(
            [message for answer in answers for message in answer.messages],
            sum(rewards) if rewards else None,
            any(answer.done for answer in answers),
            failed=[failed for answer in answers for failed in answer.failed],
        )

    async def _called(self, call: dict[str, Any], tool: Callable | None) -> Answer:
        """Result of a tool as a message; the policy reads errors, as in TRL."""
        result, failed = None, False
        try:
            if call.get("type") != "function":
                raise ValueError(f"Unsupported tool call type: {call.get('type')}")
            if tool is None:
                raise ValueError(f"Tool {call['function']['name']} not found.")
            result = await called(tool, **call["function"]["arguments"])
            text = str(result)
        except Exception as error:
            text, failed = str({"error": str(error)}), True
        name = encodable(call.get("function", call).get("name", "unknown"))
        message = {"role": "tool", "name": name, "content": encodable(text)}
        reward, done = (result.reward, result.done) if isinstance(result, StepResult) else (None, False)
        return Answer([message], reward, done, failed=[failed])
