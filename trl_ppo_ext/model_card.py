"""The README of a saved adapter: how it was trained, and how to load it."""

import json
import os
import re
from enum import Enum
from html import escape
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig

TEMPLATE = """---
{{ card_data }}
---

# {{ model_name }}

A {{ adapter_type }} adapter trained with PPO by trl_ppo_ext
{%- if on_hub %} on [{{ base_name }}](https://huggingface.co/{{ base_link }}){% endif %}.
One frozen base model was policy (this adapter on) and reference ({{ reference }})
{%- if critic %}, and carried the critic ({{ critic }}){% endif %}.

## Use it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({{ base_model }})
model = PeftModel.from_pretrained(base, {{ adapter }})
tokenizer = AutoTokenizer.from_pretrained({{ adapter }})
```

## How it was trained

Rewards: {{ rewards }}.

| hyperparameter | value |
|---|---|
{%- for name, value in hyperparameters.items() %}
| `{{ name }}` | {{ value }} |
{%- endfor %}

{% if metrics %}Metrics at the end of training (step {{ step }}):

| metric | value |
|---|---|
{%- for name, value in metrics.items() %}
| `{{ name }}` | {{ value }} |
{%- endfor %}
{% endif %}
Versions: {{ versions }}.

PPO: [Proximal Policy Optimization Algorithms](https://huggingface.co/papers/1707.06347).
"""

HYPERPARAMETERS = (
    "learning_rate lr_scheduler_type max_steps num_train_epochs per_device_train_batch_size "
    "gradient_accumulation_steps num_mini_batches num_ppo_epochs num_generations max_completion_length temperature "
    "top_p top_k min_p repetition_penalty reward_weights reward_quantization "
    "critic critic_backprop critic_learning_rate value_warmup_steps advantage_estimator gamma lam lam_critic "
    "lam_length_alpha kl_coef kl_estimator kl_placement kl_target target_kl cliprange cliprange_high dual_clip "
    "importance_sampling_level loss_aggregation cliprange_value vf_coef entropy_coef entropy_target ptx_coef "
    "ema_decay whiten_rewards whiten_advantages "
    "reward_clip_range missing_eos_penalty mask_truncated_completions max_grad_norm adam_epsilon bf16 seed"
).split()
ADAPTER = ("r", "lora_alpha", "target_modules")
METRICS = (
    "reward reward_std objective kl kl_per_completion entropy completions/mean_length completions/clipped_ratio "
    "value/explained_variance"
).split()
CRITICS = {
    "head": "`value_head.safetensors`, on this adapter's hidden states",
    "adapter": "`value_head.safetensors`, on the adapter in `critic/`",
    "none": None,
}
PACKAGES = ("trl_ppo_ext", "trl", "transformers", "peft", "accelerate", "torch")


def _value(value: Any) -> Any:
    """A hyperparameter as it stands in the table."""
    if isinstance(value, set | list | tuple):
        value = ", ".join(sorted(map(str, value)) if isinstance(value, set) else map(str, value))
    return _text(value) if isinstance(value, str) and not isinstance(value, Enum) else value


def _one_line(text: str) -> str:
    """Keep a name in a code span from breaking out of it, of the table or of the list it stands in."""
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(printable.replace("|", "\\|").replace("`", "'").split())


def _text(text: str) -> str:
    """The same outside of a code span, where HTML and Markdown would be obeyed."""
    return re.sub(r"([\[\]()*_#!~])", r"\\\1", escape(_one_line(text), quote=False))


def _code(text: str) -> str:
    """A string in the example's Python code."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def model_card(
    args: Any,
    base_model: str | None,
    adapter: str,
    rewards: list[str],
    log_history: list[dict[str, float]],
    step: int,
    peft_config: PeftConfig,
    started_from_adapter: bool = False,
    **metadata: Any,
) -> ModelCard:
    """Write the card of a trained adapter.

    Args:
        args ([`PPOConfig`]): The run's config.
        base_model (`str`, *optional*): Id or path of the base model.
        adapter (`str`): Id or path under which the adapter can be loaded.
        rewards (`list[str]`): Names of the rewards.
        log_history (`list[dict]`): What the Trainer logged.
        step (`int`): Optimizer steps done.
        peft_config (`PeftConfig`): Config of the adapter.
        started_from_adapter (`bool`, *optional*, defaults to `False`):
            Whether the policy started from a trained adapter, a copy of which is the reference.
        metadata (`dict`): Further fields of the card's metadata.

    Returns:
        `ModelCard`: The card.
    """
    logged: dict[str, float] = {}
    for entry in log_history:
        logged |= entry
    names = [f"rewards/{name}/mean" for name in rewards]
    tags = ["trl_ppo_ext", "ppo", "trl", "rlhf", "lora", *(metadata.pop("tags", None) or [])]
    on_hub = base_model is not None and not os.path.isdir(base_model)  # a path means nothing to the Hub
    card_data = ModelCardData(
        base_model=base_model if on_hub else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
        **{key: value for key, value in metadata.items() if value is not None},
    )
    return ModelCard.from_template(
        card_data,
        template_str=TEMPLATE,
        model_name=_text(metadata.get("model_name") or adapter.rstrip("/").split("/")[-1]),
        base_model=_code(base_model or "path/to/the/base/model"),
        base_name=_text(base_model or ""),
        base_link=quote(base_model or ""),
        on_hub=on_hub,
        adapter=_code(adapter),
        rewards=", ".join(f"`{_one_line(name)}`" for name in rewards),
        adapter_type=str(getattr(peft_config.peft_type, "value", peft_config.peft_type)),
        reference="a frozen copy of the adapter it started from" if started_from_adapter else "adapter off",
        critic=CRITICS[args.critic],
        hyperparameters={name: _value(getattr(args, name)) for name in HYPERPARAMETERS}
        | {name: _value(getattr(peft_config, name)) for name in ADAPTER if hasattr(peft_config, name)},
        metrics={_one_line(name): f"{logged[name]:.4g}" for name in METRICS + names if name in logged},
        step=step,
        versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
    )
