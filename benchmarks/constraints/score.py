"""Score the base and adapters on prompts with topics and wordings that were not trained.

python benchmarks/constraints/score.py runs/constraints
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes" / "smollm2"))

import torch
from constraints import CONSTRAINTS, fulfilled, requests
from peft import PeftModel
from smollm2 import base_model
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = 288
SEED = 1
LENGTH = 256
BATCH = 96


@torch.inference_mode()
def answers(model: torch.nn.Module, tokenizer, prompts: list[list[dict]]) -> list[str]:
    """Greedy answers."""
    texts = []
    for start in range(0, len(prompts), BATCH):
        turns = prompts[start : start + BATCH]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        outputs = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        texts += tokenizer.batch_decode(
            outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return texts


def shares(name: str, checks: list[float]) -> str:
    """Row of the table."""
    return f"{name:24}" + "".join(f"{share:>16.1%}" for share in checks)


def main() -> None:
    """Print the share of fulfilled constraints by kind, and of prompts with all that they ask
    for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapters", nargs="*", help="folders; the base is always scored")
    parser.add_argument("--output", help="file for prompts and answers, as JSON")
    options = parser.parse_args()
    rows = requests(PROMPTS, SEED, held_out=True)
    tokenizer = AutoTokenizer.from_pretrained(base_model(), padding_side="left")
    texts = {}
    for adapter in (None, *options.adapters):
        model = AutoModelForCausalLM.from_pretrained(base_model(), dtype=torch.bfloat16)
        if adapter:
            model = PeftModel.from_pretrained(model, adapter)
        texts[adapter or "base"] = answers(model, tokenizer, [row["prompt"] for row in rows])
    checks = {
        name: [fulfilled(text, row["names"], row["values"]) for text, row in zip(texts[name], rows)]
        for name in texts
    }

    def of_kinds(kinds: list[str]) -> list[float]:
        return [
            statistics.mean(
                x
                for each, row in zip(all_checks, rows)
                for x, kind in zip(each, row["names"])
                if kind in kinds
            )
            for all_checks in checks.values()
        ]

    print(f"{'':24}" + "".join(f"{name[-15:]:>16}" for name in texts))
    for kind in CONSTRAINTS:
        print(shares(kind, of_kinds([kind])))
    print(shares("all kinds", of_kinds(list(CONSTRAINTS))))
    print(
        shares(
            "prompts, all they ask", [statistics.mean(map(all, each)) for each in checks.values()]
        )
    )
    if options.output:
        Path(options.output).write_text(json.dumps({"requests": rows, "answers": texts}, indent=1))


if __name__ == "__main__":
    main()
