"""`trl-ppo estimate` and `estimate_memory`: settings that make a run fit, the command, and
invalid arguments."""

import json
import re

import pytest
from peft import LoraConfig, get_peft_model
from tiny import config
from transformers import BertConfig, BitsAndBytesConfig, GPT2Config, LlamaConfig, MixtralConfig

from trl_ppo_ext import PPOConfig, RewardAdapter, estimate_memory
from trl_ppo_ext.commands import estimate as command
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands.estimate import print_estimate, proposals
from trl_ppo_ext.tools.memory import GIB, adapter_sizes, model_sizes, on_meta

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# ---- settings that make it fit ----


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Directories of a base and a classifier with their configs only."""
    path = tmp_path_factory.mktemp("configs")
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
    }
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    LlamaConfig(**sizes).save_pretrained(path / "base")
    LlamaConfig(**sizes, num_labels=1).save_pretrained(path / "reward")
    return path


def settings(**changes):
    sizes = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 1,
    }
    return sizes | {"max_completion_length": 128} | changes


def estimate_of(large, tmp_path, **changes):
    kwargs = {key: changes.pop(key) for key in ("quantization_config",) if key in changes}
    args = config(tmp_path, bf16=True, **settings(**changes))
    return estimate_memory(str(large / "base"), args, reward_funcs=str(large / "reward"), **kwargs)


@pytest.mark.parametrize("share", [0.8, 0.45])
def test_proposals_need_what_runs_with_them_need(large, tmp_path, share):
    estimate = estimate_of(large, tmp_path)
    memory = estimate.needed / GIB * share
    values = {}
    steps = proposals(estimate, memory)
    assert steps[0][0] == {"gradient_checkpointing": True}
    for before, (setting, step) in zip([estimate, *(x for _, x in steps)], steps):
        assert step.needed < before.needed and not before.fits(memory)
        values |= setting
        if values.pop("use_bnb_nested_quant", False):
            del values["load_in_4bit"]
            values["quantization_config"] = NF4
        again = estimate_of(large, tmp_path, **values)
        assert again.needed == pytest.approx(step.needed)
        assert again.args.plan(1).completions == estimate.args.plan(1).completions
    assert step.fits(memory)


def test_proposal_keeps_the_rollout_of_steps_per_generation(large, tmp_path, capsys):
    given = {"steps_per_generation": 8, "num_mini_batches": None}
    estimate = estimate_of(large, tmp_path, **given)
    print_estimate(estimate, estimate.needed / GIB * 0.45)
    assert "num_mini_batches: 4, in place of `steps_per_generation`" in capsys.readouterr().out
    (change,) = [
        x for x, _ in proposals(estimate, estimate.needed / GIB * 0.45) if "num_mini_batches" in x
    ]
    assert change["num_mini_batches"] == 4
    with pytest.raises(ValueError, match=r"steps_per_generation.*num_mini_batches"):
        estimate_of(large, tmp_path, **given | change)
    again = estimate_of(large, tmp_path, **change)
    assert again.args.plan(1).completions == estimate.args.plan(1).completions == 64


def test_proposals_omit_what_cannot_help(large, tmp_path):
    args = config(
        tmp_path, num_mini_batches=1, per_device_train_batch_size=1, gradient_checkpointing=True
    )
    estimate = estimate_memory(
        str(large / "base"), args, reward_funcs=print, quantization_config=NF4, device="cpu"
    )
    assert proposals(estimate, 0.001) == []


# ---- the command ----


def run(large, *more):
    argv = [
        "estimate",
        "--model_name_or_path",
        str(large / "base"),
        "--reward_funcs",
        str(large / "reward"),
    ]
    sizes = [
        "--per_device_train_batch_size",
        "8",
        "--prompt_length",
        "128",
        "--max_completion_length",
        "128",
    ]
    try:
        return cli.main([*argv, *sizes, "--no_gradient_checkpointing", *more])
    except SystemExit as stopped:
        return stopped.code


def test_estimate_command_prints_and_exits(large, capsys):
    assert run(large, "--memory", "24") == 0
    shown = capsys.readouterr().out
    assert "fits in 24 GiB, with" in shown and "base weights" in shown and "KV cache" in shown
    needed = float(re.search(r"([\d.]+) GiB with context", shown)[1])
    assert run(large, "--memory", str(needed * 0.6)) == 1
    shown = capsys.readouterr().out
    assert "does not fit in" in shown and "GiB, does not fit: gradient_checkpointing: true" in shown
    assert shown.count("GiB, fits: ") == 1 and "GiB, fits: " in shown.splitlines()[-1]
    assert run(large, "--memory", "0.001") == 1
    assert "All of them together do not fit" in capsys.readouterr().out
    assert run(large, "--tf32", "true") == 0  # of another machine; no device, no verdict
    assert "fit" not in capsys.readouterr().out


def test_run_that_only_distills_has_no_critic(large, capsys):
    """Nor has its estimate, as its `--dry_run`; one that leaves out its rewards has."""
    argv = ["estimate", "--model_name_or_path", str(large / "base"), "--output_dir", "unused"]
    assert cli.main(argv) == 0
    assert "critic" in capsys.readouterr().out
    assert cli.main([*argv, "--reference_prompt", "hint", "--kl_coef", "1"]) == 0
    assert "critic" not in capsys.readouterr().out


def test_share_of_vllm_must_hold_its_base(large, capsys):
    """It is not quantized, whatever the policy's base is, unless vLLM does that itself."""
    colocated = (
        "--memory",
        "24",
        "--use_vllm",
        "true",
        "--load_in_4bit",
        "true",
        "--vllm_gpu_memory_utilization",
    )
    assert run(large, *colocated, "0.1") == 0
    assert run(large, *colocated, "0.004") == 1  # 0.1 GiB
    assert (
        "vLLM's share of 0.1 GiB does not hold its base of 0.1 GiB"
        in capsys.readouterr().out.splitlines()[-1]
    )
    assert (
        run(large, *colocated, "0.004", "--generation_kwargs", '{"quantization": "bitsandbytes"}')
        == 0
    )


