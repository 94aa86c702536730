"""Judges and remote rewards against a real server that misbehaves, and the server that ships with the package."""

import asyncio
import http.client
import json
import logging
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn
from http_rewards import KEY, TEMPLATE, judge, remote, serving
from tiny import WORDS, llama, tokenizer

from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands import serve_reward
from trl_ppo_ext.rewards import ClassifierReward, RewardError, ScoringBatch, load_classifier, read_scores
from trl_ppo_ext.rewards.http import CONNECT_TIMEOUT, Judge, RemoteReward, fill, readable


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
    assert remote(port, "ok", batch_size=7).score(batch(completions)) == list(range(50))
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


@pytest.mark.parametrize("make", [judge, remote])
def test_scoring_works_inside_a_running_event_loop(port, make):
    async def notebook():
        return make(port, "ok").score(batch(["ab", "c"]))

    assert asyncio.run(notebook()) == [2, 1]


@pytest.mark.parametrize("make", [judge, remote])
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
    "half_json": (2, "it answered with .* bytes that are not JSON"),
    "hangs_up": (2, "the connection failed .*RemoteProtocolError"),
    "another_shape": (1, "it answered .*hello"),
    "huge": (1, "it answered with more than 4194304 bytes"),
    "zipped": (1, "it answered with compressed content"),
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


@pytest.mark.parametrize("mode", [*CAUSES, "wrong_count"])
def test_misbehaving_remote_reward_fails_in_time_with_the_cause(port, mode):
    tries, cause = CAUSES.get(mode, (1, "it returned 2 scores for 3 completions"))
    asked = remote(port, mode, timeout=0.5)
    with ends_within(2.5):
        errors = asked.score(batch(["abc", "de", "f"]))
    for error in errors:
        with pytest.raises(RewardError, match=f"The remote reward `house` at 127.0.0.1:{port} failed: {cause}"):
            raise error
    assert attempts(asked) == tries


def test_closed_port_is_a_failure():
    with serving() as (_, port):
        pass
    with ends_within(CONNECT_TIMEOUT):
        (error,) = judge(port, "ok").score(batch(["abc"]))
    assert "failed: the connection failed" in str(error)


def test_failed_request_fails_only_its_completions(port):
    given = batch(["a", "b", "x", "d", "e"])
    scores = remote(port, "broken_for_x", batch_size=2, max_retries=0).score(given)
    assert [isinstance(score, RewardError) for score in scores] == [False, False, True, True, False]
    scores = judge(port, "broken_for_x", max_retries=0).score(given)
    assert [isinstance(score, RewardError) for score in scores] == [False, False, True, False, False]


def test_invalid_scores_fail_alone_and_null_does_not_apply(port):
    scores = read_scores("r", remote(port, "odd").score(batch(["a"] * 5)), [1] * 5)
    assert scores.totals.isnan().tolist() == [True, True, False, True, False] and scores.totals[4] == 1
    for row, returned in ((1, "'4'"), (3, "1000")):
        assert f"returned {returned}" in str(scores.failures[row])
        assert "must be a finite number" in str(scores.failures[row])
    nan = read_scores("r", remote(port, "nan").score(batch(["a", "bb"])), [1, 1])
    assert "returned nan" in str(nan.failures[0]) and nan.totals[1] == 2


def test_dead_server_is_given_up_for_the_rest_of_a_batch(port):
    asked = judge(port, "broken", "given-up", concurrency=8, max_retries=1)
    with ends_within(3):
        errors = asked.score(batch(["abc"] * 500))
    assert all(isinstance(error, RewardError) for error in errors)
    assert "skipped, because all requests before it failed: it answered 500" in str(errors[-1])
    assert attempts(asked) <= 2 * 16


# ---- keys and addresses ----


@pytest.mark.parametrize("make", [judge, remote])
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


@pytest.mark.parametrize("make", [judge, remote])
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
            RemoteReward("https://example.invalid").score(batch(["abc"]))
        assert "hun" not in str(caught.value) and caught.value.__cause__ is None


def test_control_characters_of_a_server_are_escaped(port):
    (error,) = judge(port, "colored").score(batch(["abc"]))
    assert r"\x1b[31m" in str(error) and str(error).isprintable()


