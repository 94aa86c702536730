"""Episodes: turns of the policy, and the answers of tools and environments between them."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl import is_conversational

from ..concurrency import called, finished, started
from ..data.prompts import (
    NO_PROMPT,
    PROMPT_IDS,
    TOKEN_COLUMNS,
    PromptError,
    encode,
    prompt_limit,
    row_template_kwargs,
    with_prompts,
)
from ..randomness import fixed_seed
from ..redaction import shortened
from ..rewards import RewardError, ScoringBatch
from .chat import CHARACTERS, ChatFormat
from .protocols import TextEnvironment
from .record import ANSWERS, NOWHERE, Place, Record, forget
from .tools import Answer, ToolEnvironment
from .transformers import Generator


@dataclass
class Episode:
    """A prompt and what followed it."""

    prompt: Any  # text or chat messages, with the first observation
    prompt_ids: list[int]
    player: Any = None  # of the environment or tools; None for a rollout function
    template_kwargs: dict[str, Any] | None = None  # None if the prompt is text
    schemas: list[dict] = field(default_factory=list)  # of the tools
    columns: dict[str, Any] = field(default_factory=dict)  # of a rollout function, for rewards
    completion_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # at each token of the policy, number of its turn; else 0
    starts: list[int] = field(default_factory=list)  # first token of each turn of the policy
    logprobs: list[float] = field(default_factory=list)  # under a sampler that is not the policy; 0 if not sampled
    messages: list[dict] = field(default_factory=list)  # those of the policy and, in between, the answers
    rewards: list[tuple[int, float]] = field(default_factory=list)  # at the last token of a turn
    failed_calls: list[bool] = field(default_factory=list)  # per tool call
    stopped: bool = False  # False if `max_completion_length` or a limit of the environment ended it
    critic_prompt_ids: list[int] | None = None  # what the critic reads as the prompt, with the hidden state
    after: list[int] | None = None  # what the policy would have read next, if the value of that state bootstraps
    error: BaseException | None = None  # of the environment; it ends the episode
    place: Place = NOWHERE  # at its end

    @property
    def ids(self) -> list[int]:
        """Everything so far."""
        return self.prompt_ids + self.completion_ids

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return len(self.starts)

    @property
    def environment(self) -> Any:
        """The user's object."""
        return getattr(self.player, "instance", None)

    def add(self, ids: list[int], sampled: bool, logprobs: list[float] | None = None) -> None:
        """Append a turn, or what the environment wrote."""
        if sampled:
            self.starts.append(len(self.completion_ids))
        self.completion_ids += ids
        self.logprobs += (logprobs or [0.0] * len(ids))[: len(ids)]
        self.sampled += [self.turns if sampled else 0] * len(ids)


class Kind:
    """Kind of environment: a factory with its instances, which are reset for every episode, and the tools."""

    def __init__(self, factory: Callable[[], Any] | None, tools: list[Callable]):
        self.factory = factory
        self.tools = tools
        self.pool = [self.make()]
        self.type: Any = type(self.pool[0].instance)
        self.schemas = [get_json_schema(tool) for tool in self.pool[0].tools.values()]

    def make(self) -> ToolEnvironment | TextEnvironment:
        """Make an instance."""
        if self.factory is None:
            return ToolEnvironment(None, self.tools)
        instance = self.factory()
        if not callable(getattr(instance, "reset", None)):
            raise TypeError(f"`environment_factory` must return an object with `reset`, got {instance!r}.")
        is_plain = hasattr(instance, "step") and "seed" in inspect.signature(instance.reset).parameters
        return TextEnvironment(instance) if is_plain else ToolEnvironment(instance, self.tools)

    def lend(self) -> Any:
        """Free instance, or a new one; within a run, a factory that fails gives one that fails to reset."""
        try:
            return self.pool.pop(0) if self.pool else self.make()
        except Exception as error:
            failure = error

        async def reset(row: dict[str, Any], seed: int) -> None:
            raise failure

        return SimpleNamespace(instance=self.type.__new__(self.type), reset=reset)


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
        self, dataset: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None, args: Any, rows: int
    ) -> tuple[Any, dict | None]:
        """Return the dataset with prompts, of so many rows if there is none, and the settings of its chat template."""
        if not (self or self.rollout_func):
            return dataset, template_kwargs
        if dataset is None and self.by_name and args.max_steps > 0:
            raise ValueError(
                "A dictionary as `environment_factory` requires a `train_dataset` whose column `environment` "
                "names one of them, got None."
            )
        for reward in self.rewards:
            reward.timeout = args.environment_timeout
        if self.has_instances and (dataset is not None or args.max_steps > 0):
            dataset = with_prompts(dataset, tokenizer, rows)
        conversational = dataset is None or is_conversational(next(iter(dataset), {}))
        with_tools = any(kind.schemas for kind in self.kinds.values())
        self.chat = ChatFormat(tokenizer, template_kwargs, conversational, with_tools)
        schemas = self.kinds[None].schemas if None in self.kinds else []
        return dataset, self.chat.template_kwargs | ({"tools": schemas} if schemas else {})

    def sampler(
        self, generator: Generator, args: Any, context_length: int | None, trainer: Any
    ) -> "EpisodeSampler | RolloutFunction | None":
        """What samples episodes; `None` if a completion is one turn."""
        if self.rollout_func is not None:
            return RolloutFunction(
                self.rollout_func, trainer, self.chat, generator, args.critic_options.bootstrap_truncated
            )
        return EpisodeSampler(self, generator, args, context_length) if self else None


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


