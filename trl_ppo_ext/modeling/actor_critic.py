"""One frozen base in every role: policy (adapter on), reference (adapter off), critic (its
states, or own adapter)."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..distributed import gathered, unsharded_weights
from ..sequences import Packed, Sequences
from .adapters import adapter_parameters, add_adapter, load_adapter_weights
from .critics import Critic, Reads
from .logprobs import TokenScores, logit_scale_and_cap, project, token_logprobs

# earlier versions count a list of layers from another one, so all states are kept
SELECTS_STATES = hasattr(output_capturing, "selected_hidden_states")


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Reason why the layers of a model would mix packed rows."""
    config = model.config.get_text_config()
    decoder = model.get_decoder()
    reads_text = decoder if isinstance(decoder, PreTrainedModel) else model  # no images
    # without it, layers may need more of the mask, e.g. chunks
    if not (reads_text.is_backend_compatible() and reads_text._supports_flash_attn):
        return f"{type(model).__name__} does not support flash attention"
    others = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if others:
        return f"{type(model).__name__} has layers of {' and '.join(sorted(others))}"
    implementation = config._attn_implementation
    if implementation != "sdpa" and "flash" not in implementation:
        return f"`attn_implementation` is {implementation!r}"
    return None


def take_packed_rows(implementation: str) -> None:
    """Let an attention function of transformers take packed rows."""
    function = ALL_ATTENTION_FUNCTIONS[implementation]
    if getattr(function, "func", None) is not attend:
        AttentionInterface.register(implementation, partial(attend, function))


