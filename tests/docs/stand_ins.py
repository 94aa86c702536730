"""What documented code runs on here: tiny models under the names of those on the Hub, rows of the
right schema.

A directory wins over the Hub, so it is enough that a model's id is a path in the working directory.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from trl_ppo_ext import PPOConfig, PPOTrainer

POLICIES = [
    "Qwen/Qwen2-0.5B-Instruct",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3.5-4B",
    "my-sft-model",
]
CLASSIFIERS = ["Skywork/Skywork-Reward-V2-Qwen3-0.6B", "my-reward-model", "reward-model-2"]
ADAPTERS = ["my-adapter", "round-1"]
REWARD_ADAPTERS = ["my-reward-adapter", "path-or-id", "path-or-id-of-the-reward-adapter"]
WORDS = tiny.WORDS


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _rows(**columns: Any) -> Dataset:
    return Dataset.from_list(
        [{name: make(row) for name, make in columns.items()} for row in range(16)]
    )


# id -> columns, each a function of the row
DATASETS = {
    "trl-lib/ultrafeedback-prompt": {"prompt": lambda row: _messages(f"w{row} w1")},
    "trl-lib/DeepMath-103K": {
        "prompt": lambda row: _messages(f"w{row} w2"),
        "solution": lambda row: f"${row}$",
    },
    "trl-lib/tldr": {"prompt": lambda row: f"w{row} w3 w4", "completion": lambda row: "w5 w6"},
    "openai/gsm8k": {"question": lambda row: f"w{row} w7", "answer": lambda row: f"w8 #### {row}"},
    "mlabonne/smoltldr": {"prompt": lambda row: f"w{row} w3 w4", "completion": lambda row: "w5 w6"},
    "AI-MO/NuminaMath-TIR": {
        "problem": lambda row: f"w{row} w5",
        "solution": lambda row: f"${row}$",
        "messages": lambda row: _messages(f"w{row} w5"),
    },
    "csv": {"question": lambda row: f"w{row} w6"},  # a file of the reader's
    "stanfordnlp/imdb": {"text": lambda row: f"w{row} w9 w10 w11", "label": lambda row: row % 2},
}


def load_dataset(
    path: str, name: str | None = None, split: str | list | None = None, **kwargs: Any
) -> Any:
    """`datasets.load_dataset` without the Hub."""
    if path not in DATASETS:
        raise KeyError(
            f"The documentation loads the dataset {path!r}: add its schema to DATASETS of "
            f"{__file__}."
        )
    rows = _rows(**DATASETS[path])
    if isinstance(split, list):
        return [rows] * len(split)
    return rows if split is not None else datasets.DatasetDict(train=rows, test=rows)


def build(folder: Path) -> None:
    """Write the models, each kind once."""
    tokenizer = tiny.tokenizer(chat_template=tiny.CHAT_TEMPLATE)
    for kind, classifier in (("policy", False), ("classifier", True)):
        # with fewer, nothing is left to quantise
        model = tiny.llama(classifier=classifier, hidden_size=64)
        # chat prompts are longer than those of other tests
        model.config.max_position_embeddings = 512
        if classifier:
            model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
        if classifier:
            task = "SEQ_CLS"
        else:
            task = "CAUSAL_LM"
        adapter = get_peft_model(
            model, LoraConfig(task_type=task, target_modules="all-linear", r=2)
        )
        adapter.peft_config["default"].base_model_name_or_path = POLICIES[0]
        adapter.save_pretrained(folder / f"{kind}_adapter")
        tokenizer.save_pretrained(folder / f"{kind}_adapter")


def place(folder: Path, directory: Path) -> None:
    """Put the models where a working directory has them under the documented names."""
    kinds = {
        "policy": POLICIES,
        "classifier": CLASSIFIERS,
        "policy_adapter": ADAPTERS,
        "classifier_adapter": REWARD_ADAPTERS,
    }
    for kind, ids in kinds.items():
        for model_id in ids:
            (directory / model_id).parent.mkdir(parents=True, exist_ok=True)
            (directory / model_id).symlink_to(folder / kind, target_is_directory=True)


def _smaller(kwargs: dict[str, Any], num_generations: int) -> dict[str, Any]:
    """Settings of a run of two optimizer steps, all that has no size left as it is."""
    micro_batch = min(kwargs.get("per_device_train_batch_size", 2), 2)
    generations = kwargs.get("num_generations", num_generations)
    sizes = {
        "per_device_train_batch_size": micro_batch,
        "generation_batch_size": math.lcm(
            micro_batch * kwargs.get("num_mini_batches", 1), generations
        ),
        "max_completion_length": min(kwargs.get("max_completion_length", 8), 8),
        "max_steps": 2,
    }
    left_out = ("gradient_accumulation_steps", "per_device_generation_batch_size")
    return {name: value for name, value in kwargs.items() if name not in left_out} | sizes


ON_A_CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}


def shrink(
    monkeypatch: pytest.MonkeyPatch, config_class: type, num_generations: int, sizes: bool
) -> None:
    """Let every config be made for a CPU and, if `sizes`, for a run of seconds."""
    made = config_class.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if sizes:
            kwargs = _smaller(kwargs, num_generations)
        made(self, *args, **kwargs | ON_A_CPU)

    monkeypatch.setattr(config_class, "__init__", make)


def install(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """Put the stand-ins in place."""
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    shrink(monkeypatch, PPOConfig, num_generations=1, sizes=trains)
    shrink(monkeypatch, trl.GRPOConfig, num_generations=8, sizes=trains)


# ---- names that a page may use without saying where they come from ----


def _prompts() -> Dataset:
    return load_dataset("trl-lib/tldr", split="train")


def _brevity(completions: list, **kwargs: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def _trainer() -> PPOTrainer:
    """A run that was interrupted after the first of its two steps."""
    args = partial(PPOConfig, "interrupted", save_steps=1, logging_steps=1, max_steps=2)
    args = args(max_completion_length=8, per_device_train_batch_size=2)
    built = PPOTrainer(
        POLICIES[0], _brevity, args, _prompts(), eval_dataset=_prompts().select(range(2))
    )
    built.train()
    (Path("interrupted") / "checkpoint-2").rename("interrupted/later")
    return built


NAMES = {
    "trainer": _trainer,
    "dataset": _prompts,
    "train_dataset": _prompts,
    "base_id": lambda: POLICIES[0],
    "brevity": lambda: _brevity,
    "your_reward": lambda: _brevity,
}
