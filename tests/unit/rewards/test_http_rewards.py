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

import pytest
from http_rewards import KEY, TEMPLATE, classifier, judge, predicted, remote, serving
from tokenizers import processors

from trl_ppo_ext.rewards import RewardError, ScoringBatch, read_scores
from trl_ppo_ext.rewards.http import Judge, RemoteReward, fill


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


def test_judge_and_remote_reward_score_each_completion(port):
    completions = ["a" * n for n in range(50)]
    assert judge(port, "ok").score(batch(completions)) == list(range(50))
    for make in (remote, predicted):
        assert make(port, "ok", batch_size=7).score(batch(completions)) == list(range(50))
        assert make(port, "zipped").score(batch(completions)) == list(range(50))
    assert judge(port, "ok").score(batch([])) == remote(port, "ok").score(batch([])) == []


def test_hundred_slow_calls_run_concurrently(port):
    asked = judge(port, "slow", concurrency=32)
    seconds = []
    for _ in range(3):  # the best of three: other work on this machine is not what is measured
        start = time.perf_counter()
        assert asked.score(batch(["abc"] * 100)) == [3.0] * 100
        seconds.append(time.perf_counter() - start)
    print(f"\n100 calls of 0.2 s at concurrency 32: {', '.join(f'{s:.2f} s' for s in seconds)}")
    assert 0.8 <= min(seconds) < 2  # four waves; faster would be more than 32 at a time, and in turn they take 20 s


@pytest.mark.parametrize("make", [judge, remote, predicted])
def test_scoring_works_inside_a_running_event_loop(port, make):
    async def notebook():
        return make(port, "ok").score(batch(["ab", "c"]))

    assert asyncio.run(notebook()) == [2, 1]


@pytest.mark.parametrize("make", [judge, remote, predicted])
def test_server_that_fails_twice_is_retried(port, make):
    assert make(port, "broken_twice", max_retries=2).score(batch(["abc"])) == [3]


@pytest.mark.parametrize("mode", ["limited", "limited_until"])
def test_retry_after_is_honored(port, mode):
    start = time.perf_counter()
    assert judge(port, mode, timeout=5).score(batch(["abc"])) == [3]
    assert 0.9 < time.perf_counter() - start < 3


def test_server_restart_loses_no_score():
    completions = ["a" * n for n in range(32)]
    with serving() as (process, port):
        asked = judge(port, "slow", concurrency=4, max_retries=6)
        scores = []
        run = threading.Thread(target=lambda: scores.extend(asked.score(batch(completions))))
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
    "broken": (2, "it answered 500 Internal Server Error: CUDA out of memory"),
    "limited_for_an_hour": (1, "it answered 429"),
    "silent": (2, "no complete answer within timeout=0.5 s"),
    "trickle": (2, "no complete answer within timeout=0.5 s"),
    "half_json": (1, "it answered .*, which is not"),
    "hangs_up": (2, "the connection failed .*RemoteProtocolError"),
    "another_shape": (1, "it answered .*hello.*, which is not"),
    "redirect": (1, ".* a redirect to http://example.com:81/elsewhere; use that as `url`"),
}
JUDGED = {
    "numberless": (1, "its answer has no match of `pattern` .*: 'I would rather not say.'"),
    "nan": (1, "its answer's score nan is outside `score_range`"),
    "cut_off": (1, "its answer was truncated .*; raise `max_tokens`"),
    "wrong_count": (1, "its answer's score 99999 is outside `score_range`"),
}


def attempts(reward):
    path = urllib.parse.urlsplit(reward.url)
    with urllib.request.urlopen(f"http://{path.netloc}/") as counts:
        return json.load(counts)[path.path]


