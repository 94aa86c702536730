"""One result, however it is spread over processes."""

import json
import math
from functools import partial

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from processes import finished, in_a_fork
from safetensors.torch import load_file
from tiny import llama
from train import FIXED, main

from trl_ppo_ext.modeling.loading import default_peft_config

TIMED = (
    "time/",
    "step_time",
    "tokens_per",
    "train_",
    "eval_time",
    "eval_runtime",
    "eval_model_preparation",
)

CHOICES = {
    "plain": {"save_strategy": "steps", "save_steps": 6},
    "critic adapter": {"critic": "adapter", "critic_learning_rate": 1e-3},
    "side critic": {"critic": "side"},
    "default critic": {"critic": "side", "normalize_values": True, "vf_coef": 0.5},
    "critic with all tokens": {
        "critic": "side",
        "normalize_values": True,
        "num_generations": 4,
        "mask_truncated_completions": True,
        "max_grad_norm": 0.1,
    },
    "warmup": {"critic": "adapter", "critic_kwargs": {"warmup_steps": 2}},
    "all that is steered or added": {
        "kl_target": 0.01,
        "kl_horizon": 100,
        "target_kl": 1e-3,
        "kl_estimator": "exact",
        "kl_placement": "both",
        "ptx_coef": 0.5,
        "weighs": True,
    },
    # one rollout has nothing to learn from: neither momentum nor weight decay may move the weights
    "an empty rollout": {
        "reward_on_error": "skip",
        "max_reward_failures": 1.0,
        "weight_decay": 0.1,
    },
    # a group of 8 lies on two processes of 4 completions
    "GRPO": {"critic": "none", "num_generations": 8, "importance_sampling_level": "sequence"},
    # evaluated before training, which recomputes layers; ranks have other numbers of turns, batches
    # and sampled tokens
    "turns": {
        "plays": True,
        "gradient_checkpointing": True,
        "top_k": 1,
        "max_completion_length": 24,
        "stop_token_ids": list(range(16, 32)),
        "per_device_generation_batch_size": 3,
    },
    "a gradient that is no number": {"nan_at": 4},
    # evaluation before training, a second training, a reward adapter, layers that are recomputed
    "all other ways": {"others": True, "critic": "adapter", "gradient_checkpointing": True},
}
OF_A_MICRO_BATCH = ("approx_kl", "ratio/max")
OF_THE_RUN = ("nan_at", "others", "plays", "weighs")  # not of its config
# by choices that add to them, or by other launches
COVERED = ("critic adapter", "side critic", "turns")
SPREADS = {  # two batches of an evaluation
    "8": {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4},
    "8 micro-batches of 1": {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "per_device_eval_batch_size": 4,
    },
    "2 x 4": {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2},
    "2 x 2 micro-batches of 2": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
    },
}
# what is run beside one process with the whole batch: by how it is launched
RUNS = {
    "one process": [("plain", "8 micro-batches of 1")],
    "DDP": [
        ("plain", "2 x 2 micro-batches of 2"),
        *((choice, "2 x 4") for choice in CHOICES if choice not in COVERED),
    ],
    "DDP, all": [(choice, "2 x 4") for choice in COVERED],
    "ZeRO-1": [("plain", "2 x 4"), ("default critic", "2 x 4"), ("an empty rollout", "2 x 4")],
    "ZeRO-2": [
        ("plain", "2 x 4"),
        ("default critic", "2 x 4"),
        ("plain", "2 x 2 micro-batches of 2"),
        ("all that is steered or added", "2 x 4"),
    ],
    "ZeRO-3": [
        ("plain", "2 x 4"),
        ("default critic", "2 x 4"),
        ("all that is steered or added", "2 x 4"),
        ("turns", "2 x 4"),
    ],
    "ZeRO-3, all": [
        (choice, "2 x 4") for choice in ("critic adapter", "side critic", "an empty rollout")
    ],
    "FSDP2": [
        ("plain", "2 x 2 micro-batches of 2"),
        ("default critic", "2 x 4"),
        ("all other ways", "2 x 4"),
        ("turns", "2 x 4"),
    ],
    "FSDP2, all": [(choice, "2 x 4") for choice in CHOICES],
}
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def stage_of(launch):
    if launch.startswith("ZeRO"):
        return int(launch[5])
    return None


