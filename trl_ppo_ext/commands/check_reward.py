"""`trl-ppo check-reward MODEL DATASET`: does a reward model rank as before once it is loaded quantised?

Scores the same preference pairs twice, in full precision and quantised, with the scorer that a run uses. Leaves out
statistics with error bars, and what is wrong with a model that ranks badly in full precision already. Nothing heavy is
imported before it is needed, so that `--help` comes at once.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.preference_pairs import Pairs, encode_pairs, load_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..rewards import Reward, ScoringBatch

MAX_PAIRS = 500
TIMED_BATCHES = 16
# beyond these a run should not use the quantised model
KEEPS_RANKING = 0.95  # rank agreement, at least
FLIPPED = 0.1  # pairs ordered differently, at most: what that agreement gives where the scores of a pair are unrelated
LOST = 0.05  # accuracy, at most

# key in the report: (label in the table, format)
MEASURES = {
    "accuracy": ("accuracy", "{:.3f}"),
    "mean": ("mean score", "{:.3f}"),
    "deviation": ("standard deviation", "{:.3f}"),
    "length_correlation": ("correlation with length", "{:.3f}"),
    "completions_per_second": ("completions/s", "{:.1f}"),
    "memory_mib": ("model memory (MiB)", "{:.1f}"),
}
COMPARISONS = {
    "rank_agreement": ("rank agreement (Spearman)", "{:.3f}"),
    "disagreement": ("pairs ordered differently", "{:.1%}"),
    "largest_difference": ("largest difference", "{:.3f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trl-ppo check-reward`."""
    parser.add_argument("model", metavar="MODEL", help="id or path of a sequence classifier")
    parser.add_argument(
        "dataset", metavar="DATASET", help="id of a preference dataset, or a .json, .jsonl or .parquet file"
    )
    parser.add_argument("--split", help="split of the dataset; the first there is of test, validation and train")
    parser.add_argument(
        "--max-pairs", type=int, default=MAX_PAIRS, help="pairs to score at most, spread evenly over the dataset"
    )
    parser.add_argument("--quantization", choices=("nf4", "fp4", "int8"), default="nf4", help="what is checked")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="full precision, and compute dtype of the quantised model; auto is bfloat16 on a GPU that has it, else "
        "float32",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="completions in one forward")
    parser.add_argument("--device", default="auto", help="such as cuda:0 or cpu; auto is a GPU if there is one")
    parser.add_argument("--reward-label", type=int, help="which of several labels is the reward, counted from 0")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model run code of its own")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file too")


