"""The client of a vLLM server, against one with recorded answers; tests/with_vllm has the real
one."""

import asyncio
import json
import re
import shutil
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from fake_vllm import LOGPROB, serving
from peft import LoraConfig
from runs_of_tiny import trainer, weights
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from tiny import config, llama, prompts
from transformers import TrainerCallback

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.episodes import vllm_server
from trl_ppo_ext.episodes.engine import Request, VLLMError
from trl_ppo_ext.episodes.vllm_server import VLLMServer
from trl_ppo_ext.rewards import RewardError

BASE = "org/base"
KEY = "tok-0123456789abcdef"
SETTINGS = {"temperature": 0.7, "stop_token_ids": [1], "logprobs": 0}
REQUESTS = [Request([4 + row, 5], 1 + row % 3, 100 + row, 6) for row in range(20)]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(vllm_server, "PAUSE", 0.02)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with serving(BASE) as server:
        yield server


def client(server, timeout=5.0, base=BASE, rank=16):
    return VLLMServer(server.url, timeout, base, SETTINGS, rank)


def adapter(directory, rank=4):
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (directory / "adapter_model.safetensors").touch()
    return directory


@pytest.fixture
def loaded(server, tmp_path):
    built = client(server)
    built.load("run-1", adapter(tmp_path / "run-1"))
    return built


def paths(server):
    return [path for path, *_ in server.asked]


def test_requests_have_the_sampling_settings_and_seeds(server, loaded):
    sampled = loaded.sample("run-1", REQUESTS)
    asked = [body for path, body, _ in server.asked if path == "/v1/completions"]
    by_seed = {body["seed"]: body for body in asked}
    for request, completions in zip(REQUESTS, sampled, strict=True):
        body = by_seed[request.seed]
        expected = {
            "model": "run-1",
            "prompt": request.prompt_ids,
            "n": request.copies,
            "seed": request.seed,
        }
        assert body == SETTINGS | expected | {"max_tokens": 6, "return_token_ids": True}
        assert len(completions) == request.copies
        assert all(x.logprobs == [LOGPROB] * len(x.ids) for x in completions)
    assert loaded.sample("run-1", REQUESTS[::-1])[::-1] == sampled


def test_adapter_that_is_loaded_or_unloaded_twice_is_no_error(server, loaded, tmp_path):
    loaded.load("run-1", tmp_path / "run-1")
    loaded.unload("run-1")
    loaded.unload("run-1")
    assert not server.adapters


# ---- outages ----


def test_unavailable_server_is_asked_again(server, loaded):
    expected = loaded.sample("run-1", REQUESTS)
    server.asked.clear()
    server.failures = {"/v1/completions": [429, 502, 503, 504, "engine died"]}
    assert loaded.sample("run-1", REQUESTS) == expected
    assert len(server.asked) == len(REQUESTS) + 5


def test_completion_that_a_shutdown_cuts_is_asked_for_again(server, loaded):
    """vLLM answers requests in flight with the tokens so far, as if they were sampled."""
    expected = loaded.sample("run-1", REQUESTS[2:3])
    complete = server.completions

    def cut(body):
        server.completions = complete
        answer = json.loads(complete(body).body)
        choices = [
            x | {"finish_reason": "abort", "token_ids": x["token_ids"][:1]}
            for x in answer["choices"]
        ]
        choices = [x | {"logprobs": {"token_logprobs": [LOGPROB]}} for x in choices]
        return JSONResponse(answer | {"choices": choices})

    server.completions = cut
    assert loaded.sample("run-1", REQUESTS[2:3]) == expected
    assert paths(server).count("/v1/completions") == 3


def test_words_of_an_outage_in_a_completion_are_no_outage(server, loaded):
    text = '{"finish_reason":"abort", "message": "EngineCore encountered an issue"}'
    complete = server.completions
    server.completions = lambda body: JSONResponse(json.loads(complete(body).body) | {"text": text})
    loaded.sample("run-1", REQUESTS[:1])
    assert paths(server).count("/v1/completions") == 1


def test_other_failures_raise_at_once(server, loaded):
    server.failures = {"/v1/completions": [500]}
    with pytest.raises(
        VLLMError, match=r"did not sample 1 completions with token ids and log-probs: 500 busy\."
    ):
        loaded.sample("run-1", REQUESTS[:1])
    server.failures = {"/v1/completions": ["too long"]}
    with pytest.raises(
        VLLMError, match=r"400 .*max_tokens=400 cannot be greater than max_model_len=256"
    ):
        loaded.sample("run-1", REQUESTS[:1])
    assert paths(server).count("/v1/completions") == 2


