"""Tools and environments of a run: the protocols, who answers which row, and the rewards that
they give."""

import asyncio
import inspect
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)
from trl import is_conversational

from ..concurrency import FAILURES, called, in_thread, leave_blocked_loops, started
from ..config import EARLIER_NAME, PRIVILEGED_STATE
from ..data import NO_PROMPT, TOKEN_COLUMNS, PromptError, described, with_prompts
from ..redaction import redacted, shortened
from ..rewards import RewardError, ScoringBatch
from ..rewards.scoring import CPU, guarded, seeded
from .chat import ChatFormat, encodable
from .episode import Episode
from .record import Answer

# types of what a message may consist of, as chat templates and servers name them
MESSAGE_PARTS = frozenset(
    "text image image_url audio audio_url input_audio video video_url".split()
)
_NOT_TOOLS = ("reset", "get_reward", PRIVILEGED_STATE, EARLIER_NAME)


def method_of(environment: Any, name: str) -> Callable[[], Any] | None:
    """Method of an environment, or of the one below all its wrappers, which may hide it."""
    method = getattr(environment, name, None)
    if method is None:
        method = getattr(getattr(environment, "unwrapped", None), name, None)
    return method


def privileged_state(environment: Any) -> Callable[[], Any] | None:
    """Method of an environment that returns a text which critic or reference may read, also under
    its earlier name."""
    return method_of(environment, PRIVILEGED_STATE) or method_of(environment, EARLIER_NAME)


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
        result.reward = reward
        result.done = done
        return result


