"""recipes/check_reward.py: each number recomputed by other means, and every form of pairs."""

import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
from pandas import DataFrame
from tiny import CHAT_TEMPLATE, WORDS, llama, tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import check_reward as module
from check_reward import check_reward, compare, verdict

CONFIGS = {
    "none": None,
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


def save(directory, own_tokenizer=None, **kwargs):
    own_tokenizer = own_tokenizer or tokenizer(chat_template=CHAT_TEMPLATE)
    llama(classifier=True, hidden_size=64, **kwargs).save_pretrained(directory)
    own_tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def expected(model):
    """The table of `ROWS`."""
    return checked(model, ROWS)


def checked(model, rows, **kwargs):
    return check_reward(model, rows, device="cpu", **kwargs)[1]


def words(start, count):
    return " ".join(WORDS[(start + 5 * k) % len(WORDS)] for k in range(count))


# prompts end and completions begin with a space, so that both sides of the seam are words of their
# own
ROWS = [
    {
        "prompt": words(n, 1 + n % 4) + " ",
        "chosen": words(n + 3, 1 + n % 7) + " ",
        "rejected": words(n + 4, 1 + (3 * n) % 11) + " ",
    }
    for n in range(24)
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*arguments):
    return module.main([*arguments, "--device", "cpu"])


# ---- the numbers, recomputed ----


def load_by_hand(model, quantization):
    return AutoModelForSequenceClassification.from_pretrained(
        model,
        quantization_config=CONFIGS[quantization],
        device_map={"": "cpu"},
        dtype=torch.float32,
    ).eval()


def scores_by_hand(classifier, own_tokenizer, texts):
    """One text at a time, no padding, the model's own choice of the last token."""
    scores = []
    for text in texts:
        ids = own_tokenizer(text)["input_ids"] + [own_tokenizer.eos_token_id]
        with torch.no_grad():
            scores.append(classifier(input_ids=torch.tensor([ids])).logits.item())
    return scores


def ranks_by_hand(values):
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def spearman_by_hand(x, y):
    return statistics.correlation(ranks_by_hand(x), ranks_by_hand(y))


def order(chosen, rejected):
    return (chosen > rejected) - (chosen < rejected)


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_table_equals_scoring_by_hand(model, monkeypatch, quantization):
    seen = []
    monkeypatch.setattr(module, "compare", lambda scores: seen.append(scores) or compare(scores))
    pairs, table = check_reward(model, ROWS, quantization, device="cpu")
    assert pairs == 24
    own_tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [row["prompt"] + row[side] for side in ("chosen", "rejected") for row in ROWS]
    orders = []
    columns = (("full (float32)", "none"), (quantization, quantization))
    for name, kind in columns:
        scores = seen[0][name].tolist()
        assert scores == pytest.approx(
            scores_by_hand(load_by_hand(model, kind), own_tokenizer, texts), abs=1e-4
        )
        orders.append([order(c, r) for c, r in zip(scores[:24], scores[24:])])
        numbers = [
            statistics.mean((x + 1) / 2 for x in orders[-1]),
            statistics.mean(scores),
            statistics.stdev(scores),
        ]
        assert table.loc[
            ["accuracy", "mean", "standard deviation"], name
        ].tolist() == pytest.approx(numbers)
    full, quantized = (seen[0][name].tolist() for name, _ in columns)
    differences = {
        "rank agreement": spearman_by_hand(full, quantized),
        "disagreement": sum(a != b for a, b in zip(*orders)) / 24,
        "largest difference": max(abs(a - b) for a, b in zip(full, quantized)),
    }
    assert table.loc[list(differences), quantization].to_dict() == pytest.approx(differences)
    assert differences["rank agreement"] < 1  # there is a difference to be measured


def test_ties_count_half():
    for scores, share in (
        ([2.0, 1.0, 1.0, 0.0, 1.0, 1.0, 2.0, 0.0], 0.5),
        ([2.0, 1.0, 1.0, 1.0], 0.75),
        ([1.0, 2.0], 0),
    ):
        assert compared(scores, scores).loc["accuracy"].tolist() == [share, share]


def compared(full, quantized):
    return compare(DataFrame({"full": full, "nf4": quantized}))


def test_rank_agreement_averages_ranks_of_ties():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, y = torch.randint(0, 6, (2, 16), generator=generator).double().tolist()
        assert compared(x, y).loc["rank agreement", "nf4"] == pytest.approx(spearman_by_hand(x, y))


def test_pair_that_becomes_a_tie_is_ordered_differently():
    # pairs (2, 1), (1, 1), (0, 1), (3, 3)
    table = compared([2.0, 1.0, 0.0, 3.0, 1.0, 1.0, 1.0, 3.0], [1.0] * 8)
    assert math.isnan(table.loc["rank agreement", "nf4"])
    assert table.loc[["disagreement", "largest difference"], "nf4"].tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("quantization", "agreement", "disagreement", "outcome"),
    [
        ("nf4", 0.95, 0.1, "nf4 keeps the ranking"),
        ("nf4", 0.94, 0.01, "reward_quantization='int8' or 'none'"),
        ("int8", 0.99, 0.11, "reward_quantization='none'"),
        ("int8", math.nan, 0.0, "reward_quantization='none'"),
    ],
)
def test_verdict_names_the_quantization_to_use(quantization, agreement, disagreement, outcome):
    table = DataFrame(
        {quantization: {"accuracy": 0.9, "rank agreement": agreement, "disagreement": disagreement}}
    )
    assert verdict(quantization, table).endswith(outcome)


