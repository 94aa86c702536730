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
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..distributed import gathered, is_sharded, whole_weights
from ..sequences import Sequences
from .adapters import adapter_parameters, add_adapter, keeping_trained, load_adapter_weights
from .logprobs import TokenOutputs, TokenStatistics, token_logprobs


class ActorCritic(nn.Module):
    """A PEFT policy with a critic on the same base.

    The critic is a value head on the policy's last hidden state, or on that of an adapter of its own. The head is
    float32 and starts at zero, so the first values are 0. Adapters are switched here and nowhere else.

    Args:
        policy (`PeftModel`): Causal language model with an adapter, as [`load_actor_critic`] makes it.
        reference_adapter (`str`, *optional*):
            Name of the frozen adapter that is the reference. By default the reference is the base alone.
        has_critic (`bool`, *optional*, defaults to `True`): Whether there is a value head.
        critic_adapter (`str`, *optional*):
            Name of the adapter on which the value head sits. By default it sits on the policy's.
        critic_backprop (`bool`, *optional*, defaults to `True`):
            Whether the value loss of a head on the policy's trunk also trains the policy's adapter.

    Raises:
        `ValueError`: If an adapter sits on the output projection, or the model changes its logits after it.
    """

    def __init__(
        self,
        policy: PeftModel,
        reference_adapter: str | None = None,
        has_critic: bool = True,
        critic_adapter: str | None = None,
        critic_backprop: bool = True,
    ):
        super().__init__()
        self.policy = policy
        self.policy_adapter = policy.active_adapter
        self.reference_adapter = reference_adapter
        self.critic_adapter = critic_adapter
        self.critic_backprop = critic_backprop
        base = policy.get_base_model()
        self._check_output_projection(base.get_output_embeddings())
        if not is_sharded(self.embedding):  # then the trainer has it checked, once it can run
            self.check_logits()
        self.value_head: nn.Linear | None = None
        if has_critic:
            hidden_size = policy.config.get_text_config().hidden_size
            self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32, device=self.device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @staticmethod
    def _check_output_projection(head: nn.Module | None) -> None:
        if head is None:
            raise ValueError("The model has no output projection; PPO needs a causal language model.")
        if isinstance(head, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ValueError(
                "The adapter sits on the output projection (`lm_head`), but log-probabilities are computed from the "
                "frozen projection in chunks and would not see it. Take `lm_head` out of `target_modules` and "
                '`modules_to_save` (`target_modules="all-linear"` leaves it out).'
            )

    @torch.no_grad()
    def check_logits(self) -> None:
        """Check that log-probabilities can be computed from hidden states and the output projection alone."""
        base: PreTrainedModel = self.policy.get_base_model()
        ids = torch.arange(4, device=base.get_input_embeddings().weight.device)[None]
        training = base.training
        base.eval()
        hidden = getattr(base, base.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
        logits = base(input_ids=ids, use_cache=False).logits
        base.train(training)
        if not torch.equal(base.get_output_embeddings()(hidden), logits):
            raise ValueError(
                f"{type(base).__name__} changes its logits after the output projection (a cap or a scale), which "
                "log-probabilities computed from hidden states would not see; use a model that does not."
            )

    @property
    def config(self):
        """Config of the base model."""
        return self.policy.config

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the base computes, also a quantised one."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of the base."""
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """The base's weight that is never quantised."""
        return self.policy.get_base_model().get_input_embeddings().weight

    @property
    def trunk(self) -> nn.Module:
        """The base model without its output projection."""
        base = self.policy.get_base_model()
        return getattr(base, base.base_model_prefix)

    def policy_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the policy's adapter.

        Returns:
            `dict[str, nn.Parameter]`: By name.
        """
        return adapter_parameters(self.policy, self.policy_adapter)

    def freeze_policy(self) -> None:
        """From now on only the critic is trained."""
        for parameter in self.policy_parameters().values():
            parameter.requires_grad_(False)

    def critic_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the value head and, if it has one, of its adapter.

        Returns:
            `dict[str, nn.Parameter]`: By name; empty without a critic.
        """
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return head if self.critic_adapter is None else head | adapter_parameters(self.policy, self.critic_adapter)

    def trained_weights(self) -> dict[str, Tensor]:
        """Weights of policy and critic, whole also where they are sharded; all processes must call it."""
        trained = {id(x) for x in (*self.policy_parameters().values(), *self.critic_parameters().values())}
        return whole_weights({name: x for name, x in self.named_parameters() if id(x) in trained})

    def _recomputing(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """Keyword arguments of checkpointing with which each layer is recomputed under the adapter it ran with."""
        kwargs = {"use_reentrant": False} | (kwargs or {})
        if self.critic_adapter is None:
            return kwargs
        if kwargs["use_reentrant"]:
            raise ValueError(
                "Reentrant activation checkpointing would recompute the critic's layers with the policy's adapter; "
                "set `use_reentrant` to False in `gradient_checkpointing_kwargs`."
            )

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            active = self.policy.active_adapter
            # in the backward the policy's adapter is active
            return nullcontext(), nullcontext() if active == self.policy_adapter else self.adapter(active)

        return kwargs | {"context_fn": contexts}

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs
    ) -> None:
        """Recompute activations in the backward; called by the Trainer."""
        self.policy.get_base_model().activation_checkpointing_enable(
            activation_checkpointing_kwargs=self._recomputing(activation_checkpointing_kwargs), **kwargs
        )

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs
    ) -> None:
        """The same, under the name that transformers before 5.23 calls."""
        self.policy.get_base_model().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=self._recomputing(gradient_checkpointing_kwargs), **kwargs
        )

    def _hidden_states(self, sequences: Sequences) -> Tensor:
        """Last hidden states at the positions that predict response tokens, `[batch, response, hidden]`."""
        attention_mask = sequences.attention_mask
        hidden = self.trunk(
            input_ids=sequences.input_ids,
            attention_mask=attention_mask,
            # positions count real tokens: padding on the left must not shift them
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        # the state at the prompt's last token predicts the first response token, and holds its value
        return hidden[:, sequences.prompt_ids.shape[1] - 1 : -1]

    def forward(
        self,
        sequences: Sequences,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_kl: bool = False,
        with_values: bool = True,
    ) -> TokenOutputs:
        """Score the response tokens. Gradients flow through everything that is asked for.

        Args:
            sequences ([`Sequences`]): Prompts and completions.
            temperature (`float`, *optional*, defaults to 1.0): Sampling temperature.
            with_entropy (`bool`, *optional*, defaults to `False`): Whether to compute entropies.
            with_kl (`bool`, *optional*, defaults to `False`): Whether to compute the exact KL from the reference.
            with_values (`bool`, *optional*, defaults to `True`): Whether to compute values, if there is a critic.

        Returns:
            [`TokenOutputs`]: Log-probabilities, values, entropies and KLs.
        """
        ref_hidden = None
        if with_kl:
            with torch.no_grad(), self.reference():
                ref_hidden = sequences.pick(self._hidden_states(sequences))
        hidden = sequences.pick(self._hidden_states(sequences))  # [tokens, hidden]: nothing is projected for padding
        statistics = self.project(
            hidden,
            sequences.pick(sequences.completion_ids),
            temperature,
            with_entropy=with_entropy,
            entropy_needs_grad=with_entropy and torch.is_grad_enabled(),
            ref_hidden=ref_hidden,
            kl_needs_grad=with_kl and torch.is_grad_enabled(),
        )
        values = self._values(hidden, sequences) if with_values else None
        others = (None if x is None else sequences.spread(x) for x in (values, statistics.entropies, statistics.kls))
        return TokenOutputs(sequences.spread(statistics.logprobs), *others)

    def reference_logprobs(self, sequences: Sequences, temperature: float = 1.0) -> Tensor:
        """Log-probabilities of the response tokens under the reference."""
        with self.reference():
            hidden = sequences.pick(self._hidden_states(sequences))
        return sequences.spread(self.project(hidden, sequences.pick(sequences.completion_ids), temperature).logprobs)

    def project(self, hidden: Tensor, tokens: Tensor, temperature: float, **kwargs: Any) -> TokenStatistics:
        """Log-probabilities of tokens from hidden states."""
        head = self.policy.get_base_model().get_output_embeddings()
        with gathered([head.weight, head.bias]):
            return token_logprobs(hidden, head.weight, tokens, temperature, bias=head.bias, **kwargs)

    def values_of(self, hidden: Tensor) -> Tensor:
        """Values from hidden states."""
        if self.value_head is None:
            raise ValueError("There is no critic; `critic='none'` leaves the value head out.")
        with torch.autocast(hidden.device.type, enabled=False):
            # DeepSpeed casts what it trains
            return self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0].float()

    def _values(self, hidden: Tensor, sequences: Sequences) -> Tensor | None:
        """Values at the positions that predict response tokens, `[tokens]`."""
        if self.value_head is None:
            return None
        if self.critic_adapter is not None:
            with self.adapter(self.critic_adapter):
                hidden = sequences.pick(self._hidden_states(sequences))
        elif not self.critic_backprop:
            hidden = hidden.detach()
        return self.values_of(hidden)

    def reference(self) -> AbstractContextManager[None]:
        """Within this context the model is the reference: the base alone, or its frozen adapter."""
        return self.adapter(self.reference_adapter)

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Within this context another adapter is active, or none."""
        with keeping_trained(self.policy):
            if name is None:
                with self.policy.disable_adapter():
                    yield
            else:
                self.policy.set_adapter(name)
                yield

    def read_trunk(self, read: Callable[[nn.Module], Tensor], adapter: str) -> Tensor:
        """What a function reads from the trunk under an adapter."""
        with self.adapter(adapter):
            return read(self.trunk)

    def add_frozen_adapter(self, name: str, config: PeftConfig, weights: dict[str, Tensor]) -> str:
        """Load another adapter onto the base; it is never trained."""
        name = f"frozen_{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{len(self.policy.peft_config)}"
        name = add_adapter(self.policy, name, config)
        load_adapter_weights(self.policy, name, weights)
        return name

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: GenerationConfig,
        stopping_criteria: list[StoppingCriteria] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Sample from the policy.

        Args:
            input_ids (`Tensor` of shape `[batch, prompt]`): Token ids, padded on the left.
            attention_mask (`Tensor` of shape `[batch, prompt]`): 1 at real tokens.
            generation_config ([`~transformers.GenerationConfig`]): How to sample.
            stopping_criteria (`list[StoppingCriteria]`, *optional*): Called after every token.
            kwargs (`dict`): Passed on to `generate` of transformers.

        Returns:
            `Tensor` of shape `[batch, prompt + response]`: The prompts with their completions.
        """
        # what a config leaves open, transformers would fill in from the model's own: sampling would differ from what
        # is scored, and nobody had said so
        models = (self.policy, self.policy.get_base_model())
        of_models = [model.generation_config for model in models]
        for model in models:  # which of them it asks depends on the adapter's `task_type`
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
            for model, own in zip(models, of_models):
                model.generation_config = own
