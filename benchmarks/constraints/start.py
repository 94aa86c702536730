"""A supervised start for kinds that the base never fulfils: its own answers, rewritten by a rule for each kind.

python benchmarks/constraints/start.py     # writes runs/constraints-start
"""

import json
import os
import random
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the Hub
sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes" / "smollm2"))

from constraints import TOPICS, fresh, fulfilled, requests
from datasets import Dataset
from peft import LoraConfig
from smollm2 import base_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

REQUESTS, SEED, LENGTH, BATCH = 480, 12, 128, 96
OUTPUT = "runs/constraints-start"


def sentences(text: str) -> list[str]:
    """Sentences that end."""
    return re.findall(r"\S[^.!?]*[.!?]+", text)


def parts(text: str, number: int) -> list[str]:
    """Sentences in parts of about the same number."""
    each = sentences(text)
    cuts = [place * len(each) // number for place in range(number + 1)]
    return [" ".join(each[start:end]) for start, end in pairwise(cuts)]


def first_sentences(text: str, fits: Callable[[str], bool]) -> str:
    """As many of the first sentences as fit."""
    each = sentences(text)
    return next((x for n in range(len(each), 0, -1) if fits(x := " ".join(each[:n]))), "")


def change_words(text: str, number: int, change: Callable[[str], str]) -> str:
    """Change the longest words where they occur first."""
    for word in sorted(dict.fromkeys(re.findall(r"\b[a-z]{4,}\b", text)), key=len, reverse=True)[:number]:
        text = re.sub(rf"\b{word}\b", change(word), text, count=1)
    return text


def with_blanks(text: str, number: int) -> str:
    """A letter with blanks."""
    blanks = ["Dear [name]", "[place]", "[date]", "[signature]"][:number]
    return "\n\n".join([blanks[0], text, *blanks[1:]])


# how an answer is made to fulfil each kind, in the order in which two are applied; for others the base is asked
REWRITTEN: dict[str, Callable[[str, str, str], str]] = {  # text, value, topic
    "few words": lambda text, value, _: first_sentences(text, lambda x: len(re.findall(r"\w+", x)) < int(value)),
    "few sentences": lambda text, value, _: " ".join(sentences(text)[: int(value) - 1]),
    "no commas": lambda text, *_: text.replace(",", ""),
    "capital words": lambda text, value, _: change_words(text, int(value), str.upper),
    "highlights": lambda text, value, _: change_words(text, int(value), lambda word: f"*{word}*"),
    "bullets": lambda text, value, _: "\n".join(f"* {x}" for x in sentences(text)[: int(value)]),
    "sections": lambda text, value, _: "\n\n".join(
        f"SECTION {place}\n{x}" for place, x in enumerate(parts(text, int(value)), 1)
    ),
    "paragraphs": lambda text, value, _: "\n\n***\n\n".join(parts(text, int(value))),
    "two answers": lambda text, *_: "\n\n******\n\n".join(parts(text, 2)),
    "placeholders": lambda text, value, _: with_blanks(text, int(value)),
    "title": lambda text, _, topic: f"<<{topic.title()}>>\n\n{text}",
    "postscript": lambda text, value, _: f"{' '.join(sentences(text)[:-1])}\n\n{value} {sentences(text)[-1]}",
    "ending": lambda text, value, _: f"{text}\n\n{value}",
    "lowercase": lambda text, *_: text.lower(),
    "uppercase": lambda text, *_: text.upper(),
    "repeat": lambda text, value, _: f"{value}\n\n{text}",
    "quotation": lambda text, *_: '"{}"'.format(text.replace('"', "'")),
    "JSON": lambda text, _, topic: json.dumps({"topic": topic, "text": text}, indent=1, ensure_ascii=False),
}


def rewritten(text: str, row: dict) -> str:
    """An answer that fulfils what is asked for, or an empty one."""
    topic = max((x for x in TOPICS if x in row["parts"][0]), key=len)
    text, asked = " ".join(sentences(text)), dict(zip(row["names"], row["values"]))
    for name, change in REWRITTEN.items():
        if name in asked and sentences(text):
            text = change(text, asked[name], topic)
    return text if all(fulfilled(text, row["names"], row["values"])) and fresh(text) > 0.5 else ""


def main() -> None:
    """Write answers, and train an adapter on them."""
    set_seed(SEED)
    rows = requests(REQUESTS, SEED)
    tokenizer = AutoTokenizer.from_pretrained(base_model(), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base_model(), dtype="bfloat16")
    examples = []
    for start in range(0, REQUESTS, BATCH):
        batch = rows[start : start + BATCH]
        # the base answers what no rule can rewrite
        asked = [
            [x["parts"][0], *(part for name, part in zip(x["names"], x["parts"][1:]) if name not in REWRITTEN)]
            for x in batch
        ]
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": " ".join(x)}] for x in asked],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        outputs = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=True, temperature=0.7, top_k=0)
        texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for text, row in zip(texts, batch):
            if answer := rewritten(text, row):
                examples.append({"prompt": row["prompt"], "completion": [{"role": "assistant", "content": answer}]})
    random.Random(SEED).shuffle(examples)
    Path(OUTPUT).mkdir(parents=True, exist_ok=True)
    Path(OUTPUT, "examples.json").write_text(json.dumps(examples, indent=1))
    print(f"{len(examples)} of {REQUESTS} answers fulfil what is asked for")
    args = SFTConfig(
        OUTPUT,
        seed=SEED,
        learning_rate=1e-3,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=True,
        logging_steps=5,
        report_to="none",
        save_strategy="no",
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(examples), peft_config=lora)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