def test_pattern_that_hangs_fails_in_time(port):
    with ends_within(3):
        (error,) = judge(port, "many_letters", pattern=r"(a|aa)+$").score(batch(["abc"]))
    assert "searched its answer for more than 1 s; remove nested repeats" in str(error)


@pytest.mark.parametrize("make", [judge, remote])
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
    for make in (judge, remote):
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
    assert readable(prompt) == "System: Be kind.\n\nUser: Hi"
    assert readable([{"role": "assistant", "content": "Hello"}], False) == "Hello"


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
    "prompt_template={prompt} pattern=( score_range=(2,1) extra_body={'n':1} timeout=0 concurrency=0".split(),
)
def test_invalid_arguments_raise(bad):
    name, value = bad.split("=")
    value = value if name in ("prompt_template", "pattern") else eval(value)
    with pytest.raises(ValueError, match=f"`{name}`"):
        Judge(**({"url": "http://localhost/v1", "model": "m", "prompt_template": TEMPLATE} | {name: value}))


# ---- trl-ppo serve-reward ----


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    llama(classifier=True).save_pretrained(path)
    tokenizer().save_pretrained(path)
    options = "--port 0 --quantization none --batch-size 4 --api-key-env TEST_KEY --max-request-bytes 5000"
    process = subprocess.Popen(
        [sys.executable, "-m", "trl_ppo_ext.commands.main", "serve-reward", str(path), *options.split()],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TEST_KEY": KEY, "HF_HUB_OFFLINE": "1"},
    )
    for line in process.stderr:
        if "running on http://127.0.0.1:" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield path, f"http://127.0.0.1:{line.split('127.0.0.1:')[1].split()[0]}"
            break
    else:
        pytest.fail("the server did not start")
    process.terminate()
    assert process.wait(10) in (0, -signal.SIGTERM)


def test_served_classifier_scores_as_in_this_process(served, monkeypatch):
    path, url = served
    with urllib.request.urlopen(f"{url}/health") as answer:  # without a key
        assert json.load(answer) == {"status": "ok"}
    monkeypatch.setenv("TEST_KEY", KEY)
    completions = [" ".join(["", *WORDS[: row % 9 + 1]]) for row in range(40)]
    here = ClassifierReward(load_classifier(str(path), torch.float32, "none")).score(batch(completions))
    there = RemoteReward(url, api_key_env="TEST_KEY", batch_size=7).score(batch(completions))
    assert there == pytest.approx(here, abs=1e-5)
    assert len({round(score, 3) for score in here}) > 5
    (error,) = RemoteReward(url, api_key_env="TEST_KEY").score(batch(["w1 " * 3000]))
    assert "413" in str(error) and "send fewer completions" in str(error)


@pytest.mark.parametrize(
    ("content", "key", "status", "said"),
    [
        (b"{}", None, 401, "key"),
        (b"{}", "Bearer wrong", 401, "key"),
        (b"{", f"Bearer {KEY}", 400, "must be JSON"),
        (b"[1]", f"Bearer {KEY}", 400, "must be"),
        (b'{"prompts": ["a"], "completions": []}', f"Bearer {KEY}", 400, "1 prompts for 0 completions"),
        (b'{"prompts": ["a"], "completions": [3]}', f"Bearer {KEY}", 400, "all text or all lists"),
        (b'{"prompts": [[{"role": 3}]], "completions": [[{"role": 4}]]}', f"Bearer {KEY}", 500, "scoring failed with"),
        (b" " * 5001, f"Bearer {KEY}", 413, "longer than 5000 bytes"),
    ],
)
def test_invalid_request_gets_a_clear_error(served, content, key, status, said):
    request = urllib.request.Request(f"{served[1]}/score", content, {"Authorization": key} if key else {})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    text = caught.value.read().decode()
    assert caught.value.code == status and said in text
    assert "Traceback" not in text and KEY not in text


class Stub:
    """A reward that counts the completions it has scored."""

    batch_size = 2

    def __init__(self, seconds=0.0):
        self.seconds, self.scored = seconds, 0

    def score(self, given):
        time.sleep(self.seconds)
        self.scored += len(given)
        return [float(len(completion)) for completion in given.completions]


