"""The memory estimate: counts against models that are built, peaks against tensors that exist."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import config, llama, qwen2, tokenizer
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

import trl_ppo_ext
from trl_ppo_ext import estimate_memory
from trl_ppo_ext.episodes.transformers_generator import KEPT
from trl_ppo_ext.rewards import load_classifier
from trl_ppo_ext.tools.memory import (
    OPTIMIZERS,
    AdapterSizes,
    MemoryEstimate,
    ModelSizes,
    adapter_sizes,
    model_sizes,
    on_meta,
)

ROOT = Path(__file__).parents[3]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NO_CRITIC = {"critic": "none", "advantage_estimator": "reinforce"}


@pytest.fixture(scope="module")
def estimates():
    path = ROOT / "benchmarks" / "memory" / "estimate.py"
    spec = importlib.util.spec_from_file_location("benchmarks_estimate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def qwen3():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "head_dim": 16,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))


def bytes_of(model):
    """Bytes of all storages of a model, with those of quantization constants."""
    tensors = list(model.parameters())
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            if part is not None:
                tensors += [
                    x for x in (part.absmax, part.code, part.offset) if isinstance(x, torch.Tensor)
                ]
    for module in model.modules():
        tensors += [
            x for x in (getattr(getattr(module, "weight", None), "SCB", None),) if x is not None
        ]
    return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


# ---- counts ----


@pytest.mark.parametrize(
    "make", [llama, qwen2, qwen3, lambda: llama(classifier=True), lambda: llama(hidden_size=64)]
)
def test_weight_bytes_equal_those_of_the_model(make):
    real = make()
    classifier = "Classification" in type(real).__name__
    sizes = model_sizes(on_meta(real.config, classifier), 4)
    assert sizes == model_sizes(real, 4)  # of a model that is not on the meta device
    assert sizes.bytes == bytes_of(real)
    assert replace(sizes, width=2).bytes == bytes_of(real.to(torch.bfloat16))


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 4, "target_modules": "all-linear"},
        {"r": 16, "target_modules": ["q_proj", "v_proj"]},
        {"r": 8, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}},
    ],
)
def test_adapter_sizes_equal_those_of_peft(lora):
    peft_config = LoraConfig(**lora, task_type="CAUSAL_LM")
    sizes = adapter_sizes(on_meta(llama().config), peft_config)
    real = get_peft_model(llama(), peft_config)
    assert sizes.parameters == sum(x.numel() for x in real.parameters() if x.requires_grad)
    if lora["target_modules"] == "all-linear":
        named = ALL
    else:
        named = lora["target_modules"]
    assert sizes.ranks == {
        name: lora.get("rank_pattern", {}).get(name, lora["r"]) for name in named
    }


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_quantized_bytes_equal_those_of_a_loaded_model(tmp_path, kind):
    llama(classifier=True, hidden_size=64).save_pretrained(tmp_path)
    loaded = load_classifier(str(tmp_path), torch.bfloat16, kind)
    sizes = model_sizes(
        on_meta(loaded.config, True), 2, "int8" if kind == "int8" else "4bit double"
    )
    # not counted, since it does not grow with a layer: in 4 bits its two tables of codes, in 8 bits
    # a number per row
    layers = [x for x in loaded.modules() if isinstance(x, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    constants = sum(4 * x.out_features if kind == "int8" else 4 * (16 + 256) for x in layers)
    assert sizes.bytes + constants == pytest.approx(bytes_of(loaded), abs=2100)
    estimate = estimate_memory(llama().config, config(tmp_path), reward_funcs=loaded, device="cpu")
    assert estimate.rewards == (sizes,)


def test_quantization_may_be_among_the_arguments_of_the_model(tmp_path):
    settings = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    args = config(tmp_path, model_init_kwargs={"quantization_config": settings})
    estimate = estimate_memory(llama().config, args, device="cpu")
    assert estimate.base.quantization == "4bit double"


@pytest.mark.parametrize("critic", ["head", "side", "adapter"])
def test_trained_parameters_equal_those_of_the_trainer(tmp_path, critic):
    from tiny import length_reward, prompts

    args = config(tmp_path, critic=critic)
    trainer = trl_ppo_ext.PPOTrainer(
        llama(), length_reward, args, prompts(), processing_class=tokenizer()
    )
    parts = estimate_memory(llama().config, args, device="cpu").phases["update"]
    trained = sum(x.numel() for x in trainer.model.parameters() if x.requires_grad)
    assert parts["policy adapter"] + parts["critic"] == 4 * trained
    made = sum(parts[name] for name in ("base weights", "policy adapter", "critic"))
    assert made == sum(x.numel() * x.element_size() for x in trainer.model.parameters())


def test_saved_adapter_is_there_twice(tmp_path):
    """Its frozen copy is the reference."""
    from tiny import length_reward, prompts

    policy = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    policy.save_pretrained(tmp_path / "saved")
    args = config(tmp_path / "run")
    settings = {"args": args, "peft_config": str(tmp_path / "saved")}
    trainer = trl_ppo_ext.PPOTrainer(
        llama(),
        length_reward,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **settings,
    )
    parts = estimate_memory(llama().config, **settings, device="cpu").phases["update"]
    assert parts["reference adapter"] == parts["policy adapter"] > 0
    kinds = ("base weights", "policy adapter", "reference adapter", "critic")
    loaded = sum(x.numel() * x.element_size() for x in trainer.model.parameters())
    assert sum(parts[kind] for kind in kinds) == loaded
    new = estimate_memory(llama().config, args, device="cpu").phases["update"]
    assert "reference adapter" not in new


def test_layer_with_a_parameter_of_its_own_is_named(tmp_path):
    """Such as Doge's."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    doge = AutoConfig.for_model("doge", **sizes, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match="cannot be estimated: its `layers` must have"):
        estimate_memory(doge, config(tmp_path), device="cpu")