@pytest.mark.parametrize(
    ("accuracy", "said"), [(0.133, "prefers the rejected"), (0.5, "hardly tells"), (0.7, "keeps")]
)
def test_verdict_speaks_of_accuracy_before_quantization(accuracy, said):
    column = {"accuracy": accuracy, "rank agreement": 0.99, "disagreement": 0.01}
    said_of = verdict(
        "nf4", DataFrame({"full (float32)": column, "nf4": column | {"accuracy": 0.9}})
    )
    assert (
        said in said_of
        and ("nf4" in said_of) == (said == "keeps")
        and (said == "keeps" or "0." in said_of)
    )


def test_verdict_rejects_swapped_pairs_despite_rank_agreement():
    """As where prompts differ far more than the two answers to one: each pair is a step apart,
    and is swapped."""
    table = compared(
        *([10.0 * n + x for x in order for n in range(20)] for order in ((1, 0), (0, 1)))
    )
    assert table.loc["rank agreement", "nf4"] > 0.99 and table.loc["disagreement", "nf4"] == 1
    assert "loses the ranking" in verdict("nf4", table)


# ---- the command ----


def test_command_prints_table_and_verdict(model, expected, tmp_path, capsys):
    run(model, write(tmp_path / "pairs.jsonl", ROWS))
    printed = capsys.readouterr().out.splitlines()
    rows = {
        name.strip(): cells for name, *cells in (line.rsplit(None, 2) for line in printed[2:-1])
    }
    assert printed[0] == "24 pairs" and re.split(r"\s{2,}", printed[1].strip()) == list(expected)
    assert rows == {
        name: [f"{x:.3f}".replace("nan", "–") for x in row] for name, *row in expected.itertuples()
    }
    assert printed[-1] == verdict("nf4", expected)


def test_int8_does_not_warn_for_every_layer(model, tmp_path, capsys, caplog):
    run(model, write(tmp_path / "pairs.jsonl", ROWS), "--quantization", "int8")
    assert "int8" in capsys.readouterr().out
    assert not [record for record in caplog.records if "MatMul8bitLt" in record.getMessage()]


def test_pairs_are_spread_over_the_test_split(model, tmp_path, capsys):
    write(tmp_path / "train.jsonl", ROWS[1::4])
    write(tmp_path / "test.jsonl", ROWS)
    run(model, str(tmp_path), "--max-pairs", "6")
    spread = capsys.readouterr().out
    run(model, write(tmp_path / "sixth.jsonl", ROWS[::4]))
    assert capsys.readouterr().out == spread and spread.startswith("6 pairs\n")
    with pytest.raises(
        ValueError, match=r"no split 'nowhere'; set `--split` to one of \['test', 'train'\]"
    ):
        run(model, str(tmp_path), "--split", "nowhere")


