"""Runs whose completions come from a vLLM server, which dies, is restarted, shared, or served
the wrong base."""

import json
import os
import signal
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from peft import LoraConfig
from processes import finished, in_a_fork, start
from runs_of_tiny import weights
from safetensors.torch import save_file
from tiny import WORDS, config, llama, prompts, tokenizer
from vllm_servers import VLLM, served

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints import save
from trl_ppo_ext.checkpoints.atomic import checkpoints
from trl_ppo_ext.episodes import vllm_server
from trl_ppo_ext.episodes.engine import Ahead, VLLMError
from trl_ppo_ext.episodes.vllm_server import VLLMServer
from trl_ppo_ext.ppo import rollouts
from trl_ppo_ext.ppo.updates import Updates

sys.path.append(str(Path(__file__).parents[1] / "resume"))
import killed_runs

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM, see `make test-vllm`")

EXACT = 1e-4  # nats; measured 4e-6
SETTINGS = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_timeout": 300.0,
    "per_device_train_batch_size": 8,
    "num_ppo_epochs": 1,
    "max_steps": 8,  # 4 rollouts of 16 prompts
    "max_completion_length": 24,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}


def save_base(directory, **kwargs):
    llama(hidden_size=64, head_dim=32, max_position_embeddings=256, **kwargs).save_pretrained(
        directory
    )
    tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def running(base, tmp_path_factory):
    with served(base, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture
def server(running):
    """The server of all tests, which was started again if a test has ended it."""
    if running.process.poll() is not None:
        running.start()
    running.wait()
    return running


def mean_of_tokens(completion_ids, **kwargs):
    return [sum(ids) / len(ids) / 10 for ids in completion_ids]


def trainer(base, server, output_dir, dataset=None, peft_config=None, **kwargs):
    args = config(output_dir, vllm_server_base_url=server.url, **SETTINGS | kwargs)
    return PPOTrainer(
        base,
        mean_of_tokens,
        args,
        dataset or prompts(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def trained(*args, **kwargs):
    run = trainer(*args, **kwargs)
    run.train()
    return run


def logged(run, name):
    return [entry[name] for entry in run.state.log_history if name in entry]


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.fixture(scope="module")
def expected(base, running, tmp_path_factory):
    """Weights after a run that nothing happened to."""
    return weights(trained(base, running, tmp_path_factory.mktemp("undisturbed")))


# ---- the same policy ----


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "num_generations": 4, "num_ppo_epochs": 2, "max_steps": 16},
        {
            "rows": 150,
            "peft_config": LoraConfig(
                r=4, lora_alpha=16, use_rslora=True, target_modules="all-linear"
            ),
        },
    ],
    ids=["defaults", "groups", "long prompts"],
)
def test_logprobs_of_every_rollout_are_those_of_the_policy(settings, base, server, tmp_path):
    """Prompts of 150 tokens and more fill a block of the prefix cache, which an older adapter
    may have left."""
    length = settings.pop("rows", 0)
    texts = [
        " ".join(WORDS[(row * k + k) % 28] for k in range(length + row)) for row in range(1, 17)
    ]
    run = trained(base, server, tmp_path, Dataset.from_dict({"prompt": texts}), **settings)
    differences = logged(run, "sampling/sampling_logp_difference/max")
    assert len(differences) == 4 and max(differences) < EXACT
    assert logged(run, "kl")[-1] > 0.1  # the policy has moved
    newest = [path.name for path in (tmp_path / ".vllm").iterdir()]
    assert len(newest) == 1 and newest[0] in server.adapters()
    assert sum(name.startswith(newest[0].split("-")[0]) for name in server.adapters()) == 1


def test_greedy_completions_equal_those_of_transformers(base, server, tmp_path):
    run = trained(base, server, tmp_path, max_steps=4, eval_temperature=0)
    generator = run.components.player.generator
    policy = run.actor_critic.policy.eval()
    generator.evaluates = True
    batch = [[4 + (row * k + row) % 28 for k in range(1 + 3 * row)] for row in range(16)]
    with generator.awake():
        completions = generator.generate(batch)
    for prompt, completion in zip(batch, completions):
        ids = policy.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=1
        )
        assert completion == ids[0, len(prompt) :].tolist()


