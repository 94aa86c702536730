"""Fields of TRL's configs set fields of PPOConfig, change nothing, or raise with a reason."""

import dataclasses
import inspect
import logging
import re
from pathlib import Path

import pytest
import torch
import trl
import yaml
from tiny import config, length_reward, llama, prompts, tokenizer
from trl import GRPOConfig, TrlParser

import trl_ppo_ext
from trl_ppo_ext import PPOConfig, PPOTrainer, ppo_math
from trl_ppo_ext.checkpoints.files import run_settings
from trl_ppo_ext.trl_names import NAMES

PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none"}


def made(path, **settings):
    return PPOConfig(str(path), **PLAIN | settings)


def test_every_field_of_grpo_is_a_field():
    ours = {entry.name for entry in dataclasses.fields(PPOConfig)}
    assert {entry.name for entry in dataclasses.fields(GRPOConfig)} <= ours


def test_scripts_that_filter_by_the_signature_keep_their_settings():
    """TRL drops fields, so scripts pass on those that the signature has."""

    @dataclasses.dataclass
    class Mine(PPOConfig):
        further: int = 0

    names = set(inspect.signature(PPOConfig).parameters)
    assert names >= set(inspect.signature(GRPOConfig).parameters)
    assert set(inspect.signature(Mine).parameters) == names | {"further"}


