"""Compare a reward model in full precision and quantized: `python recipes/check_reward.py MODEL
DATASET`.

Scores the same preference pairs with both, using the scorer of a run.
"""

import argparse
import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from pandas import DataFrame
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import is_conversational

from trl_ppo_ext.data import get_split, load_splits, spread_indices
from trl_ppo_ext.redaction import shortened
from trl_ppo_ext.rewards import ClassifierReward, ScoringBatch, load_classifier
from trl_ppo_ext.rewards.model import SequenceScorer, context_length

BATCH_SIZE = 8  # fits wherever the model does
# a run should not use a quantized model beyond these limits
KEEPS_RANKING = 0.95  # rank agreement, at least
CHANCE = 0.6  # accuracy below which the model is no judge of these pairs
# pairs ordered differently, at most: what that agreement gives if the scores of a pair are
# unrelated
FLIPPED = 0.1


def main(argv: Sequence[str] | None = None) -> None:
    """Check a reward model, and print the table and the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("model", metavar="MODEL", help="id or path of a sequence classifier")
    add(
        "dataset",
        metavar="DATASET",
        help="id of a preference dataset, or a .json, .jsonl or .parquet file",
    )
    add(
        "--quantization",
        choices=("nf4", "fp4", "int8"),
        default="nf4",
        help="quantization of the weights",
    )
    add(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="compute dtype; auto is bfloat16 on a GPU that has it",
    )
    add("--device", default="auto", help="e.g. cuda:0 or cpu; auto is a GPU if there is one")
    add("--reward-label", type=int, help="label that is the reward, if there are several; from 0")
    add("--trust-remote-code", action="store_true", help="run the model's own code")
    add("--split", help="split of the dataset; the first of test, validation and train")
    add(
        "--max-pairs",
        type=int,
        default=500,
        help="pairs to score at most, spread evenly over the dataset",
    )

    options = parser.parse_args(argv)
    if options.max_pairs < 1:
        raise ValueError(f"`--max-pairs` must be at least 1, got {options.max_pairs}.")
    # warns for each layer of each forward that 8-bit layers take float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    splits = load_splits(options.dataset, argument="DATASET")
    default = next((name for name in ("test", "validation", "train") if name in splits), "test")
    rows = get_split(splits, options.split or default, "--split")
    rows = [rows[index] for index in spread_indices(len(rows), options.max_pairs)]
    names = ("model", "quantization", "dtype", "device", "reward_label", "trust_remote_code")
    pairs, table = check_reward(rows=rows, **{name: getattr(options, name) for name in names})
    print(f"{pairs} pairs\n{table.to_string(float_format='{:.3f}'.format, na_rep='–')}")
    if len(rows) > pairs:
        print(f"{len(rows) - pairs} more pairs exceed the model's context and were skipped")
    print(verdict(options.quantization, table))


def check_reward(
    model: str,
    rows: Sequence[dict[str, Any]],
    quantization: str = "nf4",
    dtype: str = "auto",
    device: str = "auto",
    reward_label: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[int, DataFrame]:
    """Compare a reward model in full precision and quantized; return the number of pairs that
    fit, and the table."""
    # 1. Encode the pairs that fit in the model's context: beyond it, some models crash, and others
    # were never trained.
    device, precision = choose_device(device, dtype)
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{model} is saved quantized, so it cannot be compared with full precision; use the "
            "original model."
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    sequences = encode_pairs(rows, tokenizer, context_length(config, tokenizer))
    # the scorer joins prompts and completions, so a joined sequence can be the prompt of an empty
    # completion
    batch = ScoringBatch(sequences, [x[:0] for x in sequences], [])
    # 2. Score them with both, one model in memory at a time.
    scores = DataFrame()
    for name, kind in (
        (f"full ({str(precision).removeprefix('torch.')})", "none"),
        (quantization, quantization),
    ):
        clear_device_cache(garbage_collection=True)
        classifier = load_classifier(model, precision, kind, device, trust_remote_code)
        reward = ClassifierReward(classifier, tokenizer, BATCH_SIZE, reward_label)
        scores[name] = reward.score(batch)
        del classifier, reward
    if invalid := int((~np.isfinite(scores.to_numpy())).sum()):
        raise ValueError(
            f"{invalid} scores of {model} are NaN or inf in {precision}; use e.g. float32."
        )
    return len(sequences) // 2, compare(scores)


def choose_device(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """Resolve "auto" to the device and dtype of a run on this machine."""
    gpu = torch.cuda.is_available()
    if device.startswith("cuda") and not gpu:
        raise ValueError(
            f"`device={device!r}` needs a GPU, and none is available; use 'auto' or 'cpu'."
        )
    if device == "auto":
        device = "cuda" if gpu else "cpu"
    has_bf16 = device != "cpu" and gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if has_bf16:
        auto = torch.bfloat16
    else:
        auto = torch.float32
    return device, auto if dtype == "auto" else getattr(torch, dtype)


def encode_pairs(
    rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int
) -> list[Any]:
    """Return the chosen answers with their prompts, then the rejected ones, of pairs that fit in
    the context."""
    is_text = not isinstance(rows[0].get("chosen"), list)
    end = tokenizer.eos_token or ""
    scorer = SequenceScorer("", tokenizer, 1)
    pairs = []
    empty: Any = "" if is_text else []
    for index, row in enumerate(rows):
        chosen, rejected, prompt = (row.get(name) for name in ("chosen", "rejected", "prompt"))
        for entry in (chosen, rejected, prompt or chosen):
            if not (
                isinstance(entry, str)
                if is_text
                else entry and is_conversational({"messages": entry})
            ):
                needed = (
                    "'chosen', 'rejected' and, if present, 'prompt' must all be text, or all "
                    "lists of messages"
                )
                remedy = "rename columns, and drop the prompt if the others are whole conversations"
                raise ValueError(f"Pair {index} has {shortened(row)}; {needed}: {remedy}.")
        start = prompt or empty
        if start and all(answer[: len(start)] == start for answer in (chosen, rejected)):
            raise ValueError(
                f"Pair {index} has {shortened(row)}; both answers begin with the prompt, which "
                "would be read twice: drop the prompt if the others are whole conversations."
            )
        pair: list[Any] = [start + chosen, start + rejected]
        if is_text:
            # the scorer adds it, as RewardTrainer does
            pair = [text.removesuffix(end) for text in pair]
        if max(map(len, scorer.encode(pair, [empty] * 2))) <= context:
            pairs.append(pair)
    if not pairs:
        raise ValueError(
            f"None of the {len(rows)} pairs fits in the model's context of {context} tokens; "
            "shorten them."
        )
    return list(chain(*zip(*pairs)))


def compare(scores: DataFrame) -> DataFrame:
    """Compare the two columns of scores: of the chosen answers, then of the rejected ones in the
    same order."""
    full, quantized = scores.columns
    chosen, rejected = np.split(scores.to_numpy(), 2)
    order = np.sign(chosen - rejected)  # of each pair; a tie is 0 and counts half
    rows = {
        "accuracy": (1 + order.mean(0)) / 2,
        "mean": scores.mean(),
        "standard deviation": scores.std(),
    }
    table = DataFrame(rows, index=scores.columns).T
    # NaN if all are equal
    table.loc["rank agreement", quantized] = scores.corr("spearman").loc[full, quantized]
    table.loc["disagreement", quantized] = (order[:, 0] != order[:, 1]).mean()
    table.loc["largest difference", quantized] = (scores[full] - scores[quantized]).abs().max()
    return table


def verdict(quantization: str, table: DataFrame) -> str:
    """Verdict in one line: whether the model knows the pairs, then whether the quantization
    keeps its ranking."""
    column = table[quantization]
    accuracy = table.loc["accuracy"].iloc[0]
    if accuracy < CHANCE:  # of the full precision: no quantization mends that
        if accuracy < 1 - CHANCE:
            known = "prefers the rejected answers"
        else:
            known = "hardly tells chosen from rejected answers"
        remedy = "check the columns, the chat template and `--reward-label`, or use another model"
        return f"the model {known} (accuracy {accuracy:.3f} in full precision): {remedy}"
    if column["rank agreement"] >= KEEPS_RANKING and column["disagreement"] <= FLIPPED:
        return f"{quantization} keeps the ranking"
    if quantization == "int8":
        others = "'none'"
    else:
        others = "'int8' or 'none'"
    return (
        f"{quantization} loses the ranking, which needs a rank agreement of at least "
        f"{KEEPS_RANKING} and a disagreement of at most {FLIPPED}: load this model with "
        f"reward_quantization={others}"
    )


if __name__ == "__main__":
    main()
