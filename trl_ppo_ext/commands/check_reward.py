"""`trl-ppo check-reward MODEL DATASET`: compare a reward model in full precision and quantized.

Scores the same preference pairs with both, using the scorer of a run.
"""

import argparse
import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from accelerate.utils.memory import clear_device_cache
from jinja2.exceptions import TemplateError
from pandas import DataFrame, Series
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import is_conversational

from ..data.loading import get_split, load_splits, spread_indices
from ..redaction import shortened
from ..rewards import ClassifierReward, ScoringBatch, load_classifier
from ..rewards.model import SequenceScorer, choose_device, context_length

MAX_PAIRS = 500
# a run should not use a quantized model beyond these limits
KEEPS_RANKING = 0.95  # rank agreement, at least
FLIPPED = 0.1  # pairs ordered differently, at most: what that agreement gives if the scores of a pair are unrelated
LOST = 0.05  # accuracy, at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add, dtypes = parser.add_argument, ("auto", "float32", "bfloat16", "float16")
    add("model", metavar="MODEL", help="id or path of a sequence classifier")
    add("dataset", metavar="DATASET", help="id of a preference dataset, or a .json, .jsonl or .parquet file")
    add("--quantization", choices=("nf4", "fp4", "int8"), default="nf4", help="quantization of the weights")
    add("--dtype", choices=dtypes, default="auto", help="compute dtype; auto is bfloat16 on a GPU that has it")
    add("--device", default="auto", help="e.g. cuda:0 or cpu; auto is a GPU if there is one")
    add("--batch-size", type=int, default=16, help="completions per forward")
    add("--reward-label", type=int, help="label that is the reward, if there are several; from 0")
    add("--trust-remote-code", action="store_true", help="run the model's own code")
    add("--split", help="split of the dataset; the first of test, validation and train")
    add("--max-pairs", type=int, default=MAX_PAIRS, help="pairs to score at most, spread evenly over the dataset")