def test_pairs_beyond_the_context_are_skipped_and_counted(model, tmp_path, capsys):
    # 65 tokens with the EOS, for a context of 64
    long = {"prompt": "w1 ", "chosen": words(0, 63), "rejected": "w2"}
    fits = {"prompt": "w1 ", "chosen": words(0, 62), "rejected": "w2"}
    rows = [long, *ROWS[:5], long, fits]
    assert check_reward(model, rows, device="cpu")[1].equals(checked(model, [*ROWS[:5], fits]))
    run(model, write(tmp_path / "p.jsonl", rows))
    printed = capsys.readouterr().out
    assert (
        printed.startswith("6 pairs\n")
        and "2 more pairs exceed the model's context and were skipped" in printed
    )


# ---- data ----


def test_prompt_may_be_part_of_the_completions(model, expected):
    """Their words begin to differ at once, so the common beginning is the prompt."""
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in ROWS]
    assert checked(model, whole).equals(expected)
    # as `datasets` fills a column
    assert checked(model, [row | {"prompt": None} for row in whole]).equals(expected)


def test_text_with_eos_gets_no_second_one(model, expected):
    ended = [row | {side: row[side] + "<eos>" for side in ("chosen", "rejected")} for row in ROWS]
    assert checked(model, ended).equals(expected)


def test_conversations_are_scored_in_the_chat_template(model):
    def message(role, text):
        return {"role": role, "content": text.strip()}

    explicit = [
        {"prompt": [message("user", row["prompt"])]}
        | {side: [message("assistant", row[side])] for side in ("chosen", "rejected")}
        for row in ROWS
    ]
    whole = [
        {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in explicit
    ]
    table = checked(model, explicit)
    own_tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = load_by_hand(model, "none")
    conversations = [row[side] for side in ("chosen", "rejected") for row in whole]
    by_hand = []
    for messages in conversations:
        ids = own_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        with torch.no_grad():
            by_hand.append(classifier(input_ids=torch.tensor([ids])).logits.item())
    assert table.loc["mean", "full (float32)"] == pytest.approx(statistics.mean(by_hand), abs=1e-5)
    assert checked(model, whole).equals(table)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "q", "chosen": "a"}], r"Pair 0 has .*'question'.*must all be text"),
        (
            [ROWS[0], {"chosen": "w1", "rejected": None}],
            r"Pair 1 has .*must all be text, or all lists of messages",
        ),
        (
            [
                {side: [{"role": "user", "content": "w1"}] for side in ("chosen", "rejected")}
                | {"prompt": "w1"}
            ],
            r"Pair 0 has .*drop the prompt if the others are whole conversations",
        ),
        (
            [{"prompt": "w1", "chosen": "w1 w2", "rejected": "w1 w3"}],
            r"Pair 0 has .*both answers begin with the prompt",
        ),
        (
            [{"chosen": words(0, 70), "rejected": "w1"}],
            "None of the 1 pairs fits in the model's context of 64 tokens",
        ),
    ],
    ids=["columns", "one missing", "mixed", "twice", "too long"],
)
def test_invalid_rows_are_refused(model, rows, message):
    with pytest.raises(ValueError, match=message):
        checked(model, rows)


def test_invalid_models_are_refused(model, tmp_path):
    three = save(tmp_path / "three", tokenizer(), num_labels=3)
    with pytest.raises(ValueError, match="3 labels"):
        checked(three, ROWS)
    tables = [checked(three, ROWS[:4], reward_label=label) for label in (0, 2)]
    assert (tables[0].loc["mean"] != tables[1].loc["mean"]).all()
    conversation = [{side: [{"role": "user", "content": side}] for side in ("chosen", "rejected")}]
    with pytest.raises(ValueError, match="chat_template is not set"):
        checked(three, conversation, reward_label=0)
    load_by_hand(model, "nf4").save_pretrained(tmp_path / "quantized")
    with pytest.raises(
        ValueError, match="saved quantized, so it cannot be compared with full precision"
    ):
        checked(str(tmp_path / "quantized"), ROWS)


def test_nonfinite_scores_are_refused(tmp_path):
    classifier = llama(classifier=True, hidden_size=64)
    torch.nn.init.constant_(classifier.score.weight, float("inf"))
    classifier.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"16 scores of .* are NaN or inf in torch.float32"):
        checked(str(tmp_path), ROWS[:4])
