"""Sampling with the policy itself: by steps over static memory, or with `generate`."""

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import groupby
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode
from transformers.masking_utils import create_chunked_causal_mask
from transformers.utils import logging

from ..config import PPOConfig
from ..distributed import is_sharded, unsharded
from ..modeling import ActorCritic
from ..modeling.actor_critic import four_bit_layers
from ..sequences import Sequences
from .generator import SAMPLING, Generator, cut_at_stop, stop_token_ids
from .static_sampler import Sampled, StaticSampler
from .static_step import score_filters

logger = logging.get_logger(__name__)

# bytes of keys and values that stay on a GPU while the model is trained; their graphs stay too
KEPT = 2**30
# settings of `generate` that take padding for words of the prompt
READ_PADDING = (
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "min_length",
    "no_repeat_ngram_size",
)
# fields of a generation config with which steps sample
STEPPED = frozenset(
    (
        "max_new_tokens min_new_tokens do_sample temperature top_k top_p min_p repetition_penalty "
        "pad_token_id bos_token_id eos_token_id use_cache transformers_version"
    ).split()
)
# layers of a cache with which steps sample; a dummy is that of a layer that reads another's keys
STEPPED_LAYERS = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"))


class TransformersGenerator(Generator):
    """Samples from the actor-critic's policy."""

    def __init__(
        self,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        args: PPOConfig,
        accelerator: Accelerator,
    ):
        self.actor_critic = actor_critic
        self.args = args
        self.accelerator = accelerator
        settings: dict[str, Any] = {
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": stop_token_ids(
                tokenizer,
                actor_critic.policy.generation_config,
                vocab_size=actor_critic.config.get_text_config().vocab_size,
                others=args.stop_token_ids,
            ),
            "use_cache": True,
        } | {name: getattr(args, name) for name in SAMPLING}
        # filters of transformers refuse an integer, e.g. of a YAML file
        settings["repetition_penalty"] = float(args.repetition_penalty)
        self.config = GenerationConfig(**settings | cast(dict, args.generation_kwargs or {}))
        self.stop_token_ids = frozenset(self.config.eos_token_id)
        try:
            self.stop_strings = None
            if args.stop_strings:
                self.stop_strings = StopStringCriteria(tokenizer, args.stop_strings)
        except ValueError as error:
            raise ValueError(
                f"`stop_strings` are not supported by this tokenizer ({error}); use "
                "`stop_token_ids`."
            ) from error
        self.batch_size = args.per_device_generation_batch_size
        self._sampler: StaticSampler | None = None
        self.why_not_stepped = why_not_stepped(actor_critic, self.config)
        self.longest_stepped = longest_stepped(actor_critic.policy)
        if accelerator.device.type == "mps":
            self.why_not_stepped = "MPS has no float64"
        if self.why_not_stepped is not None and accelerator.is_main_process:
            logger.warning_once(
                "Sampling calls `generate`, which keeps rows that ended in the batch and reads "
                f"earlier turns again, because {self.why_not_stepped}."
            )
        self.reads_padding = any(getattr(self.config, name, None) for name in READ_PADDING)
        self._check_dequantizing()
        self._weights: dict[nn.Module, Tensor] = {}  # of the 4-bit base, in 16 bits
        # `generate` runs one forward of the policy per token; a static cache may be compiled, and
        # guidance runs a second forward
        self.keeps_logprobs = (
            self.config.get_generation_mode() == GenerationMode.SAMPLE
            and self.config.cache_implementation in (None, "dynamic")
            and not self.config.guidance_scale
        )

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Gather sharded weights: ranks then sample by themselves."""
        is_complete = False
        try:
            with unsharded(self.actor_critic):
                yield
            is_complete = True
        finally:
            if not (is_complete and self._may_keep()):
                self.release()

    def _may_keep(self) -> bool:
        """Check whether memory and graphs may stay while the model is trained."""
        sampler = self._sampler
        # without graphs, nothing is gained by keeping the memory; graphs read gathered weights
        # where they were
        if sampler is None or not sampler.step.captures:
            return False
        is_fixed = not is_sharded(self.actor_critic) and not self._weights
        return is_fixed and sampler.memory.nbytes() <= KEPT

    def release(self) -> None:
        """Free keys, values, graphs and dequantized weights."""
        if self._sampler is not None:
            self._sampler.release()
        self._weights.clear()

    def _check_dequantizing(self) -> None:
        """Check that there is a 4-bit base to dequantize, and that steps sample."""
        if not self.args.dequantize_for_generation:
            return
        if not four_bit_layers(self.actor_critic.policy):
            raise ValueError(
                "`dequantize_for_generation` must be False, got True for a base without 4-bit "
                "layers; there is nothing to dequantize."
            )
        if self.why_not_stepped is not None:
            raise ValueError(
                "`dequantize_for_generation` must be False, got True where `generate` samples, "
                f"because {self.why_not_stepped}."
            )

    def static_sampler(self, longest: int = 0) -> StaticSampler | None:
        """Sampler by steps over static memory; `None` if only `generate` samples rows of so many
        tokens."""
        if self.why_not_stepped is not None:
            return None
        if longest > self.longest_stepped:
            logger.warning_once(
                f"Sampling calls `generate` for rows of more than {self.longest_stepped} tokens, "
                "because the rotary frequencies of all earlier tokens change there."
            )
            return None
        # built at the first batch: before that the model may move to its device
        if self._sampler is None:
            base = self.actor_critic.policy.get_base_model()
            self._sampler = StaticSampler(
                base,
                str(cache_argument(base)),
                score_filters(self.config),
                stop_token_ids=sorted(self.stop_token_ids),
                pad_token_id=self.config.pad_token_id,
                min_new_tokens=self.config.min_new_tokens or 0,
                stop_strings=self.stop_strings,
            )
        return self._sampler

    def generate(self, prompts: list[list[int]], rooms: list[int] | None = None) -> list[list[int]]:
        """Sample a completion for each prompt, of at most so many tokens."""
        size = self.batch_size or len(prompts)
        rooms = rooms or [self.config.max_new_tokens] * len(prompts)
        self.begin_logprobs()
        sampler = self.static_sampler(longest_row(prompts, rooms))
        if sampler is None and self.reads_padding:
            return self._generate_by_length(prompts, rooms, size)
        completions = []
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            if sampler is None:
                completions += self._generate_batch(prompts[part], rooms[part])
            else:
                completions += self.step_batch(sampler, prompts[part], rooms[part]).token_ids
        return completions

    def _generate_by_length(
        self, prompts: list[list[int]], rooms: list[int], size: int
    ) -> list[list[int]]:
        """Sample completions of prompts without padding, those of one length together."""
        by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        completions: list[list[int]] = []
        for _, rows in groupby(by_length, key=lambda row: len(prompts[row])):
            of_length = list(rows)
            for start in range(0, len(of_length), size):
                part = of_length[start : start + size]
                completions += self._generate_batch(
                    [prompts[row] for row in part], [rooms[row] for row in part]
                )
        order = sorted(range(len(prompts)), key=by_length.__getitem__)
        if self.sampled_logprobs is not None:
            self.sampled_logprobs = [self.sampled_logprobs[place] for place in order]
        return [completions[place] for place in order]

    def begin_logprobs(self) -> None:
        """Begin the log-probs of a call; they are comparable at the temperature of the policy
        only."""
        is_comparable = self.keeps_logprobs and self.temperature == self.args.temperature
        if is_comparable:
            self.sampled_logprobs = []
        else:
            self.sampled_logprobs = None

    def step_batch(
        self,
        sampler: StaticSampler,
        prompts: list[list[int]],
        rooms: list[int],
        last: Sampled | None = None,
        rows: list[int] | None = None,
    ) -> Sampled:
        """Sample completions by steps, maybe of prompts that continue rows of the last call."""
        temperature = self.temperature if self.config.do_sample else 0.0
        weights = self._weights if self.args.dequantize_for_generation else None
        with self.accelerator.autocast(), self.actor_critic.stepping(weights):
            sampled = sampler.sample(prompts, rooms, temperature, last, rows or [])
        if self.sampled_logprobs is not None:
            self.sampled_logprobs += sampled.logprobs
        return sampled

    def conversation(self) -> "KeptConversation":
        """Sample turn after turn of the same episodes."""
        return KeptConversation(self)

    def has_stopped(self, completion: list[int]) -> bool:
        """Check for a stop token or a stop string at the end."""
        ended = super().has_stopped(completion)
        strings = self.stop_strings
        return ended or (strings is not None and bool(strings(torch.tensor([completion]), None)))

    def _generate_batch(self, prompts: list[list[int]], rooms: list[int]) -> list[list[int]]:
        """Sample completions with `generate`.

        Log-probs of their tokens are appended to `sampled_logprobs`, unless that is `None`.
        """
        batch = Sequences.from_token_ids(
            prompts, [[]] * len(prompts), self.config.pad_token_id, self.accelerator.device
        )
        width = batch.input_ids.shape[1]
        is_greedy = self.temperature == 0
        config = copy(self.config)
        config.max_new_tokens = max(rooms)
        config.temperature = 1.0 if is_greedy else float(self.temperature)
        if is_greedy:
            config.top_k = 1
        ends = _Ends(width, torch.tensor(rooms, device=batch.input_ids.device), self.stop_strings)
        criteria = StoppingCriteriaList([ends])
        recorder = _SampledLogprobs(config.temperature)
        with ExitStack() as stack:
            stack.enter_context(self.accelerator.autocast())
            if self.sampled_logprobs is not None:
                stack.enter_context(self._recorded(recorder))
                criteria.append(recorder)
            ids = self.actor_critic.sample(
                batch.input_ids,
                batch.attention_mask,
                config,
                synced_gpus=False,
                stopping_criteria=criteria,
            )
        completions = [
            cut_at_stop(row[:length], self.stop_token_ids)
            for row, length in zip(ids[:, width:].tolist(), ends.lengths.tolist())
        ]
        if self.sampled_logprobs is not None:
            by_row = torch.stack(recorder.steps, 1).tolist()
            self.sampled_logprobs += [x[: len(ids)] for x, ids in zip(by_row, completions)]
        return completions

    @contextmanager
    def _recorded(self, recorder: "_SampledLogprobs") -> Iterator[None]:
        """Context in which the logits of the base are recorded."""
        base = self.actor_critic.policy.get_base_model()
        hook = base.register_forward_hook(recorder.read)
        try:
            yield
        finally:
            hook.remove()


class KeptConversation:
    """Turns of episodes, with the keys and values of earlier turns; the weights must stay as
    they are."""

    def __init__(self, generator: TransformersGenerator):
        self.generator = generator
        self.last: Sampled | None = None

    def __call__(
        self, prompts: list[list[int]], rooms: list[int], rows: list[int] | None
    ) -> list[list[int]]:
        """Sample the next turn of episodes; `rows` are their numbers in the call before."""
        generator = self.generator
        sampler = generator.static_sampler(longest_row(prompts, rooms))
        batch_size = generator.batch_size or len(prompts)
        if sampler is None or len(prompts) > batch_size:
            self.last = None  # its rows are not those of this call
            return generator.generate(prompts, rooms)
        generator.begin_logprobs()
        last = self.last
        if (
            rows is None
            or last is None
            or last is not sampler.last
            or not sampler.may_continue(prompts, rooms, last, rows)
        ):
            # this is the first turn, others have sampled since, an episode was not in the last
            # group, or a window would end at hidden columns: all are read again
            sampler.reserve(len(prompts), longest_row(prompts, rooms))
            self.last = generator.step_batch(sampler, prompts, rooms)
        else:
            self.last = generator.step_batch(sampler, prompts, rooms, last, rows)
        return self.last.token_ids


class _Ends(StoppingCriteria):
    """Ends rows of `generate` at the lengths that they may have, and at stop strings of the
    completion."""

    def __init__(self, start: int, rooms: Tensor, strings: StopStringCriteria | None):
        self.start = start
        self.lengths = rooms
        self.strings = strings

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        completions = input_ids[:, self.start :]
        length = completions.shape[1]
        if self.strings is not None:  # transformers would also search the prompt
            is_complete = self.strings(completions, None)
            shorter = self.lengths.clamp(max=length)
            self.lengths = torch.where(is_complete, shorter, self.lengths)
        return self.lengths <= length


class _SampledLogprobs(StoppingCriteria):
    """Records log-probs of sampled tokens under the logits that they were sampled from, before
    filters; ends no row."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logits: Tensor | None = None  # of the step, `[batch, vocabulary]`
        self.steps: list[Tensor] = []  # `[batch]`

    def read(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Keep the logits of a forward of the model, as a hook."""
        self.logits = output.logits[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if self.logits is not None:
            logits = self.logits.float() / self.temperature
            self.steps.append(
                -nn.functional.cross_entropy(logits, input_ids[:, -1], reduction="none")
            )
            self.logits = None
        return torch.zeros_like(input_ids[:, 0], dtype=torch.bool)


def cache_argument(trunk: nn.Module) -> str | None:
    """Name of the keys and values in a model's forward, which transformers 5.24 renamed; `None`
    if it takes none."""
    names = inspect.signature(trunk.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def why_not_stepped(actor_critic: ActorCritic, config: GenerationConfig) -> str | None:
    """Reason why only `generate` samples, and no steps over static memory."""
    base = actor_critic.policy.get_base_model()
    name = type(base).__name__
    # 1. Settings that only `generate` has.
    settings = config.to_diff_dict()
    others = [field for field in settings if field not in STEPPED and settings[field]]
    if config.repetition_penalty not in (None, 1):
        others.append("repetition_penalty")
    if others:
        return f"`{others[0]}` is set"
    if not config.use_cache:
        return "`use_cache` is off"

    # 2. Models that need more than a key and a value per token, and a mask.
    if base.is_remote_code():
        return "the model's code is its own, which may use a cache differently"
    if cache_argument(base) is None or cache_argument(actor_critic.trunk) is None:
        return f"the forward of {name} takes neither `cache` nor `past_key_values`"
    takes_positions = "position_ids" in inspect.signature(base.forward).parameters
    if not takes_positions or getattr(base.config.get_text_config(), "alibi", False):
        return f"{name} reads positions off its mask"
    if base.config.model_type == "gpt_neo":
        return f"{name} masks by the number of its keys"
    # transformers 5.19 passes an argument that its own function does not take
    layer_types = getattr(base.config.get_text_config(), "layer_types", None) or []
    takes_blocks = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters
    if "chunked_attention" in layer_types and not takes_blocks:
        return f"this version of transformers makes no mask for steps of {name}"
    kinds = {type(layer).__name__ for layer in DynamicCache(config=base.config).layers}
    if not kinds or kinds - STEPPED_LAYERS:
        return f"the layers of {name} keep another state than keys and values"

    # 3. Weights on several devices, for which a step would be several graphs.
    if len({x.device for x in base.parameters()}) > 1:
        return "the model is on several devices"
    return None


def longest_stepped(model: nn.Module) -> float:
    """Largest number of tokens of a row that steps sample: a longer one changes the frequencies of
    "longrope", and with them the keys of all earlier tokens."""
    limits = [math.inf]
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            config: Any = module.config
            limits.append(config.rope_parameters["original_max_position_embeddings"])
    return min(limits)


def longest_row(prompts: list[list[int]], rooms: list[int]) -> int:
    """Largest number of tokens that a row may have."""
    return max(len(ids) + room for ids, room in zip(prompts, rooms))