# ---- servers that cannot serve the run ----


def test_another_base_raises_with_the_command(base, server, tmp_path):
    other = save_base(tmp_path / "other", seed=1)
    with pytest.raises(
        VLLMError, match=rf"serves `{base}`, the policy's base is `{other}`; start it with .*vllm"
    ):
        trainer(other, server, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"differ by \d.* nats per token .*another base"):
        trained(other, server, tmp_path / "run", vllm_base_model=base)


# ---- servers that end ----


def disturb(run, action, completions=16 * 2 + 5):
    """Act after that many prompts are completed, by default in the middle of the third rollout."""
    engine = run.components.player.generator.engine
    completed = count(1)
    complete = engine._complete

    async def disturbed(*args):
        result = await complete(*args)
        if next(completed) == completions:
            action()
        return result

    engine._complete = disturbed
    return lambda: next(completed) - 1


def test_restarted_server_changes_nothing(base, server, expected, tmp_path):
    def restart():
        server.kill()
        server.start()

    run = trainer(base, server, tmp_path)
    completed = disturb(run, restart)
    run.train()
    assert completed() == 64
    check_equal(weights(run), expected)


def test_server_that_is_shut_down_raises_and_the_run_resumes(
    base, server, expected, tmp_path, monkeypatch
):
    """With a request in flight it neither answers nor hangs up, but no longer takes others."""
    monkeypatch.setattr(vllm_server, "LIFE", 1.0)

    def shut_down():
        server.kill(signal.SIGTERM)
        while server.answers():
            time.sleep(0.05)

    saving = {"save_strategy": "steps", "save_steps": 2, "vllm_server_timeout": 3.0}
    saving["vllm_concurrency"] = 4  # so that requests of the rollout are left
    run = trainer(base, server, tmp_path, **saving)
    disturb(run, shut_down)
    began = time.monotonic()
    with pytest.raises(
        VLLMError,
        match=r"No answer from .* within `vllm_server_timeout=3` s .*start it with `VLLM_",
    ):
        run.train()
    assert time.monotonic() - began < 60
    assert checkpoints(tmp_path)[0].name == "checkpoint-4"
    server.kill()
    server.start()
    server.wait()
    run = trainer(base, server, tmp_path, **saving)
    run.train(resume_from_checkpoint=True)
    check_equal(weights(run), expected)


# ---- runs that are killed while the next rollout is sampled ----

OVERLAP = {
    "use_vllm": True,
    "vllm_mode": "server",
    "overlap_rollouts": True,
    "max_steps": 48,  # 12 rollouts of 16 completions, in 2 epochs of 2 minibatches
    "save_steps": 5,  # so that checkpoints are at each step of a rollout
    "gradient_accumulation_steps": 4,
    "max_completion_length": 24,
    "learning_rate": 1e-2,
    "rows": 40,
}
# optimizer step from which on, the call that does not return, and which one of them
KILLS = [
    (1, VLLMServer, "_read", 3),  # the third completion of the next rollout has come
    (4, killed_runs, "length_reward", 1),
    (6, Updates, "loss", 2),
    (9, save, "save_file", 1),  # a checkpoint's run state
    (14, save, "publish", 1),  # a checkpoint is written, but not renamed
    (16, VLLMServer, "load", 1),  # the next rollout's adapter is written, but not loaded
    (24, VLLMServer, "start", 1),  # or loaded, and no request is sent
    (28, rollouts, "score_tokens", 1),
    (34, Ahead, "state_dict", 1),  # a checkpoint waits for completions
    (40, VLLMServer, "_read", 12),
]


