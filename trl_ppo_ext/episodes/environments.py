"""Tools and environments of a run: the protocols, who answers which row, and the rewards that they give."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl import is_conversational

from ..concurrency import CPU, called, guarded
from ..data import PromptError, with_prompts
from ..redaction import shortened
from ..rewards import RewardError, ScoringBatch
from .chat import ChatFormat, encodable
from .episode import Episode
from .record import Answer

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
            needed = "`step` must return (observation, reward, done), or Gymnasium's five values"
            raise ValueError(f"{needed}, got {shortened(repr(result)[:200])}.")
        observation, reward, done, truncated, *_ = (*result, False)
        ends = bool(done or truncated)
        if not (isinstance(observation, str) or ends):
            raise ValueError(f"`step` must return an observation that is text, got {type(observation).__name__}.")
        # after a limit, the critic reads it
        messages = [{"role": "user", "content": encodable(observation)}] if isinstance(observation, str) else []
        return Answer(messages, float(reward), ends, bool(truncated) and not done)


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


class Kind:
    """Kind of environment: a factory with its instances, which are reset for every episode, and the tools."""

    def __init__(self, factory: Callable[[], Any] | None, tools: list[Callable]):
        self.factory, self.tools = factory, tools
        self.made = {True: 0, False: 0}
        self.pool = [self.make()]
        self.pools = {True: self.pool, False: []}  # of training, and of evaluations, which may not change it
        self.type: Any = type(self.pool[0].instance)
        self.schemas = [get_json_schema(tool) for tool in self.pool[0].tools.values()]

    def make(self, trains: bool = True, device: torch.device = CPU) -> ToolEnvironment | TextEnvironment:
        """Make an instance, whose random numbers depend on how many were made before."""
        if self.factory is None:
            return ToolEnvironment(None, self.tools)
        self.made[trains] += 1
        with guarded(self.made[trains], device):
            instance = self.factory()
        if not callable(getattr(instance, "reset", None)):
            raise TypeError(f"`environment_factory` must return an object with `reset`, got {instance!r}.")
        is_plain = hasattr(instance, "step") and "seed" in inspect.signature(instance.reset).parameters
        return TextEnvironment(instance) if is_plain else ToolEnvironment(instance, self.tools)

    def lend(self, trains: bool, device: torch.device) -> ToolEnvironment | TextEnvironment:
        """Free instance for training or an evaluation, or a new one."""
        return self.pools[trains].pop(0) if self.pools[trains] else self.make(trains, device)


class Environments:
    """Tools and environments of a run, by the name that a row chooses (`None`: all have the same), or its function."""

    def __init__(self, tools: list[Callable] | None = None, factory: Any = None, rollout_func: Callable | None = None):
        if rollout_func is not None and (tools or factory):
            raise ValueError("`rollout_func` samples whole episodes; remove `tools` and `environment_factory`.")
        self.rollout_func = rollout_func
        self.by_name = isinstance(factory, dict)
        factories = factory if isinstance(factory, dict) else {None: factory} if tools or factory else {}
        self.kinds: dict[str | None, Kind] = {name: Kind(x, list(tools or [])) for name, x in factories.items()}
        kinds = self.kinds.values()
        self.tools = list({name: tool for kind in kinds for name, tool in kind.pool[0].tools.items()}.values())
        self.rewards = [EnvironmentReward(type_) for type_ in dict.fromkeys(kind.type for kind in kinds)]
        self.has_instances = bool(factory)  # which reward functions receive
        self.timeout: float | None = None  # seconds
        self.give_rewards = any(isinstance(x.pool[0], TextEnvironment) or hasattr(x.type, "get_reward") for x in kinds)

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def kind(self, row: dict[str, Any]) -> Kind:
        """Kind of environment of a row."""
        name = row.get("environment") if self.by_name else None
        if name not in self.kinds:
            names = ", ".join(map(repr, self.kinds))
            raise PromptError(f"The column `environment` has {name!r}, which is not among the environments {names}.")
        return self.kinds[name]

    def prepare(
        self,
        dataset: Any,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict | None,
        rows: int,
        timeout: float | None = None,
    ) -> tuple[Any, dict | None]:
        """Return the dataset with prompts, of so many rows if there is none, and the settings of its chat template."""
        if not (self or self.rollout_func):
            return dataset, template_kwargs
        if dataset is None and self.by_name and rows:
            needed = "a `train_dataset` whose column `environment` names one of them"
            raise ValueError(f"A dictionary as `environment_factory` requires {needed}, got None.")
        self.timeout = timeout
        for reward in self.rewards:
            reward.timeout = timeout
        if self.has_instances:
            dataset = with_prompts(dataset, tokenizer, rows)
        conversational = dataset is None or is_conversational(next(iter(dataset), {}))
        self.chat = ChatFormat(tokenizer, template_kwargs, conversational, with_tools=bool(self.tools))
        schemas = self.kinds[None].schemas if None in self.kinds else []
        return dataset, self.chat.template_kwargs | ({"tools": schemas} if schemas else {})


async def bounded(ask: Callable[[], Awaitable[Any]], timeout: float | None) -> Any:
    """Result of user code, or an error after `environment_timeout` seconds."""
    if timeout is None:
        return await ask()
    try:
        return await asyncio.wait_for(ask(), timeout)
    except TimeoutError:
        raise TimeoutError(f"no result within environment_timeout={timeout:g} s") from None


class EnvironmentReward:
    """Rewards of the environments of a class, or of tools: those of turns, and `get_reward` at the end."""

    def __init__(self, type_: type):
        self.type = type_
        self.name = "tools" if type_ is type(None) else type_.__name__
        self.timeout: float | None = None  # seconds

    def score(self, batch: ScoringBatch) -> Awaitable[list]:
        """Score episodes; those of other classes have no such reward."""
        ends = [self._end(episode) for episode in batch.episodes]

        async def entries() -> list:
            return await asyncio.gather(*map(self._entry, batch.episodes, ends))

        return entries()

    def _end(self, episode: Episode) -> Any:
        """Result of `get_reward`, in the main thread unless there is a timeout, or an awaitable of it."""
        is_other = type(episode.environment) is not self.type
        if is_other or episode.error is not None or episode.place.has("reward"):
            return None
        get_reward = getattr(episode.environment, "get_reward", lambda: None)
        try:
            return get_reward() if self.timeout is None else bounded(partial(called, get_reward), self.timeout)
        except (Exception, SystemExit) as error:
            return error if isinstance(error, Exception) else RuntimeError(repr(error))

    async def _entry(self, episode: Episode, end: Any) -> Any:
        if type(episode.environment) is not self.type:
            return None

        async def awaited() -> Any:
            if isinstance(end, Exception):
                raise end
            return await end if inspect.isawaitable(end) else end

        error = episode.error
        try:
            reward = None if error is not None else await episode.place.answer("reward", awaited)
        except Exception as failure:
            episode.error = error = failure
        if error is not None:
            return RewardError(f"The environment `{self.name}` failed with {type(error).__name__}: {shortened(error)}")
        last = [] if reward is None else [(len(episode.completion_ids) - 1, reward)]
        return [*episode.rewards, *last] or None
