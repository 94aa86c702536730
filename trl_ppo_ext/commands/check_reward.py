"""`trl-ppo check-reward MODEL DATASET`: does a quantized reward model rank as it does in full precision?

Scores the same preference pairs with both, using the scorer of a run.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import Series
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..data.loading import get_split, load_splits, spread_indices
from ..data.preference_pairs import Pairs, encode_pairs
from ..rewards import ClassifierReward, ScoringBatch, load_classifier

MAX_PAIRS = 500
TIMED_BATCHES = 16
# a run should not use a quantized model beyond these limits
KEEPS_RANKING = 0.95  # rank agreement, at least
FLIPPED = 0.1  # pairs ordered differently, at most: what that agreement gives if the scores of a pair are unrelated
LOST = 0.05  # accuracy, at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trl-ppo check-reward`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="id or path of a sequence classifier")
    add("dataset", metavar="DATASET", help="id of a preference dataset, or a .json, .jsonl or .parquet file")
    add("--split", help="split of the dataset; the first of test, validation and train")
    add("--max-pairs", type=int, default=MAX_PAIRS, help="pairs to score at most, spread evenly over the dataset")
    add("--quantization", choices=("nf4", "fp4", "int8"), default="nf4", help="quantization to check")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    hint = (
        "full precision, and compute dtype of the quantized model; auto is bfloat16 on a GPU that has it, or float32"
    )
    add("--dtype", choices=dtypes, default="auto", help=hint)
    add("--batch-size", type=int, default=16, help="completions per forward")
    add("--device", default="auto", help="such as cuda:0 or cpu; auto is a GPU if there is one")
    add("--reward-label", type=int, help="index of the label that is the reward, if there are several")
    add("--trust-remote-code", action="store_true", help="allow the model to run code of its own")
    add("--json", metavar="FILE", help="write the numbers to this file too")


def main(args: argparse.Namespace) -> None:
    """Check a reward model, print the table and the verdict, and write the numbers to `--json`."""
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():  # before the scoring
        raise ValueError(f"--json {args.json} is in a folder that does not exist; create it, or give another one.")
    # warns for each layer of each forward that 8-bit layers take float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "run", "json")}
    report = check_reward(**settings)
    print_report(report)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def check_reward(
    model: str,
    dataset: str | Sequence[dict[str, Any]],
    *,
    split: str | None = None,
    max_pairs: int = MAX_PAIRS,
    quantization: str = "nf4",
    dtype: str = "auto",
    batch_size: int = 16,
    device: str = "auto",
    reward_label: int | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Score preference pairs with a reward model in full precision and quantized, and compare."""
    for name, value in (("max_pairs", max_pairs), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    # 1. device and dtype, as a run on this machine would choose them
    gpu = torch.cuda.is_available()
    if device.startswith("cuda") and not gpu:
        raise ValueError(f"`device={device!r}` needs a GPU, and none is available; use 'auto' or 'cpu'.")
    device = device if device != "auto" else "cuda" if gpu else "cpu"
    fallback = torch.bfloat16 if device != "cpu" and gpu and torch.cuda.is_bf16_supported() else torch.float32
    precision = fallback if dtype == "auto" else getattr(torch, dtype)
    # 2. pairs that fit in the model's context: beyond it, some models crash, and the others were never trained
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{model} is saved quantized, so there is no full precision to compare with; give the original model."
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = min(positions or tokenizer.model_max_length, tokenizer.model_max_length)
    pairs = encode_pairs(_load_rows(dataset, split, max_pairs), tokenizer, context)
    # 3. scores of the two, one model in memory at a time
    load = partial(
        load_classifier, model, precision, device=device, trust_remote_code=trust_remote_code, label=reward_label
    )
    full, full_measures = _measure(load, "none", tokenizer, pairs, batch_size, reward_label)
    quantized, quantized_measures = _measure(load, quantization, tokenizer, pairs, batch_size, reward_label)
    report = {
        "model": model,
        "dataset": dataset if isinstance(dataset, str) else None,
        "device": device,
        "dtype": str(precision).removeprefix("torch."),
        "quantization": quantization,
        "pairs": len(pairs.sequences) // 2,
        "pairs_too_long": pairs.too_long,
        "full": full_measures,
        "quantized": quantized_measures,
        **compare(full, quantized),
    }
    return report | {"verdict": verdict(quantization, report)}


def _load_rows(dataset: str | Sequence[dict[str, Any]], split: str | None, max_pairs: int) -> list[dict[str, Any]]:
    rows: Any = dataset
    if isinstance(dataset, str):
        splits = load_splits(dataset, argument="DATASET")
        default = next((name for name in ("test", "validation", "train") if name in splits), "test")
        rows = get_split(splits, split or default, "--split")
    if not len(rows):
        raise ValueError(f"{dataset if isinstance(dataset, str) else 'The dataset'} has no rows; give at least one.")
    return [rows[index] for index in spread_indices(len(rows), max_pairs)]


def _measure(
    load: Callable[..., PreTrainedModel],
    quantization: str,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Pairs,
    batch_size: int,
    label: int | None,
) -> tuple[np.ndarray, dict[str, float | None]]:
    """Load the classifier, score and time it."""
    gc.collect()  # the model before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    model = load(quantize=quantization)
    reward = ClassifierReward(model, tokenizer, batch_size, label)

    def score(sequences: list) -> np.ndarray:
        # the scorer joins prompts and completions, so a joined sequence can be the prompt of an empty completion
        empty: Any = "" if isinstance(sequences[0], str) else []
        return np.array(reward.score(ScoringBatch(sequences, [empty] * len(sequences), [[]] * len(sequences))))

    scores = score(pairs.sequences)
    invalid = int((~np.isfinite(scores)).sum())
    if invalid:
        raise ValueError(
            f"{invalid} of {len(scores)} scores of {model.config._name_or_path} are NaN or inf in {model.dtype} with "
            f"quantization {quantization!r}; use another dtype, such as float32."
        )
    timed = pairs.sequences[:: -(-len(scores) // (TIMED_BATCHES * batch_size))]
    score(timed)  # the first time, kernels are set up for each shape
    start = time.perf_counter()
    score(timed)
    seconds = time.perf_counter() - start
    return scores, {
        "accuracy": accuracy(scores),
        "mean": float(scores.mean()),
        "standard_deviation": float(scores.std(ddof=1)),
        "length_correlation": correlation(Series(scores), Series(pairs.lengths)),
        "completions_per_second": len(timed) / seconds,
        "memory_mib": model.get_memory_footprint() / 2**20,
    }


def pair_order(scores: np.ndarray) -> np.ndarray:
    """Order of each pair: 1 if the chosen answer scores higher, 0 for a tie, else -1."""
    chosen, rejected = np.split(scores, 2)
    return np.sign(chosen - rejected)


def accuracy(scores: np.ndarray) -> float:
    """Share of pairs with the chosen answer scored higher; a tie counts half."""
    return float((1 + pair_order(scores).mean()) / 2)


def correlation(x: Series, y: Series) -> float | None:
    """Pearson correlation (Spearman's of ranks); None if one of the two is constant."""
    return None if x.nunique() == 1 or y.nunique() == 1 else float(x.corr(y))


def compare(full: np.ndarray, quantized: np.ndarray) -> dict[str, float | None]:
    """Differences between scores in full precision and quantized."""
    return {
        "rank_agreement": correlation(Series(full).rank(), Series(quantized).rank()),
        "disagreement": float((pair_order(full) != pair_order(quantized)).mean()),
        "largest_difference": float(np.abs(full - quantized).max()),
    }


def verdict(quantization: str, report: dict[str, Any]) -> str:
    """One line on whether a run can load the model quantized."""
    bits, others = ("8-bit", "'none'") if quantization == "int8" else ("4-bit", "'int8' or 'none'")
    agreement, flipped = report["rank_agreement"], report["disagreement"]
    full, quantized = (report[load]["accuracy"] for load in ("full", "quantized"))
    if agreement is None:
        return f"{bits}: all scores are equal, so there is no ranking to keep"
    losses = {
        f"rank agreement {agreement:.3f} is below {KEEPS_RANKING}": agreement < KEEPS_RANKING,
        f"{flipped:.1%} of the pairs are ordered differently, more than {FLIPPED:.0%}": flipped > FLIPPED,
        f"the accuracy falls from {full:.3f} to {quantized:.3f}": full - quantized > LOST,
    }
    reasons = [reason for reason, applies in losses.items() if applies]
    if not reasons:
        return f"{bits} keeps the ranking ({agreement:.3f}, {flipped:.1%} of the pairs ordered differently)"
    return f"{bits}: {', and '.join(reasons)}: load this model with reward_quantization={others}"


def print_report(report: dict[str, Any]) -> None:
    """Print the table and the verdict."""

    def cell(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    table = Table()
    table.add_column(f"{report['pairs']} pairs")
    for heading in (f"full ({report['dtype']})", report["quantization"]):
        table.add_column(heading, justify="right")
    for key, value in report["full"].items():
        table.add_row(key.replace("_", " "), cell(value), cell(report["quantized"][key]))
    table.add_section()
    for key in ("rank_agreement", "disagreement", "largest_difference"):
        table.add_row(key.replace("_", " "), "", cell(report[key]))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if report["pairs_too_long"]:
        console.print(f"{report['pairs_too_long']} more pairs exceed the model's context and were skipped")
    console.print(report["verdict"], soft_wrap=True)
