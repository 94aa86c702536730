"""Play episodes: one turn of the policy, turns with answers in between, or those of the user's
function."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import groupby, repeat
from operator import index, itemgetter
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..concurrency import called
from ..config import PRIVILEGED_STATE, PPOConfig
from ..data import (
    NO_PROMPT,
    REWARD_ARGUMENTS,
    PromptError,
    encode,
    prompt_limit,
    row_template_kwargs,
    warn_of_other_tools,
)
from ..distributed import on_every_rank
from ..modeling import ActorCritic
from ..rewards.scoring import guarded, own_random, seeded
from ..text import protected, text_only
from .chat import CHARACTERS, encodable
from .environments import (
    Environments,
    TextEnvironment,
    bounded,
    privileged_state,
)
from .episode import Episode, decode
from .generator import Generator
from .record import ANSWERS, Answer, Place, Record, forget
from .transformers_generator import TransformersGenerator
from .turns import TurnSampler
from .vllm_generator import OverlappingGenerator, VLLMGenerator


class Player:
    """Plays episodes of one turn, which are completions."""

    def __init__(
        self, generator: Generator, tokenizer: PreTrainedTokenizerBase, bootstraps: bool = False
    ):
        self.generator = generator
        self.tokenizer = tokenizer
        # whether the critic's value stands for what a limit of the run cut off
        self.bootstraps = bootstraps
        # episodes whose environments go back to their pools at the next rollout
        self.lent: list[Episode] = []
        self.names: list[str] = []  # of several environments
        self.run = ""  # digest of the run's settings, beside recorded answers
        # called when a rollout is sampled, before it is scored
        self.begin_next: Callable[[], None] | None = None

    def play(
        self, rows: Sequence[dict], seeds: list[int], step: int | None = None, evaluates=False
    ) -> list[Episode]:
        """Play an episode for each row, whose environment is seeded; with a step, answers are
        recorded."""
        episodes = [Episode.of(row) for row in rows]
        self.generator.evaluates = evaluates
        with self.generator.awake():
            on_every_rank(partial(self._sample, episodes, rows, seeds, step), Exception)
        if self.begin_next is not None and step is not None:
            self.begin_next()
        decode(episodes, self.tokenizer)
        return episodes

    def _sample(
        self, episodes: list[Episode], rows: Sequence[dict], seeds: list[int], step: int | None
    ) -> None:
        """Sample a turn for each episode."""
        turns = self.generator.generate([episode.prompt_ids for episode in episodes])
        for episode, turn, logprobs in zip(
            episodes, turns, self.generator.sampled_logprobs or repeat(None)
        ):
            episode.add(turn, True, logprobs)
            self._note_ending(episode, turn)

    def _note_ending(self, episode: Episode, turn: list[int]) -> None:
        """Note how an episode ends if nothing follows a turn."""
        if self.generator.has_stopped(turn):
            episode.ending = "stopped"
        else:
            episode.ending = "cut"
        episode.bootstraps = self.bootstraps and episode.ending == "cut"


class EnvironmentPlayer(Player):
    """Plays episodes of many turns, in between of which tools and environments answer."""

    def __init__(
        self,
        generator: Generator,
        environments: Environments,
        args: PPOConfig,
        context_length: int | None,
    ):
        options = args.critic_options
        iterations = args.max_tool_calling_iterations
        self.environments = environments
        self.chat = environments.chat
        super().__init__(generator, self.chat.tokenizer, options.bootstrap_truncated)
        self.names = [name for name in environments.kinds if name is not None]
        self.limit = args.max_completion_length
        self.truncates = args.overlong_prompts == "truncate"
        self.prompt_limit = prompt_limit(self.limit, context_length, args.max_prompt_length)
        self.context_limit = prompt_limit(self.limit, context_length, None)
        self.shown_to = [
            role for role, column in args.other_prompts.items() if column == PRIVILEGED_STATE
        ]
        self.iterations = math.inf if iterations is None else iterations
        self.device = args.device
        self.rank = args.process_index
        self.folder = args.output_dir
        self.saves = args.save_strategy != "no"
        self.trains = True  # in the last episodes

    def _sample(
        self, episodes: list[Episode], rows: Sequence[dict], seeds: list[int], step: int | None
    ) -> None:
        # 1. Take back the environments of the last episodes, which have been scored by now.
        for episode in self.lent:
            if episode.error is None:  # otherwise it may still be running
                episode.kind.pools[self.trains].append(episode.responder)
        self.lent = []
        self.trains = step is not None

        # 2. Take an environment for each row.
        record = self._record(step)
        resets = []
        hidden = self.environments.hidden
        for number, (episode, row, seed) in enumerate(zip(episodes, rows, seeds)):
            episode.kind = self.environments.kind(row)
            free = episode.kind.pools[self.trains]
            if free:
                episode.responder = free.pop(0)
            else:
                episode.responder = episode.kind.make(self.trains, self.device)
            episode.place = Place(record, number).after([seed] + episode.prompt_ids)
            if not isinstance(episode.prompt, str):
                episode.template_kwargs = row_template_kwargs(row, self.chat.template_kwargs)
            columns = {name: deepcopy(x) for name, x in row.items() if name not in hidden}
            if columns["prompt"] == NO_PROMPT:
                del columns["prompt"]
            resets.append(partial(episode.responder.reset, columns, seed))
            self.lent.append(episode)
        if self.environments.has_instances and len({id(x.environment) for x in episodes}) < len(
            episodes
        ):
            raise ValueError(
                "`environment_factory` must return a new environment at each call, got one twice."
            )

        # 3. Let every episode run by itself.
        sampler = self.generator.turn_sampler()
        parts = [
            self._play_episode(episode, reset, sampler, seeds[0])
            for episode, reset in zip(episodes, resets)
        ]
        with own_random():
            sampler.play(
                parts, record, lambda number: guarded(self._seed(seeds[0], number), self.device)
            )

    async def _play_episode(
        self, episode: Episode, reset: Callable, sampler: TurnSampler, seed: int
    ) -> None:
        """Play an episode from its reset to its end."""
        # 1. Reset its environment: the observation continues the prompt.
        observation = await self._answer(episode, "reset", reset, seed)
        # without an observation the ids of the dataset stay
        if episode.error is None and (self.environments.by_name or observation is not None):
            self._observe(episode, observation)

        # 2. Show critic or reference what the policy must find out.
        shows = privileged_state(episode.environment) if self.shown_to else None
        if episode.error is None and shows is not None:
            ask = partial(called, shows)
            state = await self._answer(episode, "privileged state", ask, seed, changes_state=False)
            if episode.error is None:
                self._show(episode, state)

        continues = True
        while continues:
            # 3. Sample a turn, within what is left of its length; after an error nobody reads it.
            room = self.limit - len(episode.completion_ids)
            if episode.error is not None:
                room = 1
            sampled = await sampler.sample(episode.place.row, episode.turns, episode.ids, room)
            turn = sampled.ids[:room]
            message, is_malformed = self.chat.parsed(turn, episode.ids, episode.kind.schemas)
            episode.messages.append(message)
            if is_malformed:
                episode.failed_calls.append(True)
            episode.add(turn, True, sampled.logprobs)
            episode.place = episode.place.after(episode.ids)
            self._note_ending(episode, turn)

            # 4. Let tools or the environment answer, and go on if they do not end it.
            continues = False
            is_asked = episode.turns <= self.iterations or not episode.responder.tools
            if episode.error is None and is_asked:
                ask = partial(episode.responder.respond, episode.messages[-1], episode.place)
                answer = await self._answer(episode, "turn", ask, seed)
                continues = episode.error is None and self._continues(episode, answer)

    def _seed(self, seed: int, turns: int) -> int:
        """Seed of user code after so many turns."""
        return hash((seed, self.rank, turns)) % 2**31

    def _record(self, step: int | None) -> Record:
        """Answers to the rollout before an optimizer step, also those of a run that was killed
        in it."""
        if step is None:
            return Record(None)
        if not self.saves:  # otherwise a checkpoint deletes what it has
            forget(self.folder, self.rank, step)
        path = Path(self.folder, ANSWERS, f"{step}-{self.rank}.jsonl").absolute()
        return Record(path, CHARACTERS * self.limit, self.run)

    async def _answer(
        self,
        episode: Episode,
        part: str,
        ask: Callable,
        seed: int,
        changes_state: bool = True,
    ) -> Any:
        """Answer of tools or an environment; `None` after an error, which the episode keeps.

        If it is recorded, an environment is asked again only if that changes its state.
        """
        has_state = changes_state and episode.environment is not None
        in_time = partial(bounded, ask, self.environments.timeout)
        answer = episode.place.answer(part, in_time, has_state)
        own_seed = hash((self._seed(seed, episode.turns), episode.place.row))
        try:
            return await seeded(answer, own_seed)
        except BaseException as error:
            episode.error = error
            if not isinstance(error, Exception):  # the rollout ends, and the environment may run on
                raise
        return None

    def _observe(self, episode: Episode, observation: Any) -> None:
        """Add the first observation to the prompt."""
        limit = self.prompt_limit
        longest = CHARACTERS * limit
        try:
            observation = encodable(observation)
            end = observation
            if isinstance(observation, str) and len(observation) > longest:
                if not self.truncates:
                    raise PromptError(
                        f"`reset` returned {len(observation)} characters, but {limit} tokens fit"
                    )
                end = observation[-longest:]
            kwargs = dict(episode.template_kwargs or {})
            if schemas := episode.kind.schemas:
                if kwargs.get("tools") != schemas:
                    warn_of_other_tools(kwargs.get("tools"))
                kwargs["tools"] = schemas
            prompt = with_observation(episode.prompt, observation)
            # what the environment spells is text
            marked = protected(end, self.tokenizer, kwargs.get("chat_template"))
            ids = (
                encode(with_observation(episode.prompt, marked), self.tokenizer, kwargs)
                or episode.prompt_ids
            )
            if self.truncates:
                ids = ids[-limit:]
            if not 0 < len(ids) <= limit:
                raise PromptError(
                    f"the prompt with its tools and the observation has {len(ids)} tokens, but "
                    f"{limit} fit"
                )
            episode.prompt = prompt
            episode.prompt_ids = ids
        except Exception as error:  # the policy answers the row's own prompt, for nothing
            episode.error = error

    def _show(self, episode: Episode, state: Any) -> None:
        """Begin the prompt of other roles with the privileged state of an environment."""
        tokenizer = self.tokenizer
        room = self.context_limit - len(episode.prompt_ids)
        try:
            if not isinstance(state, str):
                raise TypeError(f"`privileged_state` must return text, got {type(state).__name__}")
            ids = self.chat.encoded(state)
            if len(ids) > room:
                raise ValueError(f"`privileged_state` returned {len(ids)} tokens, but {room} fit")
            start = int(episode.prompt_ids[0] == tokenizer.bos_token_id)
            ids = episode.prompt_ids[:start] + ids + episode.prompt_ids[start:]
            episode.other_prompts |= dict.fromkeys(self.shown_to, ids)
        except Exception as error:
            episode.error = error

    def _continues(self, episode: Episode, answer: Answer) -> bool:
        """Add an answer to its episode, unless that ends."""
        episode.failed_calls += answer.failed
        episode.unread = answer.messages
        if answer.reward is not None:
            episode.rewards.append((len(episode.completion_ids) - 1, answer.reward))
        if answer.done and not answer.truncated:
            episode.bootstraps = False
            return False
        is_last = (
            isinstance(episode.responder, TextEnvironment) and episode.turns >= self.iterations
        )
        is_limited = answer.truncated or is_last
        ids: list[int] = []
        room = self.limit - len(episode.completion_ids) - 1  # the next turn has at least one token
        # otherwise its turn was cut, or calls no tool
        if episode.ending == "stopped" and answer.messages:
            turn = episode.completion_ids[episode.starts[-1] :]
            stops = self.generator.stop_token_ids
            ids = self.chat.following(turn, answer.messages, episode.template_kwargs, stops, room)
            episode.is_overlong = not is_limited and len(ids) > room
            is_limited = is_limited or episode.is_overlong
            if not is_limited:
                episode.add(ids, sampled=False)
                episode.messages += answer.messages
                episode.unread = []
                return True
        if is_limited:
            if episode.ending == "stopped" and not episode.is_overlong:
                episode.ending = "limited"
            else:
                episode.ending = "cut"
            episode.bootstraps = answer.truncated or self.bootstraps
            if episode.bootstraps and len(ids) <= room:
                episode.following = ids
            else:
                episode.following = []
        return False


def with_observation(prompt: Any, observation: Any) -> Any:
    """A prompt with the first observation: text ends its last message, as in TRL; messages
    follow it."""
    match observation:
        case None:
            return prompt
        case list():
            if prompt in (NO_PROMPT, ""):
                return observation
            if isinstance(prompt, str):
                raise TypeError(
                    "`reset` must return text beside a prompt of text, got messages; make the "
                    "column 'prompt' messages, too."
                )
            return list(prompt) + observation
        case str() if isinstance(prompt, str):
            return prompt + observation
        case str():
            last = text_only(prompt[-1])
            return prompt[:-1] + [last | {"content": last["content"] + observation}]
        case _:
            raise TypeError(
                f"`reset` must return text, messages or None, got {type(observation).__name__}"
            )


class FunctionPlayer(Player):
    """Plays the episodes of a function with the interface of TRL's `rollout_func`."""

    def __init__(
        self,
        function: Callable,
        trainer: Any,
        vocab_size: int,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        bootstraps: bool = False,
    ):
        super().__init__(generator, tokenizer, bootstraps)
        self.function = function
        self.trainer = trainer
        self.vocab_size = vocab_size

    def _sample(
        self, episodes: list[Episode], rows: Sequence[dict], seeds: list[int], step: int | None
    ) -> None:
        # 1. Call the function with the prompts of all rows.
        with guarded(
            hash((seeds[0], self.trainer.args.process_index)) % 2**31, self.trainer.args.device
        ):
            output = self.function([deepcopy(row["prompt"]) for row in rows], self.trainer)
        if isinstance(output, Mapping):
            output = dict(output)
        else:
            output = {}
        output.pop("logprobs", None)  # they are computed with the forward of the updates
        reserved = sorted(output.keys() & set(REWARD_ARGUMENTS) - {"completion_ids"})
        if reserved:
            raise ValueError(
                "`rollout_func` must not return arguments of reward functions, which the trainer "
                f"computes, got {reserved}; drop or rename these entries."
            )
        for name, x in output.items():
            # those would be padded
            if hasattr(x, "tolist") and name not in ("prompt_ids", "completion_ids"):
                output[name] = x = x.tolist()
            if isinstance(x, list | tuple) and len(x) != len(rows):
                raise ValueError(
                    f"`rollout_func` must return lists of {len(rows)} entries, got {len(x)} in "
                    f"{name!r}."
                )
        for number, episode in enumerate(episodes):
            own = {
                name: x[number] if isinstance(x, list | tuple) else x for name, x in output.items()
            }

            # 2. Check the token ids of each row, up to the last one that the policy sampled.
            try:
                prompt_ids, completion_ids = (
                    list(map(index, own.pop(x))) for x in ("prompt_ids", "completion_ids")
                )
                sampled = list(map(int, own.pop("env_mask", [1] * len(completion_ids))))
                end = len(sampled) - sampled[::-1].index(1)  # nothing is learned from what follows
            except (KeyError, TypeError, ValueError):
                end = 0
            if not (end and prompt_ids and len(sampled) == len(completion_ids)):
                raise ValueError(
                    "`rollout_func` must return a dict with lists of token ids, `prompt_ids` and "
                    "`completion_ids`, and `env_mask` with 1 at sampled tokens if others wrote "
                    f"some; row {number} has no valid ones."
                )
            if not all(0 <= token < self.vocab_size for token in prompt_ids + completion_ids[:end]):
                raise ValueError(
                    f"`rollout_func` must return ids of the model's {self.vocab_size} tokens, row "
                    f"{number} has others; use its tokenizer."
                )
            if end > (limit := self.trainer.args.max_completion_length):
                raise ValueError(
                    f"`rollout_func` must keep to `max_completion_length={limit}`, got {end} "
                    f"tokens in row {number}; raise it, or sample fewer."
                )

            # 3. Split them into turns and answers. Other entries are for reward functions.
            episode.prompt_ids = prompt_ids
            episode.columns |= own
            for is_sampled, run in groupby(zip(sampled[:end], completion_ids), itemgetter(0)):
                ids = [token for _, token in run]
                episode.add(ids, sampled=bool(is_sampled))
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                episode.messages.append(
                    {"role": "assistant" if is_sampled else "environment", "content": text}
                )
            self._note_ending(episode, episode.completion_ids)


def build_player(
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    accelerator: Accelerator,
    environments: Environments,
    context_length: int | None = None,
    trainer: Any = None,
) -> Player:
    """Player of a run, which samples with its `generation_backend`."""
    kind: Any = VLLMGenerator if args.generation_backend == "vllm" else TransformersGenerator
    if args.vllm_options.overlap_rollouts:
        kind = OverlappingGenerator
    generator = kind(actor_critic, tokenizer, args, accelerator)
    bootstraps = args.critic_options.bootstrap_truncated
    if environments.rollout_func is not None:
        vocab_size = actor_critic.config.get_text_config().vocab_size
        return FunctionPlayer(
            environments.rollout_func, trainer, vocab_size, generator, tokenizer, bootstraps
        )
    if environments:
        return EnvironmentPlayer(generator, environments, args, context_length)
    return Player(generator, tokenizer, bootstraps)
