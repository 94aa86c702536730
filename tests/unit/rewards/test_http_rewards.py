"""Judges and remote rewards against a server that misbehaves."""

import asyncio
import json
import logging
import pickle
import re
import signal
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_rewards import KEY, TEMPLATE, judge, remote, scored, serving
from tiny import byte_tokenizer

from trl_ppo_ext.redaction import without_key
from trl_ppo_ext.rewards import FunctionReward, RewardError, ScoringBatch, http
from trl_ppo_ext.rewards.http import Judge
from trl_ppo_ext.rewards.scoring import collect_scores

both = pytest.mark.parametrize("make", [judge, remote])


def batch(completions):
    return ScoringBatch(["p"] * len(completions), list(completions), [[1]] * len(completions), {})


@pytest.fixture(scope="module")
def port():
    with serving() as (_, port):
        yield port


@contextmanager
def ends_within(seconds):
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start < seconds


# ---- success ----


@both
def test_each_completion_is_scored(port, make):
    completions = ["a" * n for n in range(50)]
    for mode in ("ok", "redirect"):
        assert scored(make(port, mode), batch(completions)) == list(range(50))
    assert scored(make(port, "ok"), batch([])) == []


def test_slow_calls_run_concurrently(port):
    """Also those of two rewards, in a running event loop such as a notebook's."""
    first = judge(port, "slow", concurrency=16)
    second = remote(port, "slow", concurrency=16)
    seconds = []

    async def notebook():
        return collect_scores([first, second], batch(["abc"] * 64))

    for _ in range(3):  # the best of three: other work on this machine is not what is measured
        start = time.perf_counter()
        assert [scores.totals.tolist() for scores in asyncio.run(notebook())] == [[3.0] * 64] * 2
        seconds.append(time.perf_counter() - start)
    # four waves; faster would be more than 16 at a time, and in turn they take 25 s
    assert 0.8 <= min(seconds) < 1.6


def test_coroutine_that_blocks_its_loop_holds_no_judge_up(port):
    answered = threading.Event()
    asked = judge(port, "ok")
    score = asked.score

    async def scores(given):
        result = await score(given)
        answered.set()
        return result

    async def blocks(**kwargs):
        return [float(answered.wait(10))]

    asked.score = scores
    blocked, judged = collect_scores([FunctionReward(blocks), asked], batch(["abc"]))
    assert blocked.totals.tolist() == [1.0] and judged.totals.tolist() == [3.0]


@both
def test_server_that_fails_twice_is_retried(port, make):
    assert scored(make(port, "broken_twice", max_retries=2), batch(["abc"])) == [3]


def test_server_restart_loses_no_score():
    completions = ["a" * n for n in range(32)]
    with serving() as (process, port):
        asked = judge(port, "slow", concurrency=4, max_retries=6)
        scores = []
        run = threading.Thread(target=lambda: scores.extend(scored(asked, batch(completions))))
        run.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not scores
        with serving(port):
            run.join(20)
    assert scores == list(range(32))


# ---- failures: in time, of these completions only, with the cause ----

# attempts, cause
CAUSES = {
    "broken": (2, "InternalServerError: Error code: 500 CUDA out of memory"),
    "limited_for_an_hour": (1, "RateLimitError: Error code: 429 slow down"),
    "silent": (2, "APITimeoutError: Request timed out.* raise timeout=0.5"),
    "half_json": (1, "ValueError: it answered in an unknown form"),
    "hangs_up": (2, "APIConnectionError: Connection error.* Check that the server runs"),
    "floods": (
        1,
        "AnswerError: The server.s answer must have at most 16777216 bytes.* check the address",
    ),
    "another_shape": (1, r'ValueError: it answered in an unknown form: \["hello"\]'),
}
JUDGED = {
    "numberless": (
        1,
        "ValueError: its answer has no match of `pattern` .*: 'I would rather not say.'",
    ),
    "nan": (1, "ValueError: its answer's score nan is outside `score_range`"),
    "cut_off": (1, "ValueError: its answer was truncated .*; raise `max_tokens`"),
    "shuts_down": (1, "ValueError: its answer was truncated .*abort"),
    "far_off": (1, "ValueError: its answer's score 99999 is outside `score_range`"),
}


