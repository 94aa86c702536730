"""The README of a saved adapter: how it was trained, and how to load it."""

import json
import math
import os
import re
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..arguments import as_list
from ..tracking.run_log import package_versions
from .files import run_settings

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
METRICS = (
    "reward reward_std objective kl kl_per_completion entropy completions/mean_length completions/clipped_ratio "
    "value/explained_variance"
).split()
BASE_COPY = "path/to/your/copy/of/the/base"
PACKAGES = ("trl", "transformers", "peft", "accelerate", "torch")


def _one_line(text: Any) -> str:
    """A name for a code span: it ends neither the span nor its table cell."""
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(printable.replace("|", "\\|").replace("`", "'").split())


def _text(text: Any) -> str:
    """A name for prose, in which it acts neither as Markdown nor as HTML."""
    return re.sub(r"([\[\]()*_#!~])", r"\\\1", escape(_one_line(text), quote=False))


def is_hub_id(name: str) -> bool:
    """Return `True` if a name is an id on the Hub, and not the path of a directory."""
    with suppress(HFValidationError):
        validate_repo_id(name)
        return not os.path.exists(name)
    return False


def model_card(trainer: Any, output_dir: str, **metadata: Any) -> ModelCard:
    """Build the card of a run, as saved in a directory; it contains no path of this machine."""
    actor_critic, evaluated = trainer.actor_critic, trainer.eval_dataset
    policy, config, rewards = actor_critic.policy, actor_critic.config, trainer.reward_func_names
    settings, peft_config = run_settings(trainer.args), policy.peft_config[actor_critic.policy_adapter]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    base_model = metadata.pop("finetuned_from", config._name_or_path) or ""
    adapter = trainer.hub_model_id or os.path.abspath(output_dir)
    on_hub, adapter_on_hub = is_hub_id(base_model), is_hub_id(adapter)
    shown = adapter if adapter_on_hub else os.path.basename(os.path.normpath(adapter))
    model_name = metadata.pop("model_name", shown.split("/")[-1])
    text, kind = config.get_text_config(), type(policy.get_base_model()).__name__
    sizes = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, vocabulary {text.vocab_size}"

    # 1. datasets, under any name that the Trainer and TRL use
    fields = ("datasets", "dataset", "dataset_name", "dataset_tags")
    names = [name for field in fields for name in as_list(metadata.pop(field, None))]
    datasets = [name for name in dict.fromkeys(names) if is_hub_id(name)]

    # 2. the metrics as they were logged last, in a table and in the Hub's `model-index`, which has no place for NaN.
    # Their split is their role, since the index merges results of one split.
    named = evaluated if isinstance(evaluated, dict) else {}
    splits = {"": "train"} | ({f"eval_{name}_": name for name in named} or {"eval_": "eval"})
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    names = [*METRICS, *(f"rewards/{name}/mean" for name in rewards)]
    metrics = [(prefix, name) for prefix in splits for name in names if prefix + name in logged]
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=(datasets or ["unknown"])[0],
            dataset_name=f"{', '.join(datasets) or 'prompts'} ({splits[prefix]})",
            dataset_split=splits[prefix],
            metric_type=name,
            metric_name=name,
            metric_value=float(logged[prefix + name]),
        )
        for prefix, name in metrics
        if math.isfinite(logged[prefix + name])
    ]

    # 3. the card
    table = settings | {name: getattr(peft_config, name, None) for name in ("r", "lora_alpha", "target_modules")}
    if isinstance(table["target_modules"], set):  # a set has no order
        table["target_modules"] = sorted(table["target_modules"])
    card_data = ModelCardData(
        base_model=base_model if on_hub else None,
        datasets=datasets or None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["trl_ppo_ext", "ppo", "trl", "rlhf", "lora", *as_list(metadata.pop("tags", None))])),
        model_name=model_name if results else None,
        eval_results=results or None,
        **metadata,
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=_text(model_name),
        base_model=json.dumps(base_model if on_hub else BASE_COPY),  # a Python string
        base_name=_text(base_model),
        base_link=quote(base_model),
        on_hub=on_hub,
        architecture=_text(f"{kind}, {sizes}"),
        adapter=json.dumps(shown, ensure_ascii=not shown.isprintable()),
        adapter_on_hub=adapter_on_hub,
        rewards=", ".join(f"`{_one_line(name)}`" for name in rewards),
        adapter_type=str(getattr(peft_config.peft_type, "value", peft_config.peft_type)),
        reference="a frozen copy of the adapter it started from" if actor_critic.reference_adapter else "adapter off",
        critic=settings["critic"],
        normalized=settings["normalize_values"],
        settings={name: _text(value) for name, value in table.items() if value is not None},
        metrics={_one_line(prefix + name): f"{logged[prefix + name]:.4g}" for prefix, name in metrics},
        step=trainer.state.global_step,
        versions=", ".join(f"{name} {number}" for name, number in package_versions(PACKAGES).items()),
    )