def deepspeed(stage):
    sizes = dict.fromkeys(
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"], "auto"
    )
    # a tiny model's parameters would all stay whole
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return sizes | {"gradient_accumulation_steps": "auto", "zero_optimization": zero}


def run_of(choice, spread, launch):
    """Arguments of `train`."""
    chosen = CHOICES[choice]
    stage = stage_of(launch)
    if launch.startswith("FSDP2"):
        sharding = FSDP2
    else:
        if stage:
            sharding = {"deepspeed": deepspeed(stage)}
        else:
            sharding = {}
    settings = {name: value for name, value in chosen.items() if name not in OF_THE_RUN}
    # with Monte Carlo targets the gradient of a bias cancels to rounding
    if choice not in ("GRPO", "default critic"):
        settings["lam_critic"] = 0.95
    others = {name: chosen[name] for name in OF_THE_RUN if name in chosen}
    return others | {"settings": settings | SPREADS[spread] | sharding}


def run_all(lists):
    """Train in forks of a fork, which imports DeepSpeed."""
    assert finished([in_a_fork(partial(main, lists), {})], 300) == [0]


def outcome(output_dir):
    files = [
        file
        for file in sorted(output_dir.glob("**/*.safetensors"))
        if "checkpoint-" not in str(file)
    ]
    weights = {
        f"{file.relative_to(output_dir)}:{name}": x
        for file in files
        for name, x in load_file(file).items()
    }
    about, *log = json.loads((output_dir / "log.json").read_text())
    log = [
        {k: v for k, v in entry.items() if not k.startswith(TIMED) and "per_s" not in k}
        for entry in log
    ]
    return about, weights, log, json.loads((output_dir / "ppo_state.json").read_text())


