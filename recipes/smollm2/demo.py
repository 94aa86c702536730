"""A pretrained chat model learns to write positive reviews, from a frozen 4-bit reward model;
another rule judges.

    make demo

SmolLM2-135M-Instruct comes from the package index. A reward model is fitted on the same base and
loaded in NF4. PPO trains an adapter against it. TextBlob, which nothing has optimized, judges
reviews of things that were not trained.
"""

import logging
import os
import time
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the Hub

# on import it warns of kernels that no GPU here could use
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import torch
from card import METADATA, draw, write_card
from datasets import Dataset
from peft import LoraConfig, PeftModel
from reviews import THINGS, THINGS_HELD_OUT, distinct, openings, textblob
from reward_model import LENGTH, sample, train_reward_model
from smollm2 import base_model, faster_dtype
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging as transformers_logging

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.commands.main import main as trl_ppo

OUTPUT = Path("runs/reviews")
DTYPE = faster_dtype()  # of the base; what is trained is in float32
TALK = f"trl-ppo chat {OUTPUT / 'ppo'} --plain --temperature 0.7"
SETTINGS = {
    "learning_rate": 5e-4,
    "max_steps": 32,
    "generation_batch_size": 64,
    "per_device_train_batch_size": 16,
    "max_completion_length": LENGTH,
    "kl_coef": 0.07,  # a reward model can be hacked
    "bf16": DTYPE is torch.bfloat16,
    "model_init_kwargs": {"dtype": DTYPE},
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 4,
    "save_strategy": "no",
}


def main() -> None:
    """Run all stages."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    print("Four to nine minutes on two cores, after the installation; PPO shows its time left.")
    with timed("SmolLM2-135M-Instruct, from the package index"):
        base = base_model()
    with timed(
        "Reward model: six layers of the base, taught VADER's opinion of the base's own reviews"
    ):
        correlation = train_reward_model(base, OUTPUT / "reward_model", DTYPE)
        print(f"correlation with VADER on things that were not trained: {correlation:.2f}")
    with timed("PPO: policy, reference and critic on one base, the reward model in 4 bits"):
        align(base)
    with timed("Verdict: TextBlob, on things that were not trained, at temperature 0.7"):
        rows, pairs = give_verdict(base)
    trl_ppo(["report", str(OUTPUT / "ppo")])
    print(f"{write_card(OUTPUT / 'ppo', rows, pairs)}: a card to publish")
    print(f"{TALK}, to talk to both")


def align(base: str) -> None:
    """Train the adapter."""
    trainer = PPOTrainer(
        model=base,
        reward_funcs=str(OUTPUT / "reward_model"),
        args=PPOConfig(str(OUTPUT / "ppo"), resume_from_checkpoint="false", **SETTINGS),
        train_dataset=Dataset.from_dict({"prompt": openings(THINGS)}),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        monitor_funcs=textblob,  # logged, never optimized
    )
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(**METADATA)
    steps = trainer.plan.optimizer_steps
    per_step = SETTINGS["generation_batch_size"] / steps
    draw(trainer.state.log_history, per_step, OUTPUT / "ppo")


def give_verdict(base: str) -> tuple[dict[str, tuple[str, str]], list[tuple[str, str, str]]]:
    """Compare reviews of the base and of the adapter, which is an ordinary one.

    Returns the measurements of both by name, and two prompts with both reviews.
    """
    prompts = openings(THINGS_HELD_OUT) * 4
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPE)
    texts = {}
    for name, adapter in (("before", None), ("after", OUTPUT / "ppo")):
        if adapter:
            model = PeftModel.from_pretrained(model, adapter)
        set_seed(1)
        texts[name] = sample(model, tokenizer, prompts, temperature=0.7)
    measured = []
    for name, completions in texts.items():
        polarity = textblob(completions)
        positive = f"{sum(x > 0 for x in polarity) / len(polarity):.0%}"
        mean = f"{sum(polarity) / len(polarity):.2f}"
        words = f"{distinct(completions):.0%}"
        print(f"{name:7} {positive:>4} positive, polarity {mean:>5}, {words} distinct words")
        measured.append((positive, mean, words))
    for number in range(0, 40, 4):
        print(f"\n{prompts[number]} ...")
        for name, completions in texts.items():
            print(f"  {name:7} {' '.join(completions[number].split())}")
    names = "positive for TextBlob", "its polarity, from -1 to 1", "distinct among all words"
    pairs = [(prompts[n], texts["before"][n], texts["after"][n]) for n in (0, 4)]
    return dict(zip(names, zip(*measured))), pairs


@contextmanager
def timed(title: str):
    """Print a title and the elapsed time."""
    print(f"\n== {title}", flush=True)
    start = time.monotonic()
    yield
    print(f"== done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
