"""Sampling with continuous batching of transformers: a completion that ends makes room for the next one."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AttentionInterface, ContinuousBatchingConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .transformers import Generator, cut_at_stop, sampling_config
from .vllm import distinct

# tokens per forward on a CPU; transformers' default is thousands, with a mask of that many × the whole cache
CPU_BATCH_TOKENS = 512
_PROBE = "probe_of_the_paged_cache"


class ContinuousBatchingGenerator(Generator):
    """Samples from the actor-critic's policy, with a paged cache and no padding.

    Adapters compute in their own dtype: the forward runs in a thread of transformers, which the run's autocast does
    not reach.
    """

    def __init__(
        self, actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, accelerator: Accelerator
    ):
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        fsdp = getattr(accelerator.state, "fsdp_plugin", None) is not None
        if fsdp or (plugin is not None and plugin.zero_stage == 3):
            raise ValueError(
                "`generation_backend='continuous_batching'` runs a different number of forwards per rank, but "
                f"{'FSDP' if fsdp else 'ZeRO-3'} gathers weights for all processes in step, so they would deadlock; "
                "use 'transformers', or do not shard the base."
            )
        self.base: Any = actor_critic.policy.get_base_model()
        self.device = accelerator.device
        self.batch_size = args.per_device_generation_batch_size
        self.settings = dict(args.generation_kwargs or {})
        self.show_progress = not args.disable_tqdm and accelerator.is_main_process
        self.config = sampling_config(actor_critic, tokenizer, args)
        self.stop_token_ids = frozenset(self.config.eos_token_id)

        # transformers raises errors about the model or the settings now, before the first rollout
        try:
            with self._manager([[0]], 1, self.config.max_new_tokens):
                pass
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                "`generation_backend='continuous_batching'` is not supported by this model or these "
                f"`generation_kwargs` (the backend 'transformers' may support the model): {error}"
            ) from error
        if not reads_paged_cache(self.base):
            raise ValueError(
                f"`generation_backend='continuous_batching'` is not supported by {type(self.base).__name__}: its "
                "layers attend in a way of their own, which ignores the paged cache; use 'transformers'."
            )

    @contextmanager
    def _manager(self, prompts: list[list[int]], copies: int, max_new_tokens: int, **settings: Any) -> Iterator[Any]:
        """Start a manager; afterwards restore the model's attention."""
        requests = len(prompts) * copies
        defaults: dict[str, Any] = {
            "max_requests_per_batch": min(self.batch_size or requests, requests),
            # otherwise transformers may download a kernel and sample with another attention
            "auto_switch_to_flash": False,
            # the config rejects unsupported settings, so none may be dropped silently
            "drop_unsupported_processors": False,
        }
        if self.device.type == "cpu":  # other programs need main memory too: take no more than the rollout needs
            page = self.settings.get("page_size", ContinuousBatchingConfig().page_size)
            lengths = [len(ids) + max_new_tokens for ids in prompts]
            defaults["num_blocks"] = sum(math.ceil(length / page) for length in lengths) * copies
            defaults["max_batch_tokens"] = CPU_BATCH_TOKENS
            defaults["safety_margin"] = 0.0  # everything fits, so no request has to wait
        batching = ContinuousBatchingConfig(**defaults | self.settings, **settings)
        attention, config, manager = self.base.config._attn_implementation, copy(self.config), None
        config.num_return_sequences, config.max_new_tokens = copies, max_new_tokens
        try:
            manager = self.base.init_continuous_batching(config, batching)
            yield manager
        finally:
            if manager is not None:
                if manager.is_running():  # after an error or a signal
                    manager.stop(hard_stop=True)
                manager.destroy()
            if self.base.config._attn_implementation != attention:
                self.base.set_attn_implementation(attention)

    def _sample(
        self, prompts: list[list[int]], copies: int, max_new_tokens: int, seed: int, bar: tqdm
    ) -> list[list[list[int]]]:
        """Sample some completions of each prompt."""
        done: dict[str, list[int]] = {}
        # a prompt that is cached except for its last token would be a forward of no tokens before it is copied, on
        # which transformers 5.23 fails
        with self._manager(prompts, copies, max_new_tokens, seed=seed, allow_block_sharing=copies == 1) as manager:
            # add all requests before the start: which tokens share a forward, and thus the noise of each, must not
            # depend on the speed of this thread
            requests = manager.add_requests(prompts)
            manager.start()
            while len(done) < len(prompts) * copies:
                result = manager.get_result(timeout=1)
                if getattr(result, "error", None) is not None:
                    raise RuntimeError(f"Continuous batching failed: {result.error}")
                if result is not None and result.is_finished():
                    done[result.request_id] = result.generated_tokens
                    bar.update()
                elif not manager.is_running():
                    raise RuntimeError("Continuous batching stopped before all completions were sampled.")
            manager.stop()
        children = [f"__child#{number}" for number in range(copies - 1)]
        return [[done[request + suffix] for suffix in ["", *children]] for request in requests]

    def generate(self, prompts: list[list[int]], max_new_tokens: int | None = None) -> list[list[int]]:
        """Sample a completion for each prompt."""
        max_new_tokens = max_new_tokens or self.config.max_new_tokens
        first_rows, groups = distinct(prompts)
        # prompts are shared only if all have the same number of completions, because a manager takes one number
        if len(set(Counter(groups).values())) > 1 or min(map(len, prompts)) == 1:
            first_rows = groups = list(range(len(prompts)))
        copies = len(prompts) // len(first_rows)
        # transformers seeds the global generators: draw its seed from the run's stream, and restore the stream
        seed = int(torch.randint(2**31, ()))
        with (
            torch.random.fork_rng([self.device] if self.device.type == "cuda" else []),
            tqdm(total=len(prompts), desc="Generating", leave=False, delay=3, disable=not self.show_progress) as bar,
        ):
            sampled = self._sample([prompts[row] for row in first_rows], copies, max_new_tokens, seed, bar)
        return [cut_at_stop(sampled[group].pop(0), self.stop_token_ids) for group in groups]


@torch.no_grad()
def reads_paged_cache(base: PreTrainedModel) -> bool:
    """Check that a stand-in for the cache arrives at the attention of two tokens, once per layer.

    transformers passes the cache through its attention interface. Layers with their own attention ignore it without
    an error: sequences in one forward would attend to one another. Layers that attend twice write to it twice.
    """
    cache, layers = object(), []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **inputs: Any) -> tuple:
        layers.append(id(module) if inputs.get("cache") is cache else None)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_PROBE, attention)
    own, ids = base.config._attn_implementation, torch.zeros(1, 2, dtype=torch.long, device=base.device)
    try:
        base.set_attn_implementation(_PROBE)
        base(input_ids=ids, cache=cache, use_cache=False)
    except (TypeError, ValueError, RuntimeError):
        pass  # such an argument is unknown, or zeros are no valid attention: the calls so far count
    finally:
        base.set_attn_implementation(own)
    return bool(layers) and None not in layers and len({*layers}) == len(layers)