def train_until(output_dir, settings, step, owner, name, calls):
    reached = [-1]
    counted = count(1)
    original = getattr(owner, name)
    training_step = PPOTrainer.training_step

    def dies(*args, **kwargs):
        if reached[0] >= step and next(counted) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    def recorded(self, *args, **kwargs):
        reached[0] = self.state.global_step
        return training_step(self, *args, **kwargs)

    setattr(owner, name, dies)
    PPOTrainer.training_step = recorded
    killed_runs.train(output_dir, settings)


def test_ten_kills_amid_overlap_do_not_change_the_result(base, server, tmp_path):
    settings = OVERLAP | {"model": base, "vllm_server_base_url": server.url}
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert finished([in_a_fork(lambda: killed_runs.train(whole, settings), {})], bound=300) == [0]
    resumed = []
    for kill in KILLS:
        assert finished(
            [in_a_fork(partial(train_until, killed, settings, *kill), {})], bound=300
        ) == [-signal.SIGKILL]
        resumed.append(killed_runs.newest(killed))
    assert resumed == [0, 0, 5, 5, 10, 15, 20, 25, 30, 40]
    assert finished([in_a_fork(lambda: killed_runs.train(killed, settings), {})], bound=300) == [0]
    assert killed_runs.drawn(killed, 1) == killed_runs.drawn(whole, 1)
    (weights, logs), expected = killed_runs.outcome(killed), killed_runs.outcome(whole)
    assert sum("reward" in log for log in logs) == 12
    assert logs == expected[1]
    check_equal(weights, expected[0])


# ---- what goes wrong in a run ----


def train_in_a_fork(base, server, output_dir, **settings):
    run = trained(base, server, output_dir, **settings)
    if run.is_world_process_zero():
        save_file(weights(run), f"{output_dir}/weights")
        (output_dir / "log.json").write_text(json.dumps(run.state.log_history))
    run.end()


def test_two_ranks_sample_with_one_adapter(base, server, tmp_path):
    before = len(server.adapters())
    children = start(
        lambda: train_in_a_fork(base, server, tmp_path, per_device_train_batch_size=4), 2
    )
    assert finished(children, bound=300) == [0, 0]
    differences = [
        entry["sampling/sampling_logp_difference/max"]
        for entry in json.loads((tmp_path / "log.json").read_text())
        if "sampling/sampling_logp_difference/max" in entry
    ]
    assert len(differences) == 4 and max(differences) < EXACT
    assert len(server.adapters()) == before + 1


def test_adapters_of_a_killed_run_are_removed_by_the_next(base, server, tmp_path):
    def die():
        run = trainer(base, server, tmp_path)
        disturb(run, lambda: os.kill(os.getpid(), signal.SIGKILL))
        run.train()

    before = set(server.adapters())
    assert finished([in_a_fork(die, {})], bound=300) == [-signal.SIGKILL]
    left = set(server.adapters()) - before
    assert left == {path.name for path in (tmp_path / ".vllm").iterdir()} and len(left) == 1
    run = trainer(base, server, tmp_path)
    with FileLock(tmp_path / ".lock"):  # as while it trains
        trainer(base, server, tmp_path)
    assert run.components.player.generator.version in server.adapters()
    assert not left & set(server.adapters())


# ---- the optimum ----


@pytest.mark.slow
def test_training_reaches_the_optimum_of_exact_ascent(tmp_path, all_cores, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "optimum")
    from optimum import gap, model, tokenizer

    model(0, head_dim=32).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    with served(str(tmp_path / "base"), tmp_path / "log") as server:
        settings = {"critic": "side", "cliprange": None, "cliprange_value": None}
        settings |= {"normalize_values": True, "vf_coef": 0.5}  # as in the config
        settings |= {"vllm_mode": "server", "vllm_server_base_url": server.url}
        # 32 requests per rollout instead of 512
        result = gap(0, tmp_path, use_vllm=True, learning_rate=1e-3, num_generations=16, **settings)
    print(result)
    assert result["gap"] <= 0.02, result
