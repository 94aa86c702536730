"""Tiny offline twins of the templates with tools and environments: a model with random weights
learns each on a CPU.

python recipes/offline.py calculator     # or wordle, search

Tools and environments are those of the template. A turn is one token: the vocabulary has one for each
call, guess and answer of the task, so that random weights use tools, too.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

from trl_ppo_ext import PPOConfig, PPOTrainer

# like Qwen's, without its preamble
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% for c in m.tool_calls or [] "
    "%}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{{ m.content }} "
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
# how a turn is read: the calls of a JSON object each, and text
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|> assistant",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]


class Twin(NamedTuple):
    """A task that fits a tiny model."""

    rows: list[dict]
    words: list[str]  # that it reads
    turns: list[str]  # that it writes, each as one token
    arguments: dict[str, Any]  # of the trainer
    completions: int = 64  # of a rollout


def call(name: str, **arguments: Any) -> str:
    """Write a tool call as Qwen does."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calculator(task: Any) -> Twin:
    """Four products."""
    products = {f"{a} * {b}": str(a * b) for a, b in [(12, 7), (13, 8), (17, 6), (19, 4)]}
    rows = [
        {"question": question, "answer": f"#### {product}"}
        for question, product in products.items()
    ]
    calls = [call("calculate", expression=question) for question in products]
    arguments = {"tools": [task.calculate], "reward_funcs": task.correct}
    return Twin(rows, list(products.values()), calls + [row["answer"] for row in rows], arguments)


def wordle(task: Any) -> Twin:
    """Eight secrets."""
    words = ["cigar", "rebut", "sissy", "humph", "awake", "blush", "focal", "evade"]
    guesses = [f"<guess>{word}</guess>" for word in words]
    return Twin(
        [{"secret": word} for word in words],
        [*"".join(words), *"GY-"],
        guesses,
        {"environment_factory": task.Wordle},
    )


def search(task: Any) -> Twin:
    """Four questions and the passages with their answers."""
    capitals = {"Chad": "N'Djamena", "Peru": "Lima", "Fiji": "Suva", "Laos": "Vientiane"}
    index = task.BM25(
        [f"{city} is the capital of {country} ." for country, city in capitals.items()]
    )
    task.index = lambda: index
    rows = [
        {"question": f"The capital of {name} ?", "answers": {"text": [city]}}
        for name, city in capitals.items()
    ]
    calls = [call("search", query=name) for name in capitals] + [
        call("answer", text=x) for x in capitals.values()
    ]
    # of 64 completions, some seeds learn two answers only
    return Twin(rows, index.passages, calls, {"environment_factory": task.Search}, completions=128)


TWINS = {"calculator": calculator, "wordle": wordle, "search": search}


def build(name: str, output_dir: str, **settings: Any) -> PPOTrainer:
    """Build the trainer of a twin."""
    # 1. The task, with the prompts of the template.
    sys.path.append(str(Path(__file__).parent / "templates" / name))
    task = import_module(name)
    twin: Twin = TWINS[name](task)
    rows = [row | task.to_prompt(row) for row in twin.rows]

    # 2. A tokenizer: words, and whole turns. The instruction, which all prompts share, is one
    # token, too.
    *_, instruction = rows[0]["prompt"][0]["content"].splitlines()
    texts = [row["prompt"][0]["content"].removesuffix(instruction) for row in rows]
    words = " ".join([*SPECIAL, "user assistant tool", *texts, *twin.words]).split()
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_tokens([instruction, *twin.turns])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    tokenizer.response_template = RESPONSE_TEMPLATE

    # 3. A model and its run.
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
    )
    defaults = {
        "max_completion_length": 128,
        "max_tool_calling_iterations": 6,
        "stop_token_ids": list(range(len(tokenizer))),  # each token ends a turn
        "max_steps": 120,
        "generation_batch_size": twin.completions,
        "per_device_train_batch_size": 32,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "learning_rate": 1e-3,
        "kl_coef": 0.0,
        "entropy_coef": 0.04,
        "target_kl": None,  # a token is a whole turn here, and a bound per token one per turn
        "gamma": 1.0,
        "lam": 0.95,  # over a token, which is a turn
        "advantage_level": "turn",
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    return PPOTrainer(
        Qwen2ForCausalLM(config),
        args=PPOConfig(output_dir, **defaults | settings),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        **twin.arguments,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("template", choices=TWINS)
    name = parser.parse_args().template
    build(name, f"runs/offline_{name}", log_completions=True, num_completions_to_print=2).train()