def with_observation(prompt: Any, observation: Any) -> Any:
    """The prompt of an episode: text ends the last message, as in TRL; messages follow it."""
    if observation is None:
        return prompt
    if isinstance(observation, list):
        return observation if prompt in (NO_PROMPT, "") else [*prompt, *observation]
    if not isinstance(observation, str):
        raise TypeError(f"`reset` must return text, messages or None, got {type(observation).__name__}")
    if isinstance(prompt, str):
        return prompt + observation
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]


class EpisodeSampler:
    """Samples an episode for each row: turns of all unfinished episodes in one batch, and answers in between."""

    def __init__(self, environments: Environments, generator: Generator, args: Any, context_length: int | None):
        self.environments, self.chat = environments, environments.chat
        self.generator, self.args = generator, args
        self.limit = args.max_completion_length
        self.prompt_limit = prompt_limit(self.limit, context_length, args.max_prompt_length)
        self.critic_limit = prompt_limit(self.limit, context_length, None)
        iterations = args.max_tool_calling_iterations
        self.iterations = sys.maxsize if iterations is None else iterations
        self.lent: list[tuple[Kind, Episode]] = []

    def _record(self, step: int | None) -> Record:
        """Answers to the rollout before an optimizer step, also those of a run that was killed in it."""
        if step is None:
            return Record(None)
        rank = self.args.process_index
        if self.args.save_strategy == "no":  # otherwise a checkpoint deletes what it has
            forget(self.args.output_dir, rank, step)
        return Record(Path(self.args.output_dir, ANSWERS, f"{step}-{rank}.jsonl").absolute(), CHARACTERS * self.limit)

    def sample(self, rows: Sequence[dict], seeds: list[int], step: int | None = None) -> list[Episode]:
        """Sample an episode for each row, whose environment is seeded; with a step, answers are recorded."""
        # 1. Reset an environment for each row; those of the last episodes have been scored by now.
        for kind, episode in self.lent:
            if episode.error is None:  # otherwise it may still be running
                kind.pool.append(episode.player)
        record, seed, by_name = self._record(step), seeds[0], self.environments.by_name
        hidden = TOKEN_COLUMNS | ({"environment"} if by_name else set())
        self.lent, resets = [], []
        for number, row in enumerate(rows):
            kind = self.environments.kind(row)
            kwargs = None if isinstance(row["prompt"], str) else row_template_kwargs(row, self.chat.template_kwargs)
            place = Place(record, number).after([seeds[number], *row[PROMPT_IDS]])
            episode = Episode(row["prompt"], row[PROMPT_IDS], kind.lend(), kwargs, kind.schemas, place=place)
            columns = {name: deepcopy(x) for name, x in row.items() if name not in hidden}
            if columns["prompt"] == NO_PROMPT:
                del columns["prompt"]
            resets.append(partial(episode.player.reset, columns, seeds[number]))
            self.lent.append((kind, episode))
        episodes = [episode for _, episode in self.lent]
        for episode, observation in self._answers("reset", episodes, resets, seed):
            if by_name or observation is not None:  # otherwise the ids of the dataset stay
                self._observe(episode, observation)
        if self.args.critic == "adapter" and self.args.critic_options.prompt is None:
            with_state = [x for x in episodes if x.error is None and hasattr(x.environment, "hidden_state")]
            states = [partial(called, x.environment.hidden_state) for x in with_state]
            for episode, state in self._answers("hidden state", with_state, states, seed):
                self._show_critic(episode, state)

        active, going_on = episodes, [*range(len(rows))]
        sample_turns = self.generator.conversation()
        while self.generator.largest_count(len(active)):
            # 2. Sample a turn for each unfinished episode, within what is left of its length.
            rooms = [self.limit - len(episode.completion_ids) for episode in active]
            turns = sample_turns([episode.ids for episode in active], max(rooms, default=1), going_on)
            turns = [turn[:room] for turn, room in zip(turns, rooms)]
            logprobs = self.generator.sampled_logprobs or [[0.0] * len(turn) for turn in turns]
            for episode, turn, of_turn in zip(active, turns, logprobs):
                episode.messages.append(self.chat.parsed(turn, episode.ids, episode.schemas))
                episode.add(turn, True, of_turn)
                episode.place = episode.place.after(episode.ids)
                episode.stopped = self.generator.has_stopped(turn)
                episode.after = [] if self.args.critic_options.bootstrap_truncated and not episode.stopped else None

            # 3. Let tools and environments answer, and go on with the episodes that they do not end.
            asked = [x for x in active if x.error is None and x.turns <= self.iterations]
            responses = [partial(x.player.respond, x.messages[-1], x.place) for x in asked]
            answers = self._answers("turn", asked, responses, seed)
            continuing = {id(episode) for episode, answer in answers if self._continues(episode, answer)}
            going_on = [number for number, episode in enumerate(active) if id(episode) in continuing]
            active = [active[number] for number in going_on]
        return episodes

    def _answers(self, part: str, episodes: list[Episode], asks: Sequence[Callable], seed: int) -> list[tuple]:
        """Answers of all episodes at once, without those that failed; sampling draws its random numbers as before."""

        async def together() -> list:
            answers = []
            for episode, ask in zip(episodes, asks):
                has_state = part != "hidden state" and episode.environment is not None
                in_time = partial(bounded, ask, self.args.environment_timeout)
                answers.append(episode.place.answer(part, in_time, has_state))
            return await asyncio.gather(*answers, return_exceptions=True)

        if not episodes:
            return []
        with fixed_seed(hash((seed, episodes[0].turns)) % 2**31, self.args.device):
            answers = finished(started(together()))
        for episode, answer in zip(episodes, answers):
            episode.error = answer if isinstance(answer, BaseException) else None
        return [(episode, answer) for episode, answer in zip(episodes, answers) if episode.error is None]

    def _observe(self, episode: Episode, observation: Any) -> None:
        """Add the first observation to the prompt."""
        try:
            prompt, limit = with_observation(episode.prompt, observation), self.prompt_limit
            if isinstance(observation, str) and len(observation) > CHARACTERS * limit:
                raise PromptError(f"`reset` returned {len(observation)} characters, but {limit} tokens fit")
            kwargs = (episode.template_kwargs or {}) | ({"tools": episode.schemas} if episode.schemas else {})
            ids = encode(prompt, self.chat.tokenizer, kwargs)
            if self.args.overlong_prompts == "truncate":
                ids = ids[-limit:]
            if not 0 < len(ids) <= limit:
                raise PromptError(f"the prompt with the observation has {len(ids)} tokens, but {limit} fit")
            episode.prompt, episode.prompt_ids = prompt, ids
        except Exception as error:  # the policy answers the row's own prompt, for nothing
            episode.error = error

    def _show_critic(self, episode: Episode, state: Any) -> None:
        """Begin the prompt of the critic with the hidden state of an environment."""
        tokenizer, room = self.chat.tokenizer, self.critic_limit - len(episode.prompt_ids)
        try:
            if not isinstance(state, str):
                raise TypeError(f"`hidden_state` must return text, got {type(state).__name__}")
            fits = len(state) <= CHARACTERS * room
            ids = tokenizer(state, add_special_tokens=False)["input_ids"] if fits else []
            if not fits or len(ids) > room:
                raise ValueError(f"`hidden_state` returned {len(state)} characters, but {room} tokens fit")
            start = int(episode.prompt_ids[0] == tokenizer.bos_token_id)
            episode.critic_prompt_ids = [*episode.prompt_ids[:start], *ids, *episode.prompt_ids[start:]]
        except Exception as error:
            episode.error = error

    def _continues(self, episode: Episode, answer: Answer) -> bool:
        """Add an answer to its episode, unless that ends."""
        episode.failed_calls += answer.failed
        if answer.reward is not None:
            episode.rewards.append((len(episode.completion_ids) - 1, answer.reward))
        if answer.done and not answer.truncated:
            episode.after = None
            return False
        is_last = isinstance(episode.player, TextEnvironment) and episode.turns == self.iterations
        is_limited = answer.truncated or is_last
        ids, room = list[int](), self.limit - len(episode.completion_ids) - 1  # the next turn has at least one token
        if episode.stopped and answer.messages:  # otherwise its turn was cut, or calls no tool
            turn, stops = episode.completion_ids[episode.starts[-1] :], self.generator.stop_token_ids
            ids = self.chat.following(turn, answer.messages, episode.template_kwargs, stops, room)
            is_limited = is_limited or len(ids) > room
            if not is_limited:
                episode.add(ids, sampled=False)
                episode.messages += answer.messages
                return True
        if is_limited:
            episode.stopped = False
            if answer.truncated or self.args.critic_options.bootstrap_truncated:
                episode.after = ids if len(ids) <= room else []
        return False