class ToolEnvironment:
    """Tools of a run, and those of an environment if there is one."""

    def __init__(self, instance: Any, tools: list[Callable]):
        self.instance = instance
        # of the class: `getmembers` of an instance evaluates properties
        members = [] if instance is None else inspect.getmembers(type(instance), inspect.isfunction)
        names = [name for name, _ in members if name not in _NOT_TOOLS and not name.startswith("_")]
        methods = [getattr(instance, name) for name in names]
        self.tools: dict[str, Callable] = {}
        for tool in list(tools) + list(methods):
            if not (callable(tool) and hasattr(tool, "__name__")):
                raise TypeError(
                    f"`tools` must be functions, got {shortened(repr(tool), 80)}; wrap it in a "
                    "`def` with type hints and a docstring."
                )
            if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
                raise TypeError(
                    f"A tool must return its result, got the generator `{tool.__name__}`; use "
                    "`return`."
                )
            if self.tools.setdefault(tool.__name__, tool) != tool:
                raise ValueError(
                    f"Tools must have distinct names, got two of the name `{tool.__name__}`; "
                    "rename one."
                )
        self.with_state = {tool.__name__ for tool in methods}

    def schemas(self) -> list[dict]:
        """Schemas of the tools."""
        schemas = []
        for name, tool in self.tools.items():
            try:
                schemas.append(schema_of(tool))
            except Exception as error:  # e.g. of a method without docstring
                if name == "step" and name in self.with_state:
                    raise self._seed_error() from error
                raise
        return schemas

    def _seed_error(self) -> TypeError:
        """Error of a plain environment that is taken for one with tools."""
        name = type(self.instance).__name__
        return TypeError(
            f"`reset` of the environment `{name}` must have a parameter `seed` if `step` returns "
            f"(observation, reward, done), got {inspect.signature(self.instance.reset)}; add "
            "`seed`. Without it `step` is a tool, which needs type hints and a docstring, and "
            "returns text or a `StepResult`."
        )

    def check_columns(self, columns: set[str]) -> None:
        """Raise if `reset` does not take all columns."""
        if self.instance is None:
            return
        signature = inspect.signature(self.instance.reset)
        try:
            signature.bind(**dict.fromkeys(columns))
        except TypeError as error:
            raise ValueError(
                f"`reset` of the environment `{type(self.instance).__name__}` must take each "
                f"column by name, got {signature} for the columns {sorted(columns)}; end its "
                "parameters with `**columns`, and add a missing column."
            ) from error

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        """First observation, which is appended to the prompt."""
        return None if self.instance is None else await called(self.instance.reset, **row)

    async def respond(self, message: dict[str, Any], place: Any) -> Answer:
        """Call the tools of a message in its order, up to one that ends the episode; coroutines
        run together."""
        calls = message.get("tool_calls")
        if not calls:
            return Answer()
        started: list[asyncio.Future] = []
        for number, call in enumerate(calls):
            name = call.get("function", call).get("name")
            tool = self.tools.get(name)
            runs_beside = inspect.iscoroutinefunction(tool)
            if not runs_beside and any(x.done for x in await asyncio.gather(*started)):
                break
            answer = place.answer(
                f"call {number}", partial(self._called, call, tool), name in self.with_state
            )
            started.append(asyncio.ensure_future(answer))
            # one may need what another has done
            if not runs_beside and (await started[-1]).done:
                break
        answers = await asyncio.gather(*started)
        ends = next((place for place, answer in enumerate(answers, 1) if answer.done), None)
        answers = answers[:ends]
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        return Answer(
            [message for answer in answers for message in answer.messages],
            sum(rewards) if rewards else None,
            any(answer.done for answer in answers),
            failed=[failed for answer in answers for failed in answer.failed],
        )

    async def _called(self, call: dict[str, Any], tool: Callable | None) -> Answer:
        """Result of a tool as a message; the policy reads errors, as in TRL."""
        result = None
        failed = False
        try:
            if call.get("type") != "function":
                raise ValueError(f"Unsupported tool call type: {call.get('type')}")
            if tool is None:
                raise ValueError(f"Tool {call['function']['name']} not found.")
            # a tool may change them, and the transcript holds what the policy wrote
            result = await called(tool, **deepcopy(call["function"]["arguments"]))
            # of a function that is no generator itself
            if isinstance(result, Iterator | AsyncIterator):
                raise TypeError(f"A tool must return its result, got a {type(result).__name__}.")
            text = _text_of(result)
        except Exception as error:
            text = str({"error": redacted(str(error))})
            failed = True
        name = encodable(call.get("function", call).get("name", "unknown"))
        if text is None:
            raise TypeError(
                f"The tool `{name}` returned parts of a message, got {described(result)}, but images "
                "and sounds are not supported; return text."
            )
        # the policy would read the reward, and nothing would learn from it
        if name in self.with_state and _is_transition(result):
            if name == "step":
                raise self._seed_error()
            raise TypeError(
                f"The tool `{name}` of the environment `{type(self.instance).__name__}` returned "
                "(observation, reward, done), which would be read as text; return "
                "`StepResult(observation, reward, done)`."
            )
        message = {"role": "tool", "name": name, "content": encodable(text)}
        reward = None
        done = False
        if isinstance(result, StepResult):
            done = _flag(result.done)
            if result.reward is not None:
                reward = _number(result.reward)
        return Answer([message], reward, done, failed=[failed])


def _text_of(result: Any) -> str | None:
    """What the policy reads of a result; `None` if it has parts of a message that are no text."""
    if not (isinstance(result, list) and result and all(map(_is_part, result))):
        return str(result)
    if any(part["type"] != "text" for part in result):
        return None
    return "".join(part["text"] for part in result)


def _is_part(x: Any) -> bool:
    """Whether an entry of a list is a part of a message: it has what its type says, as text or
    object."""
    kind = x.get("type") if isinstance(x, dict) else None
    if not isinstance(kind, str) or kind not in MESSAGE_PARTS or x.keys() != {"type", kind}:
        return False
    return kind != "text" or isinstance(x["text"], str)


def _is_transition(result: Any) -> bool:
    """Check if a result is that of a plain environment's `step`: (observation, reward, done)."""
    if not (isinstance(result, tuple) and len(result) in (3, 5)):
        return False
    observation, reward, done = result[:3]
    return (
        isinstance(observation, str | None)
        and isinstance(reward, Real)
        and isinstance(done, bool | np.bool_)
    )


def _flag(done: Any) -> bool:
    """`done` of the user: text is always true, and a number is a reward in the wrong place."""
    if hasattr(done, "item"):
        done = done.item()
    if not isinstance(done, bool):  # of NumPy or torch
        raise TypeError(
            f"`done` must be True or False, got {shortened(repr(done))}: (observation, reward, "
            "done)."
        )
    return done


