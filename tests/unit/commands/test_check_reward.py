"""`trl-ppo check-reward`: each number recomputed by other means, and every form of data."""

import argparse
import json
import re
import statistics
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import CHAT_TEMPLATE, WORDS, llama, tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

from trl_ppo_ext.commands import check_reward as module
from trl_ppo_ext.commands.check_reward import check_reward, compare, describe, verdict

RECIPE = Path(__file__).parents[3] / "recipes" / "docstrings"
CONFIGS = {
    "none": None,
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
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
    """The report of `ROWS`."""
    return check_reward(model, ROWS, device="cpu")


def words(start, count):
    return " ".join(WORDS[(start + 5 * k) % len(WORDS)] for k in range(count))


# prompts end and completions begin with a space, so that both sides of the seam are words of their own
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


@pytest.fixture
def pairs(tmp_path):
    return write(tmp_path / "pairs.jsonl", ROWS)


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args([*arguments, "--device", "cpu"])


# ---- the numbers, recomputed ----


def load_by_hand(model, quantization):
    return AutoModelForSequenceClassification.from_pretrained(
        model, quantization_config=CONFIGS[quantization], device_map={"": "cpu"}, dtype=torch.float32
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
def test_report_equals_scoring_by_hand(model, pairs, quantization):
    report = check_reward(model, pairs, quantization=quantization, batch_size=5, device="cpu")

    own_tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [row["prompt"] + row[side] for side in ("chosen", "rejected") for row in ROWS]
    scores = {}
    for load, kind in (("full", "none"), ("quantized", quantization)):
        classifier = load_by_hand(model, kind)
        scores[load] = by_hand = scores_by_hand(classifier, own_tokenizer, texts)
        wins = [(order(c, r) + 1) / 2 for c, r in zip(by_hand[:24], by_hand[24:])]
        assert report[load] == pytest.approx(
            {
                "accuracy": statistics.mean(wins),
                "mean": statistics.mean(by_hand),
                "standard_deviation": statistics.stdev(by_hand),
            },
            abs=1e-4,
        )
    full, quantized = scores["full"], scores["quantized"]
    orders = [[order(c, r) for c, r in zip(by_hand[:24], by_hand[24:])] for by_hand in (full, quantized)]
    assert report["rank_agreement"] == pytest.approx(spearman_by_hand(full, quantized), abs=1e-4)
    assert report["rank_agreement"] < 1  # there is a difference to be measured
    assert report["disagreement"] == pytest.approx(sum(a != b for a, b in zip(*orders)) / 24)
    assert report["largest_difference"] == pytest.approx(max(abs(a - b) for a, b in zip(full, quantized)), abs=1e-4)
    assert (report["pairs"], report["pairs_too_long"], report["dtype"]) == (24, 0, "float32")


def test_ties_count_half():
    for scores, share in (
        ([2.0, 1.0, 1.0, 0.0, 1.0, 1.0, 2.0, 0.0], 0.5),
        ([2.0, 1.0, 1.0, 1.0], 0.75),
        ([1.0, 2.0], 0),
    ):
        assert describe(np.array(scores))["accuracy"] == share


def test_rank_agreement_averages_ranks_of_ties():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, y = torch.randint(0, 6, (2, 16), generator=generator).double().numpy()
        assert compare(x, y)["rank_agreement"] == pytest.approx(spearman_by_hand(x.tolist(), y.tolist()))


def test_rank_agreement_depends_only_on_order():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).double().numpy()
    assert compare(x, np.exp(x))["rank_agreement"] == pytest.approx(1)
    assert compare(x, -(x**3))["rank_agreement"] == pytest.approx(-1)
    assert np.corrcoef(x, np.exp(x))[0, 1] < 0.99


def test_pair_that_becomes_a_tie_is_ordered_differently():
    full, quantized = np.array([2.0, 1.0, 0.0, 3.0, 1.0, 1.0, 1.0, 3.0]), np.ones(8)
    compared = compare(full, quantized)  # pairs (2, 1), (1, 1), (0, 1), (3, 3), then ties throughout
    assert compared == {"rank_agreement": None, "disagreement": 0.5, "largest_difference": 2.0}


def outcome(agreement=0.99, flipped=0.01, full=0.8, quantized=0.8):
    accuracies = {"full": {"accuracy": full}, "quantized": {"accuracy": quantized}}
    return {"rank_agreement": agreement, "disagreement": flipped, **accuracies}


@pytest.mark.parametrize(
    ("quantization", "found", "line"),
    [
        (
            "nf4",
            outcome(0.9981, 0.034, 0.8, 0.79),
            "4-bit keeps the ranking (0.998, 3.4% of the pairs ordered differently)",
        ),
        ("fp4", outcome(0.95, 0.1), "4-bit keeps the ranking (0.950, 10.0% of the pairs ordered differently)"),
        (
            "int8",
            outcome(1.0, 0.0, 0.5, 0.7),
            "8-bit keeps the ranking (1.000, 0.0% of the pairs ordered differently)",
        ),
        (
            "nf4",
            outcome(0.9),
            "4-bit: rank agreement 0.900 is below 0.95: load this model with reward_quantization='int8' or 'none'",
        ),
        (
            "int8",
            outcome(-0.1),
            "8-bit: rank agreement -0.100 is below 0.95: load this model with reward_quantization='none'",
        ),
        (
            "nf4",
            outcome(0.96, 0.17, 0.42, 0.28),
            "4-bit: 17.0% of the pairs are ordered differently, more than 10%, and the accuracy falls from 0.420 to "
            "0.280: load this model with reward_quantization='int8' or 'none'",
        ),
        (
            "nf4",
            outcome(quantized=0.74),
            "4-bit: the accuracy falls from 0.800 to 0.740: load this model with reward_quantization='int8' or 'none'",
        ),
        ("nf4", outcome(None), "4-bit: all scores are equal, so there is no ranking to keep"),
    ],
)
def test_verdict_names_the_quantization_to_use(quantization, found, line):
    assert verdict(quantization, found) == line


def test_verdict_rejects_swapped_pairs_despite_rank_agreement():
    """As where prompts differ far more than the two answers to one: each pair is a step apart, and is swapped."""
    full = np.array([10.0 * n + 1 for n in range(20)] + [10.0 * n for n in range(20)])
    found = compare(full, np.roll(full, 20))
    assert found["rank_agreement"] > 0.99 and found["disagreement"] == 1
    assert "100.0% of the pairs are ordered differently" in verdict("nf4", outcome() | found)


# ---- the command ----


def test_table_shows_the_numbers_of_the_report(model, pairs, capsys):
    module.main(parsed(model, pairs))
    report = check_reward(model, pairs, device="cpu")
    shown = capsys.readouterr().out.splitlines()
    rows = {name.strip(): cells for name, *cells in (line.rsplit(None, 2) for line in shown[2:-1])}
    assert shown[0] == "24 pairs" and re.split(r"\s{2,}", shown[1].strip()) == ["full (float32)", "nf4"]
    for key in report["full"]:
        assert rows[key.replace("_", " ")] == [f"{report[load][key]:.3f}" for load in ("full", "quantized")]
    for key in ("rank_agreement", "disagreement", "largest_difference"):
        assert rows[key.replace("_", " ")] == ["–", f"{report[key]:.3f}"]
    assert shown[-1] == report["verdict"] == verdict("nf4", report)


def test_int8_does_not_warn_for_every_layer(model, pairs, capsys, caplog):
    module.main(parsed(model, pairs, "--quantization", "int8"))
    assert "8-bit" in capsys.readouterr().out
    assert not [record for record in caplog.records if "MatMul8bitLt" in record.getMessage()]


def test_model_with_equal_scores_has_no_ranking(tmp_path, capsys):
    classifier = llama(classifier=True, hidden_size=64)
    torch.nn.init.zeros_(classifier.score.weight)
    classifier.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    report = check_reward(str(tmp_path), ROWS[:4], device="cpu")
    assert report["rank_agreement"] is None
    assert report["full"]["accuracy"] == 0.5  # ties
    module.print_report(report)
    assert "no ranking to keep" in capsys.readouterr().out


# ---- data ----


def test_report_is_independent_of_the_dataset_format(model, pairs, tmp_path, expected):
    (tmp_path / "pairs.json").write_text(json.dumps(ROWS))
    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "pairs.parquet"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS[::-1])
    write(folder / "test.jsonl", ROWS)  # chosen before train
    forms = [
        pairs,
        str(tmp_path / "pairs.json"),
        str(tmp_path / "pairs.parquet"),
        str(folder),
        Dataset.from_list(ROWS),
    ]
    for form in forms:
        assert check_reward(model, form, device="cpu") == expected


