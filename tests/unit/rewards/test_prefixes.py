"""A reward model pays the changes of its score from token to token, or from turn to turn."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from peft import LoraConfig, get_peft_model
from runs_of_tiny import rollouts_of, trainer, weights
from tiny import CHAT_TEMPLATE, WORDS, byte_tokenizer, llama, tokenizer

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.episodes import Episode
from trl_ppo_ext.ppo.rollouts import shaped_rewards
from trl_ppo_ext.ppo_math import gae
from trl_ppo_ext.rewards import ClassifierReward, ScoringBatch, read_scores, score_all
from trl_ppo_ext.rewards import model as reward_model
from trl_ppo_ext.rewards.prefixes import (
    Foresight,
    PrefixScores,
    growing_text,
    pay_changes,
    prefix_ends,
)

NAN = math.nan


CERTAIN = Foresight(products=1e6, squares=1e6, last_squares=1e6)


def random_walks(rows=512, places=12, seed=0):
    """Scores whose best forecast of the last one is the present one."""
    torch.manual_seed(seed)
    return torch.randn(rows, places).cumsum(1)


# ---- what is paid


def test_changes_and_the_prompts_part_sum_to_the_score():
    prefixes = random_walks(rows=6)
    prefixes[1, 5:] = NAN  # a shorter completion
    prefixes[2, 0] = NAN  # its prompt has no score
    prefixes[3, 1:6] = NAN  # paid at later places only
    prefixes[4, :-1] = NAN  # has a score at its end only
    prefixes[5] = NAN  # has no score
    changes = pay_changes(prefixes, CERTAIN)
    final = [prefixes[0, -1], prefixes[1, 4], *prefixes[2:5, -1], torch.tensor(0.0)]
    assert (changes.tokens.sum(1) + changes.unpaid).tolist() == pytest.approx(
        [x.item() for x in final], abs=1e-5
    )
    assert not changes.tokens[1, 4:].any()
    assert changes.tokens[4].nonzero().tolist() == [[10]]
    assert not changes.tokens[3, :4].any()


@pytest.mark.parametrize("rows", [2, 4, 20])
def test_longest_completion_is_paid_its_own_changes(rows):
    """Where the others have ended nothing is usual but what they had before."""
    prefixes = random_walks(rows, places=12)
    prefixes[1:, 8:] = NAN
    tokens = pay_changes(prefixes, CERTAIN).tokens[0]
    changes = prefixes[0].diff()
    assert tokens[7:-1].tolist() == pytest.approx(changes[7:-1].tolist(), abs=1e-5)


def test_changes_are_paid_if_prefixes_foresee_the_last_score():
    walks = random_walks()
    changes = pay_changes(walks)
    # the prefix of length n knows n of 11 steps
    assert float(changes.foresight.share) == pytest.approx(0.5, abs=0.1)
    # the mean of a place is no merit of its token
    deviations = walks - walks.mean(0)
    assert torch.allclose(changes.tokens, deviations.diff(dim=1), atol=1e-4)
    unpaid = deviations[:, 0] + walks[:, -1].mean()
    assert torch.allclose(changes.unpaid, unpaid, atol=1e-4)


@pytest.mark.parametrize("drift", [0.0, 100.0], ids=["noise", "with a clock"])
def test_scores_whose_prefixes_are_noise_are_paid_at_the_end(drift):
    """A number that all prefixes of a length share tells nothing."""
    torch.manual_seed(0)
    noise = torch.randn(512, 12) + drift * torch.arange(12.0)
    changes = pay_changes(noise)
    assert float(changes.foresight.share) == pytest.approx(0.0, abs=0.01)
    assert torch.equal(changes.tokens[:, -1], noise[:, -1])
    assert not changes.tokens[:, :-1].any() and not changes.unpaid.any()


def test_opposite_scores_are_paid_at_the_end():
    walks = random_walks()
    walks[:, -1] *= -1
    changes = pay_changes(walks)
    assert float(changes.foresight.share) == 0
    assert torch.equal(changes.tokens[:, -1], walks[:, -1])


@pytest.mark.parametrize(("noise", "pays"), [(1.0, True), (3.0, True), (6.0, False)])
def test_noise_of_prefixes_decides(noise, pays):
    torch.manual_seed(0)
    final = torch.randn(20_000, 1)
    earlier = final + noise * torch.randn(20_000, 4)
    changes = pay_changes(torch.cat([earlier, final], 1))
    assert float(changes.foresight.share) == pytest.approx(1 / (1 + noise**2), abs=0.02)
    assert changes.tokens[:, :-1].any().item() is pays


def test_earlier_rollouts_count_in_the_decision():
    """Once a policy ends in one text, its scores vary by noise only."""
    before = pay_changes(random_walks()).foresight
    noise = torch.randn(64, 12) * 0.1
    assert not pay_changes(noise).tokens[:, :-1].any()
    assert pay_changes(noise, before).tokens[:, :-1].any()


def test_equal_scores_tell_nothing():
    equal = torch.full((8, 12), 3.0)
    assert float(pay_changes(equal).foresight.share) == 0
    assert pay_changes(equal).tokens[0].tolist() == [0.0] * 10 + [3.0]


def test_what_a_token_is_paid_changes_no_expected_gradient():
    """From a token on, both pay the same, less a number that depends on the tokens before it only.

    Completions of three tokens of two kinds, all of them: the potential is one of the prefix.
    """
    completions = list(itertools.product((0, 1), repeat=3))
    torch.manual_seed(0)
    potential = {
        prefix: torch.randn(()).item()
        for length in range(4)
        for prefix in itertools.product((0, 1), repeat=length)
    }
    prefixes = torch.tensor([[potential[x[:end]] for end in range(4)] for x in completions])
    changes = pay_changes(prefixes, CERTAIN)
    at_end = torch.nn.functional.pad(prefixes[:, -1:], (2, 0))
    mask = torch.ones_like(at_end)
    zeros = torch.zeros_like(at_end)
    to_go = [gae(rewards, zeros, mask, 1.0, 1.0)[1] for rewards in (changes.tokens, at_end)]
    difference = to_go[0] - to_go[1]
    for length in range(3):
        by_prefix = {}
        for row, completion in enumerate(completions):
            by_prefix.setdefault(completion[:length], []).append(difference[row, length].item())
        for values in by_prefix.values():
            assert values == pytest.approx([values[0]] * len(values), abs=1e-5)


def test_ranks_pay_as_one():
    prefixes = random_walks(rows=8)
    parts = prefixes[:5], prefixes[5:]
    sent = {}
    barrier = Barrier(2)

    def on_rank(rank):
        calls = itertools.count()

        def all_sum(x):
            call = next(calls)
            sent[rank, call] = x
            barrier.wait(timeout=10)
            return sent[0, call] + sent[1, call]

        return pay_changes(parts[rank], all_sum=all_sum)

    with ThreadPoolExecutor(2) as pool:
        own, other = pool.map(on_rank, range(2))
    whole = pay_changes(prefixes)
    both = torch.cat([own.tokens, other.tokens])
    assert both.flatten().tolist() == pytest.approx(whole.tokens.flatten().tolist(), abs=1e-5)
    for sums in (own.foresight, other.foresight):
        assert sums.to_json() == pytest.approx(whole.foresight.to_json())


# ---- where tokens of the policy end


def test_same_tokens_are_their_own_places():
    own = tokenizer()
    row = own("w1 w2 w3 w4 <eos>")["input_ids"]
    assert prefix_ends(row, row[2:4], own, own) == [1, 2, 3]
    assert prefix_ends(row, row[2:], own, own) == [1, 2, 3, 4]


def test_last_of_repeated_texts_is_the_completion():
    own = tokenizer()
    row = own("w1 w2 w1 w2")["input_ids"]
    assert prefix_ends(row, row[:2], own, own) == [1, 2, 3]


@pytest.mark.parametrize("text", ["wide w", "w1 w2", " été ", "naïve 😀 smile"])
def test_other_tokens_end_with_the_same_characters(text):
    """A policy with a token per byte, and a reward model with pieces of two letters."""
    policy = byte_tokenizer()
    reader = byte_tokenizer()
    reader.add_tokens(["wi", "de", "na", "sm"])
    prompt = "Say: "
    row = reader(prompt + text)["input_ids"]
    ids = policy(text)["input_ids"]
    ends = prefix_ends(row, ids, reader, policy)
    assert len(ends) == len(ids) + 1 and ends == sorted(ends)
    trimmed = text.strip()
    for token, place in enumerate(ends):
        read = reader.decode(row[: place + 1])
        written = policy.decode(ids[:token]).rstrip("\ufffd")
        # no more than what the policy has written
        assert read.rstrip("\ufffd").removeprefix(prompt).strip() in written.strip() + trimmed[:0]
    assert reader.decode(row[: ends[-1] + 1]).strip() == (prompt + text).strip()


def test_last_of_repeated_characters_is_the_completion():
    own = byte_tokenizer()
    reader = byte_tokenizer()
    reader.add_tokens(["wi", "de"])
    row = reader("wide wide")["input_ids"]
    assert prefix_ends(row, own("wide")["input_ids"], reader, own) == [2, 2, 3, 3, 4]


def test_completion_that_a_template_changes_has_no_places():
    own = tokenizer()
    row = own("w1 w2 w3")["input_ids"]
    assert prefix_ends(row, own("w5 w6")["input_ids"], own, own) is None
    assert prefix_ends(own("w1 w2")["input_ids"], own("w1 w2")["input_ids"], own, own) is None


def test_text_grows_to_the_decoded_one():
    own = byte_tokenizer()
    text = "naïve 😀, été"
    grown, ends = growing_text(own(text)["input_ids"], own)
    assert grown == text and ends[-1] == len(text) and ends == sorted(ends)


# ---- models


PAIRS = [("w1 w2 ", "w3"), ("w4 ", "w5 w6 w7 w8"), ("w9 w10 w11 ", "w13 w14"), ("w0 ", "w0")]


def batch_of(own, pairs=PAIRS, ends_with_eos=True):
    end = " <eos>" if ends_with_eos else ""
    ids = [own(completion + end)["input_ids"] for _, completion in pairs]
    given, completions = zip(*pairs)
    return ScoringBatch(list(given), list(completions), ids)


def by_hand(model, ids, label=0):
    """Score of each prefix, one at a time."""
    scores = []
    for end in range(1, len(ids) + 1):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([ids[:end]])).last_hidden_state
            scores.append(model.score(hidden[0, -1])[label].item())
    return scores


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_prefix_has_the_score_of_its_text(batch_size, side, pad):
    """With pad = EOS the model is read before EOS, and so EOS changes nothing."""
    model = llama(classifier=True)
    own = tokenizer()
    own.padding_side = side
    own.pad_token = pad
    model.config.pad_token_id = own.pad_token_id
    reward = ClassifierReward(model, own, batch_size)
    at_end = reward.score(batch_of(own))
    reward.pay_at("token", own)
    for (prompt, completion), scores, final in zip(PAIRS, reward.score(batch_of(own)), at_end):
        ids = own(prompt + completion + " <eos>")["input_ids"]
        expected = by_hand(model, ids)
        if pad == "<eos>":
            expected[-1] = expected[-2]
        start = len(own(prompt)["input_ids"])
        assert scores.prompt == pytest.approx(expected[start - 1], abs=1e-5)
        assert [place for place, _ in scores.pairs] == list(range(len(ids) - start))
        assert [x for _, x in scores.pairs] == pytest.approx(expected[start:], abs=1e-5)
        assert scores.pairs[-1][1] == pytest.approx(final, abs=1e-5)


def test_label_and_adapter_of_a_classifier_are_read():
    torch.manual_seed(0)
    model = llama(classifier=True)
    model.score = torch.nn.Linear(32, 3, bias=False)
    model.config.num_labels = 3
    with_adapter = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS")
    )
    for name, parameter in with_adapter.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    own = tokenizer()
    reward = ClassifierReward(with_adapter, own, label=2)
    reward.pay_at("token", own)
    (scores,) = reward.score(batch_of(own, PAIRS[1:2]))
    merged = with_adapter.merge_and_unload()
    ids = own("w4 w5 w6 w7 w8 <eos>")["input_ids"]
    assert [x for _, x in scores.pairs] == pytest.approx(by_hand(merged, ids, 2)[1:], abs=1e-5)


def test_truncated_completion_is_paid_for_what_ends_its_text():
    """The text that is scored ends with EOS; the last token of the policy is paid for it."""
    model = llama(classifier=True)
    own = tokenizer()
    reward = ClassifierReward(model, own)
    reward.pay_at("token", own)
    (scores,) = reward.score(batch_of(own, PAIRS[1:2], ends_with_eos=False))
    expected = by_hand(model, own("w4 w5 w6 w7 w8 <eos>")["input_ids"])
    assert [x for _, x in scores.pairs] == pytest.approx([*expected[1:4], expected[-1]], abs=1e-5)


def test_ends_of_turns_are_paid_with_the_answers_to_them():
    words = [*WORDS[:20], "user", "assistant", "tool"]
    own = tokenizer(words, CHAT_TEMPLATE)
    model = llama(classifier=True)
    reward = ClassifierReward(model, own)
    prompt = [{"role": "user", "content": "w1 w2"}]
    turns = [
        {"role": "assistant", "content": "w3 w4"},
        {"role": "tool", "content": "w5"},
        {"role": "assistant", "content": "w6"},
    ]
    ids = own.apply_chat_template(prompt + turns, return_dict=False)
    start = len(own.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    episode = Episode(prompt, ids[:start])
    first_answer = ids.index(own.convert_tokens_to_ids("w6"))
    episode.add(ids[start : start + 2], sampled=True)
    episode.add(ids[start + 2 : first_answer], sampled=False)
    episode.add(ids[first_answer:], sampled=True)
    batch = ScoringBatch([prompt], [turns], [episode.completion_ids], episodes=[episode])
    expected = by_hand(model, ids)
    reward.pay_at("turn", own)
    (scores,) = reward.score(batch)
    places = [first_answer - start - 1, len(ids) - start - 1]
    assert [place for place, _ in scores.pairs] == places
    assert [x for _, x in scores.pairs] == pytest.approx(
        [expected[start + place] for place in places], abs=1e-5
    )
    assert scores.prompt == pytest.approx(expected[start - 1], abs=1e-5)


def test_completion_that_is_not_found_is_paid_at_the_end(monkeypatch):
    own = tokenizer()
    reward = ClassifierReward(llama(classifier=True), own)
    reward.pay_at("token", own)
    batch = ScoringBatch(["w1 "], ["w2 w3"], [own("w7 w8 w9")["input_ids"]])
    warnings = []
    monkeypatch.setattr(reward_model.logger, "warning_once", warnings.append)
    (scores,) = reward.score(batch)
    assert [place for place, _ in scores.pairs] == [2]
    assert "in other words than the policy has written" in warnings[0]


def test_completion_that_is_not_found_has_the_score_of_its_prompt():
    """Otherwise a policy could choose what is subtracted from its score, e.g. by writing nothing
    but EOS."""
    own = tokenizer()
    other = byte_tokenizer()
    model = llama(classifier=True)
    reward = ClassifierReward(model, own)
    reward.pay_at("token", other)
    batch = ScoringBatch(["w1 w2 "], ["w3"], [[other.eos_token_id]])
    (scores,) = reward.score(batch)
    assert scores.prompt == pytest.approx(by_hand(model, own("w1 w2")["input_ids"])[-1], abs=1e-5)
    assert [place for place, _ in scores.pairs] == [0]


def test_ids_of_another_vocabulary_are_no_places():
    own = tokenizer()
    other = tokenizer(WORDS[::-1])
    row = own("w1 w2 w3")["input_ids"]
    assert prefix_ends(row, row[1:2], own, other) == [0, 1]
    assert prefix_ends(row, row[1:2], own, other, same_tokens=False) is None


def test_sampled_bytes_that_are_no_text_are_not_found(monkeypatch):
    """Tokenizers that fall back to bytes raise on them."""

    def raises(*args):
        raise Exception("Invalid prefix encountered")

    monkeypatch.setattr("trl_ppo_ext.rewards.prefixes.growing_text", raises)
    own = tokenizer()
    assert prefix_ends(own("w1 w2")["input_ids"], own("w5")["input_ids"], own, own) is None


def test_level_of_an_earlier_run_is_taken_back(tmp_path):
    reward = ClassifierReward(llama(classifier=True), tokenizer())
    trainer(tmp_path / "token", reward_funcs=reward, reward_level="token")
    assert reward.level == "token"
    trainer(tmp_path / "end", reward_funcs=reward, reward_level="end")
    assert reward.level == "end"


def test_classifier_that_may_read_ahead_is_paid_at_the_end(tmp_path):
    model = llama(classifier=True)
    model.config.use_bidirectional_attention = True
    reward = ClassifierReward(model, tokenizer())
    trainer(tmp_path, reward_funcs=reward)
    assert reward.level == "end"
    with pytest.raises(ValueError, match="needs a causal reward model"):
        trainer(tmp_path, reward_funcs=reward, reward_level="token")


# ---- beside other rewards


class Paid:
    """Prefix scores of a model."""

    name = "model"
    level = "token"

    def __init__(self, *entries):
        self.entries = list(entries)

    def score(self, batch):
        return self.entries


class Other:
    name = "other"

    def score(self, batch):
        return [1.0, [0.0, 0.5], None]


def test_weighted_sum_holds_changes_and_other_rewards():
    entries = [PrefixScores(float(n), [(0, n + 1.0), (1, n**2 + 2.0)]) for n in range(3)]
    batch = ScoringBatch(["p"] * 3, ["c"] * 3, [[5, 6]] * 3)
    scored = score_all(
        [Paid(*entries), Other()],
        batch,
        [2.0, 10.0],
        "raise",
        1.0,
        torch.clone,
        torch.device("cpu"),
    )
    assert scored.rewards[:, 0].tolist() == [2.0, 3.0, 6.0]
    assert scored.totals.tolist() == pytest.approx([14.0, 11.0, 12.0], abs=1e-5)
    assert (scored.paid + scored.unpaid).tolist() == pytest.approx(scored.totals.tolist())
    assert scored.places.all() and set(scored.foresight) == {"model"}


def test_plain_scores_of_a_model_are_paid_at_the_end():
    """Of one of your own, that has prefixes for some completions only."""
    entries = [PrefixScores(0.0, [(0, 1.0), (1, 2.0)]), 5.0]
    batch = ScoringBatch(["p"] * 2, ["c"] * 2, [[5, 6]] * 2)
    alone = [torch.clone, torch.device("cpu")]
    scored = score_all([Paid(*entries)], batch, None, "raise", 1.0, *alone)
    assert scored.totals.tolist() == pytest.approx([2.0, 5.0])
    assert scored.tokens[1].tolist() == [0.0, 5.0]
    assert scored.is_whole[1]


def test_places_are_those_where_something_is_paid():
    """λ follows from them: noise that is paid at the end has none, and scores a completion as a
    whole."""
    torch.manual_seed(0)
    batch = ScoringBatch(["p"] * 64, ["c"] * 64, [[5] * 6] * 64)
    alone = [torch.clone, torch.device("cpu")]
    for scores, pays in ((torch.randn(64, 7), False), (random_walks(64, 7), True)):
        entries = [PrefixScores(x[0], list(enumerate(x[1:]))) for x in scores.tolist()]
        scored = score_all([Paid(*entries)], batch, None, "raise", 1.0, *alone)
        assert scored.places.all().item() is pays and scored.places.any().item() is pays
        assert scored.is_whole.all().item() is not pays and scored.is_whole.any().item() is not pays


def test_reward_that_weighs_nothing_has_no_places():
    batch = ScoringBatch(["p"] * 64, ["c"] * 64, [[5] * 6] * 64)
    walks = [PrefixScores(x[0], list(enumerate(x[1:]))) for x in random_walks(64, 7).tolist()]
    alone = [torch.clone, torch.device("cpu")]
    for unheard in (walks, [[0.5] * 6] * 64, [[(2, 1.0)]] * 64):
        rewards = [Paid(*[1.0] * 64), Paid(*unheard)]
        scored = score_all(rewards, batch, [1.0, 0.0], "raise", 1.0, *alone)
        assert not scored.places[:, :-1].any() and scored.totals.tolist() == [1.0] * 64
        heard = score_all(rewards, batch, [1.0, 0.1], "raise", 1.0, *alone)
        assert heard.places[:, :-1].any()


def test_monitored_model_is_read_at_the_end():
    scores = read_scores("model", [PrefixScores(1.0, [(0, 2.0), (2, 5.0)])], [3])
    assert scores.totals.tolist() == [5.0] and scores.tokens[0].tolist() == [0, 0, 5.0]


@pytest.mark.parametrize("broken", [NAN, 1e12])
def test_broken_prefix_score_fails_its_completion(broken):
    entries = [PrefixScores(0.0, [(0, broken), (1, 1.0)]), PrefixScores(0.0, [(0, 1.0), (1, 1.0)])]
    assert set(read_scores("model", entries, [2, 2]).failures) == {0}


# ---- runs


def saved_classifier(folder):
    model = llama(classifier=True)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_run_by_token_has_the_same_scores_and_learns_elsewhere(tmp_path):
    model = saved_classifier(tmp_path / "model")
    seen = {}
    for level in ("end", "token"):
        run = trainer(
            tmp_path / level,
            reward_funcs=model,
            reward_quantization="none",
            reward_level=level,
            max_steps=8,
            normalize_rewards=level == "token",
        )
        rollouts = rollouts_of(run)
        run.train()
        seen[level] = rollouts[0][1], run.state.log_history
    by_token, history = seen["token"]
    at_end, _ = seen["end"]
    assert torch.equal(by_token.sequences.completion_ids, at_end.sequences.completion_ids)
    assert by_token.scored.rewards.flatten().tolist() == pytest.approx(
        at_end.scored.rewards.flatten().tolist(), abs=1e-5
    )
    assert by_token.scored.totals.tolist() == pytest.approx(at_end.scored.totals.tolist(), abs=1e-4)
    mask = by_token.sequences.completion_mask
    (foresight,) = by_token.scored.foresight.values()
    assert float(foresight.share) > 0.05
    assert (by_token.scored.tokens != 0)[mask].float().mean() > 0.8
    assert ((at_end.scored.tokens != 0).sum(1) <= 1).all()
    assert not by_token.scored.tokens[~mask].any()
    logged = next(row for row in history if "reward" in row)
    assert logged["rewards/model/foreseen"] == pytest.approx(float(foresight.share))
    assert logged["reward"] == pytest.approx(logged["rewards/model/mean"], abs=1e-4)


def test_tokens_are_paid_and_the_objective_is_the_score(tmp_path):
    """What no token earned is paid to none, and the run still reports the score."""
    model = saved_classifier(tmp_path / "model")
    settings = {"reward_quantization": "none", "max_steps": 4, "kl_coef": 0.0}
    run = trainer(tmp_path / "run", reward_funcs=model, logging_steps=4, **settings)
    rollouts = rollouts_of(run)
    run.train()
    samples = rollouts[0][1]
    assert samples.scored.unpaid.abs().max() > 0.01
    (rewards, *_), _ = shaped_rewards(run.components, samples, run.run_state)
    torch.testing.assert_close(rewards, samples.scored.tokens)
    logged = next(row for row in run.state.log_history if "reward" in row)
    assert logged["objective"] == pytest.approx(logged["reward"], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_level": "word"}, "`reward_level` must be 'end', 'token' or 'turn'"),
        ({"reward_level": ["word"]}, "`reward_level` must"),
        (
            {"reward_level": "token", "gamma": 0.9},
            "`reward_level='token'` does not fit `gamma=0.9`",
        ),
        ({"reward_level": "token", "critic": "none"}, "compares sums of scores"),
    ],
    ids=["value", "value in a list", "gamma", "groups"],
)
def test_level_that_cannot_be_is_refused_by_the_config(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig("unused", use_cpu=True, bf16=False, **settings)


def test_level_without_a_causal_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`reward_level='token'` needs a causal reward model"):
        trainer(tmp_path, reward_level="token")
    with pytest.raises(ValueError, match="2 entries for 1 rewards"):
        trainer(tmp_path, reward_level=["token", None])


def test_resumed_run_remembers_what_prefixes_foresaw(tmp_path):
    """Bit for bit, also where the decision depends on earlier rollouts."""
    model = saved_classifier(tmp_path / "model")
    ends = []
    for resumes in (False, True):
        run = trainer(
            tmp_path / "run",
            reward_funcs=model,
            reward_quantization="none",
            max_steps=8,
            save_strategy="steps",
            save_steps=4,
        )
        run.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4") if resumes else None)
        sums = run.run_state.foresight["model"].to_json()
        ends.append((weights(run), sums))
    (whole, foresight), (resumed, remembered) = ends
    assert remembered == foresight and foresight[1] > 0
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
