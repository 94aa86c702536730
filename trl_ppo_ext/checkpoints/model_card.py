"""The README of a saved adapter: how it was trained, and how to load it."""

import json
import math
import os
import re
from enum import Enum
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig

TEMPLATE = """---
{{ card_data }}
---

# {{ model_name }}

A {{ adapter_type }} adapter trained with PPO by trl_ppo_ext on
{%- if on_hub %} [{{ base_name }}](https://huggingface.co/{{ base_link }})
{%- else %} a base model that is not on the Hub{% if architecture %} ({{ architecture }}){% endif %}{% endif %}.
One frozen base model was policy (this adapter on) and reference ({{ reference }})
{%- if critic %}, and carried the critic ({{ critic }}){% endif %}.

## Use it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {{ base_model }}{% if not on_hub %}  # put in where your copy of the base is{% endif %}
adapter = {{ adapter }}{% if not adapter_on_hub %}  # put in where this folder is{% endif %}
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
tokenizer = AutoTokenizer.from_pretrained(adapter)
```
{% if critic %}
What the critic expects of a text, after each of its tokens:

```python
import torch
from safetensors.torch import load_file
from transformers.utils import cached_file

{% if critic_folder -%}
model.load_adapter(adapter, "critic", subfolder="{{ critic_folder }}")
model.set_adapter("critic")
{% endif -%}
head = load_file(cached_file(adapter, "value_head.safetensors"))
ids = tokenizer("A prompt, and what was written so far", return_tensors="pt").input_ids
with torch.no_grad():
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
values = torch.nn.functional.linear(hidden.float(), head["weight"], head["bias"])[..., 0]
{%- if critic_folder %}
model.set_adapter("default")  # the policy again
{%- endif %}
```
{% endif %}
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
BASE_COPY = "path/to/your/copy/of/the/base"
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


class Measured(NamedTuple):
    """Prompts on which metrics were measured."""

    prefix: str  # what the names of their metrics begin with
    split: str  # name of the split
    ids: list[str]  # ids of the datasets on the Hub, as far as they are known


def is_hub_id(name: str | None) -> bool:
    """Whether a model's name means the same everywhere: the path of a directory means nothing to others."""
    if not name or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_datasets(dataset: Any) -> list[str]:
    """Ids of the datasets on the Hub that `load_dataset` made a dataset of."""
    downloaded = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    found = (re.match(r"hf://datasets/([^@]+?/[^@/]+)@", str(address)) for address in downloaded)
    return sorted({match[1] for match in found if match})


def provenance(trainer: Any) -> dict[str, Any]:
    """What a card says of the base and of the data, as far as the trainer knows it."""
    config = trainer.actor_critic.config
    names = getattr(config, "architectures", None) or [type(trainer.actor_critic.policy.get_base_model()).__name__]
    text = config.get_text_config()
    sizes = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, vocabulary {text.vocab_size}"
    measured: list[Measured] = []
    evaluated = trainer.eval_dataset
    named = evaluated.items() if isinstance(evaluated, dict) else [(None, evaluated)]
    sets = [("", "train", trainer.train_dataset)]
    sets += [("eval_" if key is None else f"eval_{key}_", key or "eval", given) for key, given in named]
    for prefix, split, dataset in sets:
        if dataset is not None:
            of_dataset = str(getattr(dataset, "split", None) or split)
            taken = {entry.split for entry in measured}  # results of one split are one entry of the index
            name = f"{of_dataset} ({split})" if of_dataset in taken else of_dataset
            measured.append(Measured(prefix, name, hub_datasets(dataset)))
    return {"architecture": f"{names[0]}, {sizes}", "measured": measured}