def test_prompt_may_be_part_of_the_completions(model, expected):
    """Their words begin to differ at once, so the common beginning is the prompt."""
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in ROWS]
    assert check_reward(model, whole, device="cpu") == expected
    none = [row | {"prompt": None} for row in whole]  # as `datasets` fills a column
    assert check_reward(model, none, device="cpu") == expected


def test_text_with_eos_gets_no_second_one(model, expected):
    ended = [row | {side: row[side] + "<eos>" for side in ("chosen", "rejected")} for row in ROWS]
    assert check_reward(model, ended, device="cpu") == expected


def test_conversations_are_scored_in_the_chat_template(model):
    def message(role, text):
        return {"role": role, "content": text.strip()}

    explicit = [
        {"prompt": [message("user", row["prompt"])]}
        | {side: [message("assistant", row[side])] for side in ("chosen", "rejected")}
        for row in ROWS
    ]
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in explicit]
    report = check_reward(model, explicit, device="cpu")
    own_tokenizer, classifier = AutoTokenizer.from_pretrained(model), load_by_hand(model, "none")
    conversations = [row[side] for side in ("chosen", "rejected") for row in whole]
    by_hand = []
    for messages in conversations:
        ids = own_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        with torch.no_grad():
            by_hand.append(classifier(input_ids=torch.tensor([ids])).logits.item())
    assert report["full"]["mean"] == pytest.approx(statistics.mean(by_hand), abs=1e-5)
    implicit = check_reward(model, whole, device="cpu")
    assert implicit["full"] == pytest.approx(report["full"])
    assert implicit["rank_agreement"] == report["rank_agreement"]


