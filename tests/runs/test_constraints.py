"""Each kind of constraint accepts an answer that fulfils it and refuses one that does not."""

from pathlib import Path

import pytest

ANSWERS = {  # value, an answer that fulfils it, one that does not
    "no commas": ("", "Tea is warm; I like it.", "Tea, warm."),
    "lowercase": ("", "tea is warm, 2 cups.", "tea is Warm."),
    "uppercase": ("", "TEA IS WARM, 2 CUPS.", "TEA IS warm."),
    "quotation": ("", '"Tea is warm."\n', '"Tea" is warm.'),
    "title": ("", "<<On tea>>\nTea is warm.", "<On tea> Tea is warm <<>>."),
    "postscript": ("P.S.", "Tea is warm.\nP.S. And good.", "Tea is warm. PS: And good."),
    "placeholders": ("2", "Dear [name], bring [number] cups.", "Dear [name], bring cups."),
    "bullets": ("2", "Tea is\n* warm\n- good", "Tea is\n* warm\n* good\n* sweet"),
    "highlights": ("2", "*Tea* is **warm**.", "*Tea* is warm."),
    "sections": ("2", "SECTION 1 Tea. SECTION 2 Cups.", "SECTION 1 Tea. Section 2 Cups."),
    "JSON": ("", '```json\n{"tea": "warm"}\n```', "{tea: warm}"),
    "ending": ("Thank you.", 'Tea is warm. "Thank you."', "Thank you. Tea is warm."),
    "keyword": ("warm", "Tea is Warm.", "Tea is hot."),
    "repeated keyword": ("warm", "Warm tea is warm.", "Tea is warm."),
    "forbidden": ("war", "Tea is warm.", "No war."),
    "letter": ("a", "A cat at a bar, a man.", "A cat."),
    "few words": ("4", "Tea is warm.", "Tea is warm today."),
    "many words": ("4", "Tea is warm today.", "Tea is warm."),
    "few sentences": ("3", "Tea is warm. I like it!", "Tea. Is. Warm."),
    "many sentences": ("3", "Tea is warm. Is it? Yes!", "Tea is warm... I like it."),
    "paragraphs": ("2", "Tea.\n***\nCups.", "Tea.\n\nCups."),
    "two answers": ("", "Tea.\n******\nCoffee.", "Tea.\n***\nCoffee."),
    "capital words": ("2", "TEA is WARM, I say.", "TEA is Warm, I say."),
    "repeat": ("What is good about tea?", "what is good about tea? It is warm.", "Tea is warm."),
}


@pytest.fixture
def constraints(monkeypatch):
    monkeypatch.syspath_prepend(
        str(Path(__file__).resolve().parents[2] / "benchmarks" / "constraints")
    )
    import constraints

    return constraints


def test_checks_accept_and_refuse(constraints):
    assert ANSWERS.keys() == constraints.CONSTRAINTS.keys()
    for name, (value, right, wrong) in ANSWERS.items():
        assert constraints.fulfilled(right, [name], [value]) == [True], name
        assert constraints.fulfilled(wrong, [name], [value]) == [False], name


def test_repetition_marks_and_short_answers_are_not_fresh(constraints):
    prose = (
        "Rivers carry rain from the hills down into wide valleys, where many people live, fish "
        "and trade."
    )
    assert constraints.fresh(prose) == 1 and constraints.fresh("") == 0
    for text in (
        prose * 5,
        "Rivers.",
        "[address] [street] [street] [street]" * 3,
        "*" * 90,
        "🐦" * 90,
    ):
        assert constraints.fresh(text) < 0.5, text


def test_reward_is_one_where_all_is_fulfilled_and_less_elsewhere(constraints, monkeypatch):
    monkeypatch.setattr(constraints, "fresh", lambda text: 1.0)

    def reward(text, names, values):
        return constraints.progress([[{"role": "assistant", "content": text}]], [names], [values])[
            0
        ]

    for name, (value, right, wrong) in ANSWERS.items():
        assert reward(right, [name], [value]) == 1 > reward(wrong, [name], [value]) >= 0, name
        for end in range(len(right) + 3):  # also of what is not finished
            text = f"\n\n {right}"[:end]
            assert 0 <= reward(text, [name], [value]) <= 1, (name, text)
            assert (
                reward(text, [name], [value]) == 1
                or not constraints.fulfilled(text, [name], [value])[0]
            ), (
                name,
                text,
            )
    assert reward("Tea, warm, and good.", ["no commas", "uppercase"], ["", ""]) == (0.5 + 0) / 2


def test_copied_examples_and_text_between_marks_do_not_count(constraints):
    assert constraints.highlights("*this part* **Tea** is **warm** * * *") == 2
    assert constraints.highlights("*this is important*") == 1
    assert not constraints.title.search("<<this>>") and constraints.title.search("<<this is tea>>")
    assert (
        constraints.sentences('"Tea is warm." (Is it?)') == 2
        and constraints.bullets("- a\n---\n-5") == 1
    )


def test_held_out_requests_share_no_text_with_trained_ones(constraints):
    """No topic, no wording and no sentence to repeat."""
    trained = constraints.requests(480, seed=0)
    held_out = constraints.requests(480, seed=1, held_out=True)
    texts = [row["prompt"][0]["content"] for row in held_out]
    assert not any(f" {topic}" in text for text in texts for topic in constraints.TOPICS)
    assert not set(texts) & {row["prompt"][0]["content"] for row in trained}
    assert not set(constraints.HELD_OUT_VALUES["repeat"]) & set(
        constraints.CONSTRAINTS["repeat"].values
    )
    for constraint in constraints.CONSTRAINTS.values():
        assert len(set(constraint.wordings)) == len(constraint.wordings) > 2
    for rows in (trained, held_out):
        kinds = [name for row in rows for name in row["names"]]
        assert set(kinds) == set(constraints.CONSTRAINTS) and 600 < len(kinds) < 680
        assert not any(set(row["names"]) in constraints.CONTRARY for row in rows)