def test_optimizer_states_equal_those_of_the_optimizer():
    weight = torch.nn.Parameter(torch.zeros(5000))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [x for x in optimizer.state[weight].values() if x.ndim]
    assert OPTIMIZERS["adamw_torch"] * 5000 == sum(x.numel() * x.element_size() for x in states)


# ---- peaks ----


def test_tracker_counts_each_storage_while_it_is_alive(estimates):
    with estimates.Tracker() as tracker:
        x = torch.zeros(1000)
        view = x.view(10, 100)[2:]
        tracker.enter("second")
        y = x + 1
        del y
        tracker.enter("third")
        del x
        z = torch.zeros(10)
        assert tracker.alive == 4040  # the view still holds it
        del view, z
    assert tracker.alive == 0
    assert tracker.peaks == {"load": 4000, "second": 8000, "third": 4040}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"dtype": "fp32", "fields": {"critic": "adapter"}}, marks=pytest.mark.slow),
        {
            "dtype": "bf16",
            "fields": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        },
        pytest.param(
            {"dtype": "bf16", "classifier": "fp32", "fields": {"gradient_checkpointing": True}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"dtype": "bf16", "fields": {"critic": "side"}}, marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16", "checkpointing", "side"],
)
def test_peaks_are_within_a_tenth_of_a_run(estimates, tmp_path, case):
    case = estimates.Case(estimates.Shape(1024, 128, 3, 8, 32, 32), **case)
    phases_in_mib = estimates.measure(case, str(tmp_path))["phases"]
    measured = {name: peak * 2**20 for name, peak in phases_in_mib.items()}
    estimate = estimates.estimated(case, str(tmp_path))
    assert estimate.peak == pytest.approx(max(measured.values()), rel=0.1)
    for phase, peak in estimate.phases.sum().items():
        assert peak == pytest.approx(measured[phase], rel=0.15), phase


# ---- formulas ----


BASE = ModelSizes(
    256,
    1024,
    4,
    256,
    128,
    False,
    8192,
    linear=16 * 256**2 + 12 * 1024 * 256,
    others=8192 * 256,
    width=2,
)


def estimate(directory, **changes):
    sizes = {
        "base": BASE,
        "adapter": AdapterSizes(32 * 16 * 256, dict.fromkeys(ALL, 16)),
        "prompt_length": 128,
    }
    sizes |= {
        name: changes.pop(name)
        for name in list(changes)
        if name in MemoryEstimate.__dataclass_fields__
    }
    fields = {
        "num_mini_batches": 2,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 128,
    } | changes
    return MemoryEstimate(config(directory, **fields), **sizes)


def part(run, phase, name):
    return run.phases[phase].dropna().get(name, 0)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
        ({}, {"prompt_length": 256}),
        ({}, {"max_completion_length": 256}),
        ({"critic": "head"}, {}),
        ({"critic": "head"}, {"critic": "adapter"}),
        ({}, {"base": replace(BASE, width=4)}),
        ({}, {"processes": 2}),
        ({}, {"base": replace(BASE, layers=8)}),
        (NO_CRITIC, {}),
        ({"gradient_checkpointing": True}, {}),
        (
            {"base": replace(BASE, quantization="4bit double")},
            {"base": replace(BASE, quantization="4bit")},
        ),
        (
            {"base": replace(BASE, quantization="4bit")},
            {"base": replace(BASE, quantization="int8")},
        ),
        ({"base": replace(BASE, quantization="int8")}, {}),
        ({"optimizer": OPTIMIZERS["adamw_8bit"]}, {}),
        ({"on_gpu": False}, {}),
        ({}, {"eval_strategy": "steps", "per_device_eval_batch_size": 256}),
        (
            {"gradient_accumulation_steps": 128, "per_device_generation_batch_size": 128},
            {"gradient_accumulation_steps": 128},
        ),
    ],
)
def test_larger_runs_need_more(tmp_path, less, more):
    smaller = estimate(tmp_path, **less)
    larger = estimate(tmp_path, **more)
    assert smaller.needed < larger.needed
    for phase in ("generate", "score"):
        assert smaller.phases[phase].sum() <= larger.phases[phase].sum()