def test_pairs_beyond_the_context_are_skipped_and_counted(model, tmp_path, capsys):
    long = {"prompt": "w1 ", "chosen": words(0, 63), "rejected": "w2"}  # 65 tokens with the EOS, for a context of 64
    fits = {"prompt": "w1 ", "chosen": words(0, 62), "rejected": "w2"}
    rows = [long, *ROWS[:5], long, fits]
    report = check_reward(model, rows, device="cpu")
    assert (report["pairs"], report["pairs_too_long"]) == (6, 2)
    assert report["full"] == check_reward(model, [*ROWS[:5], fits], device="cpu")["full"]
    module.main(parsed(model, write(tmp_path / "p.jsonl", rows)))
    assert "2 more pairs exceed the model's context and were skipped" in capsys.readouterr().out


def test_max_pairs_are_spread_over_the_dataset(model):
    report = check_reward(model, ROWS, max_pairs=6, device="cpu")
    assert report["pairs"] == 6
    assert report == check_reward(model, ROWS[::4], device="cpu")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows; pass at least one"),
        (
            [{"question": "q", "chosen": "a"}],
            r"Pair 0 has .*'question'.*'chosen', 'rejected' and, .* must all be text",
        ),
        ([ROWS[0], {"chosen": "w1", "rejected": None}], r"Pair 1 has .*must all be text, or all be lists of messages"),
        ([{"prompt": "w1", "chosen": "w1", "rejected": None}], r"Pair 0 has .*must all be text"),
        ([{"chosen": 1.0, "rejected": 2.0}], r"Pair 0 has \{'chosen': 1\.0, 'rejected': 2\.0\}; .*must all"),
        (
            [{side: [{"role": "user", "content": "w1"}] for side in ("chosen", "rejected")} | {"prompt": "w1"}],
            r"Pair 0 has .*drop the prompt if the others are whole conversations",
        ),
        ([{"chosen": words(0, 70), "rejected": "w1"}], "None of the 1 pairs fits in the model's context of 64 tokens"),
    ],
    ids=["no rows", "columns", "one missing", "rejected missing", "numbers", "mixed", "too long"],
)
def test_invalid_rows_are_refused(model, rows, message):
    with pytest.raises(ValueError, match=message):
        check_reward(model, rows, device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pairs": 0}, "`max_pairs` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"split": "nowhere"}, r"no split 'nowhere'; set `--split` to one of \['train'\]"),
    ],
)
def test_invalid_settings_are_refused(model, pairs, settings, message):
    with pytest.raises(ValueError, match=message):
        check_reward(model, pairs, **({"device": "cpu"} | settings))