def attempts(reward):
    path = urllib.parse.urlsplit(reward.url)
    with urllib.request.urlopen(f"http://{path.netloc}/") as counts:
        return json.load(counts)[path.path]


@pytest.mark.parametrize(
    "make, mode", [(judge, mode) for mode in CAUSES | JUDGED] + [(remote, mode) for mode in CAUSES]
)
def test_misbehaving_server_fails_in_time_with_the_cause(port, make, mode):
    tries, cause = (CAUSES | JUDGED)[mode]
    asked = make(port, mode, timeout=0.5, **{"score_range": (0, 100)} if make is judge else {})
    with ends_within(2.5):  # two attempts of half a second each and a wait of at most one
        errors = scored(asked, batch(["abc", "de"]))
    for error in errors:
        with pytest.raises(
            RewardError, match=f"The reward `{asked.name}` at {asked.url} failed with {cause}"
        ):
            raise error
    assert attempts(asked) == 2 * tries  # of two requests


def test_call_that_a_chat_template_refuses_fails_only_itself(port):
    """However many there are: the server has not failed."""
    asked = remote(port, "ok", concurrency=2)
    asked.tokenizer = byte_tokenizer("llama3_1")  # one call in a turn
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        [{"role": "assistant", "content": "", "tool_calls": [call] * count}]
        for count in [2] * 12 + [1, 1]
    ]
    scores = scored(
        asked, ScoringBatch([[{"role": "user", "content": "q"}]] * 14, turns, [[1]] * 14)
    )
    assert all("failed with TemplateError" in str(x) for x in scores[:12])
    assert not any(isinstance(x, RewardError) for x in scores[12:])


def test_answer_that_drips_is_a_failure(port, monkeypatch):
    monkeypatch.setattr(http, "PAUSE", 0.1)
    with ends_within(2):
        (error,) = scored(judge(port, "drips", timeout=0.2), batch(["abc"]))
    assert re.search("failed with TimeoutError: .*raise timeout=0.2", str(error))


