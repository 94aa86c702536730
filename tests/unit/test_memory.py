"""What a run will need: counts against models that are really made, peaks against tensors that are really there."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import config, llama, qwen2, tokenizer
from transformers import (
    BitsAndBytesConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import trl_ppo_ext
from trl_ppo_ext import estimate_memory
from trl_ppo_ext.memory.fit import needed, peak
from trl_ppo_ext.memory.phases import Workload, optimizer_bytes, phases, resident_parts
from trl_ppo_ext.memory.sizes import AdapterSizes, ModelSizes, adapter_sizes, model_sizes, on_meta, weight_bytes
from trl_ppo_ext.rewards import load_classifier

ROOT = Path(__file__).parents[2]
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def benchmark():
    path = ROOT / "benchmarks" / "estimate.py"
    spec = importlib.util.spec_from_file_location("benchmarks_estimate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def qwen3():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))


def bytes_of(model):
    """Of all storages of a model, those beside quantised weights too."""
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            if part is not None:
                tensors += [x for x in (part.absmax, part.code, part.offset) if isinstance(x, torch.Tensor)]
    for module in model.modules():
        tensors += [x for x in (getattr(getattr(module, "weight", None), "SCB", None),) if x is not None]
    return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


# ---- counts ----


@pytest.mark.parametrize("make", [llama, qwen2, qwen3, lambda: llama(classifier=True), lambda: llama(hidden_size=64)])
def test_parameters_are_those_of_the_model(make):
    real = make()
    classifier = "Classification" in type(real).__name__
    sizes = model_sizes(on_meta(real.config, classifier))
    assert sizes == model_sizes(real)  # from a model that has memory
    assert sizes.parameters == sum(x.numel() for x in real.parameters())
    assert weight_bytes(sizes, 4) == bytes_of(real)
    assert weight_bytes(sizes, 2) == bytes_of(real.to(torch.bfloat16))


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 4, "target_modules": "all-linear"},
        {"r": 16, "target_modules": ["q_proj", "v_proj"]},
        {"r": 8, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}},
    ],
)
def test_adapters_are_those_that_peft_makes(lora):
    peft_config = LoraConfig(**lora, task_type="CAUSAL_LM")
    sizes = adapter_sizes(on_meta(llama().config), peft_config)
    real = get_peft_model(llama(), peft_config)
    trained = [x.numel() for x in real.parameters() if x.requires_grad]
    assert (sizes.parameters, sorted(sizes.tensors)) == (sum(trained), sorted(trained))
    named = ALL if lora["target_modules"] == "all-linear" else lora["target_modules"]
    assert sizes.ranks == {name: lora.get("rank_pattern", {}).get(name, lora["r"]) for name in named}


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_quantised_weights_are_those_that_are_loaded(tmp_path, kind):
    llama(classifier=True, hidden_size=64).save_pretrained(tmp_path)
    loaded = load_classifier(str(tmp_path), torch.bfloat16, kind)
    sizes = model_sizes(on_meta(loaded.config, classifier=True))
    tables = 0
    if kind != "int8":  # layers share the table of the 4-bit code, which is a few bytes
        tables = (len(sizes.linears) - 1) * 16 * 4
    assert weight_bytes(sizes, 2, kind, double=True) == pytest.approx(bytes_of(loaded) + tables, abs=2100)


def test_the_whole_is_what_the_trainer_makes(tmp_path):
    """Trained parameters, from a trainer that is really built."""
    from tiny import length_reward, prompts

    args = config(tmp_path, critic="adapter")
    trainer = trl_ppo_ext.PPOTrainer(llama(), length_reward, args, prompts(), processing_class=tokenizer())
    load = estimate_memory(llama().config, args, device="cpu").workload
    assert load.trained == sum(x.numel() for x in trainer.model.parameters() if x.requires_grad)
    parts = resident_parts(load)
    made = sum(parts[name] for name in ("base weights", "policy adapter", "critic"))
    assert made == sum(x.numel() * x.element_size() for x in trainer.model.parameters())


def test_optimizer_states_are_those_of_the_optimizer():
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (5000, 700)]
    adapter = AdapterSizes(5700, {}, (5000, 700))
    load = replace(workload(), adapter=adapter, critic="none")
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    assert optimizer_bytes(load) == sum(x.numel() * x.element_size() for x in states)
    in_8_bits = optimizer_bytes(replace(load, optimizer="adamw_8bit"))
    assert in_8_bits == 2 * 5000 * (1 + 4 / 256) + 2 * 4 * 700  # small tensors stay in 32 bits
    assert optimizer_bytes(replace(load, optimizer="sgd")) == 0


# ---- peaks ----


def test_the_tracker_counts_each_storage_while_it_is_there(benchmark):
    with benchmark.Tracker() as tracker:
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
        {"dtype": "fp32", "fields": {"critic": "adapter", "ema_decay": 0.9}},
        {"dtype": "bf16", "fields": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}},
        {"dtype": "bf16", "same_length": False, "classifier": "fp32", "fields": {"gradient_checkpointing": True}},
    ],
    ids=["fp32", "bf16", "checkpointing"],
)
def test_peaks_are_those_of_a_run(benchmark, tmp_path, case):
    case = benchmark.Case(benchmark.Shape(1024, 128, 3, 8, 32, 32), **case)
    phases_in_mib = benchmark.measure(case, str(tmp_path))["phases"]
    measured = {name: peak * 2**20 for name, peak in phases_in_mib.items()}
    estimate = benchmark.estimated(case, str(tmp_path))
    assert estimate.peak == pytest.approx(max(measured.values()), rel=0.1)
    for phase in estimate.phases:
        assert phase.bytes == pytest.approx(measured[phase.name], rel=0.15), phase.name


# ---- the arithmetic ----


def workload(**changes):
    sizes = ModelSizes(256, 1024, 4, 8, 4, 32, 8192, ((256, 256),) * 16 + ((1024, 256),) * 12, 8192 * 256)
    tensors = (16 * 256,) * 32
    load = Workload(
        base=sizes,
        adapter=AdapterSizes(sum(tensors), dict.fromkeys(ALL, 16), tensors),
        width=2,
        chunk=2**22,
        prompt=128,
        response=128,
        micro_batch=4,
        completions=32,
        mini_batch=16,
        generation_batch=32,
        autocast=True,
    )
    return replace(load, **changes)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"micro_batch": 8}),
        ({}, {"prompt": 256}),
        ({}, {"response": 256}),
        ({}, {"critic": "adapter"}),
        ({}, {"width": 4, "autocast": False}),
        ({}, {"averaged": True}),
        ({}, {"ptx": 128}),
        ({}, {"processes": 2}),
        ({}, {"base": replace(workload().base, layers=8)}),
        ({"critic": "none"}, {}),
        ({"checkpointing": True}, {}),
        ({"quantization": "nf4", "double_quantization": True}, {"quantization": "nf4"}),
        ({"quantization": "nf4"}, {"quantization": "int8"}),
        ({"quantization": "int8"}, {}),
        ({"masked": False}, {}),
        ({"optimizer": "sgd"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "adamw_8bit"}, {}),
        ({"on_gpu": False}, {}),
        ({"generation_batch": 128, "completions": 1024}, {"generation_batch": 1024, "completions": 1024}),
    ],
)
def test_more_takes_more(less, more):
    smaller, larger = workload(**less), workload(**more)
    assert needed(smaller) < needed(larger)
    for one, other in zip(phases(smaller), phases(larger)):
        assert one.bytes <= other.bytes or one.name in ("update", "load")


def test_phases_are_the_sum_of_their_parts():
    for phase in phases(workload()):
        assert all(x > 0 and math.isfinite(x) for x in phase.parts.values())
        assert phase.bytes == sum(phase.parts.values())
    assert peak(workload()) == max(phase.bytes for phase in phases(workload()))


def test_a_closed_form():
    """fp32, one layer, no critic: every saved tensor of the layer counted by hand."""
    base = ModelSizes(8, 16, 1, 2, 2, 4, 32, ((8, 8),) * 4 + ((16, 8),) * 3, 32 * 8)
    load = workload(base=base, adapter=AdapterSizes(0, dict.fromkeys(ALL, 2), ()), width=4, autocast=False)
    load = replace(load, masked=False, critic="none", micro_batch=1, mini_batch=1, prompt=1, response=1, on_gpu=False)
    (update,) = [phase for phase in phases(load) if phase.name == "update"]
    tokens = 2
    # inputs of attention's and the MLP's adapters, second and last norm with a scale each, q k v out and log-sum-exp,
    # four of SwiGLU, seven of rank 2
    saved = tokens * 4 * (2 * 8 + 2 * (8 + 1) + 4 * 8 + 2 + 4 * 16 + 7 * 2)
    backward = tokens * 4 * (2 * 8 + 2 * 16)
    derivative = 4 * 8
    assert update.parts["activations"] + update.parts["logits"] == saved + backward + derivative


# ---- docs/memory.md ----


def test_the_table_of_the_page(benchmark):
    assert benchmark.table() in (ROOT / "docs" / "memory.md").read_text()


def test_results_of_the_benchmark_are_within_a_tenth():
    """What docs/memory.md says of them."""
    told = json.loads((ROOT / "benchmarks" / "results" / "estimate.json").read_text())
    page = (ROOT / "docs" / "memory.md").read_text()
    assert len(told["results"]) >= 6
    for result in told["results"]:
        measured, estimated = max(result["measured"]["phases"].values()), result["estimated"]["peak"]
        assert estimated == pytest.approx(measured, rel=0.1)
        assert (
            f"| {result['name']} | {estimated:.1f} | {measured:.1f} | {result['measured']['resident']:.0f} |" in page
        )


def test_results_are_of_the_arithmetic_as_it_is(benchmark, tmp_path):
    """Formulas that were changed since would make the page a claim about something else."""
    told = {x["name"]: x["estimated"]["peak"] for x in json.loads(benchmark.RESULTS.read_text())["results"]}
    assert told.keys() == benchmark.CASES.keys()
    for name, case in benchmark.CASES.items():
        if case.shape.vocabulary <= 8192:  # larger ones take seconds to make
            directory = tmp_path / name
            benchmark.saved_models(case, directory)
            assert benchmark.estimated(case, str(directory)).peak / 2**20 == pytest.approx(told[name], rel=0.01), name