def main(args: argparse.Namespace) -> None:
    """Check a reward model, print the table and the verdict, and write the numbers where that is asked for."""
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():  # found now, not after the scoring
        raise ValueError(f"--json {args.json} lies in a folder that does not exist; create it, or give another one.")
    # says for every layer of every forward that 8-bit layers take float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    report = check_reward(
        args.model,
        args.dataset,
        split=args.split,
        max_pairs=args.max_pairs,
        quantization=args.quantization,
        dtype=args.dtype,
        batch_size=args.batch_size,
        device=args.device,
        reward_label=args.reward_label,
        trust_remote_code=args.trust_remote_code,
    )
    print_report(report)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def check_reward(
    model: str,
    dataset: str | Sequence[dict[str, Any]],
    *,
    split: str | None = None,
    max_pairs: int | None = MAX_PAIRS,
    quantization: str = "nf4",
    dtype: str = "auto",
    batch_size: int = 16,
    device: str = "auto",
    reward_label: int | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Score preference pairs with a reward model in full precision and quantised, and compare."""
    _check_arguments(max_pairs, quantization, batch_size)
    classifier = Classifier(model, *_precision(dtype, device), trust_remote_code, reward_label)
    pairs = encode_pairs(load_rows(dataset, split, max_pairs), *_tokenizer(classifier))
    full_scores, full = _measure(classifier, "none", pairs, batch_size)
    quantized_scores, quantized = _measure(classifier, quantization, pairs, batch_size)
    given = {"model": model, "dataset": dataset if isinstance(dataset, str) else None, "device": classifier.device}
    loads = {"dtype": str(classifier.dtype).removeprefix("torch."), "quantization": quantization}
    counts = {"pairs": len(pairs.sequences) // 2, "pairs_too_long": pairs.too_long}
    compared = _compare(full_scores, quantized_scores)
    outcome = {"full": full, "quantized": quantized, **compared}
    return given | loads | counts | outcome | {"verdict": verdict(quantization, outcome)}


class Classifier(NamedTuple):
    """What is loaded, whatever the quantisation."""

    model: str  # id or path
    dtype: "torch.dtype"  # full precision, and compute dtype of the quantised model
    device: str  # where it is loaded
    trust_remote_code: bool  # whether it may run code of its own
    label: int | None  # which of several labels is the reward


def _check_arguments(max_pairs: int | None, quantization: str, batch_size: int) -> None:
    if quantization not in ("nf4", "fp4", "int8"):
        raise ValueError(f"quantization must be 'nf4', 'fp4' or 'int8', got {quantization!r}.")
    for name, value in (("max_pairs", max_pairs), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def _precision(dtype: str, device: str) -> tuple["torch.dtype", str]:
    """Dtype and device, as a run on this machine would choose them."""
    import torch

    gpu = torch.cuda.is_available()
    place = device if device != "auto" else "cuda" if gpu else "cpu"
    if place.startswith("cuda") and not gpu:
        raise ValueError(f"device={device!r} needs a GPU, and there is none; leave it 'auto', or give 'cpu'.")
    fits = place != "cpu" and gpu and torch.cuda.is_bf16_supported()
    return (getattr(torch, dtype) if dtype != "auto" else torch.bfloat16 if fits else torch.float32), place


def _tokenizer(classifier: Classifier) -> tuple["PreTrainedTokenizerBase", int]:
    """Its tokenizer, and the most tokens it takes: some models crash beyond, the others were never trained there."""
    from transformers import AutoConfig, AutoTokenizer

    model, trust = classifier.model, classifier.trust_remote_code
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{model} is saved quantised, so there is no full precision to compare with; give the model that it was "
            "made from."
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return tokenizer, min(positions or tokenizer.model_max_length, tokenizer.model_max_length)


def _measure(
    classifier: Classifier, quantization: str, pairs: Pairs, batch_size: int
) -> tuple["Tensor", dict[str, float | None]]:
    """Load the classifier, score, and let go of it before the next one is loaded."""
    import torch

    from ..rewards import ClassifierReward, ScoringBatch, load_classifier

    model_id, dtype, device, trust_remote_code, label = classifier
    model = load_classifier(model_id, dtype, quantization, device, trust_remote_code, label)
    reward = ClassifierReward(model, pairs.tokenizer, batch_size, label)
    # the scorer reads prompt and completion as one text, so they may come as one
    empty: Any = "" if isinstance(pairs.sequences[0], str) else []
    batch = ScoringBatch(pairs.sequences, [empty] * len(pairs.sequences), pairs.completion_ids)
    scores = torch.tensor(reward.score(batch)).double()
    wrong = int((~scores.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"{wrong} of {len(scores)} scores of {model_id} are not finite in {dtype} with quantization "
            f"{quantization!r}; take another dtype, such as float32."
        )
    lengths = torch.tensor([len(ids) for ids in pairs.completion_ids])
    measures = {
        "accuracy": accuracy(*scores.chunk(2)),
        "mean": scores.mean().item(),
        "deviation": scores.std().item(),
        "length_correlation": correlation(scores, lengths),
        "completions_per_second": _speed(reward, batch, TIMED_BATCHES * batch_size),
        "memory_mib": model.get_memory_footprint() / 2**20,
    }
    del model, reward
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return scores, measures


def _speed(reward: "Reward", batch: "ScoringBatch", size: int) -> float:
    """Completions scored in a second, the second time: the first time, kernels are set up for each shape."""
    from ..rewards import ScoringBatch

    every = -(-len(batch) // size)
    timed = ScoringBatch(batch.prompts[::every], batch.completions[::every], batch.completion_ids[::every])
    reward.score(timed)
    start = time.perf_counter()
    reward.score(timed)
    return len(timed) / (time.perf_counter() - start)


def _compare(full: "Tensor", quantized: "Tensor") -> dict[str, float | None]:
    """What changed from one load to the other, on scores of all that was chosen, then all that was rejected."""
    orders = [(chosen - rejected).sign() for chosen, rejected in (full.chunk(2), quantized.chunk(2))]
    return {
        "rank_agreement": correlation(average_ranks(full), average_ranks(quantized)),
        "disagreement": (orders[0] != orders[1]).double().mean().item(),
        "largest_difference": (full - quantized).abs().max().item(),
    }


def accuracy(chosen: "Tensor", rejected: "Tensor") -> float:
    """Share of pairs with the chosen one scored above the rejected one; a tie counts half."""
    return ((chosen > rejected).double() + 0.5 * (chosen == rejected)).mean().item()


def average_ranks(x: "Tensor") -> "Tensor":
    """Ranks from 1; equal values share the average of theirs."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts.double() - 1) / 2)[inverse]


def correlation(x: "Tensor", y: "Tensor") -> float | None:
    """Pearson's correlation; of ranks, it is Spearman's."""
    if x.min() == x.max() or y.min() == y.max():
        return None
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return ((x @ y) / (x.norm() * y.norm())).item()


def verdict(quantization: str, outcome: dict[str, Any]) -> str:
    """Say in a line whether a run can load the model quantised."""
    bits, others = ("8-bit", "'none'") if quantization == "int8" else ("4-bit", "'int8' or 'none'")
    agreement, flipped = outcome["rank_agreement"], outcome["disagreement"]
    full, quantized = (outcome[load]["accuracy"] for load in ("full", "quantized"))
    if agreement is None:
        return f"{bits}: all scores are equal, there is no ranking to keep"
    against = {
        f"rank agreement {agreement:.3f} is below {KEEPS_RANKING}": agreement < KEEPS_RANKING,
        f"{flipped:.1%} of the pairs are ordered differently, more than {FLIPPED:.0%}": flipped > FLIPPED,
        f"the accuracy falls from {full:.3f} to {quantized:.3f}": full - quantized > LOST,
    }
    found = [what for what, is_so in against.items() if is_so]
    if not found:
        return f"{bits} keeps the ranking ({agreement:.3f}, {flipped:.1%} of the pairs ordered differently)"
    return f"{bits}: {', and '.join(found)}: load this model with reward_quantization={others}"


def print_report(report: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    def shown(form: str, value: float | None) -> str:
        return "–" if value is None else form.format(value)

    table = Table()
    table.add_column(f"{report['pairs']} pairs")
    for heading in (f"full ({report['dtype']})", report["quantization"]):
        table.add_column(heading, justify="right")
    for key, (label, form) in MEASURES.items():
        table.add_row(label, *(shown(form, report[load][key]) for load in ("full", "quantized")))
    table.add_section()
    for key, (label, form) in COMPARISONS.items():
        table.add_row(label, "", shown(form, report[key]))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if report["pairs_too_long"]:
        console.print(f"{report['pairs_too_long']} more pairs are longer than the model's context and were left out")
    console.print(report["verdict"], soft_wrap=True)