def test_key_over_plain_http_to_another_machine_warns(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    with pytest.warns(
        UserWarning, match=r"`TEST_KEY` is sent to http://judge\.example/v1/.*, unencrypted"
    ) as seen:
        Judge("http://judge.example/v1", "m", "{completion}", api_key_env="TEST_KEY")
        Judge("https://judge.example/v1", "m", "{completion}", api_key_env="TEST_KEY")
        Judge("http://localhost:8000/v1", "m", "{completion}", api_key_env="TEST_KEY")
    assert len(seen) == 1 and KEY not in str(seen[0].message)


def test_closed_port_is_a_failure():
    with serving() as (_, port):
        pass
    with ends_within(10):
        (error,) = scored(judge(port, "ok"), batch(["abc"]))
    assert "failed with APIConnectionError" in str(error)


@both
def test_failed_request_fails_only_its_completion(port, make):
    scores = scored(make(port, "broken_for_x", max_retries=0), batch(["a", "b", "x", "d", "e"]))
    assert [isinstance(score, RewardError) for score in scores] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_label_chooses_an_output(port):
    for label, sign in ((0, 1), (1, -1)):
        assert scored(remote(port, "classifier-of-two", label=label), batch(["abc", ""])) == [
            3 * sign,
            0,
        ]
    for label in (None, 7):
        (error,) = scored(remote(port, "classifier-of-two", label=label), batch(["abc"]))
        assert f"`label` must be one of its 2 outputs, got {label}" in str(error)


def test_classifier_gets_the_tokens_that_the_run_would_score():
    """Text with an EOS, chat messages by their template, which writes special tokens itself."""
    asked = remote(1, "ok")
    assert asked.url.endswith("/classify")
    chat = [{"role": "user", "content": "w1"}], [{"role": "assistant", "content": "w2"}]
    bodies = [asked._body(ScoringBatch([p], [c], [[1]]), 0) for p, c in (("w1", " w2"), chat)]
    written = [asked.tokenizer.decode(body["input"]) for body in bodies]
    expected = ["w 1   w 2<eos>", "<bos>  u s e r   w 1  <bos>  a s s i s t a n t   w 2  "]
    assert [text.replace(" ", "") for text in written] == [
        text.replace(" ", "") for text in expected
    ]


def test_classifier_with_eos_as_pad_is_read_before_eos():
    """As transformers does, while vLLM reads the last token that it gets."""
    asked = remote(1, "ok")
    eos = asked.tokenizer.eos_token_id
    asked.pad_token_id = eos
    assert asked._body(ScoringBatch(["a"], ["b"], [[1]]), 0)["input"] == [ord("a"), ord("b")]
    asked.pad_token_id = 0
    assert asked._body(ScoringBatch(["a"], ["b"], [[1]]), 0)["input"] == [ord("a"), ord("b"), eos]


def test_dead_server_is_given_up_for_the_rest_of_a_batch(port):
    asked = judge(port, "broken", "given-up", concurrency=8, max_retries=1)
    with ends_within(3):
        errors = scored(asked, batch(["abc"] * 500))
    assert all(isinstance(error, RewardError) for error in errors)
    assert "skipped, because all requests before it failed: InternalServerError" in str(errors[-1])
    assert attempts(asked) <= 2 * 16


# ---- keys and addresses ----


@both
def test_key_is_sent_and_never_shown(port, make, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TEST_KEY", f"{KEY}\n")
    right = make(port, "needs_key", KEY[::-1], api_key_env="TEST_KEY")
    assert scored(right, batch(["abc"])) == [3]
    wrong = make(port, "wrong_key", api_key_env="TEST_KEY")  # the server repeats it
    (error,) = scored(wrong, batch(["abc"]))
    assert "AuthenticationError: *** (it repeats" in str(error)
    (slow,) = scored(
        make(port, "limited_for_an_hour", api_key_env="TEST_KEY", timeout=0.5), batch(["abc"])
    )
    for shown in (repr(wrong), vars(wrong), pickle.dumps(wrong), pickle.dumps(error), caplog.text):
        assert KEY not in str(shown)
    assert caplog.text and error.__context__ is None and slow.__context__ is None
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(ValueError, match="`TEST_KEY` is not set"):
        scored(right, batch(["abc"]))


@both
@pytest.mark.parametrize("how", ["body", "score"])
def test_parts_of_a_key_are_not_shown(port, make, how, monkeypatch):
    """Cut, split, in another case, coded, and instead of a score."""
    monkeypatch.setenv("TEST_KEY", KEY)
    (error,) = scored(make(port, f"echo_{how}", api_key_env="TEST_KEY"), batch(["abc"]))
    text = re.sub(r"%..|[^a-z0-9]", "", str(error).replace(f"127.0.0.1:{port}", "").lower())
    for start in range(len(KEY) - 5):
        assert re.sub(r"\W", "", KEY)[start : start + 5] not in text, (KEY[start:], str(error))
    assert isinstance(error, RewardError) and "***" in str(error)


def test_key_that_is_a_word_hides_no_error():
    assert without_key("max_tokens cannot be empty", "EMPTY") == "max_tokens cannot be empty"
    assert without_key("max_tokens is wrong", "token") == "max_tokens is wrong"
    assert (
        without_key("the key s3cr3t7 is wrong", "s3cr3t7") == "*** (it repeats a part of the key)"
    )
    assert without_key("max_tokens is wrong", "MaxTokens1") == "*** (it repeats a part of the key)"


def test_control_characters_of_a_server_are_escaped(port):
    (error,) = scored(judge(port, "colored"), batch(["abc"]))
    assert r"\x1b[31m" in str(error) and str(error).isprintable()


@both
def test_openai_credentials_in_the_environment_are_not_sent(port, make, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: {KEY}")
    (error,) = scored(make(port, "wrong_key"), batch(["abc"]))
    assert "AuthenticationError: Error code: 401 no such key: None" in str(error)


@both
@pytest.mark.parametrize(
    ("given", "said"), [("UNSET_KEY", "`UNSET_KEY` is not set"), (KEY, "name"), ("hf_Ab", "name")]
)
def test_missing_variable_or_a_key_in_its_place_raises(make, given, said):
    with pytest.raises(ValueError, match=said) as caught:
        make(1, "ok", api_key_env=given)
    assert given == "UNSET_KEY" or given not in str(caught.value)


def test_no_request_at_a_time_is_refused():
    with pytest.raises(ValueError, match="`concurrency` must be at least 1, got 0"):
        Judge("http://localhost:8000", "m", TEMPLATE, concurrency=0)


@pytest.mark.parametrize(
    "url", "https://user:hunter2@host/v1 https://host/v1?key=hunter2 ftp://host host".split()
)
def test_url_with_secrets_or_without_a_scheme_raises(url):
    with pytest.raises(ValueError, match="`url`") as caught:
        Judge(url, "m", TEMPLATE)
    assert "hunter2" not in str(caught.value)


def test_loopback_requests_bypass_proxies(port, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert scored(judge(port, "ok"), batch(["abc"])) == [3]


# ---- a judge's prompt and answer ----


def asked_of(template, prompt, completion, **columns):
    body = Judge("http://localhost/v1", "m", template)._body(
        ScoringBatch([prompt], [completion], [[1]], columns), 0
    )
    return body["messages"][0]["content"]


def test_inserted_text_is_not_interpreted():
    asked = asked_of(
        '{"a": 1} {prompt}|{completion}{target}', "{completion} {0} {", "}{prompt}{{x}}", target=[7]
    )
    assert asked == '{"a": 1} {completion} {0} {|}{prompt}{{x}}7'
    with pytest.warns(UserWarning, match="{'answer'}, not among .*'target'"):
        assert asked_of("{answer}{completion}", "p", "c", target=[7]) == "{answer}c"


def test_chat_messages_are_readable():
    prompt = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    asked = asked_of(TEMPLATE, prompt, [{"role": "assistant", "content": "Hello"}])
    assert (
        asked
        == "Rate what follows.\nPROMPT system: Be kind.\nuser: Hi\nCOMPLETION assistant: Hello"
    )


def test_extra_body_adds_and_removes_fields():
    settings = {"extra_body": {"temperature": None, "max_tokens": 9, "top_p": 0.5}}
    body = Judge("http://localhost/v1", "m", TEMPLATE, **settings)._body(batch(["c"]), 0)
    body.pop("messages")
    assert body == {"model": "m", "max_tokens": 9, "top_p": 0.5}


def score_in(answer, **kwargs):
    return Judge("http://localhost/v1", "m", TEMPLATE, **kwargs)._read(
        {"choices": [{"message": {"content": answer}}]}
    )


def test_default_pattern_matches_the_last_score():
    scores = {
        "8": 8,
        "Score: 8/10.": 8,
        "8 / 10": 8,
        "3 then 7.5 out of 10": 7.5,
        "-2.": -2,
        "**4**": 4,
    }
    assert {answer: score_in(answer) for answer in scores} == scores
    for answer in ("1,000", "1.2.3", "nan", "v2", ""):
        with pytest.raises(ValueError, match="no match"):
            score_in(answer)
    for answer, score in (("Score: 8", 8), ("I give 7 points", 7)):
        assert score_in(answer, pattern=r"Score: (\d+)|(\d+) points") == score


def test_pattern_of_the_page_reads_scores_as_models_write_them():
    page = Path(__file__).parents[3] / "docs" / "rewards.md"
    [pattern] = re.findall(r'pattern=r"(.*)",', page.read_text(encoding="utf-8"))
    scores = {
        "Score: 8": 8,
        "**Score:** 8": 8,
        "Score: **8**": 8,
        "Score: 8.5.": 8.5,
        "score: 10/10": 10,
        "Score: 8, as it is short": 8,
    }
    assert {answer: score_in(answer, pattern=pattern) for answer in scores} == scores
    with pytest.raises(ValueError, match="no match"):
        score_in("Score: 8,5", pattern=pattern)


def test_template_without_the_completion_raises():
    with pytest.raises(ValueError, match="`prompt_template` must contain"):
        Judge("http://localhost/v1", "m", "{prompt}")
