"""A score that is paid as it comes: each token gets what it changes, and the sum is the score."""

import random
from pathlib import Path

import pytest
from tiny import tokenizer


@pytest.fixture
def by_token(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "recipes"))
    from by_token import by_token

    return by_token


def worth(completions, weight, trainer_state=None, **kwargs):
    """7, and the weighted sum of the words' numbers unless w0 is among them."""
    texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
    sums = [sum(int(word[1:]) for word in text.split()) for text in texts]
    return [
        7 + (0.0 if "w0" in text.split() else x * total)
        for text, x, total in zip(texts, weight, sums)
    ]


@pytest.mark.parametrize("conversation", [False, True])
def test_tokens_get_what_they_change(by_token, conversation):
    inner = tokenizer()
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(8)}" for _ in range(draw.randrange(9))) for _ in range(20)]
    ids = [inner(text)["input_ids"] + [inner.eos_token_id] for text in texts]
    if conversation:
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    else:
        completions = texts
    weights = [draw.random() for _ in texts]
    rewards = by_token(worth, inner)(
        completions=completions, completion_ids=ids, weight=weights, trainer_state=None
    )
    assert [len(row) for row in rewards] == [len(row) for row in ids]
    assert [sum(row) + 7 for row in rewards] == pytest.approx(worth(completions, weights))
    assert all(row[-1] == 0 for row in rewards)  # the EOS changes no text


def test_completions_of_several_turns_are_refused(by_token):
    turns = [{"role": "assistant", "content": "w1"}, {"role": "tool", "content": "w2"}]
    with pytest.raises(ValueError, match="one turn, got 2 messages"):
        by_token(worth, tokenizer())(completions=[turns], completion_ids=[[4, 5]], weight=[1.0])


def test_score_reads_the_completion_with_its_leading_space_and_may_leave_one_out(by_token):
    def begins_with_space(completions, completion_ids, kept, **kwargs):
        assert [len(ids) for ids in completion_ids] == list(range(3))
        return [float(text.startswith(" ")) if kept[0] else None for text in completions]

    inner = tokenizer()
    ids = [inner("w3 w2")["input_ids"]] * 2
    rewards = by_token(begins_with_space, inner)(
        completions=[" w3 w2", " w3 w2"], completion_ids=ids, kept=[True, False]
    )
    assert rewards == [[1.0, 0.0], None]


def test_loss_is_paid_where_it_happens(by_token):
    inner = tokenizer()
    ids = inner("w3 w2 w0 w5")["input_ids"]
    rewards = by_token(worth, inner)(
        completions=["w3 w2 w0 w5"], completion_ids=[ids], weight=[2.0]
    )
    assert rewards == [[6.0, 4.0, -10.0, 0.0]]