def _number(reward: Any) -> float:
    """Reward of a turn, from the user."""
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The reward of a turn must be a number, got {shortened(repr(reward))}; use 0.0 for "
            "none."
        ) from error


class TextEnvironment:
    """Environment with `reset(row, seed)` and `step(text)`, or those of Gymnasium and its
    relatives."""

    tools: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def __init__(self, instance: Any):
        self.instance = instance
        self.signature = inspect.signature(instance.reset)
        parameters = self.signature.parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = {x.name for x in parameters if x.kind not in variable}
        self.takes_all = any(x.kind == inspect.Parameter.VAR_KEYWORD for x in parameters)

    def schemas(self) -> list[dict]:
        """Schemas of tools: none."""
        return []

    def _arguments(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """Arguments of `reset`: the seed, and the row as a dict or by its columns."""
        names_columns = self.names & (row.keys() - {"options", "seed"})
        # `options` are Gymnasium's, unless others are columns, e.g. a question with its options
        if "row" in self.names or ("options" in self.names and not names_columns):
            values = {"row": row, "options": row, "seed": seed}
        else:  # as in TRL
            values = row | {"seed": seed}
            if self.takes_all:
                return values
        return {name: x for name, x in values.items() if name in self.names}

    def check_columns(self, columns: set[str]) -> None:
        """Raise if `reset` needs a parameter that is not a column."""
        try:
            self.signature.bind(**self._arguments(dict.fromkeys(columns), 0))
        except TypeError as error:
            raise ValueError(
                f"`reset` of the environment `{type(self.instance).__name__}` must take `row` (a "
                f"dict of the columns) and `seed`, or columns by name, got {self.signature} for "
                f"the columns {sorted(columns)}; use `reset(self, row, seed)`, or "
                "`reset(self, seed, **columns)`."
            ) from error

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        """First observation; a second value, the info, is dropped."""
        result = await called(self.instance.reset, **self._arguments(row, seed))
        if isinstance(result, tuple):
            return result[0]
        return result

    async def respond(self, message: dict[str, Any], place: Any) -> Answer:
        """Step with the text of a turn."""
        result = await called(self.instance.step, message["content"])
        if not (isinstance(result, tuple) and len(result) in (3, 5)):
            raise ValueError(
                "`step` must return (observation, reward, done), or Gymnasium's five values, got "
                f"{shortened(repr(result)[:200])}."
            )
        observation, reward, done, truncated, *_ = (*result, False)
        ends = _flag(done) | _flag(truncated)
        if not (isinstance(observation, str) or ends):
            raise ValueError(
                f"`step` must return an observation that is text, got {type(observation).__name__}."
            )
        # after a limit, the critic reads it
        if isinstance(observation, str):
            messages = [{"role": "user", "content": encodable(observation)}]
        else:
            messages = []
        return Answer(messages, _number(reward), ends, bool(truncated and not done))


def schema_of(tool: Callable) -> dict[str, Any]:
    """Schema of a tool, which the chat template renders."""
    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            "A tool must have type hints, and a docstring that describes it and its arguments in "
            f"Google's style, got `{tool.__name__}` ({error}); add what is missing."
        ) from error


def check_factory(factory: Any, place: str) -> None:
    """Raise an error for a factory of environments that cannot be called without arguments."""
    if not callable(factory):
        raise TypeError(
            f"`{place}` must be a class or a function that returns an environment, got "
            f"{type(factory).__name__}."
        )
    try:
        # what a decorated function takes, and not what the function inside takes
        inspect.signature(factory, follow_wrapped=False).bind()
    except ValueError:
        return  # a type of C may have no signature
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise ValueError(
            f"`{place}` must be callable without arguments, got `{name}` ({error}); bind them with "
            "`functools.partial`."
        ) from None