def _results(logged: dict[str, float], names: list[str], measured: list[Measured], ids: list[str]) -> list[EvalResult]:
    """The metrics in the form of the Hub's `model-index`; what is no number has no place there."""
    results = []
    for prefix, split, own in measured:
        dataset = ", ".join(own or ids)
        for name in names:
            value = logged.get(prefix + name)
            if value is None or not math.isfinite(value):
                continue
            result = EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=(own or ids or ["unknown"])[0],
                dataset_name=f"{dataset or 'prompts'} ({split})",
                dataset_split=split,
                metric_type=name,
                metric_name=name,
                metric_value=float(value),
            )
            results.append(result)
    return results


def _as_list(given: Any) -> list:
    return [given] if isinstance(given, str) else list(given or [])


def _datasets(metadata: dict[str, Any], measured: list[Measured]) -> list[str]:
    """Ids of datasets, under whatever name the Trainer and TRL give them, else those that the datasets know."""
    given = [_as_list(metadata.pop(name, None)) for name in ("datasets", "dataset", "dataset_name", "dataset_tags")]
    known = [name for names in given for name in names] or [name for entry in measured for name in entry.ids]
    return [name for name in dict.fromkeys(known) if is_hub_id(name)]


def _card_data(
    metadata: dict[str, Any], base_model: str | None, datasets: list[str], model_name: str, results: list[EvalResult]
) -> ModelCardData:
    given = {key: value for key, value in metadata.items() if value is not None}
    tags = ["trl_ppo_ext", "ppo", "trl", "rlhf", "lora", *_as_list(given.pop("tags", None))]
    return ModelCardData(
        base_model=base_model if is_hub_id(base_model) else None,
        datasets=datasets or None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
        model_name=model_name if results else None,
        eval_results=results or None,
        **{key: value for key, value in given.items() if key != "model_name"},
    )


def model_card(
    args: Any,
    base_model: str | None,
    adapter: str,
    rewards: list[str],
    log_history: list[dict[str, float]],
    step: int,
    peft_config: PeftConfig,
    started_from_adapter: bool = False,
    architecture: str | None = None,
    measured: list[Measured] | None = None,
    **metadata: Any,
) -> ModelCard:
    """Write the card of a trained adapter. No path of this machine stands in it."""
    logged: dict[str, float] = {}
    for entry in log_history:
        logged |= entry
    measured = [Measured("", "train", [])] if measured is None else measured
    base_model = metadata.pop("finetuned_from", None) or base_model
    on_hub, adapter_on_hub = is_hub_id(base_model), is_hub_id(adapter) and not os.path.isabs(adapter)
    shown = adapter if adapter_on_hub else os.path.basename(os.path.normpath(adapter))
    model_name = metadata.get("model_name") or shown.split("/")[-1]
    datasets = _datasets(metadata, measured)
    names = [*METRICS, *(f"rewards/{name}/mean" for name in rewards)]
    results = _results(logged, names, measured, datasets)
    in_table = [prefix + name for prefix, *_ in measured for name in names]
    return ModelCard.from_template(
        _card_data(metadata, base_model, datasets, model_name, results),
        template_str=TEMPLATE,
        model_name=_text(model_name),
        base_model=_code(str(base_model) if on_hub else BASE_COPY),
        base_name=_text(base_model or ""),
        base_link=quote(base_model or ""),
        on_hub=on_hub,
        architecture=_text(architecture or ""),
        adapter=_code(shown),
        adapter_on_hub=adapter_on_hub,
        rewards=", ".join(f"`{_one_line(name)}`" for name in rewards),
        adapter_type=str(getattr(peft_config.peft_type, "value", peft_config.peft_type)),
        reference="a frozen copy of the adapter it started from" if started_from_adapter else "adapter off",
        critic=CRITICS[args.critic],
        critic_folder="critic" if args.critic == "adapter" else None,
        hyperparameters={name: _value(getattr(args, name)) for name in HYPERPARAMETERS}
        | {name: _value(getattr(peft_config, name)) for name in ADAPTER if hasattr(peft_config, name)},
        metrics={_one_line(name): f"{logged[name]:.4g}" for name in in_table if name in logged},
        step=step,
        versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
    )
