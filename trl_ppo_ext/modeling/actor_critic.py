"""One frozen base in every role: policy (adapter on), reference (adapter off), critic (value head on the trunk)."""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import NamedTuple

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..rollout import Sequences
from .logprobs import token_logprobs

REFERENCE_ADAPTER = "reference"


def check_fit(needed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Check that tensors read from a file are those that a model has.

    Args:
        needed (`Mapping[str, Tensor]`): Tensors of the model, by name.
        given (`Mapping[str, Tensor]`): Tensors of the file, by name.

    Raises:
        `ValueError`: Names the first tensor that is missing, has another shape, or is not the model's.
    """
    for key, tensor in needed.items():
        if key not in given or given[key].shape != tensor.shape:
            shape = tuple(given[key].shape) if key in given else "missing"
            raise ValueError(f"`{key}` is {shape}, the model has {tuple(tensor.shape)}.")
    for key in given.keys() - needed.keys():
        raise ValueError(f"the model has no `{key}`.")


class TokenOutputs(NamedTuple):
    """What [`ActorCritic`] says about each response token: `[batch, response]` in float32, 0 at padding.

    Args:
        logprobs (`Tensor`): Log-probability of the token at the sampling temperature.
        values (`Tensor`): Value of the state in which the token was sampled.
        entropies (`Tensor`, *optional*): Entropy of the distribution it was sampled from, in nats, if asked for.
    """

    logprobs: Tensor
    values: Tensor
    entropies: Tensor | None


class ActorCritic(nn.Module):
    """A PEFT policy with a value head on its last hidden state.

    The value head is float32 and starts at zero, so the first values are 0. Adapters are switched here and nowhere
    else: PEFT freezes whatever adapter is not active, so every switch restores what is trained.

    Args:
        policy (`PeftModel`): Causal language model with an adapter, as [`load_actor_critic`] makes it.
        reference_adapter (`str`, *optional*):
            Name of the frozen adapter that is the reference. By default the reference is the base alone.

    Raises:
        `ValueError`: If an adapter sits on the output projection, or the model changes its logits after it.
    """

    def __init__(self, policy: PeftModel, reference_adapter: str | None = None):
        super().__init__()
        self.policy = policy
        self.policy_adapter = policy.active_adapter
        self.reference_adapter = reference_adapter
        base = policy.get_base_model()
        self._check_output_projection(base.get_output_embeddings())
        self._check_logits(base)
        device = base.get_input_embeddings().weight.device
        hidden_size = policy.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32, device=device)
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

    @staticmethod
    @torch.no_grad()
    def _check_logits(base: PreTrainedModel) -> None:
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
        return self.policy.get_base_model().get_input_embeddings().weight.dtype

    @property
    def trunk(self) -> nn.Module:
        """The base model without its output projection."""
        base = self.policy.get_base_model()
        return getattr(base, base.base_model_prefix)

    def activation_checkpointing_enable(self, **kwargs) -> None:
        """Recompute activations in the backward; called by the Trainer.

        Args:
            kwargs (`dict`): Passed on to the base model.
        """
        self.policy.get_base_model().activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs) -> None:
        """The same, under the name that transformers before 5.23 calls.

        Args:
            kwargs (`dict`): Passed on to the base model.
        """
        self.policy.get_base_model().gradient_checkpointing_enable(**kwargs)

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
        entropy_needs_grad: bool = False,
    ) -> TokenOutputs:
        """Score the response tokens.

        Args:
            sequences ([`Sequences`]): Prompts and completions.
            temperature (`float`, *optional*, defaults to 1.0): Sampling temperature.
            with_entropy (`bool`, *optional*, defaults to `False`): Whether to compute entropies.
            entropy_needs_grad (`bool`, *optional*, defaults to `False`): Whether gradients flow through them.

        Returns:
            [`TokenOutputs`]: Log-probabilities, values and entropies.
        """
        mask = sequences.completion_mask
        hidden = self._hidden_states(sequences)[mask]  # [tokens, hidden]: nothing is projected for padding
        head = self.policy.get_base_model().get_output_embeddings()
        logprobs, entropies = token_logprobs(
            hidden,
            head.weight,
            sequences.completion_ids[mask],
            temperature,
            bias=head.bias,
            with_entropy=with_entropy,
            entropy_needs_grad=entropy_needs_grad,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.value_head(hidden.float())[:, 0]

        def spread(per_token: Tensor) -> Tensor:
            return per_token.new_zeros(mask.shape).masked_scatter(mask, per_token)

        return TokenOutputs(spread(logprobs), spread(values), None if entropies is None else spread(entropies))

    def reference(self) -> AbstractContextManager[None]:
        """Within this context the model is the reference: the base alone, or its frozen adapter."""
        return self.adapter(self.reference_adapter)

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Within this context another adapter is active, or none.

        Args:
            name (`str`, *optional*): Name of the adapter; `None` is the base alone.
        """
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        try:
            if name is None:
                with self.policy.disable_adapter():
                    yield
            else:
                self.policy.set_adapter(name)
                yield
        finally:
            if name is not None:
                self.policy.set_adapter(self.policy_adapter)
            self.policy.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)

    def add_frozen_adapter(self, name: str, config: PeftConfig, weights: dict[str, Tensor]) -> str:
        """Load another adapter onto the base; it is never trained.

        Args:
            name (`str`): What it may be called.
            config (`PeftConfig`): Its config.
            weights (`dict[str, Tensor]`): Its weights, as PEFT saves them, without heads.

        Returns:
            `str`: What it is called.

        Raises:
            `ValueError`: If its weights do not fit the base.
        """
        name = f"frozen_{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{len(self.policy.peft_config)}"
        config = copy(config)
        config.modules_to_save, config.task_type, config.inference_mode = None, "CAUSAL_LM", True
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.policy.add_adapter(name, config)
        needed = get_peft_model_state_dict(self.policy, adapter_name=name, save_embedding_layers=False)
        check_fit(needed=needed, given=weights)
        set_peft_model_state_dict(self.policy, weights, adapter_name=name)
        self.policy.set_adapter(self.policy_adapter)
        self.policy.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
        return name

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: GenerationConfig,
        stopping_criteria: list[StoppingCriteria] | None = None,
    ) -> Tensor:
        """Sample from the policy.

        Args:
            input_ids (`Tensor` of shape `[batch, prompt]`): Token ids, padded on the left.
            attention_mask (`Tensor` of shape `[batch, prompt]`): 1 at real tokens.
            generation_config ([`~transformers.GenerationConfig`]): How to sample.
            stopping_criteria (`list[StoppingCriteria]`, *optional*): Called after every token.

        Returns:
            `Tensor` of shape `[batch, prompt + response]`: The prompts with their completions.
        """
        # what a config leaves open, transformers would fill in from the model's own: sampling would differ from what
        # is scored, and nobody had said so
        models = (self.policy, self.policy.get_base_model())
        of_models = [model.generation_config for model in models]
        self.policy.generation_config = GenerationConfig()
        try:
            return self.policy.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=generation_config,
                stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
            )
        finally:
            for model, own in zip(models, of_models):
                model.generation_config = own