def attend(
    function: Callable, module: nn.Module, *inputs: Any, packed: Packed | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call an attention function of transformers, on packed rows each by itself."""
    if packed is None:
        return function(module, *inputs, **kwargs)
    kwargs["attention_mask"] = None
    if function is not sdpa_attention_forward:  # flash attention packs by itself
        lengths = {"cu_seq_lens": packed.starts, "max_length": packed.longest}
        kwargs |= {f"{name}_{of}": x for name, x in lengths.items() for of in "qk"}
        return function(module, *inputs[:3], **kwargs)
    # only SDPA gets padding, which is on the right: causality masks it
    padded = [packed.pad(x[0].transpose(0, 1)).transpose(1, 2) for x in inputs[:3]]
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    if window is not None and packed.longest > window:
        every = torch.ones(
            packed.longest, packed.longest, dtype=torch.bool, device=padded[0].device
        )
        kwargs["attention_mask"] = every.tril().triu(1 - window)[None, None]
    output, weights = function(module, *padded, **kwargs)
    return packed.unpad(output)[None], weights


class _OutsideAutocast:
    """True outside autocast, where only PEFT casts the input of an adapter to the adapter's
    dtype."""

    def __bool__(self) -> bool:
        return not any(map(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")))


def adapter_layers(policy: PeftModel) -> Iterator[tuple[nn.Module, frozenset[str] | None]]:
    """Layers with adapters, and the names of their adapters if a layer looks the active one up."""
    for module in policy.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            yield module, frozenset(module._adapters)
        elif isinstance(module, BaseTunerLayer):
            # PEFT would cast inputs to float32 under autocast, which takes as long as the adapter
            # itself
            module.cast_input_dtype_enabled = _OutsideAutocast()
            yield module, None


@contextmanager
def attention_by_masks(model: PreTrainedModel) -> Iterator[None]:
    """Replace flash attention, which takes no mask, by SDPA or eager attention."""
    configs = [x.config for x in model.modules() if hasattr(x, "config")]
    changed = [x for x in configs if x._attn_implementation not in ("sdpa", "eager")]
    own = [x._attn_implementation for x in changed]
    try:
        for x in changed:
            x._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
        yield
    finally:
        for x, implementation in zip(changed, own):
            x._attn_implementation = implementation


# operands of a layer with LoRA by their dtype
Products = dict[torch.dtype, tuple[Tensor, Tensor]]


@contextmanager
def fused(
    policy: PeftModel, name: str, kept: dict[nn.Module, Products] | None = None
) -> Iterator[None]:
    """Compute plain LoRA, whose weights must be gathered, in three operations per layer instead
    of PEFT's six.

    Operands are copies, which `kept` keeps by layer: the next context overwrites them, so their
    addresses stay, as a CUDA graph needs it.
    """
    # PEFT imports bitsandbytes for the second
    plain = {lora.Linear, getattr(lora, "Linear4bit", lora.Linear)}
    changed = []
    kept = {} if kept is None else kept
    try:
        for x in policy.modules():
            # replaced by a hook
            if type(x) not in plain or name not in x.lora_A or x.merged or "forward" in vars(x):
                continue
            if name not in x.lora_variant and not x.lora_bias[name]:
                changed.append(x)
                down = x.lora_A[name].weight
                up = x.lora_B[name].weight
                copies = kept.setdefault(x, {})
                for kept_down, kept_up in copies.values():
                    kept_down.copy_(down.detach())
                    kept_up.copy_(up.detach().T)
                x.forward = partial(_add_product, x.base_layer, down, up, x.scaling[name], copies)
        yield
    finally:
        for x in changed:
            vars(x).pop("forward", None)


def _add_product(
    base: nn.Module, down: Tensor, up: Tensor, scale: float, copies: Products, inputs: Tensor
) -> Tensor:
    """Output of a layer with LoRA; autocast ignores operations in place, so their operands are
    cast here."""
    outputs = base(inputs)
    dtype = outputs.dtype
    if dtype not in copies:
        copies[dtype] = (
            down.detach().to(dtype, copy=True),
            up.detach().to(dtype, copy=True).T,
        )
    down, up = copies[dtype]
    narrow = nn.functional.linear(inputs.to(dtype), down).flatten(0, -2)
    outputs.view(-1, outputs.shape[-1]).addmm_(narrow.to(dtype), up, alpha=scale)
    return outputs


@contextmanager
def dequantized(policy: PeftModel, copies: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Compute 4-bit layers with copies of their weights in 16 bits, with which training computes
    as well; `copies` keeps them by layer."""
    # on a CPU, bitsandbytes may have packed weights for a faster product of its own
    layers = [x for x in four_bit_layers(policy) if not is_packed_for_cpu(x)]
    try:
        for x in layers:
            if x not in copies:
                copies[x] = _dequantized_weight(x)
            x.forward = partial(_linear, copies[x], x.bias)
        yield
    finally:
        for x in layers:
            vars(x).pop("forward", None)


def four_bit_layers(policy: PeftModel) -> list[Any]:
    """Linear layers of a base that bitsandbytes has quantized to 4 bits."""
    layers = [x for x in policy.modules() if isinstance(x, nn.Linear)]
    return [x for x in layers if hasattr(x.weight, "quant_state")]


def is_packed_for_cpu(layer: Any) -> bool:
    """Check if a 4-bit layer has weights in a format that only a CPU reads."""
    return getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


def _dequantized_weight(layer: Any) -> Tensor:
    """Weight of a 4-bit layer in the dtype that it computes in."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight.to(layer.compute_dtype or weight.dtype)


def _linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """Output of a layer in the dtype of its inputs, as that of a 4-bit layer."""
    bias = None if bias is None else bias.to(weight.dtype)
    outputs = nn.functional.linear(inputs.to(weight.dtype), weight, bias)
    return outputs.to(inputs.dtype)


@contextmanager
def contiguous_states(head: nn.Module) -> Iterator[None]:
    """Project contiguous states: torch would copy the projection for each row of last states,
    which are a slice of the prompts' states."""
    hook = head.register_forward_pre_hook(lambda head, args: (args[0].contiguous(),))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def in_float32(head: Any) -> Iterator[None]:
    """Let an output projection, whose weights must be gathered, return logits in float32,
    without gradients."""
    forward = vars(head).get("forward")  # of a hook

    def float32_logits(hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        logits = project(
            rows, head.weight, torch.empty(len(rows), len(head.weight), device=hidden.device)
        )
        if head.bias is not None:
            logits += head.bias
        return logits.unflatten(0, hidden.shape[:-1])

    head.forward = float32_logits
    try:
        yield
    finally:
        del head.forward
        if forward is not None:
            head.forward = forward


# attributes of the policy that the Trainer and Accelerate must not find: they would treat this as a
# plain model
HIDDEN = frozenset(
    "base_model_prefix estimate_tokens floating_point_ops hf_device_map hf_quantizer "
    "is_loaded_in_4bit is_distributed_loading_by_transformers is_loaded_in_8bit is_quantized "
    "loss_type main_input_name policy model_tags quantization_method tie_weights tp_plan tp_size".split()
)


class ActorCritic(nn.Module):
    """A PEFT policy with a critic on the same base, as returned by [`load_actor_critic`].

    Called with token ids it is the policy, a causal language model: so are `generate`,
    `save_pretrained`, `merge_and_unload`, `generation_config` and all other attributes of a
    `PeftModel`. Adapters are switched here and nowhere else.

    Args:
        policy (`PeftModel`): Causal language model with an adapter.
        value_head ([`Critic`], *optional*): The critic. Without it there is none.
        reference_adapter (`str`, *optional*):
            Frozen adapter that is the reference. Defaults to the base without one.
        critic_adapter (`str`, *optional*):
            Adapter that the value head reads. Defaults to the policy's.
        critic_backprop (`bool`, *optional*, defaults to `True`):
            Whether the value loss of a head on the policy's trunk also trains the policy's adapter.
        cast_lm_head_to_fp32 (`bool`, *optional*, defaults to `False`):
            Whether sampling computes logits in float32, as log-probs do, and autocast does not
            round their factors.
    """

    accepts_loss_kwargs = False  # the Trainer would read it off the signature of `forward`

    def __init__(
        self,
        policy: PeftModel,
        value_head: Critic | None = None,
        reference_adapter: str | None = None,
        critic_adapter: str | None = None,
        critic_backprop: bool = True,
        cast_lm_head_to_fp32: bool = False,
    ):
        super().__init__()
        self.policy = policy
        self.value_head = value_head
        self.policy_adapter = policy.active_adapter
        self.reference_adapter = reference_adapter
        self.critic_adapter = critic_adapter
        self.critic_backprop = critic_backprop
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.active_adapter: str | None = self.policy_adapter
        self._layers = list(adapter_layers(policy))
        self._products: dict[nn.Module, Products] = {}  # LoRA of the policy, for `stepping`
        self._is_checked = False  # until the first rollout
        self.why_not_packed: str | None = "its logits were not checked"  # `None` if rows are packed
        self._logit_scale, self._logit_cap = logit_scale_and_cap(policy.get_base_model().config)
        # names of trained parameters, which FSDP replaces; PEFT takes tens of milliseconds to find
        # them
        trained = [name for name in (self.policy_adapter, critic_adapter) if name is not None]
        self._names = {name: set(adapter_parameters(policy, name)) for name in trained}
        self.train()

    def __getattr__(self, name: str) -> Any:
        is_own = name.startswith("_") or name in HIDDEN or name in self._modules
        if is_own:
            return super().__getattr__(name)
        return getattr(self.policy, name)

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the policy's adapter, as a `PeftModel` does."""
        self.policy.save_pretrained(
            save_directory, **{"selected_adapters": [self.policy_adapter]} | kwargs
        )

    @property
    def trunk(self) -> nn.Module:
        """Base model without its output projection."""
        base = self.policy.get_base_model()
        # Llama 4's names another attribute
        if base.base_model is base:
            return base.model
        return base.base_model

    # ---- parameters ----

    def policy_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the policy's adapter, by name."""
        return self._adapter_parameters(self.policy_adapter)

    def critic_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the value head and, if it has one, of its adapter, by name; empty
        without a critic."""
        head = (
            {}
            if self.value_head is None
            else dict(self.value_head.named_parameters(prefix="value_head"))
        )
        return (
            head
            if self.critic_adapter is None
            else head | self._adapter_parameters(self.critic_adapter)
        )

    def _adapter_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        return {
            name: x for name, x in self.policy.named_parameters() if name in self._names[adapter]
        }

    def trained_weights(self) -> dict[str, Tensor]:
        """Unsharded weights of policy and critic by name; all ranks must call it."""
        trained = {
            id(x) for x in (*self.policy_parameters().values(), *self.critic_parameters().values())
        }
        return unsharded_weights(
            {name: x for name, x in self.named_parameters() if id(x) in trained}
        )

    # ---- roles ----

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Activate another adapter within a context, or none (`None`)."""
        previous = self.active_adapter
        self._activate(name)
        try:
            yield
        finally:
            self._activate(previous)

    def _activate(self, name: str | None) -> None:
        """Set the two flags that a layer's forward reads: PEFT would walk the whole model and
        flip `requires_grad`."""
        self.active_adapter = name
        for layer, adapters in self._layers:
            # `nn.Module.__setattr__` looks for parameters first, which takes 20 times as long
            object.__setattr__(layer, "_disable_adapters", name is None)
            if name is not None:
                active: str | list[str] = [name]
                if adapters is not None:  # PEFT's wrappers of whole modules have a name
                    active = name if name in adapters else []
                object.__setattr__(layer, "_active_adapter", active)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Context in which the model is the base, as of a `PeftModel`, whose own one would
        freeze the critic."""
        return self.adapter(None)

    def reference(self) -> AbstractContextManager[None]:
        """Context in which the model is the reference: the base without an adapter, or its
        frozen adapter."""
        return self.adapter(self.reference_adapter)

    def add_frozen_adapter(self, name: str, config: PeftConfig, weights: dict[str, Tensor]) -> str:
        """Load a frozen adapter onto the base and return its name; raise a `ValueError` if it
        does not fit."""
        name = f"frozen_{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{len(self.policy.peft_config)}"
        name = add_adapter(self.policy, name, config)
        load_adapter_weights(self.policy, name, weights)
        self._layers = list(adapter_layers(self.policy))  # it may be on layers that had none
        self.train(self.training)
        return name

    # ---- forwards ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call [`score_responses`] on sequences; on anything else, return the policy's output
        with its logits."""
        if args and isinstance(args[0], Sequences):
            return self.score_responses(*args, **kwargs)
        return self.policy(*args, **kwargs)

    def score_responses(
        self,
        sequences: Sequences,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_kl: bool = False,
        with_values: bool = True,
    ) -> TokenScores:
        """Score the response tokens; entropies, exact KLs from the reference, and values are
        computed if asked for.

        Gradients flow through everything that is computed. Without, an exact KL comes with the
        reference's log-probs.
        """
        ref_hidden = None
        if with_kl:
            with torch.no_grad(), self.reference():
                ref_hidden = self._hidden_states(sequences.for_reference)
        critic = self.value_head if with_values else None
        hidden, states = self.read_layers(sequences, Reads() if critic is None else critic)
        scores = self._project(
            hidden, sequences, temperature, with_entropy=with_entropy, ref_hidden=ref_hidden
        )
        if ref_hidden is not None and not torch.is_grad_enabled():
            scores = scores._replace(
                ref_logprobs=self._project(ref_hidden, sequences, temperature).logprobs
            )
        if critic is not None:
            inputs = self._critic_inputs(critic, sequences, states)
            with torch.autocast(hidden.device.type, enabled=False):
                values = critic(inputs)
            if values.shape != inputs.shape[:1]:
                raise ValueError(
                    f"`forward` of {type(critic).__name__} must return a value per token, "
                    f"{tuple(inputs.shape[:1])}, got {tuple(values.shape)}."
                )
            scores = scores._replace(values=values)
        return scores.map(sequences.spread)

    @torch.no_grad()
    def read_critic(self, sequences: Sequences, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a function on what the critic reads at the sampled tokens, `[tokens, features]`."""
        critic = cast(Critic, self.value_head)
        hidden, states = self.read_layers(sequences, critic)
        inputs = self._critic_inputs(critic, sequences, states)
        with torch.autocast(hidden.device.type, enabled=False):
            return read(inputs)

    def _critic_inputs(self, critic: Critic, sequences: Sequences, states: list[Tensor]) -> Tensor:
        """Inputs of the critic from states of the policy, or of an adapter of its own."""
        if self.critic_adapter is not None:
            with self.adapter(self.critic_adapter):
                _, states = self.read_layers(sequences.for_critic, critic)
        elif not self.critic_backprop:
            states = [x.detach() for x in states]
        observed = None if sequences.observed is None else sequences.pick(sequences.observed)
        return critic.inputs(states, sequences.positions, observed)

    def reference_logprobs(self, sequences: Sequences, temperature: float = 1.0) -> Tensor:
        """Log-probs of the response tokens under the reference, `[batch, response]`, 0 at
        padding."""
        with self.reference():
            hidden = self._hidden_states(sequences.for_reference)
        return sequences.spread(self._project(hidden, sequences, temperature).logprobs)

    def read_trunk(self, read: Callable[[nn.Module], Tensor], adapter: str) -> Tensor:
        """Run a function on the trunk under an adapter."""
        with self.adapter(adapter):
            return read(self.trunk)

    def _hidden_states(self, sequences: Sequences) -> Tensor:
        return self.read_layers(sequences)[0]

    def read_layers(
        self, sequences: Sequences, reads: Critic | Reads = Reads()
    ) -> tuple[Tensor, list[Tensor]]:
        """Last hidden states where response tokens are predicted, and the states that are to be
        read there, each `[tokens, hidden]`."""
        packed = sequences.packed
        inputs = dict[str, Any]()
        packs = self.why_not_packed is None
        if packs:
            # transformers makes no mask beside one of four axes; to find packed rows, it would wait
            # for the device
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.starts.device)
            inputs = {
                "position_ids": packed.position_ids[None],
                "attention_mask": mask,
                "packed": packed,
            }
        # no token reads a later one
        if packs:
            ids = packed.input_ids[None]
        else:
            ids = packed.pad(packed.input_ids)
        needed = sorted({*reads.layers, *reads.turn_layers})
        kept = bool(needed) and (needed if SELECTS_STATES else True)
        outputs = self.trunk(ids, **inputs, use_cache=False, output_hidden_states=kept)

        def read(x: Tensor, places: Tensor) -> Tensor:
            x = x[0] if x.dim() == 4 else x  # the active stream of Gemma 3n
            return (x[0] if packs else packed.unpad(x)).index_select(0, places)

        hidden = read(outputs.last_hidden_state, packed.reads)
        states = [read(outputs.hidden_states[layer], packed.reads) for layer in reads.layers]
        of_turns = [
            read(outputs.hidden_states[layer], packed.turn_begins) for layer in reads.turn_layers
        ]
        return hidden, (states or [hidden]) + of_turns

    def _project(
        self, hidden: Tensor, sequences: Sequences, temperature: float, **kwargs: Any
    ) -> TokenScores:
        head = self.policy.get_base_model().get_output_embeddings()
        tokens = sequences.pick(sequences.completion_ids)
        scaled = temperature / self._logit_scale
        with gathered([head.weight, head.bias]):
            settings = {
                "bias": head.bias,
                "cap": self._logit_cap,
                "in_float32": self.cast_lm_head_to_fp32,
            }
            return token_logprobs(hidden, head.weight, tokens, scaled, **settings, **kwargs)

    @torch.no_grad()
    def prepare_forwards(self) -> None:
        """Choose, at the first rollout, whether rows are packed.

        Raises an error if log-probs would have other logits, or if the model reads padding. In a
        constructor, device and dtype would not be final.
        """
        if self._is_checked:
            return
        base: PreTrainedModel = self.policy.get_base_model()
        ids = torch.arange(4, device=self.device)[None]
        hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        logits = base(input_ids=ids, use_cache=False).logits
        head = base.get_output_embeddings()
        with gathered([head.weight, head.bias]):
            projected = head(hidden).float()
        cap = self._logit_cap
        if cap is not None:
            projected = cap * torch.tanh(projected / cap)
        # a scale or a cap rounds; NaN equals nothing
        if (self._logit_scale, cap) == (1, None):
            rtol = 0.0
        else:
            rtol = 0.02
        if not torch.allclose(self._logit_scale * projected, logits.float(), rtol=rtol, atol=0):
            if not logits.isfinite().all():  # float16 overflows
                raise ValueError(
                    f"The logits of {type(base).__name__} must be finite, got NaN or inf; check "
                    "its weights, or load it in bfloat16."
                )
            raise ValueError(
                f"{type(base).__name__} changes its logits after the output projection, in a way "
                "that log-probs ignore; use another model."
            )
        # a row that is padded on the left, as for sampling, or packed differs from the row alone by
        # rounding only
        rows = Sequences.from_token_ids([[3, 2, 1], [0]], [[0, 1], [1, 2, 3]], 0, self.device)
        alone = hidden[0, :3].float()
        mask = rows.attention_mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = self.trunk(
            rows.input_ids, attention_mask=mask, position_ids=positions, use_cache=False
        )[0][1, 2:-1]

        def differs(states: Tensor) -> Tensor:
            return (states.float() - alone).norm().nan_to_num(torch.inf) > 0.1 * alone.norm()

        self.why_not_packed = why_not_packed(base)
        if self.why_not_packed is None:
            take_packed_rows(base.config.get_text_config()._attn_implementation)
            if differs(self._hidden_states(rows)[2:]):
                self.why_not_packed = f"{type(base).__name__} mixes rows that are packed"
        # also padded on the right, if not packed
        if differs(padded) or differs(self._hidden_states(rows)[2:]):
            raise ValueError(
                f"{type(base).__name__} does not ignore padding; use a causal model that reads the "
                "attention mask."
            )
        self._is_checked = True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as a `PeftModel` does, in evaluation mode: layers that are recomputed in
        training keep no cache."""
        was_training = self.training
        self.eval()
        try:
            return self.policy.generate(*args, **kwargs)
        finally:
            self.train(was_training)

    @torch.no_grad()
    def sample(
        self, input_ids: Tensor, attention_mask: Tensor, config: GenerationConfig, **kwargs: Any
    ) -> Tensor:
        """Sample from the policy for a rollout, with nothing of the model's own generation
        config."""
        # threads of environments may have left contexts of others in any order
        self._activate(self.policy_adapter)
        base = self.policy.get_base_model()  # `PeftModel.generate` would restore that config
        # transformers would fill unset fields from it, and sample from another distribution than
        # the scored one
        own = base.generation_config
        base.generation_config = GenerationConfig()
        head = base.get_output_embeddings()
        try:
            with ExitStack() as stack:
                stack.enter_context(contiguous_states(head))
                # with a static cache, transformers compiles on a GPU, and would again for each new
                # forward
                if config.cache_implementation in (None, "dynamic"):
                    stack.enter_context(fused(self.policy, self.policy_adapter))
                    if self.cast_lm_head_to_fp32:
                        stack.enter_context(in_float32(head))
                return base.generate(
                    input_ids, attention_mask=attention_mask, generation_config=config, **kwargs
                )
        finally:
            base.generation_config = own

    @contextmanager
    def stepping(self, copies: dict[nn.Module, Tensor] | None = None) -> Iterator[PreTrainedModel]:
        """Context in which the base samples as the policy, by forwards that a CUDA graph may
        replay in this context and in later ones.

        With `copies`, 4-bit layers compute with weights in 16 bits, which are kept there.
        """
        # threads of environments may have left contexts of others in any order
        self._activate(self.policy_adapter)
        base = self.policy.get_base_model()
        head = base.get_output_embeddings()
        with torch.no_grad(), ExitStack() as stack:
            stack.enter_context(attention_by_masks(base))
            stack.enter_context(contiguous_states(head))
            if copies is not None:
                stack.enter_context(dequantized(self.policy, copies))
            stack.enter_context(fused(self.policy, self.policy_adapter, self._products))
            if self.cast_lm_head_to_fp32:
                stack.enter_context(in_float32(head))
            yield base

    def train(self, mode: bool = True) -> "ActorCritic":
        """Set the mode; of the policy only layers that may be recomputed train, so that updates
        score as rollouts do.

        Others would add dropout or the noise of a router, or take a kernel that rounds otherwise.
        """
        super().train(mode)
        for module in self.policy.modules():
            if not hasattr(module, "gradient_checkpointing"):
                module.training = False
        return self

    # ---- activation checkpointing, called by the Trainer ----

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, **kwargs
    ) -> None:
        """Recompute activations in the backward, each layer under the adapter it ran with."""
        settings = self._recompute_kwargs(activation_checkpointing_kwargs)
        self.policy.get_base_model().activation_checkpointing_enable(settings, **kwargs)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict | None = None, **kwargs
    ) -> None:
        """Same as [`activation_checkpointing_enable`], called by transformers before 5.23."""
        settings = self._recompute_kwargs(gradient_checkpointing_kwargs)
        self.policy.get_base_model().gradient_checkpointing_enable(settings, **kwargs)

    def _recompute_kwargs(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        kwargs = {"use_reentrant": False} | (kwargs or {})
        if self.critic_adapter is None:
            return kwargs
        if kwargs["use_reentrant"]:
            raise ValueError(
                "`use_reentrant` in `gradient_checkpointing_kwargs` must be False with a critic "
                "adapter, or recompute the critic's layers under the policy's adapter."
            )

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            active = self.active_adapter
            # the backward runs under the policy's adapter
            return nullcontext(), nullcontext() if active == self.policy_adapter else self.adapter(
                active
            )

        return kwargs | {"context_fn": contexts}
