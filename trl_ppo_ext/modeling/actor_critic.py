"""One frozen base in every role: policy (adapter on), reference (adapter off), critic (value head, own adapter)."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..distributed import gathered, unsharded_weights
from ..sequences import Sequences
from .adapters import adapter_parameters, add_adapter, load_adapter_weights
from .critics import SideCritic, ValueHead
from .logprobs import TokenScores, token_logprobs


class _OutsideAutocast:
    """True outside autocast, where only PEFT casts the input of an adapter to the adapter's dtype."""

    def __bool__(self) -> bool:
        return not any(map(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")))


class AdapterSwitch:
    """Flags on the layers that have adapters, found once.

    PEFT's `set_adapter` and `disable_adapter` walk the whole model and flip `requires_grad`; this sets the two flags
    that a layer's forward reads.
    """

    def __init__(self, policy: PeftModel):
        self.layers: list[tuple[nn.Module, frozenset[str] | None]] = []
        for module in policy.modules():
            if isinstance(module, AuxiliaryTrainingWrapper):  # it looks its active adapter up, so it must have it
                self.layers.append((module, frozenset(module._adapters)))
            elif isinstance(module, BaseTunerLayer):
                self.layers.append((module, None))
                # PEFT would cast inputs to float32 under autocast, which takes as long as the adapter itself
                module.cast_input_dtype_enabled = _OutsideAutocast()

    def __call__(self, name: str | None) -> None:
        """Activate an adapter on every layer; `None` disables all."""
        active = [name]
        for layer, adapters in self.layers:
            # `nn.Module.__setattr__` looks for parameters first, which takes 20 times as long
            object.__setattr__(layer, "_disable_adapters", name is None)
            if name is not None:
                object.__setattr__(layer, "_active_adapter", active if adapters is None or name in adapters else [])


# attributes of the policy that a user of a trained model reaches for; the Trainer must not find others, such as
# `is_quantized` or `main_input_name`, by which it would treat this as a plain model
POLICY_API = frozenset(
    "base_model generate generation_config get_base_model get_input_embeddings get_nb_trainable_parameters "
    "get_output_embeddings merge_adapter merge_and_unload name_or_path peft_config print_trainable_parameters "
    "push_to_hub unload unmerge_adapter".split()
)


class ActorCritic(nn.Module):
    """A PEFT policy with a critic on the same base.

    The critic is a value head on the policy's last hidden state, or on that of an adapter of its own, or a small
    network beside the trunk. The head is float32 and starts at zero, so the first values are 0. Adapters are switched
    here and nowhere else.

    Called with token ids it is the policy, a causal language model: so are `generate`, `save_pretrained`,
    `merge_and_unload`, `generation_config` and other attributes of a `PeftModel`.

    Args:
        policy (`PeftModel`): Causal language model with an adapter, as returned by [`load_actor_critic`].
        reference_adapter (`str`, *optional*):
            Name of the frozen adapter that is the reference. Defaults to the base without an adapter.
        has_critic (`bool`, *optional*, defaults to `True`): Whether to add a value head.
        critic_adapter (`str`, *optional*):
            Name of the adapter that the value head reads. Defaults to the policy's.
        critic_backprop (`bool`, *optional*, defaults to `True`):
            Whether the value loss of a head on the policy's trunk also trains the policy's adapter.
        normalize_values (`bool`, *optional*, defaults to `False`):
            Whether a new head predicts in units of the returns.
        side_length (`int`, *optional*):
            Maximum completion length, in tokens, if the critic is a [`SideCritic`].

    Raises:
        `ValueError`: If an adapter is on the output projection.
    """

    accepts_loss_kwargs = False  # the Trainer would read it off the signature of `forward`

    def __init__(
        self,
        policy: PeftModel,
        reference_adapter: str | None = None,
        has_critic: bool = True,
        critic_adapter: str | None = None,
        critic_backprop: bool = True,
        normalize_values: bool = False,
        side_length: int | None = None,
    ):
        super().__init__()
        self.policy = policy
        self.policy_adapter = policy.active_adapter
        self.reference_adapter = reference_adapter
        self.critic_adapter = critic_adapter
        self.critic_backprop = critic_backprop
        self.active_adapter: str | None = self.policy_adapter
        self._switch = AdapterSwitch(policy)
        self._is_checked = False
        self._names: dict[str, set[str]] = {}  # of an adapter's parameters: PEFT takes tens of milliseconds
        head = policy.get_base_model().get_output_embeddings()
        if isinstance(head, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ValueError(
                "The adapter must not be on the output projection (`lm_head`): log-probs are computed from the frozen "
                "projection in chunks and would not see it. Remove `lm_head` from `target_modules` and "
                '`modules_to_save` (`target_modules="all-linear"` excludes it).'
            )
        self.value_head: ValueHead | None = None
        config = policy.config.get_text_config()
        last_size = getattr(head, "in_features", config.hidden_size)  # smaller in OPT-350m
        if has_critic and side_length is not None:
            sizes = last_size, config.hidden_size, config.num_hidden_layers, side_length
            self.value_head = SideCritic(*sizes, normalize_values, self.device)
        elif has_critic:
            self.value_head = ValueHead(last_size, normalize_values, self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name) if name in POLICY_API else super().__getattr__(name)

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the policy's adapter, as a `PeftModel` does."""
        self.policy.save_pretrained(save_directory, **{"selected_adapters": [self.policy_adapter]} | kwargs)

    @property
    def config(self):
        """Config of the base model."""
        return self.policy.config

    @property
    def embedding(self) -> Tensor:
        """Input embedding of the base, which is never quantized."""
        return self.policy.get_base_model().get_input_embeddings().weight

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the base computes."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of the base."""
        return self.embedding.device

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards of the base (ZeRO-3, FSDP), so that they must run it together."""
        return hasattr(self.embedding, "ds_id") or isinstance(self.embedding, DTensor)

    @property
    def trunk(self) -> nn.Module:
        """Base model without its output projection."""
        base = self.policy.get_base_model()
        return getattr(base, base.base_model_prefix)

    # ---- parameters ----

    def policy_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the policy's adapter.

        Returns:
            `dict[str, nn.Parameter]`: Parameters by name.
        """
        return self._adapter_parameters(self.policy_adapter)

    def critic_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the value head and, if it has one, of its adapter.

        Returns:
            `dict[str, nn.Parameter]`: Parameters by name; empty without a critic.
        """
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return head if self.critic_adapter is None else head | self._adapter_parameters(self.critic_adapter)

    def _adapter_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        if adapter not in self._names:
            self._names[adapter] = {*adapter_parameters(self.policy, adapter)}
        return {name: x for name, x in self.policy.named_parameters() if name in self._names[adapter]}

    def trained_weights(self) -> dict[str, Tensor]:
        """Unsharded weights of policy and critic by name; all ranks must call it."""
        trained = {id(x) for x in (*self.policy_parameters().values(), *self.critic_parameters().values())}
        return unsharded_weights({name: x for name, x in self.named_parameters() if id(x) in trained})

    # ---- roles ----

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Activate another adapter within a context, or none (`None`)."""
        previous, self.active_adapter = self.active_adapter, name
        self._switch(name)
        try:
            yield
        finally:
            self.active_adapter = previous
            self._switch(previous)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Context in which the model is the base, as of a `PeftModel`, whose own one would freeze the critic."""
        return self.adapter(None)

    def reference(self) -> AbstractContextManager[None]:
        """Context in which the model is the reference: the base without an adapter, or its frozen adapter."""
        return self.adapter(self.reference_adapter)

    def add_frozen_adapter(self, name: str, config: PeftConfig, weights: dict[str, Tensor]) -> str:
        """Load a frozen adapter onto the base and return its name; raise a `ValueError` if it does not fit."""
        name = f"frozen_{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{len(self.policy.peft_config)}"
        name = add_adapter(self.policy, name, config)
        load_adapter_weights(self.policy, name, weights)
        self._switch = AdapterSwitch(self.policy)  # it may be on layers that had none
        return name

    # ---- forwards ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call [`score_responses`] on sequences; on anything else, return the policy's output with its logits."""
        is_rollout = bool(args) and isinstance(args[0], Sequences)
        return self.score_responses(*args, **kwargs) if is_rollout else self.policy(*args, **kwargs)

    def score_responses(
        self,
        sequences: Sequences,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_kl: bool = False,
        with_values: bool = True,
    ) -> TokenScores:
        """Score the response tokens. Gradients flow through everything that is computed.

        Args:
            sequences ([`Sequences`]): Prompts and completions.
            temperature (`float`, *optional*, defaults to 1.0): Sampling temperature.
            with_entropy (`bool`, *optional*, defaults to `False`): Whether to compute entropies.
            with_kl (`bool`, *optional*, defaults to `False`): Whether to compute the exact KL from the reference.
            with_values (`bool`, *optional*, defaults to `True`): Whether to compute values, if there is a critic.

        Returns:
            [`TokenScores`]: Log-probs, entropies, KLs and values, `[batch, response]`.
        """
        ref_hidden = None
        if with_kl:
            with torch.no_grad(), self.reference():
                ref_hidden = self._hidden_states(sequences)
        side = self.value_head if with_values and isinstance(self.value_head, SideCritic) else None
        hidden, *states = self._read_layers(sequences, [] if side is None else side.layers)
        scores = self._project(hidden, sequences, temperature, with_entropy=with_entropy, ref_hidden=ref_hidden)
        if with_values and self.value_head is not None:
            if self.critic_adapter is not None:
                with self.adapter(self.critic_adapter):
                    hidden = self._hidden_states(sequences.for_critic)
            elif side is not None:
                earned = None if sequences.earned is None else sequences.pick(sequences.earned)
                hidden = side.read(states, sequences.positions, earned)
            elif not self.critic_backprop:
                hidden = hidden.detach()
            with torch.autocast(hidden.device.type, enabled=False):
                scores = scores._replace(values=self.value_head(hidden)[:, 0])
        return scores.map(sequences.spread)

    def reference_logprobs(self, sequences: Sequences, temperature: float = 1.0) -> Tensor:
        """Log-probs of the response tokens under the reference, `[batch, response]`, 0 at padding."""
        with self.reference():
            hidden = self._hidden_states(sequences)
        return sequences.spread(self._project(hidden, sequences, temperature).logprobs)

    def read_trunk(self, read: Callable[[nn.Module], Tensor], adapter: str) -> Tensor:
        """Run a function on the trunk under an adapter."""
        with self.adapter(adapter):
            return read(self.trunk)

    def _hidden_states(self, sequences: Sequences) -> Tensor:
        """Last hidden states at the positions that predict response tokens, `[tokens, hidden]`."""
        return self._read_layers(sequences, [])[0]

    def _read_layers(self, sequences: Sequences, layers: list[int]) -> list[Tensor]:
        """Hidden states at the positions that predict response tokens: the last ones, and those after some layers."""
        attention_mask = sequences.attention_mask
        outputs = self.trunk(
            input_ids=sequences.input_ids,
            attention_mask=attention_mask,
            # left padding must not shift positions
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            output_hidden_states=bool(layers),
        )
        read = [outputs.last_hidden_state, *(outputs.hidden_states[layer] for layer in layers)]
        # the state at the prompt's last token predicts the first response token, and holds its value
        return [sequences.pick(x[:, sequences.prompt_ids.shape[1] - 1 : -1]) for x in read]

    def _project(self, hidden: Tensor, sequences: Sequences, temperature: float, **kwargs: Any) -> TokenScores:
        head = self.policy.get_base_model().get_output_embeddings()
        tokens = sequences.pick(sequences.completion_ids)
        with gathered([head.weight, head.bias]) if self.is_sharded else nullcontext():
            return token_logprobs(hidden, head.weight, tokens, temperature, bias=head.bias, **kwargs)

    @torch.no_grad()
    def check_logits(self) -> None:
        """Raise a `ValueError` if the model changes its logits after the output projection, or reads padding.

        It is checked once, and not in a constructor: device and dtype are final at the first rollout.
        """
        if self._is_checked:
            return
        base: PreTrainedModel = self.policy.get_base_model()
        ids = torch.arange(4, device=self.device)[None]
        hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        logits = base(input_ids=ids, use_cache=False).logits
        head = base.get_output_embeddings()
        with gathered([head.weight, head.bias]) if self.is_sharded else nullcontext():
            projected = head(hidden)
        if not torch.equal(projected, logits):
            raise ValueError(
                f"{type(base).__name__} changes its logits after the output projection (a cap or a scale), which "
                "log-probs computed from hidden states would not see; use a model that does not."
            )
        # a padded row differs from the same row without padding by rounding only
        rows = Sequences.from_token_ids([[0], [3, 2, 1, 0]], [[1, 2, 3], [1]], 0, self.device)
        padded, plain = (self._hidden_states(x)[:3].float() for x in (rows, rows.rows(torch.tensor([0]))))
        if (padded - plain).norm() > 0.1 * plain.norm():
            raise ValueError(
                f"{type(base).__name__} does not ignore padding on the left, so its log-probs would depend on the "
                "other rows of a batch; use a model that reads the attention mask."
            )
        self._is_checked = True

    @torch.no_grad()
    def sample(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: GenerationConfig,
        stopping_criteria: list[StoppingCriteria] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Sample from the policy for a rollout, with nothing of the model's own generation config."""
        # transformers would fill unset fields from the model's own generation config, and the policy would be sampled
        # from another distribution than the scored one; whose config it reads depends on the adapter's task type
        models = (self.policy, self.policy.get_base_model())
        configs = [model.generation_config for model in models]
        for model in models:
            model.generation_config = GenerationConfig()
        try:
            return self.policy.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=generation_config,
                stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
                **kwargs,
            )
        finally:
            for model, config in zip(models, configs):
                model.generation_config = config

    # ---- activation checkpointing, called by the Trainer ----

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **kwargs) -> None:
        """Recompute activations in the backward, each layer under the adapter it ran with."""
        settings = self._recompute_kwargs(activation_checkpointing_kwargs)
        self.policy.get_base_model().activation_checkpointing_enable(settings, **kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs) -> None:
        """Same as [`activation_checkpointing_enable`], called by transformers before 5.23."""
        settings = self._recompute_kwargs(gradient_checkpointing_kwargs)
        self.policy.get_base_model().gradient_checkpointing_enable(settings, **kwargs)

    def _recompute_kwargs(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        kwargs = {"use_reentrant": False} | (kwargs or {})
        if self.critic_adapter is None:
            return kwargs
        if kwargs["use_reentrant"]:
            raise ValueError(
                "`use_reentrant` in `gradient_checkpointing_kwargs` must be False with a critic adapter: reentrant "
                "checkpointing would recompute the critic's layers under the policy's adapter."
            )

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            active = self.active_adapter
            # the backward runs under the policy's adapter
            return nullcontext(), nullcontext() if active == self.policy_adapter else self.adapter(active)

        return kwargs | {"context_fn": contexts}