@pytest.mark.parametrize("mode", CAUSES | JUDGED)
def test_misbehaving_judge_fails_in_time_with_the_cause(port, mode):
    tries, cause = (CAUSES | JUDGED)[mode]
    asked = judge(port, mode, score_range=(0, 100), timeout=0.5)
    with ends_within(2.5):  # two attempts of half a second each and a wait of at most one
        errors = asked.score(batch(["abc", "de"]))
    for error in errors:
        with pytest.raises(RewardError, match=f"The judge `rubric` at 127.0.0.1:{port} failed: {cause}"):
            raise error
    assert attempts(asked) == 2 * tries  # of two requests


@pytest.mark.parametrize("make", [remote, predicted])
@pytest.mark.parametrize("mode", [*CAUSES, "wrong_count"])
def test_misbehaving_remote_reward_fails_in_time_with_the_cause(port, mode, make):
    tries, cause = CAUSES.get(mode, (1, "it returned 2 scores for 3 completions"))
    asked = make(port, mode, timeout=0.5)
    with ends_within(2.5):
        errors = asked.score(batch(["abc", "de", "f"]))
    for error in errors:
        with pytest.raises(RewardError, match=f"The remote reward `house` at 127.0.0.1:{port} failed: {cause}"):
            raise error
    assert attempts(asked) == tries


def test_closed_port_is_a_failure():
    with serving() as (_, port):
        pass
    with ends_within(10):
        (error,) = judge(port, "ok").score(batch(["abc"]))
    assert "failed: the connection failed" in str(error)


def test_failed_request_fails_only_its_completions(port):
    given = batch(["a", "b", "x", "d", "e"])
    scores = remote(port, "broken_for_x", batch_size=2, max_retries=0).score(given)
    assert [isinstance(score, RewardError) for score in scores] == [False, False, True, True, False]
    scores = judge(port, "broken_for_x", max_retries=0).score(given)
    assert [isinstance(score, RewardError) for score in scores] == [False, False, True, False, False]


@pytest.mark.parametrize("make", [remote, predicted])
def test_score_of_nan_fails_alone(port, make):
    scores = read_scores("r", make(port, "nan").score(batch(["a", "bb"])), [1, 1])
    assert "returned nan" in str(scores.failures[0]) and scores.totals[1] == 2


@pytest.mark.parametrize("make, labels", [(remote, (0, 1)), (predicted, ("GOOD", "BAD"))])
def test_label_chooses_an_output(port, make, labels):
    for label, sign in zip(labels, (1, -1)):
        assert make(port, "classifier-of-two", label=label).score(batch(["abc", ""])) == [3 * sign, 0]
    for label in (None, 7):
        (error,) = make(port, "classifier-of-two", label=label).score(batch(["abc"]))
        assert f"`label` must be one of its outputs ({labels[0]!r}" in str(error) and f"got {label}" in str(error)


@pytest.mark.parametrize("make, field", [(remote, "input"), (predicted, "inputs")])
def test_classifier_gets_the_text_that_the_run_would_score(make, field):
    """Text with an EOS, chat messages by their template; a tokenizer that begins with BOS adds it on the server."""
    asked = make(1, "ok")
    chat = [{"role": "user", "content": "w1"}], [{"role": "assistant", "content": "w2"}]
    bodies = [asked._body(ScoringBatch([p], [c], [[1]]), slice(0, 1)) for p, c in (("w1", " w2"), chat)]
    assert [str(body[field][0]).strip("[']") for body in bodies] == ["w1 w2<eos>", "<bos> user w1 <bos> assistant w2 "]
    assert make is predicted or [body["add_special_tokens"] for body in bodies] == [True, False]
    if make is predicted:
        inner = asked.tokenizer.backend_tokenizer
        inner.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
        (text,) = asked._body(ScoringBatch([chat[0]], [chat[1]], [[1]]), slice(0, 1))["inputs"][0]
        assert text == " user w1 <bos> assistant w2 "


def test_remote_reward_names_the_endpoints_that_it_knows(port):
    assert RemoteReward(f"http://127.0.0.1:{port}", classifier()).url.endswith("/classify")
    with pytest.raises(ValueError, match=r"`url` must end with /classify \(vLLM\) or /predict \(TEI\), got .*/score"):
        remote(port, "ok", endpoint="score")