def test_restarted_server_gets_the_adapter_again(server, loaded):
    expected = loaded.sample("run-1", REQUESTS)
    server.stop()
    server.start()
    assert loaded.sample("run-1", REQUESTS) == expected
    assert server.adapters.keys() == {"run-1"}


def test_server_that_is_gone_raises_after_the_timeout(server, loaded):
    loaded.timeout = 0.3
    server.stop()
    began = time.monotonic()
    with pytest.raises(
        VLLMError,
        match=r"No answer .* within `vllm_server_timeout=0.3` s \(ConnectError.*vllm serve",
    ):
        loaded.sample("run-1", REQUESTS)
    assert time.monotonic() - began < 2
    server.start()


def test_slow_completions_are_waited_for_while_the_server_runs(server, loaded):
    loaded.timeout = 0.2
    server.delay = 0.5
    assert len(loaded.sample("run-1", REQUESTS)) == 20
    assert paths(server).count("/v1/completions") == 20


def test_server_shutting_down_during_a_request_is_not_awaited(server, loaded, monkeypatch):
    """It no longer listens, and neither answers nor hangs up while a request is in flight."""
    monkeypatch.setattr(vllm_server, "LIFE", 0.1)
    loaded.timeout = 0.2
    server.delay = 4.0
    threading.Timer(0.3, lambda: setattr(server.server, "should_exit", True)).start()
    began = time.monotonic()
    with pytest.raises(VLLMError, match=r"No answer from .*\(ConnectError"):
        loaded.sample("run-1", REQUESTS[:3])
    assert time.monotonic() - began < 3


def unfinished(text, seconds):
    """An answer that never ends: it drips, or is silent for a long time."""

    async def parts():
        while True:
            await asyncio.sleep(seconds)
            yield text

    return StreamingResponse(parts())


@pytest.mark.parametrize("answer", [("", 60.0), (" ", 0.02)], ids=["silent", "drips"])
@pytest.mark.parametrize(
    "path", ["models", "load_lora_adapter", "unload_lora_adapter", "completions"]
)
def test_unanswered_request_ends_although_the_server_runs(
    server, loaded, path, answer, monkeypatch
):
    monkeypatch.setattr(vllm_server, "LIFE", 0.1)
    monkeypatch.setattr(vllm_server, "SLOWEST", 0.05)
    server.failures = {f"/v1/{path}": [unfinished(*answer) for _ in range(50)]}
    ask = {
        "models": lambda: client(server, timeout=0.3),
        "load_lora_adapter": lambda: loaded.load("run-2", loaded.directory),
        "unload_lora_adapter": lambda: loaded.unload("run-1"),
        "completions": lambda: loaded.sample("run-1", REQUESTS[:2]),
    }
    loaded.timeout = 0.3
    began = time.monotonic()
    with pytest.raises(
        VLLMError, match=r"No answer from .* within `vllm_server_timeout=0.3` s \(Timeout"
    ):
        ask[path]()
    assert time.monotonic() - began < 10  # a machine may be busy; an answer would take 60 s


def test_gateway_that_times_out_again_and_again_ends_the_wait(server, loaded, monkeypatch):
    monkeypatch.setattr(vllm_server, "LIFE", 0.02)
    monkeypatch.setattr(vllm_server, "SLOWEST", 0.0)
    # each attempt takes longer than a sign of life
    loaded.timeout = 0.3
    server.delay = 0.1
    complete = server.completions
    server.completions = lambda body: PlainTextResponse("gateway", 504)
    with pytest.raises(
        VLLMError, match=r"No answer .*504 gateway|No answer .*does not answer this request"
    ):
        loaded.sample("run-1", REQUESTS[:1])
    server.completions = complete