def main(options: argparse.Namespace) -> None:
    """Check a reward model, and print the table and the verdict."""
    # warns for each layer of each forward that 8-bit layers take float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    print_report(check_reward(**{name: x for name, x in vars(options).items() if name not in ("command", "run")}))


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
    """Compare a reward model in full precision and quantized on preference pairs."""
    for name, value in (("max_pairs", max_pairs), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    device, precision = choose_device(device, dtype)
    # 1. Load pairs.
    rows: Any = dataset
    if isinstance(dataset, str):
        splits = load_splits(dataset, argument="DATASET")
        default = next((name for name in ("test", "validation", "train") if name in splits), "test")
        rows = get_split(splits, split or default, "--split")
    if not len(rows):
        raise ValueError(f"{dataset if isinstance(dataset, str) else 'The dataset'} has no rows; pass at least one.")
    rows = [rows[index] for index in spread_indices(len(rows), max_pairs)]
    # 2. Encode those that fit in the model's context: beyond it, some models crash, and others were never trained.
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{model} is saved quantized, so it cannot be compared with full precision; use the original model."
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    sequences = encode_pairs(rows, tokenizer, context_length(config, tokenizer))
    report: dict[str, Any] = {
        "dtype": str(precision).removeprefix("torch."),
        "quantization": quantization,
        "pairs": len(sequences) // 2,
        "pairs_too_long": len(rows) - len(sequences) // 2,
    }
    # 3. Score them with both, one model in memory at a time.
    scores = {}
    for load, kind in (("full", "none"), ("quantized", quantization)):
        clear_device_cache(garbage_collection=True)
        classifier = load_classifier(model, precision, kind, device, trust_remote_code)
        reward = ClassifierReward(classifier, tokenizer, batch_size, reward_label)
        scores[load] = _score(reward, sequences)
        report[load] = describe(scores[load])
        del classifier, reward
    # 4. Compare.
    report |= compare(scores["full"], scores["quantized"])
    return report | {"verdict": verdict(quantization, report)}


def encode_pairs(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int) -> list[Any]:
    """Return the chosen answers with their prompts, then the rejected ones, of pairs that fit in the context."""
    is_text, end = not isinstance(rows[0].get("chosen"), list), tokenizer.eos_token or ""
    scorer, pairs = SequenceScorer("", tokenizer, 1), []
    empty: Any = "" if is_text else []
    for index, row in enumerate(rows):
        chosen, rejected, prompt = (row.get(name) for name in ("chosen", "rejected", "prompt"))
        for entry in (chosen, rejected, prompt or chosen):
            if not (isinstance(entry, str) if is_text else entry and is_conversational({"messages": entry})):
                raise ValueError(
                    f"Pair {index} has {shortened(row)}; 'chosen', 'rejected' and, if there is one, 'prompt' must all "
                    "be text, or all be lists of messages with a role, in every row. Rename columns, and drop the "
                    "prompt if the others are whole conversations."
                )
        pair: list[Any] = [(prompt or empty) + chosen, (prompt or empty) + rejected]
        if is_text:
            pair = [text.removesuffix(end) for text in pair]  # the scorer adds it, as RewardTrainer does
        try:
            length = max(map(len, scorer.encode(pair, [empty] * 2)))
        except TemplateError as error:
            raise ValueError(f"The chat template does not take pair {index}: {error}; drop or reshape it.") from error
        if length <= context:
            pairs.append(pair)
    if not pairs:
        raise ValueError(
            f"None of the {len(rows)} pairs fits in the model's context of {context} tokens; shorten them."
        )
    return list(chain(*zip(*pairs)))


def _score(reward: ClassifierReward, sequences: list[Any]) -> np.ndarray:
    """Score with a classifier."""
    # the scorer joins prompts and completions, so a joined sequence can be the prompt of an empty completion
    empty: Any = "" if isinstance(sequences[0], str) else []
    scores = np.array(reward.score(ScoringBatch(sequences, [empty] * len(sequences), [])))
    if invalid := int((~np.isfinite(scores)).sum()):
        raise ValueError(
            f"{invalid} of {len(scores)} scores of {reward.name} are NaN or inf in {reward.model.dtype}; use another "
            "dtype, such as float32."
        )
    return scores


def _order(scores: np.ndarray) -> np.ndarray:
    """Order of each pair: 1 if the chosen answer scores higher, 0 for a tie, else -1."""
    chosen, rejected = np.split(scores, 2)
    return np.sign(chosen - rejected)


def describe(scores: np.ndarray) -> dict[str, float]:
    """Numbers of a model; its accuracy is the share of pairs whose chosen answer scores higher, a tie counts half."""
    accuracy = (1 + _order(scores).mean()) / 2
    return {"accuracy": float(accuracy), "mean": float(scores.mean()), "standard_deviation": float(scores.std(ddof=1))}


def compare(full: np.ndarray, quantized: np.ndarray) -> dict[str, float | None]:
    """Differences between scores in full precision and quantized; equal scores have no rank agreement."""
    equal = np.ptp(full) == 0 or np.ptp(quantized) == 0
    return {
        # Spearman's correlation
        "rank_agreement": None if equal else float(Series(full).rank().corr(Series(quantized).rank())),
        "disagreement": float((_order(full) != _order(quantized)).mean()),
        "largest_difference": float(np.abs(full - quantized).max()),
    }


def verdict(quantization: str, report: dict[str, Any]) -> str:
    """Verdict in one line: keep the quantization, or load the model otherwise."""
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
    columns = {f"full ({report['dtype']})": report["full"], report["quantization"]: report["quantized"]}
    differences = {key: report[key] for key in ("rank_agreement", "disagreement", "largest_difference")}
    columns[report["quantization"]] = columns[report["quantization"]] | differences
    table = DataFrame(columns, dtype=float).rename(index=lambda key: key.replace("_", " "))
    print(f"{report['pairs']} pairs\n{table.to_string(float_format='{:.3f}'.format, na_rep='–')}")
    if report["pairs_too_long"]:
        print(f"{report['pairs_too_long']} more pairs exceed the model's context and were skipped")
    print(report["verdict"])