def test_dead_server_is_given_up_for_the_rest_of_a_batch(port):
    asked = judge(port, "broken", "given-up", concurrency=8, max_retries=1)
    with ends_within(3):
        errors = asked.score(batch(["abc"] * 500))
    assert all(isinstance(error, RewardError) for error in errors)
    assert "skipped, because all requests before it failed: it answered 500" in str(errors[-1])
    assert attempts(asked) <= 2 * 16


# ---- keys and addresses ----


@pytest.mark.parametrize("make", [judge, remote, predicted])
def test_key_is_sent_and_never_shown(port, make, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TEST_KEY", f"{KEY}\n")
    right = make(port, "needs_key", KEY[::-1], api_key_env="TEST_KEY")
    assert right.score(batch(["abc"])) == [3]
    wrong = make(port, "wrong_key", api_key_env="TEST_KEY")  # the server repeats it
    (error,) = wrong.score(batch(["abc"]))
    assert "401 Unauthorized: *** (it repeats" in str(error)
    (slow,) = make(port, "limited_for_an_hour", api_key_env="TEST_KEY", timeout=0.5).score(batch(["abc"]))
    for shown in (repr(wrong), vars(wrong), pickle.dumps(wrong), pickle.dumps(error), caplog.text):
        assert KEY not in str(shown)
    assert caplog.text and error.__context__ is None and slow.__context__ is None
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(ValueError, match="`TEST_KEY` is not set"):
        right.score(batch(["abc"]))


@pytest.mark.parametrize("make", [judge, remote, predicted])
@pytest.mark.parametrize("how", ["body", "redirect", "scores"])
def test_parts_of_a_key_are_not_shown(port, make, how, monkeypatch):
    """Cut, split, in another case, coded, in a redirect, and instead of a score."""
    monkeypatch.setenv("TEST_KEY", KEY)
    (error,) = make(port, f"echo_{how}", api_key_env="TEST_KEY").score(batch(["abc"]))
    if not isinstance(error, RewardError):  # of a score that is text
        error = read_scores("r", [error], [1]).failures[0]
    text = re.sub(r"%..|[^a-z0-9]", "", str(error).replace(f"127.0.0.1:{port}", "").lower())
    for start in range(len(KEY) - 5):
        assert re.sub(r"\W", "", KEY)[start : start + 5] not in text, (KEY[start:], str(error))
    assert "***" in str(error)


def test_invalid_proxy_is_named_without_its_password(monkeypatch):
    for wrong in ("http://user:hun/ter2@proxy:80", "ftp://user:hunter2@proxy", "http://user@proxy:hunter2"):
        monkeypatch.setenv("HTTPS_PROXY", wrong)
        with pytest.raises(ValueError, match=r"`HTTPS_PROXY`.* must be an address") as caught:
            RemoteReward("https://example.invalid", classifier()).score(batch(["abc"]))
        assert "hun" not in str(caught.value) and caught.value.__cause__ is None


def test_control_characters_of_a_server_are_escaped(port):
    (error,) = judge(port, "colored").score(batch(["abc"]))
    assert r"\x1b[31m" in str(error) and str(error).isprintable()


def test_pattern_that_hangs_fails_in_time(port):
    with ends_within(3):
        (error,) = judge(port, "many_letters", pattern=r"(a|aa)+$").score(batch(["abc"]))
    assert "searched its answer for more than 1 s; remove nested repeats" in str(error)


@pytest.mark.parametrize("make", [judge, remote, predicted])
def test_openai_credentials_in_the_environment_are_not_sent(port, make, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: {KEY}")
    (error,) = make(port, "wrong_key").score(batch(["abc"]))
    assert "401 Unauthorized: no such key: None" in str(error)


@pytest.mark.parametrize(
    ("given", "said"), [("UNSET_KEY", "`UNSET_KEY` is not set"), (KEY, "name"), ("hf_Ab", "name")]
)
def test_missing_variable_or_a_key_in_its_place_raises(given, said):
    for make in (judge, remote, predicted):
        with pytest.raises(ValueError, match=said) as caught:
            make(1, "ok", api_key_env=given)
        assert given == "UNSET_KEY" or given not in str(caught.value)


@pytest.mark.parametrize(
    "url", "https://user:hunter2@host/v1 https://host/v1?key=hunter2 http://user:hunter2 ftp://host host".split()
)
def test_url_with_secrets_or_without_a_host_raises(url):
    with pytest.raises(ValueError, match="`url`") as caught:
        Judge(url, "m", TEMPLATE)
    assert "hunter2" not in str(caught.value)


def test_key_over_plain_http_to_another_machine_warns(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    with pytest.warns(UserWarning, match="unencrypted"):
        Judge("http://judge.example/v1", "m", TEMPLATE, api_key_env="TEST_KEY")
    Judge("https://judge.example/v1", "m", TEMPLATE, api_key_env="TEST_KEY")


def test_loopback_requests_bypass_proxies(port, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert judge(port, "ok").score(batch(["abc"])) == [3]


# ---- a judge's prompt and answer ----


def test_inserted_text_is_not_interpreted():
    values = {"prompt": "{completion} {0} {", "completion": "}{prompt}{{x}}"}
    assert fill('{"a": 1} {prompt}|{completion}', values) == '{"a": 1} {completion} {0} {|}{prompt}{{x}}'
    with pytest.warns(UserWarning, match="{answer}"):
        assert fill("{answer}", values) == "{answer}"


def test_template_takes_columns_of_the_dataset():
    asked = Judge("http://localhost/v1", "m", "{completion}{target}")
    body = asked._body(ScoringBatch(["p"], ["c"], [[1]], {"target": [7]}), slice(0, 1))
    assert body["messages"] == [{"role": "user", "content": "c7"}]


def test_chat_messages_are_readable():
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = judge(1, "ok")._body(
        ScoringBatch([prompt], [[{"role": "assistant", "content": "Hello"}]], [[1]]), slice(0, 1)
    )
    asked = "Rate what follows.\nPROMPT system: Be kind.\nuser: Hi\nCOMPLETION Hello"
    assert body["messages"] == [{"role": "user", "content": asked}]


def test_pattern_may_have_alternatives():
    asked = Judge("http://localhost/v1", "m", TEMPLATE, pattern=r"Score: (\d+)|(\d+) points")
    for answer, score in (("Score: 8", 8), ("I give 7 points", 7)):
        assert asked._read({"choices": [{"message": {"content": answer}}]}) == [score]


@pytest.mark.parametrize(
    ("answer", "score"),
    [("8", 8), ("Score: 8/10.", 8), ("8 / 10", 8), ("3 then 7.5 out of 10", 7.5), ("-2.", -2), ("**4**", 4)]
    + [(text, None) for text in ("1,000", "1.2.3", "nan", "v2", "")],
)
def test_default_pattern_matches_the_last_score(answer, score):
    chat = {"choices": [{"message": {"content": answer}}]}
    asked = Judge("http://localhost/v1", "m", TEMPLATE)
    if score is None:
        with pytest.raises(ValueError, match="no match"):
            asked._read(chat)
    else:
        assert asked._read(chat) == [score]


@pytest.mark.parametrize(
    "bad",
    "prompt_template={prompt} pattern=( score_range=(2,1) timeout=0 concurrency=0".split(),
)
def test_invalid_arguments_raise(bad):
    name, value = bad.split("=")
    value = value if name in ("prompt_template", "pattern") else eval(value)
    with pytest.raises(ValueError, match=f"`{name}`"):
        Judge(**({"url": "http://localhost/v1", "model": "m", "prompt_template": TEMPLATE} | {name: value}))
