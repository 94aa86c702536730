"""`trl-ppo estimate` and `estimate_memory`: settings that make a run fit, the command, and what is refused."""

import json
from itertools import combinations

import pytest
from peft import LoraConfig, get_peft_model
from tiny import config
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
)

from trl_ppo_ext import RewardAdapter, estimate_memory
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.memory import GIB, GPUS, gpu_memory
from trl_ppo_ext.memory.fit import changes, first_that_fits, needed
from trl_ppo_ext.memory.phases import resident_parts
from trl_ppo_ext.memory.sizes import adapter_sizes, model_sizes, on_meta, weight_bytes

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# ---- settings that make it fit ----


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A base and a classifier of some size, as directories that hold configs alone, and no weights."""
    path = tmp_path_factory.mktemp("configs")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    LlamaConfig(**sizes).save_pretrained(path / "base")
    LlamaConfig(**sizes, num_labels=1).save_pretrained(path / "reward")
    return path


def settings(**changes):
    return {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_completion_length": 128} | changes


def estimate_of(large, tmp_path, **changes):
    kwargs = {key: changes.pop(key) for key in ("quantization_config",) if key in changes}
    args = config(tmp_path, num_mini_batches=1, bf16=True, **settings(**changes))
    return estimate_memory(str(large / "base"), args, reward_funcs=str(large / "reward"), **kwargs)


def as_arguments(told):
    """What a proposal says, as a user would set it."""
    found = {}
    for text in told:
        text = text.split(" (")[0]
        if text.startswith("load_in_4bit"):
            found["quantization_config"] = NF4
            continue
        for part in text.split(", "):
            name, value = part.split(": ")
            found[name] = json.loads(value) if value in ("true",) or value.isdigit() else value
    return found


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.45])
def test_proposals_fit_when_they_are_set(large, tmp_path, share):
    estimate = estimate_of(large, tmp_path)
    memory = estimate.needed / GIB * share
    assert not estimate.fits(memory)
    alone, first = estimate.proposals(memory)
    assert [x.settings[0].split(":")[0] for x in alone] == [
        "gradient_checkpointing",
        "per_device_train_batch_size",
        "per_device_generation_batch_size",
        "load_in_4bit",
        "offload_rewards",
        "rewards as adapters on the base (reward_funcs",
        "optim",
    ]
    for proposal in [*alone, *([] if first is None else [first])]:
        assert proposal.needed == needed(proposal.workload)
        assert proposal.fits == (proposal.needed <= memory * GIB)
        if not any(text.startswith("rewards") for text in proposal.settings):
            again = estimate_of(large, tmp_path, **as_arguments(proposal.settings))
            assert again.needed == pytest.approx(proposal.needed)
            assert again.workload.completions == estimate.workload.completions
    if first is not None:
        assert first.fits
        assert len(first.settings) == 1 or not any(proposal.fits for proposal in alone)
    if any(proposal.fits for proposal in alone):
        assert first.settings == next(proposal.settings for proposal in alone if proposal.fits)


def test_the_first_that_fits_has_the_fewest_settings(large, tmp_path):
    """Against all combinations, each with its smallest values."""
    load = estimate_of(large, tmp_path).workload
    smallest = [values[-1][1] for values in changes(load)]
    for share in (0.9, 0.7, 0.5, 0.4, 0.3, 0.01):
        memory, counts = needed(load) * share, []
        for count in range(1, len(smallest) + 1):
            for chosen in combinations(smallest, count):
                changed = load
                for change in chosen:
                    changed = change(changed)
                counts += [count] if needed(changed) <= memory else []
        first = first_that_fits(load, memory)
        assert (None if first is None else len(first.settings)) == min(counts, default=None)


# ---- the command ----


def run(large, *more):
    argv = ["estimate", "--model_name_or_path", str(large / "base"), "--reward_funcs", str(large / "reward")]
    sizes = ["--per_device_train_batch_size", "8", "--prompt_length", "128", "--max_completion_length", "128"]
    try:
        return cli.main([*argv, *sizes, *more])
    except SystemExit as stopped:
        return stopped.code


def test_the_command_prints_and_exits(large, tmp_path, capsys):
    file = tmp_path / "numbers.json"
    assert run(large, "--gpu", "RTX 4090", "--json", str(file)) == 0
    shown, told = capsys.readouterr().out, json.loads(file.read_text())
    assert "fits in 24 GiB, with" in shown and "base weights" in shown and "KV cache" in shown
    assert told["fits"] is True and told["memory"] == 24 * GIB
    assert told["peak"] == pytest.approx(max(sum(parts.values()) for parts in told["phases"].values()), abs=20)
    small = told["needed"] / GIB * 0.7
    assert run(large, "--memory", str(small), "--json", str(file)) == 1
    shown, told = capsys.readouterr().out, json.loads(file.read_text())
    assert "does not fit in" in shown and "gradient_checkpointing: true" in shown and "First that fits" in shown
    assert told["fits"] is False and told["first_that_fits"]["needed"] <= small * GIB
    assert run(large, "--memory", "0.001") == 1
    assert "All of them together do not make it fit" in capsys.readouterr().out
    assert run(large) == 0  # no device, no verdict
    assert "fit" not in capsys.readouterr().out


def test_the_file_of_a_run_is_estimated_as_it_is(large, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    told = {"model_name_or_path": str(large / "base"), "load_in_4bit": True, "critic": "adapter", "lora_r": 8}
    told |= {"reward_funcs": "trl_ppo_ext.redaction.without_secrets", "num_generations": 4, "dtype": "bfloat16"}
    told |= {"generation_batch_size": 64, "per_device_train_batch_size": 4, "output_dir": str(tmp_path)}
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in told.items()))
    numbers = tmp_path / "numbers.json"
    both = ("--json", str(numbers), "--num_processes", "2")
    assert cli.main(["estimate", "--config", str(file), *both]) == 0
    parts = json.loads(numbers.read_text())["phases"]["update"]
    sizes = model_sizes(on_meta(LlamaConfig.from_pretrained(large / "base")))
    assert parts["base weights"] == weight_bytes(sizes, 2, "nf4")
    assert "reward models" not in parts
    adapter = adapter_sizes(
        on_meta(LlamaConfig.from_pretrained(large / "base")), LoraConfig(r=8, target_modules=list(ALL))
    )
    assert parts["policy adapter"] == 4 * adapter.parameters
    assert parts["critic"] == 4 * (adapter.parameters + 513)
    trained = 4 * (2 * adapter.parameters + 513)  # gradients, and DDP's buckets
    assert parts["gradients"] == 2 * trained


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--gpu", "RTX 9999"), "There is no GPU 'RTX 9999'"),
        (("--gpu", "A10", "--memory", "8"), "Both `gpu` and `memory`"),
        (("--memory", "0"), "`memory` must be above 0"),
        (("--prompt_length", "0"), "`prompt_length` must be at least 1"),
        (("--optim", "adafactor"), "`optim='adafactor'` is not estimated"),
        (("--attn_implementation", "eager"), "`attn_implementation='eager'` is not estimated"),
        (("--dtype", "float32"), "leave `dtype` out"),
        (("--use_dora", "true"), "`use_dora=True`"),
        (("--json", "/no/such/folder/x.json"), "does not exist"),
        (("--num_processes", "0"), "`num_processes` must be at least 1"),
        (("--cliprnge", "0.3"), "did you mean `cliprange`"),
        (("--deepspeed", "ds.json"), "not estimated"),
    ],
)
def test_bad_input_is_refused(large, capsys, more, message):
    assert run(large, *more) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_there_must_be_a_model(capsys):
    assert cli.main(["estimate"]) == 2
    assert "give `model_name_or_path`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (GPT2Config(), "GPT2LMHeadModel cannot be estimated"),
        (MixtralConfig(num_hidden_layers=1), "MixtralForCausalLM cannot be estimated"),
        (BertConfig(), "cannot be estimated"),
        (7, "`model` must be a model id or path"),
    ],
)
def test_other_architectures_are_refused(tmp_path, other, message):
    with pytest.raises(ValueError, match=message):
        estimate_memory(other, config(tmp_path))


def test_reward_adapters_and_loaded_models(large, tmp_path):
    base, args = str(large / "base"), config(tmp_path, bf16=True)
    none = resident_parts(estimate_memory(base, args).workload)
    assert none["reward models"] == none["reward adapters"] == 0
    assert resident_parts(estimate_memory(base, args, reward_funcs=print).workload) == none
    reward = LlamaConfig.from_pretrained(large / "reward", dtype="float32")
    loaded = estimate_memory(base, args, reward_funcs=[print, reward], monitor_funcs=str(large / "reward"))
    sizes = model_sizes(on_meta(reward, classifier=True))
    both = weight_bytes(sizes, 4) + weight_bytes(sizes, 2, "nf4", double=True)
    assert resident_parts(loaded.workload)["reward models"] == both
    moved = estimate_memory(base, config(tmp_path, bf16=True, offload_rewards=True), reward_funcs=reward)
    by_name = {phase.name: phase.parts for phase in moved.phases}
    assert "reward models" not in by_name["update"]
    assert by_name["score"]["activations"] > weight_bytes(sizes, 4)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    trained = get_peft_model(on_meta(reward, classifier=True), lora).peft_config["default"]
    trained.inference_mode = True  # as PEFT saves it
    trained.save_pretrained(tmp_path / "adapter")
    adapted = estimate_memory(base, args, reward_funcs=RewardAdapter(str(tmp_path / "adapter")))
    assert resident_parts(adapted.workload)["reward adapters"] == 4 * (8 * 4 * (512 + 512) + 512)


def test_a_base_that_is_saved_in_4_bits(tmp_path):
    saved = LlamaConfig(num_hidden_layers=1, quantization_config=NF4.to_dict())
    estimate = estimate_memory(saved, config(tmp_path))
    assert (estimate.workload.quantization, estimate.workload.double_quantization) == ("nf4", True)
    other = LlamaConfig(num_hidden_layers=1, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="saved quantised by 'gptq'"):
        estimate_memory(other, config(tmp_path))


def test_gpus():
    assert gpu_memory("rtx4090") == gpu_memory("NVIDIA GeForce RTX 4090") == GPUS["RTX 4090"]
    assert all(8 <= memory <= 192 for memory in GPUS.values())


def test_nothing_is_instantiated(monkeypatch, large, tmp_path):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert estimate_of(large, tmp_path).peak > 0  # the directories hold no weights either