# ZeRO-3 does what the other stages do, and more
SLOW = {"ZeRO-1", "ZeRO-2", "ZeRO-3, all", "DDP, all", "FSDP2, all"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcomes by launch, choice and spread; all that are not slow are run at once."""
    folder = tmp_path_factory.mktemp("runs")
    cache = {}

    def get(how, *run):
        if how not in cache:
            lists = []
            names = {}
            for way in [how] if how in SLOW else RUNS.keys() - SLOW:
                runs = RUNS[way] + (
                    [(choice, "8") for choice in CHOICES] if way == "one process" else []
                )
                names[way] = {each: folder / f"{way} {number}" for number, each in enumerate(runs)}
                entries = [
                    {"output_dir": str(names[way][each])} | run_of(*each, way) for each in runs
                ]
                lists.append([1 if way == "one process" else 2, entries, {}])
            run_all(lists)
            cache.update(
                {
                    way: {x: outcome(path) for x, path in paths.items()}
                    for way, paths in names.items()
                }
            )
        return cache[how][run]

    return get


@pytest.mark.parametrize(
    ("how", "choice", "spread"),
    [
        pytest.param(how, *run, marks=[pytest.mark.slow] * (how in SLOW))
        for how, runs in RUNS.items()
        for run in runs
    ],
    ids=lambda part: part,
)
def test_result_does_not_depend_on_the_spread(outcomes, how, choice, spread):
    """Weights, metrics, running statistics and steered coefficients, after 6 optimizer steps."""
    _, expected, expected_log, expected_state = outcomes("one process", choice, "8")
    about, weights, log, state = outcomes(how, choice, spread)
    assert about["num_processes"] == (1 if how == "one process" else 2) and about[
        "zero_stage"
    ] == stage_of(how)
    # the value head alone cannot be split
    assert about["part"] == (pytest.approx(0.5, abs=0.01) if how.startswith("FSDP2") else None)

    assert weights.keys() == expected.keys()
    difference = {name: (weights[name] - x).norm() for name, x in expected.items()}
    whole = (
        sum(x**2 for x in difference.values()).sqrt()
        / sum(x.norm() ** 2 for x in expected.values()).sqrt()
    )
    assert whole <= 1e-6
    # Adam turns the rounding of a gradient near zero into a step of any size
    for name, x in expected.items():
        assert difference[name] <= 1e-4 * x.norm(), name

    assert len(log) == len(expected_log)
    for got, wanted in zip(log, expected_log):
        # DeepSpeed has one norm for policy and critic
        if stage_of(how) and "value/grad_norm" in wanted:
            norms = wanted["grad_norm"], wanted["value/grad_norm"]
            wanted = {k: v for k, v in wanted.items() if k != "value/grad_norm"} | {
                "grad_norm": math.hypot(*norms)
            }
        # what was learned is measured on a micro-batch
        if "gradient_accumulation_steps" in SPREADS[spread]:
            assert got.keys() == wanted.keys()
            got, wanted = (
                {k: v for k, v in x.items() if k not in OF_A_MICRO_BATCH} for x in (got, wanted)
            )
        # the norm of a gradient that is none
        assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)
    state = state["run"]
    expected_state = expected_state["run"]
    assert state["scores"].keys() == expected_state["scores"].keys()
    for name, moments in state["scores"].items():
        # of float32 scores
        assert moments == pytest.approx(expected_state["scores"][name], rel=1e-7)
    assert state["scores"][""][0] == 8 * {"an empty rollout": 2, "all other ways": 6}.get(choice, 3)
    # chooses λ, if there is a critic
    known = [x["information"].get("", []) for x in (state, expected_state)]
    pairs = {"information": tuple(known)}
    for name, moments in expected_state["critic"].items():  # units of the critic
        pairs[name] = state["critic"][name], moments
    for name, (numbers, expected) in pairs.items():
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert sum(entry.get("empty_steps", 0) for entry in log) == (
        2 if choice == "an empty rollout" else 0
    )
    assert sum(entry.get("skipped_steps", 0) for entry in log) == ("nan_at" in CHOICES[choice])
    assert state["kl_coef"] == pytest.approx(expected_state["kl_coef"], rel=1e-5)


@pytest.mark.parametrize(("how", "gathers"), [("ZeRO-3", 53), ("FSDP2", 3)])
def test_sharded_policy_is_gathered_once_per_rollout(outcomes, how, gathers):
    """Of a tiny model FSDP gathers two layers and the rest, and ZeRO-3 each parameter by itself."""
    about, *_ = outcomes(how, "turns", "2 x 4")
    # in an evaluation of two batches, three rollouts, and another evaluation
    counts, forwards = zip(*about["plays"])
    ends = 2  # that every rank has sampled: the length of a message, and the message
    assert len(counts) == 7 and counts[0] - ends == gathers
    # ZeRO-3 keeps what a forward without gradients has gathered, after the updates of a rollout
    # until the next one
    assert max(counts) == counts[0]
    assert all(len(set(each)) == 2 for each in forwards[2:5])  # ranks sample by themselves
    assert max(map(max, forwards)) > 3 * min(map(min, forwards))


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_saved_adapter_loads_with_plain_peft(outcomes, how):
    about, weights, _, _ = outcomes(how, "all other ways", "2 x 4")
    policy = get_peft_model(llama(), default_peft_config())
    saved = {
        name.partition(":")[2]: x for name, x in weights.items() if name.startswith("adapter_model")
    }
    assert saved.keys() == get_peft_model_state_dict(policy).keys()
    set_peft_model_state_dict(policy, saved)
    for prompt, completion, logprobs in zip(*FIXED, about["logprobs"]):
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + completion])).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert logprobs[: len(completion)] == pytest.approx(expected.tolist(), abs=1e-5)