def test_estimate_command_reads_the_file_of_a_run(large, tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    told = {
        "model_name_or_path": str(large / "base"),
        "load_in_4bit": True,
        "critic": "adapter",
        "lora_r": 8,
    }
    told |= {
        "reward_funcs": "trl_ppo_ext.redaction.without_secrets",
        "num_generations": 4,
        "dtype": "bfloat16",
    }
    told |= {"generation_batch_size": 64, "num_mini_batches": 1, "per_device_train_batch_size": 4}
    told |= {"output_dir": str(tmp_path)}
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in told.items()))
    printed = []
    monkeypatch.setattr(command, "print_estimate", lambda *given: printed.append(given) or True)
    assert cli.main(["estimate", "--config", str(file), "--num_processes", "2"]) == 0
    parts = printed[0][0].phases["update"]
    base = on_meta(LlamaConfig.from_pretrained(large / "base"))
    assert parts["base weights"] == model_sizes(base, 2, "4bit").bytes
    assert "reward models" not in parts
    adapter = adapter_sizes(base, LoraConfig(r=8, target_modules=list(ALL)))
    assert parts["policy adapter"] == 4 * adapter.parameters
    assert parts["critic"] == 4 * (adapter.parameters + 513)
    trained = 4 * (2 * adapter.parameters + 513)  # gradients, and DDP's buckets
    assert parts["gradients"] == 2 * trained