def test_invalid_files_are_refused(model, pairs, tmp_path):
    with pytest.raises(ValueError, match=r"`DATASET='.*nothing\.jsonl'` does not exist"):
        check_reward(model, str(tmp_path / "nothing.jsonl"), device="cpu")
    (tmp_path / "broken.jsonl").write_text('{"chosen": "w1", "rej')
    with pytest.raises(ValueError, match=r"broken\.jsonl'` cannot be read"):
        check_reward(model, str(tmp_path / "broken.jsonl"), device="cpu")


def test_invalid_models_are_refused(model, tmp_path):
    three = save(tmp_path / "three", tokenizer(), num_labels=3)
    with pytest.raises(ValueError, match="3 labels"):
        check_reward(three, ROWS, device="cpu")
    reports = [check_reward(three, ROWS[:4], reward_label=label, device="cpu") for label in (0, 2)]
    assert reports[0]["full"]["mean"] != reports[1]["full"]["mean"]
    conversation = [{side: [{"role": "user", "content": side}] for side in ("chosen", "rejected")}]
    with pytest.raises(ValueError, match="chat_template is not set"):
        check_reward(three, conversation, reward_label=0, device="cpu")
    strict = save(tmp_path / "strict", tokenizer(chat_template="{{ raise_exception('ask first') }}"))
    with pytest.raises(ValueError, match="chat template does not take pair 0: ask first; drop or reshape it"):
        check_reward(strict, conversation, device="cpu")
    load_by_hand(model, "nf4").save_pretrained(tmp_path / "quantized")
    with pytest.raises(ValueError, match="saved quantized, so it cannot be compared with full precision"):
        check_reward(str(tmp_path / "quantized"), ROWS, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(model):
    with pytest.raises(ValueError, match="`device='cuda:0'` needs a GPU, and none is available; use 'auto'"):
        check_reward(model, ROWS, device="cuda:0")


def test_nonfinite_scores_are_refused(tmp_path):
    classifier = llama(classifier=True, hidden_size=64)
    torch.nn.init.constant_(classifier.score.weight, float("inf"))
    classifier.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"8 of 8 scores of .* are NaN or inf in torch.float32"):
        check_reward(str(tmp_path), ROWS[:4], device="cpu")


# ---- a reward model that has learnt something ----


def docstring_pairs():
    """Pairs by PEP 257 out of the top-level modules of the standard library, and a tokenizer for them."""
    from harvest import read_file, split, unique
    from pep257 import bare_verbs
    from reward_model import pairs
    from sft import train_tokenizer

    stdlib = sysconfig.get_paths()["stdlib"]
    files = sorted(path.name for path in Path(stdlib).glob("*.py"))
    corpus = unique(row for name in files for row in read_file((stdlib, name)))
    verbs = bare_verbs(corpus)
    train, held_out = split(corpus)
    return pairs(train, verbs, 1000), pairs(held_out, verbs, 200), train_tokenizer(corpus)


def train_classifier(rows, own_tokenizer, steps=120, batch_size=8):
    own_tokenizer.padding_side = "right"
    classifier = llama(vocab_size=len(own_tokenizer), hidden_size=64, classifier=True).train()
    classifier.config.pad_token_id = own_tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3)
    for step in range(steps):
        some = rows[step * batch_size % len(rows) :][:batch_size]
        texts = [row[side] + own_tokenizer.eos_token for side in ("chosen", "rejected") for row in some]
        inputs = own_tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        chosen, rejected = classifier(**inputs).logits[:, 0].chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return classifier.eval()


def test_trained_reward_model_keeps_its_ranking_in_4_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    train, held_out, own_tokenizer = docstring_pairs()
    train_classifier(train, own_tokenizer).save_pretrained(tmp_path / "model")
    own_tokenizer.save_pretrained(tmp_path / "model")
    file = write(tmp_path / "held_out.jsonl", held_out)
    report = check_reward(str(tmp_path / "model"), file, device="cpu")
    assert report["pairs"] + report["pairs_too_long"] == 200
    assert report["pairs_too_long"] < 20
    assert report["full"]["accuracy"] > 0.8  # it has learnt something to be kept
    assert report["rank_agreement"] >= 0.95
    assert report["quantized"]["accuracy"] == pytest.approx(report["full"]["accuracy"], abs=0.05)
    assert "4-bit keeps the ranking" in report["verdict"]