@pytest.mark.parametrize(
    "change",
    [
        lambda choices: [],
        lambda choices: choices[1:],
        lambda choices: [*choices, choices[0]],
        lambda choices: [choices[0] | {"token_ids": None}, *choices[1:]],
        lambda choices: [choices[0] | {"token_ids": []}, *choices[1:]],
        lambda choices: [choices[0] | {"logprobs": None}, *choices[1:]],
        # more tokens than asked for
        lambda choices: [
            choices[0] | {"logprobs": {"token_logprobs": [LOGPROB] * 7}, "token_ids": [4] * 7},
            *choices[1:],
        ],
        lambda choices: [
            choices[0] | {"logprobs": {"token_logprobs": [None, None]}, "token_ids": [4, 5]},
            *choices[1:],
        ],
        lambda choices: [{}, *choices[1:]],
    ],
)
def test_completions_of_another_form_raise(server, loaded, change):
    complete = server.completions

    def changed(body):
        answer = json.loads(complete(body).body)
        return JSONResponse(answer | {"choices": change(answer["choices"])})

    server.completions = changed
    with pytest.raises(
        VLLMError, match=r'did not sample 3 completions with token ids and log-probs: 200 \{"id"'
    ):
        loaded.sample("run-1", REQUESTS[2:3])


@pytest.mark.parametrize("text", ["<html>Sign in</html>", "", '"text"', "[]", "null", "{"])
def test_answer_that_is_not_the_servers_raises(server, loaded, text):
    server.failures = {f"/v1/{path}": [HTMLResponse(text)] for path in ("models", "completions")}
    with pytest.raises(VLLMError, match=r"is not a vLLM server: 200 " + re.escape(text)):
        client(server)
    with pytest.raises(VLLMError, match=r"did not sample 1 completions .*: 200 " + re.escape(text)):
        loaded.sample("run-1", REQUESTS[:1])


def test_failure_that_mentions_a_loaded_adapter_is_a_failure(server, loaded, tmp_path):
    server.failures = {
        "/v1/load_lora_adapter": [
            PlainTextResponse("cannot evict x: it has already been loaded", 500)
        ]
    }
    with pytest.raises(VLLMError, match="cannot load the adapter: 500 cannot evict"):
        loaded.load("run-2", tmp_path / "run-1")


# ---- servers that cannot serve the run ----


def command(server, rank=16):
    return re.escape(
        f"`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {BASE} --enable-lora --max-loras 2 "
        f"--max-lora-rank {rank} --logprobs-mode processed_logprobs --generation-config vllm "
        f"--host 127.0.0.1 --port {server.port}`"
    )


def test_another_base_raises_with_the_command(server):
    server.base = "org/other"
    message = rf"serves `org/other`, the policy's base is `{BASE}`; start.*{command(server)}"
    with pytest.raises(VLLMError, match=message):
        client(server)


@pytest.mark.parametrize("option", ["--enable-lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"])
def test_server_without_adapters_raises_with_the_command(server, option, tmp_path):
    server.failures = {"/v1/load_lora_adapter": [f"without {option}"]}
    with pytest.raises(VLLMError, match=command(server)):
        client(server).load("run-1", adapter(tmp_path / "run-1"))


@pytest.mark.parametrize(
    "rank, exists, cause",
    [
        (20, True, r"500 .*rank 20 is greater than max_lora_rank 16"),
        (4, False, r"404 .*No adapter found"),
    ],
)
def test_adapter_that_cannot_be_loaded_raises_with_the_cause(server, rank, exists, cause, tmp_path):
    if exists:
        directory = adapter(tmp_path / "run-1", rank)
    else:
        directory = tmp_path / "run-1"
    with pytest.raises(
        VLLMError, match=rf"{cause}.*{command(server, 32)}, and see `{directory}` under that path"
    ):
        client(server, rank=32).load("run-1", directory)


def test_address_of_something_else_raises(server):
    server.failures = {"/v1/models": ["no such path"]}
    with pytest.raises(VLLMError, match=r"is not a vLLM server: 404 .*Not Found"):
        client(server)


# ---- key and proxy ----


def test_key_of_the_environment_is_sent_and_not_shown(server, monkeypatch):
    server.key = KEY
    with pytest.raises(
        VLLMError, match=r"refuses VLLM_API_KEY of the environment: 401 .*Unauthorized"
    ):
        client(server)
    monkeypatch.setenv("VLLM_API_KEY", KEY + "\n")
    built = client(server)
    assert KEY not in str(vars(built))
    server.failures = {"/v1/models": [PlainTextResponse(f"I know {KEY}", 418)]}
    with pytest.raises(VLLMError, match=r"418 \*\*\* \(it repeats a part of the key\)"):
        client(server)
    monkeypatch.setenv("VLLM_API_KEY", "wrong key")
    with pytest.raises(ValueError, match=r"`VLLM_API_KEY` is not set to a key") as raised:
        client(server)
    assert "wrong key" not in str(raised.value)