@pytest.mark.parametrize(
    ("max_steps", "expected"),
    [
        (
            10,
            "384 completions in the run, with at most 12,288 tokens in all",
        ),  # three rollouts are begun
        (-1, "128 completions per rollout, with at most 4,096 tokens in all"),
    ],
)
def test_work_is_counted_in_completions_and_tokens(max_steps, expected):
    sizes = {"generation_batch_size": 128, "num_mini_batches": 2, "num_ppo_epochs": 2}
    args = PPOConfig("out", use_cpu=True, max_completion_length=32, max_steps=max_steps, **sizes)
    work = command.work_of(args, processes=1)
    assert work == f"work:    {expected}, each sampled once, and learned from 2 times"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--memory", "0"), "`memory` must be above 0"),
        (("--prompt_length", "0"), "`prompt_length` must be above 0"),
        # a context of 2,048 tokens
        (
            ("--prompt_length", "1921"),
            "`prompt_length` must be at most 1920, what the model's context leaves",
        ),
        (
            ("--prompt_length", "65", "--max_prompt_length", "64"),
            "`prompt_length` must be at most 64, what",
        ),
        (
            ("--max_completion_length", "2048"),
            "max_completion_length=2048 leaves no room for a prompt",
        ),
        (("--optim", "adafactor"), "`optim` must be adamw_torch or"),
        (("--attn_implementation", "eager"), "to be estimated, got eager"),
        (
            ("--dtype", "float32"),
            "`dtype` must be bfloat16 or float16 to be estimated, got float32",
        ),
        (("--use_dora", "true"), "`use_dora=True`"),
        (("--cliprnge", "0.3"), "did you mean `cliprange`"),
    ],
)
def test_invalid_arguments_raise(large, capsys, more, message):
    assert run(large, *more) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (GPT2Config(), "GPT2LMHeadModel cannot be estimated"),
        (MixtralConfig(num_hidden_layers=1), "MixtralForCausalLM cannot be estimated"),
        (BertConfig(), "cannot be estimated"),
    ],
)
def test_other_architectures_raise(tmp_path, other, message):
    with pytest.raises(ValueError, match=message):
        estimate_memory(other, config(tmp_path))


def test_rewards_count_by_how_they_are_loaded(large, tmp_path):
    base = str(large / "base")
    args = config(tmp_path, bf16=True)

    def parts(args=args, phase="update", **rewards):
        return estimate_memory(base, args, **rewards).phases[phase].dropna()

    none = parts()
    assert not {"reward models", "reward adapters"} & set(none.index)
    assert parts(reward_funcs=print).equals(none)
    reward = on_meta(LlamaConfig.from_pretrained(large / "reward"), classifier=True).float()
    in_fp32, in_4_bits = (model_sizes(reward, *x).bytes for x in ((4,), (2, "4bit double")))
    loaded = parts(reward_funcs=[print, reward], monitor_funcs=str(large / "reward"))
    assert loaded["reward models"] == in_fp32 + in_4_bits
    for kind in (None, "none"):
        unquantized = config(tmp_path, bf16=True, reward_quantization=kind)
        assert (
            parts(unquantized, reward_funcs=str(large / "reward"))["reward models"] == in_fp32 / 2
        )
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    trained = get_peft_model(reward, lora).peft_config["default"]
    trained.inference_mode = True  # as PEFT saves it
    trained.save_pretrained(tmp_path / "adapter")
    adapted = parts(reward_funcs=RewardAdapter(str(tmp_path / "adapter")))
    assert adapted["reward adapters"] == 4 * (8 * 4 * (512 + 512) + 512)


def test_sharded_runs_are_not_estimated(tmp_path):
    args = config(tmp_path)
    args.deepspeed = "zero3.json"
    with pytest.raises(ValueError, match="`deepspeed` must be None to be estimated"):
        estimate_memory(LlamaConfig(num_hidden_layers=1), args)


def test_saved_quantization_is_estimated(tmp_path):
    saved = LlamaConfig(num_hidden_layers=1, quantization_config=NF4.to_dict())
    estimate = estimate_memory(saved, config(tmp_path))
    assert estimate.base.quantization == "4bit double"
    other = LlamaConfig(
        num_hidden_layers=1, quantization_config={"quant_method": "gptq", "bits": 4}
    )
    with pytest.raises(ValueError, match="quantization by bitsandbytes"):
        estimate_memory(other, config(tmp_path))


@pytest.mark.parametrize("length, expected", [(None, 64), (64, 64), (30, 30)])
def test_longest_prompt_is_what_the_context_leaves(tmp_path, length, expected):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    args = config(tmp_path, max_completion_length=192)
    base = LlamaConfig(**sizes, vocab_size=100, max_position_embeddings=256)
    assert estimate_memory(base, args, prompt_length=length, device="cpu").prompt_length == expected
    wide = LlamaConfig(**sizes, vocab_size=100, max_position_embeddings=4096)
    assert estimate_memory(wide, args, prompt_length=length, device="cpu").prompt_length == (
        length or 512
    )