class Kind:
    """Kind of environment: a factory with its instances, which are reset for every episode, and
    the tools."""

    def __init__(self, factory: Callable[[], Any] | None, tools: list[Callable]):
        self.factory = factory
        self.tools = tools
        self.type: Any = None if factory else type(None)  # of its instances, without wrappers
        self.made = {True: 0, False: 0}
        self.first = self.make()
        self.pool = [self.first]
        # of training, and of evaluations, which may not change it
        self.pools = {True: self.pool, False: []}
        self.schemas = self.first.schemas()

    def make(
        self, trains: bool = True, device: torch.device = CPU
    ) -> ToolEnvironment | TextEnvironment:
        """Make an instance, whose random numbers depend on how many were made before."""
        if self.factory is None:
            return ToolEnvironment(None, self.tools)
        self.made[trains] += 1
        with guarded(self.made[trains], device):
            instance = self.factory()
        if not callable(getattr(instance, "reset", None)):
            raise ValueError(
                f"`environment_factory` must return an object with `reset`, got {instance!r}."
            )
        type_ = type(instance.unwrapped if hasattr(type(instance), "unwrapped") else instance)
        if self.type not in (None, type_):
            raise TypeError(
                f"`environment_factory` must return instances of one class, got `{type_.__name__}` "
                f"after `{self.type.__name__}`; use a dictionary of factories."
            )
        self.type = type_
        is_plain = (
            hasattr(instance, "step") and "seed" in inspect.signature(instance.reset).parameters
        )
        if is_plain:
            return TextEnvironment(instance)
        return ToolEnvironment(instance, self.tools)


def check_rollout_func(function: Any) -> None:
    """Raise a `TypeError` unless a function can be called with prompts and trainer."""
    try:
        signature = inspect.signature(function)
        signature.bind([], None)
    except ValueError:
        return  # a function of C may have no signature
    except TypeError as error:
        raise TypeError(
            "`rollout_func` is called with two arguments, the prompts and the trainer, whose "
            f"`args` and `processing_class` it may read; got {shortened(function)} ({error})."
        ) from None


class Environments:
    """Tools and environments of a run, by the name that a row chooses (`None`: all have the
    same), or its function."""

    def __init__(
        self,
        tools: list[Callable] | None = None,
        factory: Any = None,
        rollout_func: Callable | None = None,
    ):
        if rollout_func is not None and (tools or factory):
            raise ValueError(
                "`rollout_func` samples whole episodes; remove `tools` and `environment_factory`."
            )
        if rollout_func is not None:
            check_rollout_func(rollout_func)
        self.rollout_func = rollout_func
        if factory == {}:
            raise ValueError("`environment_factory` must name an environment, got {}; name one.")
        self.by_name = isinstance(factory, dict)
        # columns that `reset` does not get
        self.hidden = TOKEN_COLUMNS | ({"environment"} if self.by_name else set())
        if isinstance(factory, dict):
            factories = factory
        else:
            if tools or factory:
                factories = {None: factory}
            else:
                factories = {}
        for name, x in factories.items():
            if self.by_name and not isinstance(name, str):
                raise TypeError(
                    f"`environment_factory` must name environments by text, got {name!r}; write "
                    f"{str(name)!r}, also in the column `environment`."
                )
            if self.by_name:
                check_factory(x, f"environment_factory[{name!r}]")
            elif x is not None:
                check_factory(x, "environment_factory")
        self.kinds: dict[str | None, Kind] = {
            name: Kind(x, list(tools or [])) for name, x in factories.items()
        }
        kinds = self.kinds.values()
        self.tools = list(
            {name: tool for kind in kinds for name, tool in kind.pool[0].tools.items()}.values()
        )
        self.rewards = [
            EnvironmentReward(type_, self) for type_ in dict.fromkeys(kind.type for kind in kinds)
        ]
        if tools and kinds and all(isinstance(kind.pool[0], TextEnvironment) for kind in kinds):
            raise ValueError(
                "`tools` have no effect with environments that have `step`; remove them."
            )
        self.has_instances = bool(factory)  # which reward functions receive
        self.give_rewards = any(
            isinstance(x.first, TextEnvironment) or method_of(x.first.instance, "get_reward")
            for x in kinds
        )

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def kind(self, row: dict[str, Any]) -> Kind:
        """Kind of environment of a row."""
        if self.by_name:
            name = row.get("environment")
        else:
            name = None
        if name not in self.kinds:
            names = ", ".join(map(repr, self.kinds))
            raise PromptError(
                f"The column `environment` has {name!r}, which is not among the environments "
                f"{names}."
            )
        return self.kinds[name]

    def checked(self, dataset: Any) -> Any:
        """Return a dataset whose rows name known environments, which take their columns; those
        of a stream are checked when they are read."""
        if not (self and hasattr(dataset, "unique")):
            return dataset
        if self.by_name and "environment" in dataset.column_names:
            names = dataset.unique("environment")
        else:
            names = [None]
        columns = set(dataset.column_names) - self.hidden
        if "prompt" in columns and len(dataset) and dataset[0]["prompt"] == NO_PROMPT:
            columns.remove("prompt")  # which stands for none
        for name in names:
            self.kind({"environment": name}).first.check_columns(columns)  # the pool may be empty
        return dataset

    def prepare(
        self,
        dataset: Any,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict | None,
        rows: int,
        timeout: float | None = None,
    ) -> tuple[Any, dict | None]:
        """Return the dataset with prompts, of so many rows if there is none, and the settings of
        its chat template."""
        if not self:
            return dataset, template_kwargs
        if dataset is None and self.by_name and rows:
            raise ValueError(
                "A dictionary as `environment_factory` requires a `train_dataset` whose column "
                "`environment` names one of them, got None."
            )
        self.timeout = timeout
        if self.has_instances:
            dataset = with_prompts(dataset, tokenizer, rows)
        conversational = dataset is None or is_conversational(next(iter(dataset), {}))
        self.chat = ChatFormat(
            tokenizer, template_kwargs, conversational, with_tools=bool(self.tools)
        )
        if None in self.kinds:
            schemas = self.kinds[None].schemas
        else:
            schemas = []
        return dataset, self.chat.template_kwargs | ({"tools": schemas} if schemas else {})