@contextmanager
def running(reward):
    """The server without a key, in a thread; yields its port."""
    app = serve_reward.create_app(reward, None, 2**20)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **serve_reward.SETTINGS))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def ask(port, completions=("ab",), method="POST", **headers):
    content = json.dumps({"prompts": ["p"] * len(completions), "completions": list(completions)})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, "/score", content, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_server_without_a_key_refuses_web_pages():
    with running(Stub()) as port:
        for host in ("127.0.0.1", f"localhost:{port}", "[::1]:9000", "127.9.9.9"):
            assert ask(port, Host=host) == (200, '{"scores":[2.0]}')
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
            status, text = ask(port, **headers)
            assert status == 403 and "--api-key-env" in text


def test_idle_connections_neither_shut_out_others_nor_stay(monkeypatch):
    monkeypatch.setattr(serve_reward, "ARRIVAL_TIMEOUT", 0.5)
    with running(Stub()) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        idle[1].sendall(b"POST /score HTTP/1.1\r\n")  # slow in its headers
        idle[2].sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")  # in its body
        assert ask(port)[0] == 200
        for connection in idle:
            connection.settimeout(3)
            assert connection.recv(1) == b""
            connection.close()


def test_request_with_too_many_rows_is_refused_at_once():
    with running(Stub(10)) as port, ends_within(2):
        status, text = ask(port, [""] * 100_000)
        assert status == 413 and "100000 completions; send at most 1024" in text


def test_request_is_not_scored_after_its_client_has_left():
    reward = Stub(0.3)
    with running(reward) as port:
        first = threading.Thread(target=ask, args=(port,))
        first.start()
        time.sleep(0.1)
        left = http.client.HTTPConnection("127.0.0.1", port)
        left.request("POST", "/score", json.dumps({"prompts": ["p"] * 900, "completions": ["c"] * 900}))
        time.sleep(0.1)
        left.close()
        assert ask(port)[0] == 200
        first.join()
        assert reward.scored == 2


def test_score_of_nan_is_sent_as_null():
    reward = Stub()
    reward.score = lambda given: [1.0, math.nan, math.inf]
    with running(reward) as port:
        assert ask(port, ["a", "b", "c"]) == (200, '{"scores":[1.0,null,null]}')


def test_served_model_gets_label_and_trust(monkeypatch):
    seen = {}
    monkeypatch.setattr("trl_ppo_ext.commands.serve_reward.load_classifier", lambda *args: seen.update(loaded=args[4]))
    monkeypatch.setattr(
        "trl_ppo_ext.commands.serve_reward.ClassifierReward", lambda model, **kwargs: seen.update(kwargs)
    )
    monkeypatch.setattr(uvicorn, "run", lambda *args, **kwargs: None)
    assert cli.main("serve-reward MODEL --device cpu --reward-label 1 --trust-remote-code".split()) == 0
    assert seen == {"loaded": True, "label": 1, "trust_remote_code": True, "batch_size": 16}


@pytest.mark.parametrize("options", ["--host 0.0.0.0", "--api-key-env UNSET_KEY", "--max-request-bytes -7"])
def test_command_line_errors_are_one_line(options, capsys):
    assert cli.main(["serve-reward", "nowhere", *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-ppo serve-reward: error: ") and options.split()[1] in line


def test_server_without_its_extra_names_the_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "trl_ppo_ext.commands.serve_reward")
    assert cli.main(["serve-reward", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "pip install '.[serve]' in the clone" in said and "or pip install uvicorn starlette" in said


def test_help_imports_nothing_heavy():
    code = f"""if True:
        import importlib.machinery, sys, types
        package = types.ModuleType("trl_ppo_ext")  # without what the package's own __init__ imports
        package.__path__ = [{str(Path(cli.__file__).parents[1])!r}]
        sys.modules["trl_ppo_ext"] = package
        from trl_ppo_ext.commands import main as cli
        try:
            cli.main(["--help"])
        finally:
            assert not {{"torch", "transformers", "starlette"}} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "serve" in done.stdout, done.stderr
