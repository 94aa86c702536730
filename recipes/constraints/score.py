"""Score the base and an adapter on prompts of topics, words and values that were not trained.

python recipes/constraints/score.py recipes/constraints/adapter
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "smollm2"))

import torch
from constraints import CONSTRAINTS, fulfilled, requests
from peft import PeftModel
from smollm2 import base_model
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SEED, LENGTH, BATCH = 480, 1, 160, 120


@torch.inference_mode()
def answers(model: torch.nn.Module, tokenizer, prompts: list[list[dict]]) -> list[str]:
    """Greedy answers."""
    texts = []
    for start in range(0, len(prompts), BATCH):
        turns = prompts[start : start + BATCH]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, padding=True, padding_side="left", return_tensors="pt", return_dict=True
        )
        outputs = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        texts += tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def main() -> None:
    """Print strict accuracies: of constraints, by kind, and of prompts with all they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", nargs="+")
    parser.add_argument("--output", help="file for prompts and answers, as JSON")
    given = parser.parse_args()
    rows = requests(PROMPTS, SEED, held_out=True)
    tokenizer = AutoTokenizer.from_pretrained(base_model())
    found, texts = {}, {}
    for adapter in (None, *given.adapters):
        model = AutoModelForCausalLM.from_pretrained(base_model(), dtype=torch.float32)
        if adapter:
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        name = adapter or "base"
        texts[name] = answers(model, tokenizer, [row["prompt"] for row in rows])
        found[name] = [fulfilled(text, row["names"], row["values"]) for text, row in zip(texts[name], rows)]
    print(f"{'':18}", *(f"{name[-24:]:>24}" for name in found))
    for kind in CONSTRAINTS:
        shares = [
            [x for checks, row in zip(each, rows) for x, name in zip(checks, row["names"]) if name == kind]
            for each in found.values()
        ]
        print(f"{kind:18}", *(f"{sum(x) / len(x):24.0%}" for x in shares))
    checks = [[x for each in answers for x in each] for answers in found.values()]
    print(f"{'constraints':18}", *(f"{sum(x) / len(x):24.1%}" for x in checks))
    print(f"{'prompts':18}", *(f"{sum(map(all, x)) / len(x):24.1%}" for x in found.values()))
    if given.output:
        Path(given.output).write_text(json.dumps({"requests": rows, "answers": texts}, indent=1))


if __name__ == "__main__":
    main()
