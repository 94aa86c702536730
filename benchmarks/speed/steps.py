"""Sampling by steps on a GPU: equal tokens, and milliseconds per token.

    bash benchmarks/speed/gpu.sh --parts graphs      # writes benchmarks/results/gpu.json
    python benchmarks/speed/steps.py [CASE ...]      # by itself: prints the results only
    python benchmarks/speed/steps.py --tiny          # tiny models, also on a CPU

Tokens of tiny models of some families: those of CUDA graphs must be those of single steps, in a
second call, and with a new sampler; in float32 also those of `generate` with the same noise. In
bfloat16 `generate` rounds otherwise. Times of Qwen2.5's shapes with LoRA, as a run samples:
`generate`, single steps, graphs, and the kernels of one step.

On a CPU there are no graphs: what is compared and timed are single steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_case
from accelerate import Accelerator
from gpu import CASES, Case, case_of, why_not
from peft import LoraConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.integrations import apply_liger_kernel

from trl_ppo_ext.episodes import static_step
from trl_ppo_ext.episodes.generator import cut_at_stop
from trl_ppo_ext.episodes.static_sampler import StaticSampler
from trl_ppo_ext.episodes.static_step import score_filters
from trl_ppo_ext.episodes.transformers_generator import TransformersGenerator, cache_argument
from trl_ppo_ext.modeling.loading import load_actor_critic

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

# ---- tokens ----

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8}
LATENT = {  # attention of DeepSeek
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# settings of each family beside its sizes; its type is the first word of the name
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": LATENT | EXPERTS,
    "llama, dynamic rope": {"rope_parameters": DYNAMIC},
}
ROWS = 12
LONGEST_PROMPT = 9
NEW = 40
STOPS = [1, 7, 9]
FILTERS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
}


def tiny_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model whose next tokens depend on all earlier ones."""
    kind = family.split(",")[0]
    config = AutoConfig.for_model(kind, **SIZES | SETTINGS.get(family, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.3)
    model.generation_config = GenerationConfig()
    return model.to(DEVICE, dtype).eval()


def noise_and_prompts() -> tuple[torch.Tensor, list[list[int]]]:
    """Noise and prompts of several lengths, drawn on the CPU."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(ROWS, NEW, dtype=torch.float64, generator=generator)
    lengths = [LONGEST_PROMPT - row % 6 for row in range(ROWS)]
    prompts = [torch.randint(10, 120, (n,), generator=generator).tolist() for n in lengths]
    return noise, prompts


def generated(
    model: PreTrainedModel, noise: torch.Tensor, prompts: list[list[int]]
) -> list[list[int]]:
    """Completions of `generate`, whose `multinomial` reads the noise."""
    padding = [LONGEST_PROMPT - len(ids) for ids in prompts]
    ids = torch.tensor([[0] * pads + ids for pads, ids in zip(padding, prompts)])
    mask = torch.tensor([[0] * pads + [1] * len(ids) for pads, ids in zip(padding, prompts)])
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, eos_token_id=STOPS, **FILTERS)
    columns = iter(noise.to(DEVICE).T[..., None].contiguous())

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        ends = probabilities.double().cumsum(-1)
        return torch.searchsorted(ends / ends[:, -1:], next(columns), right=True)

    with mock.patch("torch.multinomial", multinomial), torch.no_grad():
        output = model.generate(
            ids.to(DEVICE), attention_mask=mask.to(DEVICE), generation_config=config
        )
    return [cut_at_stop(x, frozenset(STOPS)) for x in output[:, LONGEST_PROMPT:].tolist()]


def small_sampler(model: PreTrainedModel) -> StaticSampler:
    """A sampler that reads and grows often, so that it needs several graphs."""
    sampler = StaticSampler(
        model,
        str(cache_argument(model)),
        score_filters(GenerationConfig(**FILTERS)),
        STOPS,
        pad_token_id=0,
    )
    sampler.memory.block = 16
    sampler.read_every = 4
    return sampler


def compare(family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Tokens of a family's model; `differ` names those that are not those of single steps."""
    model = tiny_model(family, dtype)
    noise, prompts = noise_and_prompts()

    def sampled(sampler: StaticSampler) -> list[list[int]]:
        return sampler.sample(prompts, [NEW] * ROWS, FILTERS["temperature"], noise=noise).token_ids

    # 1. Single steps of the shapes that graphs have.
    single = small_sampler(model)
    with mock.patch.object(single.step, "_captured", return_value=None):
        expected = sampled(single)

    # 2. Graphs, which the first call captures and the second only replays.
    with mock.patch.object(static_step.logger, "warning_once") as warning:
        sampler = small_sampler(model)
        tokens = {
            "first call": sampled(sampler),
            "second call": sampled(sampler),
            "new sampler": sampled(small_sampler(model)),
        }
    if dtype == torch.float32:
        tokens["generate"] = generated(model, noise, prompts)
    result: dict[str, Any] = {
        "graphs": len(sampler.step.graphs),
        "lengths": sorted(map(len, expected)),
        "differ": [name for name, ids in tokens.items() if ids != expected],
    }
    if warning.called:
        result["not captured"] = warning.call_args.args[0]
    return result


def tokens(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Compare the tokens of a family in both dtypes."""
    result: dict[str, Any] = {"measured": {}, "tokens": {}}
    differing = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        compared = compare(case.shape, dtype)
        result["tokens"][name] = compared
        result["measured"][f"graphs in {name}"] = compared["graphs"]
        differing += [f"{which} in {name}" for which in compared["differ"]]
        tell(result)
    if differing:
        raise RuntimeError(f"Tokens differ from those of single steps: {', '.join(differing)}")
    return result


# ---- times ----

FEW = 16  # tokens of the slower ways
REPEATS = 3
LONGEST_KERNELS = 14


@lru_cache(maxsize=1)  # cases of a process share the model
def loaded(shape: str, base: str, liger: bool, directory: Path) -> Any:
    """The actor-critic of a run."""
    case = Case(shape, base)
    gpu_case.save_models(shape, directory)
    actor_critic = load_actor_critic(
        str(directory / "base"),
        gpu_case.arguments(case, directory)["args"],
        gpu_case.quantization_of(case),
        LoraConfig(**gpu_case.LORA),
        device=DEVICE,
    )
    if liger:
        without_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        apply_liger_kernel(actor_critic.policy, without_loss)
    return actor_critic.to(DEVICE).eval()


def milliseconds(sample: Callable[[int], Any], count: int) -> float:
    """Milliseconds per token, of a function that samples so many: the median of some calls.

    Reading the prompts is no part of it: calls of one token are subtracted.
    """

    def seconds(tokens: int) -> float:
        synchronize()
        began = time.perf_counter()
        sample(tokens)
        synchronize()
        return time.perf_counter() - began

    sample(count)  # warms up, and captures
    sample(1)
    differences = [seconds(count) - seconds(1) for _ in range(REPEATS)]
    return 1000 * statistics.median(differences) / (count - 1)


def synchronize() -> None:
    """Wait for the GPU."""
    if GPU:
        torch.cuda.synchronize()


def profiled(sampler: StaticSampler, rows: int, column: int) -> dict[str, Any]:
    """Kernels of one step from a column on: their number, time, and the longest; on a CPU,
    operations."""
    activity = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
    end = sampler.memory.window.end
    sampler.step.start(column, 1.0)
    synchronize()
    with profile(activities=[activity]) as record, torch.no_grad():
        sampler.step.advance(rows, end)
        synchronize()
    kernels = []
    for x in record.key_averages():
        microseconds = x.self_device_time_total if GPU else x.self_cpu_time_total
        is_on_host = x.device_type == DeviceType.CPU
        if is_on_host != GPU:
            kernels.append((x.key[:70], x.count, microseconds / 1000))
    kernels.sort(key=lambda kernel: -kernel[2])
    return {
        "kernels": sum(count for _, count, _ in kernels),
        "busy ms": sum(busy for _, _, busy in kernels),
        "longest": [
            [name, count, round(busy, 3)] for name, count, busy in kernels[:LONGEST_KERNELS]
        ],
    }


def times(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Milliseconds per token of `generate`, single steps and graphs."""
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    actor_critic = loaded(case.shape, case.base, case.liger, directory)
    words, texts = gpu_case.rows(case, directory)
    args = gpu_case.arguments(case, directory)["args"]
    accelerator = Accelerator(mixed_precision="bf16", cpu=not GPU)
    generator = TransformersGenerator(actor_critic, words, args, accelerator)
    sampler = generator.static_sampler()
    if sampler is None:
        raise RuntimeError(f"Steps do not sample, because {generator.why_not_stepped}")
    ids = [words(text)["input_ids"] for text in texts[: case.batch]]
    prompts = [row[number % 4 :] for number, row in enumerate(ids)]
    few = min(FEW, case.response)
    measured: dict[str, float] = {}
    result: dict[str, Any] = {"measured": measured}

    def step(count: int) -> list[list[int]]:
        torch.manual_seed(0)  # the CPU draws the noise
        generator.begin_logprobs()
        return generator.step_batch(sampler, prompts, [count] * case.batch).token_ids

    # 1. Graphs first, since they matter most.
    failures = []
    of_graphs = None
    if sampler.step.captures:
        with mock.patch.object(static_step.logger, "warning_once") as warning:
            milliseconds_of_graphs = milliseconds(step, case.response)
        if warning.called:
            failures.append(warning.call_args.args[0])
        else:
            measured["graphs ms/token"] = milliseconds_of_graphs
            measured["graphs"] = len(sampler.step.graphs)
            of_graphs = step(few)
    step(case.response)
    result |= profiled(sampler, case.batch, case.prompt)
    measured["kernels"] = result.pop("kernels")
    measured["busy ms"] = result.pop("busy ms")
    if GPU:
        measured["peak GB"] = torch.cuda.max_memory_allocated() / gpu_case.GB
    tell(result)

    # 2. Single steps.
    sampler.step.drop_graphs()
    sampler.step.captures = False
    measured["single steps ms/token"] = milliseconds(step, few)
    if of_graphs is not None:
        differing = sum(x != y for x, y in zip(of_graphs, step(few)))
        measured["rows of graphs that differ"] = differing
        if differing:
            failures.append("Tokens of graphs differ from those of single steps")
    tell(result)

    # 3. `generate`.
    sampler.release()
    if case.generates:

        def generate(count: int) -> list[list[int]]:
            generator.begin_logprobs()
            return generator._generate_batch(prompts, [count] * case.batch)

        measured["generate ms/token"] = milliseconds(generate, few)
        tell(result)
    if failures:
        raise RuntimeError("; ".join(failures))
    return result


# ---- by itself ----


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, case in CASES.items() if case.part == "graphs"]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {names}")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU")
    args = parser.parse_args()
    unknown = set(args.cases) - set(names)
    if unknown:
        parser.error(f"unknown case {min(unknown)!r}; choose some of {names}")
    if args.tiny:
        gpu_case.make_tiny()
    all_done = True
    with tempfile.TemporaryDirectory() as directory:
        for name in args.cases or names:
            reason = why_not(case_of(name, args.tiny))
            if reason is not None:
                print(f"{name}: skipped: {reason}", flush=True)
                continue
            all_done &= gpu_case.run(name, Path(directory), args.tiny)
    sys.exit(not all_done)


if __name__ == "__main__":
    main()
