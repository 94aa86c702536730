"""Sampling with `generate` of transformers."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria

from ..distributed import is_sharded
from ..modeling import ActorCritic
from ..sequences import Sequences
from .base import cut_at_stop
from .growing_cache import can_grow, growing_cache
from .prompt_cache import prefill
from .quick_lora import quick_adapters


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> list[int]:
    """Tokens that end a completion: the tokenizer's EOS and those of the model's generation config."""
    of_model = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id} | set(of_model if isinstance(of_model, list) else [of_model])
    return sorted(ids - {None})


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase, stops: list[int]) -> None:
    """Set the tokenizer's pad token if it is missing and a stop token other than EOS exists."""
    if not stops:
        raise ValueError(
            "Neither the tokenizer nor the model's generation config has an EOS token, so no completion could ever "
            "end; set `tokenizer.eos_token`."
        )
    if tokenizer.pad_token_id is not None:
        return
    if stops == [tokenizer.eos_token_id]:
        raise ValueError(
            f"The tokenizer has no pad token, and its EOS {tokenizer.eos_token!r} is the only token that ends a "
            "completion, so it should not serve as padding too. Choose one: `tokenizer.pad_token = "
            "tokenizer.unk_token`, or any token that is never sampled; set it on purpose to the EOS if you must."
        )
    tokenizer.pad_token = tokenizer.eos_token


def sampling_config(
    actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, **others: Any
) -> GenerationConfig:
    """Generation config of a rollout."""
    return GenerationConfig(
        **{
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": stop_token_ids(tokenizer, actor_critic.policy.generation_config),
            "use_cache": True,
        }
        | others
    )


class _Progress(StoppingCriteria):
    """Advances a progress bar with every token; never stops."""

    def __init__(self, bar: tqdm):
        self.bar = bar

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class TransformersGenerator:
    """Samples from the actor-critic's policy."""

    def __init__(
        self, actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, accelerator: Accelerator
    ):
        self.actor_critic = actor_critic
        self.accelerator = accelerator
        self.batch_size = args.per_device_generation_batch_size
        self.show_progress = not args.disable_tqdm and accelerator.is_main_process
        self.config = sampling_config(actor_critic, tokenizer, args, **(args.generation_kwargs or {}))
        self.stop_token_ids = frozenset(self.config.eos_token_id)
        self.grows = can_grow(actor_critic, self.config)

    def _generate_batch(self, prompts: list[list[int]], bar: tqdm) -> list[list[int]]:
        device, pad = self.accelerator.device, self.config.pad_token_id
        batch = Sequences.from_token_ids(prompts, [[]] * len(prompts), pad, device)
        with self.accelerator.autocast():
            ids = self._sample(batch, prompts, [_Progress(bar)])
        completions = ids[:, batch.prompt_ids.shape[1] :].tolist()
        return [cut_at_stop(completion, self.stop_token_ids) for completion in completions]

    def _sample(self, batch: Sequences, prompts: list[list[int]], criteria: list[StoppingCriteria]) -> Tensor:
        """Sequences of ids, those of the prompts included."""
        given = (batch.input_ids, batch.attention_mask, self.config, criteria)
        # a layer is gathered for all processes: they sample until the last of them is done
        together = {"synced_gpus": True} if is_sharded(self.actor_critic.embedding) else {}
        if not self.grows:
            return self.actor_critic.generate(*given, **together)
        cache = growing_cache(self.actor_critic, batch.prompt_ids.shape[1] + self.config.max_new_tokens)
        # not beside a static cache: what transformers compiles would be compiled anew for each rollout
        policy = self.actor_critic.policy
        with quick_adapters(policy):
            prefill(self.actor_critic, cache, batch, prompts)
            return self.actor_critic.generate(*given, past_key_values=cache, **together)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Sample a completion for each prompt."""
        size = self.batch_size or len(prompts)
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        tokens = len(parts) * self.config.max_new_tokens
        # the bar appears only if sampling takes more than a few seconds
        with tqdm(total=tokens, desc="Generating", leave=False, delay=3, disable=not self.show_progress) as bar:
            return [completion for part in parts for completion in self._generate_batch(part, bar)]