async def bounded(ask: Callable[[], Awaitable[Any]], timeout: float | None) -> Any:
    """Result of user code, or an error after `environment_timeout` seconds."""
    try:
        async with asyncio.timeout(timeout) as limit:
            return await ask()
    except TimeoutError:
        if timeout is None or not limit.expired():  # one of the user's
            raise
        await asyncio.wrap_future(in_thread(partial(leave_blocked_loops, timeout)))
        raise TimeoutError(f"no result within environment_timeout={timeout:g} s") from None


class EnvironmentReward:
    """Rewards of the environments of a class, or of tools: those of turns, and `get_reward` at
    the end."""

    def __init__(self, type_: type, environments: Environments):
        self.type = type_
        self.environments = environments
        if type_ is type(None):
            self.name = "tools"
        else:  # a name that lasts: some classes are made at run time, and named by an address
            self.name = re.sub("_?[0-9a-f]{9,}$", "", type_.__name__) or type_.__name__

    def score(self, batch: ScoringBatch) -> "Future[list]":
        """Score episodes; those of other classes have no such reward."""
        seeds = [random.getrandbits(31) for _ in batch.episodes]

        async def entries() -> list:
            return await asyncio.gather(*map(seeded, map(self._entry, batch.episodes), seeds))

        return started(entries(), waits=True)

    async def _entry(self, episode: Episode) -> Any:
        if episode.kind.type is not self.type:
            return None
        try:
            if episode.error is not None:
                raise episode.error
            get_reward = method_of(episode.environment, "get_reward") or (lambda: None)
            ask = partial(bounded, partial(called, get_reward), self.environments.timeout)
            reward = await episode.place.answer("reward", ask)
        except FAILURES as error:
            episode.error = error
            return RewardError(
                f"The environment `{self.name}` failed with {type(error).__name__}: "
                f"{shortened(error)}"
            )
        last = []
        if reward is not None:
            last = [(len(episode.completion_ids) - 1, reward)]
            episode.bootstraps = False  # a limit may have ended it, and this is what it earned
        return episode.rewards + last or None