@pytest.mark.parametrize(
    "name", [f"org/{KEY}", "hf_" + "aZ3kP9qLm2XvB7tRw5Yc", "http://user:hunter2@host/model"]
)
def test_model_id_that_a_server_echoes_shows_no_key(server, monkeypatch, name):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    server.base = name
    with pytest.raises(
        VLLMError, match=rf"serves `.*\*\*\*.*`, the policy's base is `{BASE}`"
    ) as raised:
        client(server)
    assert not any(part in str(raised.value) for part in (KEY, "hunter2", "aZ3kP9qLm2XvB7tRw5Yc"))


def test_server_without_a_model_raises(server):
    server.failures = {"/v1/models": [JSONResponse({"data": []})]}
    with pytest.raises(VLLMError, match="serves `None`, the policy's base is"):
        client(server)


def test_command_serves_the_commit_of_the_policys_base(server):
    server.failures = {"/v1/models": [JSONResponse({"data": []})]}
    with pytest.raises(VLLMError, match=f"vllm serve {BASE} .*--revision 5a1 .*--host"):
        VLLMServer(server.url, 1.0, BASE, SETTINGS, 16, revision="5a1")


def test_key_over_plain_http_to_another_machine_warns(server, monkeypatch, recwarn):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    client(server)
    assert not [x for x in recwarn if "unencrypted" in str(x.message)]
    for url, warned in (
        ("http://user:hunter2@gpu.invalid:8000", 1),
        ("https://gpu.invalid:8000", 0),
    ):
        with pytest.raises(VLLMError, match="No answer from"):
            VLLMServer(url, 0.05, BASE, SETTINGS, 16)
        shown = [str(x.message) for x in recwarn if "unencrypted" in str(x.message)]
        recwarn.clear()
        assert len(shown) == warned and KEY not in str(shown) and "hunter2" not in str(shown)