@dataclass
class RolloutFunction:
    """Episodes of a function with the interface of TRL's `rollout_func`."""

    function: Callable
    trainer: Any
    chat: ChatFormat
    generator: Generator
    bootstraps: bool

    def sample(self, rows: Sequence[dict], seeds: list[int], step: int | None = None) -> list[Episode]:
        """Call the function with the prompts of all rows; only environments have seeds, and answers of a step."""
        output = dict(self.function([deepcopy(row["prompt"]) for row in rows], self.trainer))
        output.pop("logprobs", None)  # they are computed with the forward of the updates
        columns = {}
        for name, values in output.items():
            is_per_row = isinstance(values, list) and len(values) == len(rows)
            columns[name] = values if is_per_row else [values] * len(rows)
        episodes = []
        for number, row in enumerate(rows):
            own = {name: values[number] for name, values in columns.items()}
            try:
                prompt_ids, completion_ids = list(own.pop("prompt_ids")), list(own.pop("completion_ids"))
                sampled = list(own.pop("env_mask", [1] * len(completion_ids)))
                end = len(sampled) - sampled[::-1].index(1)  # nothing is learned from what follows
            except (KeyError, TypeError, ValueError):
                end = 0
            if not end or len(sampled) != len(completion_ids) or not prompt_ids:
                raise ValueError(
                    "`rollout_func` must return a dict with token ids for each prompt in `prompt_ids` and "
                    "`completion_ids` and, if an environment wrote some of them, `env_mask` with 1 at each token that "
                    f"the policy sampled; row {number} of {len(rows)} has no valid ones."
                )
            episode = Episode(row["prompt"], prompt_ids, columns=own)
            for is_sampled, run in groupby(zip(sampled[:end], completion_ids), itemgetter(0)):
                ids = [token for _, token in run]
                episode.add(ids, sampled=bool(is_sampled))
                message = self.chat.parsed(ids, prompt_ids, [])
                episode.messages.append(message if is_sampled else message | {"role": "environment"})
            episode.stopped = self.generator.has_stopped(episode.completion_ids)
            episode.after = [] if self.bootstraps and not episode.stopped else None
            episodes.append(episode)
        return episodes