@pytest.mark.parametrize("settings, stays", [({}, True), ({"on_gpu": False}, False)])
def test_small_memory_of_sampling_stays_on_a_gpu(tmp_path, settings, stays):
    run = estimate(tmp_path, **settings)
    for name in ("KV cache", "sampling"):
        assert (part(run, "update", name) > 0) == stays
    large = estimate(tmp_path, **settings, gradient_accumulation_steps=4096)
    assert part(large, "generate", "KV cache") > KEPT
    assert part(large, "update", "KV cache") == 0


def test_copy_of_a_dequantized_base_is_there_during_rollouts_only(tmp_path):
    base = replace(BASE, quantization="4bit")
    run = estimate(tmp_path, base=base, dequantize_for_generation=True)
    assert part(run, "generate", "dequantized base") == base.width * base.linear
    assert part(run, "update", "dequantized base") == part(run, "update", "KV cache") == 0


def test_colocated_vllm_takes_its_share_of_the_device(tmp_path):
    plain = estimate(tmp_path, generation_backend="transformers")
    colocated = {"generation_backend": "vllm", "vllm_gpu_memory_utilization": 0.4}
    vllm = estimate(tmp_path, **colocated)
    assert part(plain, "generate", "KV cache") > 0 == part(vllm, "generate", "KV cache")
    memory = 4 * vllm.needed / 2**30
    assert (
        vllm.share_of_vllm(memory) == pytest.approx(0.4 * memory * 2**30)
        and plain.share_of_vllm(memory) == 0
    )
    assert vllm.fits(memory) and not vllm.fits(1.6 * vllm.needed / 2**30)
    asleep = estimate(tmp_path, **colocated, vllm_enable_sleep_mode=True)
    # its keys and values are freed when the others are needed, its base is not
    assert BASE.bytes <= asleep.share_of_vllm(memory) < vllm.share_of_vllm(memory)
    assert (
        estimate(tmp_path, generation_backend="vllm", vllm_mode="server").share_of_vllm(memory) == 0
    )


def test_saved_tensors_equal_a_count_by_hand(tmp_path):
    """fp32, one layer, no critic: every saved tensor of the layer."""
    base = ModelSizes(
        8, 16, 1, 8, 8, False, 32, linear=4 * 8 * 8 + 3 * 16 * 8, others=32 * 8, width=4
    )
    run = estimate(
        tmp_path,
        base=base,
        adapter=AdapterSizes(0, dict.fromkeys(ALL, 2)),
        on_gpu=False,
        prompt_length=1,
        **NO_CRITIC,
        max_completion_length=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
    )
    tokens = 2
    # inputs of attention and MLP adapters, two norms, q k v out, out without padding, four of
    # SwiGLU, seven of rank 2
    saved = tokens * 4 * (2 * 8 + 2 * 8 + 5 * 8 + 4 * 16 + 7 * 2)
    backward = tokens * 4 * (2 * 8 + 2 * 16)
    derivative = 4 * 8
    assert (
        part(run, "update", "activations") + part(run, "update", "logits")
        == saved + backward + derivative
    )


# ---- docs/speed_and_memory.md, benchmarks/README.md ----


def test_table_of_the_page_is_current(estimates):
    assert estimates.table() in (ROOT / "docs" / "speed_and_memory.md").read_text()


def test_benchmark_results_are_within_a_tenth():
    """As docs/speed_and_memory.md promises."""
    told = json.loads((ROOT / "benchmarks" / "results" / "estimate.json").read_text())
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert len(told["results"]) >= 6
    for result in told["results"]:
        measured = max(result["measured"]["phases"].values())
        estimated = result["estimated"]["peak"]
        assert estimated == pytest.approx(measured, rel=0.1)
        assert (
            f"| {result['name']} | {estimated:.1f} | {measured:.1f} | "
            f"{result['measured']['resident']:.0f} |" in page
        )


def test_benchmark_results_are_current(estimates, tmp_path):
    """The page would be about other formulas if they had changed since."""
    told = {
        x["name"]: x["estimated"]["peak"]
        for x in json.loads(estimates.RESULTS.read_text())["results"]
    }
    assert told.keys() == estimates.CASES.keys()
    for name, case in estimates.CASES.items():
        if case.shape.vocabulary <= 8192:  # larger ones take seconds to make
            directory = tmp_path / name
            estimates.saved_models(case, directory)
            assert estimates.estimated(case, str(directory)).peak / 2**20 == pytest.approx(
                told[name], rel=0.01
            ), name