def test_requests_to_this_machine_use_no_proxy(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client(server, timeout=0.1)


def test_address_may_end_as_that_of_openai_clients_do(server):
    VLLMServer(server.url + "/v1/", 1.0, BASE, SETTINGS, 16)


# ---- runs ----


def run(server, output_dir, **kwargs):
    settings = {
        "vllm_base_model": BASE,
        "vllm_server_base_url": server.url,
        "vllm_max_logp_difference": 99.0,
    }
    return trainer(
        output_dir, llama(), use_vllm=True, vllm_mode="server", max_steps=8, **settings, **kwargs
    )


def test_restart_in_the_middle_of_a_rollout_changes_nothing(server, tmp_path):
    undisturbed = run(server, tmp_path / "undisturbed")
    undisturbed.train()
    built = run(server, tmp_path / "run")
    completed = count(1)
    complete = built.components.player.generator.engine._complete

    async def disturbed(*args):
        if next(completed) == 12:  # the fourth of the second rollout
            server.failures = {"/v1/completions": ["engine died"]}
            server.adapters.clear()
        return await complete(*args)

    built.components.player.generator.engine._complete = disturbed
    built.train()
    assert next(completed) == 17
    expected = weights(undisturbed)
    assert all(torch.equal(x, expected[name]) for name, x in weights(built).items())


def test_each_rollout_loads_a_version_and_unloads_the_previous(server, tmp_path):
    built = run(server, tmp_path)
    built.train()
    loaded = [
        body["lora_name"] for path, body, _ in server.asked if path == "/v1/load_lora_adapter"
    ]
    unloaded = [
        body["lora_name"] for path, body, _ in server.asked if path == "/v1/unload_lora_adapter"
    ]
    assert len(set(loaded)) == 2 and unloaded == loaded[:-1]
    assert (
        list(server.adapters)
        == loaded[-1:]
        == [path.name for path in Path(tmp_path, ".vllm").iterdir()]
    )
    used = {body["model"] for path, body, _ in server.asked if path == "/v1/completions"}
    assert used == set(loaded)


def test_evaluation_of_many_batches_loads_a_moved_adapter_once(server, tmp_path):
    built = run(server, tmp_path, eval_dataset=prompts(200))
    built.evaluate()
    assert paths(server).count("/v1/load_lora_adapter") == 1  # by the constructor
    for x in built.actor_critic.policy_parameters().values():
        x.data += 0.01
    for _ in range(2):
        built.evaluate()
    loaded = [
        body["lora_name"] for path, body, _ in server.asked if path == "/v1/load_lora_adapter"
    ]
    used = [body["model"] for path, body, _ in server.asked if path == "/v1/completions"]
    assert len(loaded) == 2 and used == [loaded[0]] * 200 + [loaded[1]] * 400


def test_greedy_evaluation_asks_once_for_equal_prompts(server, tmp_path):
    rows = [{"prompt": text} for text in ("w1", "w1", "w2", "w1")]
    built = run(server, tmp_path, eval_dataset=rows, eval_temperature=0, num_generations_eval=2)
    lengths = built.evaluate()["eval_completions/mean_length"]
    asked = [body for path, body, _ in server.asked if path == "/v1/completions"]
    assert len(asked) == 2 and {body["n"] for body in asked} == {1} and lengths > 0


# ---- overlap ----

OVERLAP = {"overlap_rollouts": True, "save_strategy": "steps", "save_steps": 1, "num_ppo_epochs": 1}


def completions(server):
    return [body for path, body, _ in server.asked if path == "/v1/completions"]


def interrupted(built, step):
    """Train until an error after an optimizer step; its checkpoint is that of the step."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step + 1:
                raise RuntimeError("killed")

    built.add_callback(Stop())
    with pytest.raises(RuntimeError, match="killed"):
        built.train()


def test_next_rollout_is_requested_while_the_last_one_is_scored(server, tmp_path):
    server.delay = 0.05
    built = run(server, tmp_path, **OVERLAP)
    begun = []
    score = built.components.rewards[0].score

    def waiting(batch):
        expected = min(8 * (built.state.global_step // 2 + 2), 32)
        end = time.monotonic() + 5
        while len(completions(server)) < expected and time.monotonic() < end:
            time.sleep(0.005)
        begun.append(len(completions(server)) >= expected)
        return score(batch)

    built.components.rewards[0].score = waiting
    built.train()
    # the last rollout begins no other
    assert begun == [True] * 4 and len(completions(server)) == 32
    models = [body["model"] for body in completions(server)]
    assert [len(set(models[n : n + 8])) for n in range(0, 32, 8)] == [1, 1, 1, 1]
    assert len(set(models)) == 3  # the first two rollouts are those of the first policy


def test_overlapped_run_repeats_despite_delay_and_evaluations(server, tmp_path):
    results = []
    for number, settings in enumerate(
        ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4)})
    ):
        built = run(server, tmp_path / str(number), **OVERLAP, **settings)
        server.delay = 0.02 * number
        built.train()
        results.append(weights(built))
    assert all(torch.equal(x, results[1][name]) for name, x in results[0].items())


def test_overlapped_run_takes_the_same_rows_as_another(server, tmp_path):
    asked = []
    for overlap in (False, True):
        server.asked.clear()
        run(
            server,
            tmp_path / str(overlap),
            dataset=prompts(40),
            **OVERLAP | {"overlap_rollouts": overlap},
        ).train()
        asked.append([body["prompt"] for body in completions(server)])
    plain, overlapped = ([sorted(prompts[n : n + 8]) for n in range(0, 32, 8)] for prompts in asked)
    assert plain == overlapped


@pytest.mark.parametrize("stream, steps", [(False, [1, 4, 7]), (True, [2])])
def test_overlapped_run_that_was_killed_resumes_bit_for_bit(server, tmp_path, stream, steps):
    def dataset():
        if stream:
            return prompts(40).to_iterable_dataset()
        return prompts(40)

    whole = run(server, tmp_path / "whole", dataset=dataset(), **OVERLAP)
    whole.train()
    for step in steps:
        interrupted(run(server, tmp_path / str(step), dataset=dataset(), **OVERLAP), step)
        shutil.rmtree(tmp_path / str(step) / f"checkpoint-{step + 1}", ignore_errors=True)
        resumed = run(server, tmp_path / str(step), dataset=dataset(), **OVERLAP)
        resumed.train(resume_from_checkpoint=True)
        expected = weights(whole)
        assert all(torch.equal(x, expected[name]) for name, x in weights(resumed).items())


def test_error_in_a_rollout_that_was_sampled_ahead_loses_nothing(server, tmp_path):
    rare = OVERLAP | {"save_steps": 100}
    whole = run(server, tmp_path / "whole", **rare)
    whole.train()
    failing = run(server, tmp_path / "run", **rare)
    score = failing.components.rewards[0].score

    def fails(batch):
        if failing.state.global_step == 4:
            raise RuntimeError("killed")
        return score(batch)

    failing.components.rewards[0].score = fails
    with pytest.raises(RewardError, match="killed"):
        failing.train()
    resumed = run(server, tmp_path / "run", **rare)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    expected = weights(whole)
    assert all(torch.equal(x, expected[name]) for name, x in weights(resumed).items())


def test_checkpoint_without_a_server_omits_the_next_rollout(server, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "LIFE", 0.1)
    built = run(server, tmp_path, vllm_server_timeout=0.3, **OVERLAP)
    begin = built.components.player.generator.begin

    def begun(prompts):
        if built.state.global_step == 2:
            server.failures = {"/v1/completions": [503] * 1000}
        begin(prompts)

    built.components.player.generator.begin = begun
    with pytest.raises(VLLMError, match="No answer"):
        built.train()
    assert (tmp_path / "checkpoint-4").exists()
    server.failures = {}
    resumed = run(server, tmp_path, **OVERLAP)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8


class Silent:
    def reset(self, **kwargs):
        pass

    def step(self, text: str):
        """End the episode.

        Args:
            text: A turn.
        """
        return "", 0.0, True


def test_overlap_is_refused_without_a_server_and_with_tools(server, tmp_path):
    with pytest.raises(
        ValueError, match=r"overlap_rollouts'\]` needs `use_vllm=True, vllm_mode='server'`"
    ):
        config(tmp_path, overlap_rollouts=True, use_vllm=True)
    with pytest.raises(ValueError, match="does not work with tools or environments"):
        run(server, tmp_path, environment_factory=Silent, overlap_rollouts=True)
    with pytest.raises(
        ValueError, match="`curriculum` does not work with a stream, or with `overlap_rollouts`"
    ):
        run(server, tmp_path, curriculum=torch.add, overlap_rollouts=True)


def test_adapter_refused_by_the_server_raises_before_the_run(server, tmp_path):
    peft_config = LoraConfig(r=20, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(VLLMError, match=r"rank 20 is greater"):
        run(server, tmp_path, peft_config=peft_config)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://",
        "http://:8000",
        "http://u:hunter2@h:99999",
        "http://u:hunter2@h:x",
        "http://u:hunter2@[::1",
    ],
)
def test_invalid_address_raises_without_its_password(tmp_path, url):
    message = (
        r"`vllm_server_base_url` must start with http:// or https://, .* port up to 65535, got '"
    )
    with pytest.raises(ValueError, match=message) as raised:
        PPOConfig(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
        )
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("token", ["5", 5.0, True, -1, 2**70, None])
def test_token_id_of_a_server_that_is_none_is_named(server, loaded, token):
    """As text, or beyond what a tensor holds."""
    complete = server.completions

    def with_token(body):
        answer = json.loads(complete(body).body)
        answer["choices"][0]["token_ids"][-1] = token
        return JSONResponse(answer)

    server.completions = with_token
    with pytest.raises(
        VLLMError, match=r"did not sample .* completions with token ids and log-probs"
    ):
        loaded.sample("run-1", REQUESTS[:1])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_answer_longer_than_its_tokens_is_not_read(server, tmp_path, path):
    """Of 750 MiB some are read: as many as the tokens that were asked for could take."""
    sent = []

    async def flood():
        for _ in range(750):
            sent.append(2**20)
            yield b" " * 2**20
            await asyncio.sleep(1e-3)  # in which the server notices that nobody reads

    loaded = client(server)
    loaded.load("run-1", adapter(tmp_path / "run-1"))
    server.failures = {path: [StreamingResponse(flood())]}
    with pytest.raises(
        VLLMError,
        match=rf"{server.url} is not a vLLM server that fits .* at most \d+ bytes, .*got more",
    ):
        client(server) if path == "/v1/models" else loaded.sample("run-1", REQUESTS[:1])
    assert len(sent) < 750


def test_answer_as_long_as_its_tokens_need_is_read(server, loaded):
    """Logprobs of many tokens, with their texts."""
    complete = server.completions
    request = Request([4], 2, 1, 40_000)
    assert vllm_server.BYTES_PER_TOKEN * 80_000 > 60 * 2**20 > vllm_server.MOST_BYTES

    def long(body):
        answer = json.loads(complete(body).body)
        return JSONResponse(answer | {"text": "x" * (60 * 2**20)})

    server.completions = long
    assert len(loaded.sample("run-1", [request])[0]) == 2