def test_a_parser_passes_defaults_that_nobody_gave(tmp_path):
    (args,) = TrlParser(PPOConfig).parse_args_and_config(
        [
            "--output_dir",
            str(tmp_path),
            "--beta",
            "0.04",
            "--use_cpu",
            "true",
            "--report_to",
            "none",
        ]
    )
    assert args.kl_coef == 0.04


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"beta": 0.04}, {"kl_coef": 0.04}),
        ({"epsilon": 0.1, "epsilon_high": 0.28}, {"cliprange": 0.1, "cliprange_high": 0.28}),
        ({"epsilon_high": 0.28}, {"cliprange": 0.2, "cliprange_high": 0.28, "dual_clip": None}),
        ({"delta": 1.5}, {"dual_clip": 1.5, "cliprange": 0.2}),
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 4}, {"num_mini_batches": 2}),
        # two rollouts per optimizer step, as one that is sampled in two parts
        (
            {
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 8,
                "per_device_train_batch_size": 2,
            },
            {"num_mini_batches": 1, "per_device_generation_batch_size": 8},
        ),
        ({"num_iterations": 1, "num_ppo_epochs": 4}, {"num_ppo_epochs": 4}),
        (
            {"init_kl_coef": 0.2, "ppo_epochs": 4, "kl_penalty": "kl"},
            {"kl_coef": 0.2, "num_ppo_epochs": 4},
        ),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"loss_type": "dapo"}, {"loss_aggregation": "token"}),
        ({"loss_type": "grpo"}, {"loss_aggregation": "sequence_mean"}),
        ({"loss_type": "dr_grpo"}, {"loss_aggregation": "constant"}),
        ({"scale_rewards": False}, {"whiten_advantages": False}),
        ({"scale_rewards": "batch"}, {"whiten_advantages": True}),
        (
            {"scale_rewards": "group", "critic": "none", "num_generations": 8},
            {"advantage_estimator": "grpo"},
        ),
        (
            {"scale_rewards": False, "critic": "none", "num_generations": 8},
            {"advantage_estimator": "dr_grpo"},
        ),
        ({"use_bias_correction_kl": False}, {"kl_estimator": "k3", "kl_placement": "loss"}),
        ({"use_adaptive_entropy": False, "entropy_target": 0.2}, {}),
        ({"use_vllm": True, "use_transformers_paged": False}, {"generation_backend": "vllm"}),
        ({"use_vllm": False}, {"generation_backend": "transformers"}),
        (
            {"cache_implementation": "static"},
            {"generation_kwargs": {"cache_implementation": "static"}},
        ),
        ({"response_length": 53}, {"max_completion_length": 53}),
        (
            {"local_rollout_forward_batch_size": 4},
            {"per_device_generation_batch_size": 4, "per_device_reward_batch_size": 4},
        ),
        # 4 rollouts of 128 completions, of 4 minibatches each
        ({"total_episodes": 400, "gradient_accumulation_steps": 4}, {"max_steps": 16}),
        ({"cast_lm_head_to_fp32": True}, {"cast_lm_head_to_fp32": True}),
        ({"top_k": None, "use_liger_kernel": True}, {"top_k": 0, "use_liger_kernel": False}),
        ({"max_grad_norm": None}, {"max_grad_norm": 0.0}),
    ],
    ids=str,
)
def test_field_of_trl_sets_ours(tmp_path, theirs, ours):
    args = made(tmp_path, **theirs)
    assert {name: getattr(args, name) for name in ours} == ours
    # as if ours had been given: nothing of theirs is compared on resume, logged, or passed on by
    # `replace`
    assert (
        not NAMES.keys() & {*args.to_dict(), *run_settings(args)}
        and dataclasses.replace(args) == args
    )
    assert not [
        name for name in theirs.keys() & NAMES.keys() if getattr(args, name) not in (None, True)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"use_vllm": False, "generation_backend": "vllm"},
            r"`use_vllm` is False .*sets `generation_backend` to",
        ),
        (
            {
                "cache_implementation": "static",
                "generation_kwargs": {"cache_implementation": "dynamic"},
            },
            r"`cache_implementation` .*sets `generation_kwargs`.*remove one",
        ),
        (
            {"beta": 0.04, "kl_coef": 0.1},
            r"`beta` is 0.04 .*sets `kl_coef` to 0.04 .*is 0.1 .*remove one",
        ),
        ({"beta": 0.04, "kl_coef": 0.0}, r"`beta` is 0.04 .*is 0.0 .*remove one"),  # the default
        (
            {"generation_kwargs": {"temperature": 0.5}, "temperature": 1.0},
            r"`generation_kwargs` .*sets `temperature` to 0.5 .*is 1.0 .*remove one",
        ),
        ({"total_episodes": 100, "max_steps": 1}, r"`max_steps` is 1"),
        ({"epsilon": -0.2}, r"`cliprange` must be above 0, got -0.2. `epsilon` sets `cliprange`"),
        ({"delta": 1.1}, r"`delta` must be at least 1 \+ the upper clip range \(0.2\), got 1.1"),
        *[
            (
                {"steps_per_generation": 4, "generation_batch_size": size},
                rf"`steps_per_generation=4` makes a rollout of 32 .*`generation_batch_size` is {size}; remove one",
            )
            for size in (64, 128, 320)
        ],
        (
            {"steps_per_generation": 6, "gradient_accumulation_steps": 4},
            r"multiple or a divisor of .*\(4\), got 6",
        ),
        ({"kl_penalty": "mse"}, r"`kl_penalty` must be 'kl' .*set `kl_estimator`; 'mse' is 'k2'"),
        (
            {"loss_type": "cispo"},
            r"`loss_type` must be one of 'dapo', .*got 'cispo' .*clipped loss",
        ),
        (
            {"scale_rewards": "batch", "critic": "none", "num_generations": 8},
            r"one of 'group', 'none', got 'batch'",
        ),
        (
            {"vllm_server_port": 9000},
            r"`vllm_server_port` must be 8000 or omitted, got 9000 .*: set `vllm_server_base_url`",
        ),
        (
            {"use_vllm": True, "top_p": 0.9, "vllm_importance_sampling_correction": True},
            r"`top_p=0.9` changes the distribution that vLLM samples from",
        ),
        ({"off_policy_mask_threshold": 0.5}, r"must be omitted, got 0.5 .*set `dual_clip`"),
        (
            {"ds3_gather_for_generation": False},
            r"must be True or omitted, got False .* DDP with a 4-bit base",
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_conflicts_and_other_values_raise_with_the_reason(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        made(tmp_path, **settings)


@pytest.mark.parametrize(
    "name, instead",
    [
        ("use_adaptive_entropy", "the entropy bonus is constant: set `entropy_coef`"),
        ("use_transformers_continuous_batching", "drops rows that ended from the batch"),
        ("use_transformers_paged", "drops rows that ended from the batch"),
    ],
)
def test_field_without_effect_warns_with_what_happens_instead(tmp_path, caplog, name, instead):
    made(tmp_path, **{name: True})
    assert f"`{name}=True` has no effect; " in caplog.text and instead in caplog.text
    caplog.clear()
    made(tmp_path, **{name: False})
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize(
    "scale, wanted", [(True, "critic='none'"), (False, "normalize_values=False")]
)
def test_scale_that_a_critic_does_not_have_is_said(tmp_path, caplog, scale, wanted):
    PPOConfig(str(tmp_path), bf16=False, scale_rewards=scale)
    assert wanted in caplog.text
    caplog.clear()
    PPOConfig(str(tmp_path), bf16=False, scale_rewards=False, normalize_values=False)
    assert "scale_rewards" not in caplog.text


def test_every_default_of_a_grpo_config_is_accepted(tmp_path, caplog):
    logging.getLogger("transformers").propagate = True
    args = PPOConfig(**GRPOConfig(str(tmp_path), **PLAIN).to_dict())
    sizes = (
        args.learning_rate,
        args.kl_coef,
        args.num_ppo_epochs,
        args.num_generations,
        args.max_completion_length,
    )
    assert sizes == (1e-6, 0.0, 1, 8, 512)
    assert (
        "Fields of TRL that are already the case, or without effect: disable_dropout" in caplog.text
    )


@pytest.mark.parametrize("accumulation, size", [(1, 16), (2, 64), (4, 16)])
def test_generation_batch_size_is_that_of_grpo(tmp_path, accumulation, size):
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    settings = PLAIN | batch | {"generation_batch_size": size, "num_generations": 2}
    theirs = GRPOConfig(str(tmp_path), **settings)
    ours = PPOConfig(str(tmp_path), **settings)
    assert ours.gradient_accumulation_steps == accumulation
    assert ours.num_mini_batches * accumulation == theirs.steps_per_generation


@pytest.mark.parametrize("delta", [1.3, 2.0])
def test_delta_clips_like_grpo(delta):
    torch.manual_seed(0)
    logprobs = torch.randn(1000)
    advantages = torch.randn(1000)
    ratio = logprobs.exp()
    clipped = ratio.clamp(0.8, 1.3) * advantages
    # in `GRPOTrainer._compute_loss`
    grpo = -torch.min(ratio.clamp(max=delta) * advantages, clipped)
    ours = ppo_math.clipped_policy_loss(logprobs, torch.zeros(1000), advantages, 0.2, 0.3, delta)
    torch.testing.assert_close(ours, grpo)


def test_parser_reads_fields_of_trl(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text(
        yaml.safe_dump(PLAIN | {"output_dir": str(tmp_path), "beta": 0.04, "scale_rewards": False})
    )
    flags = (
        "--num_iterations 2 --epsilon 0.3 --use_vllm false --disable_dropout "
        "--no_use_bias_correction_kl"
    )
    [args] = TrlParser(PPOConfig).parse_args_and_config(["--config", str(file), *flags.split()])
    assert (args.kl_coef, args.num_ppo_epochs, args.cliprange) == (0.04, 2, 0.3)
    assert (args.whiten_advantages, args.kl_placement) == (False, "loss")


@pytest.mark.parametrize("rows, tables", [(None, 8), (0, 0)])
def test_completions_to_print_are_those_of_grpo(tmp_path, capsys, rows, tables):
    args = config(tmp_path, log_completions=True, num_completions_to_print=rows, max_steps=1)
    PPOTrainer(llama(), length_reward, args, prompts(), processing_class=tokenizer()).train()
    printed = capsys.readouterr().out
    assert printed.count("├") + printed.count("┡") == tables and ("Step 1" in printed) == bool(
        tables
    )


def test_arguments_of_grpo_are_in_its_order():
    ours, grpo = (
        list(inspect.signature(trainer).parameters) for trainer in (PPOTrainer, trl.GRPOTrainer)
    )
    assert [name for name in ours if name in grpo] == grpo


def test_other_modules_read_no_name_that_sets_ours():
    """It has its default after the config is built, so a reader would see no setting."""
    package = Path(trl_ppo_ext.__file__).parent
    read = set()
    for path in package.rglob("*.py"):
        if path.stem not in ("config", "trl_names"):
            read |= {
                (path.stem, name)
                for name in re.findall(r"\bargs\.(\w+)", path.read_text())
                if name in NAMES
            }
    assert not read
