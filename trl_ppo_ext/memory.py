"""Memory of a run, estimated from configs.

Weights are counted on models built on the meta device. Activations are formulas for decoder layers like Llama's, with
LoRA on a frozen base and attention by `scaled_dot_product_attention`.
"""

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.training_args import OptimizerNames

from .arguments import as_list
from .config import PPOConfig
from .modeling.critics import SIDE_WIDTH, side_layers
from .modeling.loading import compute_dtype, default_peft_config, hub_kwargs
from .modeling.logprobs import CHUNK_LOGITS
from .rewards import RewardAdapter

PROMPT_LENGTH = 512
GIB = 2**30
CUDA_CONTEXT, FRAGMENTATION = 0.6 * GIB, 0.05  # assumed, not measured: context, and what the allocator cannot use
# bytes of a quantized weight: 4 bits have a constant per block of 64, double quantization a constant per 256 of these
QUANTIZED = {"int8": 1.0, "4bit": 0.5 + 4 / 64, "4bit double": 0.5 + 1 / 64 + 4 / 64 / 256}
# bytes of state per trained parameter; 8 bits have a constant per block of 256, and paged states leave a full GPU
OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused"), 8.0)
OPTIMIZERS |= dict.fromkeys(("adagrad", "rmsprop", "lion_32bit"), 4.0)
OPTIMIZERS |= {"adamw_8bit": 2 + 8 / 256, "adamw_bnb_8bit": 2 + 8 / 256, "lion_8bit": 1 + 4 / 256, "sgd": 0.0}
OPTIMIZERS |= {f"paged_{name}": 0.0 for name in ("adamw", "adamw_32bit", "adamw_8bit", "lion_32bit", "lion_8bit")}
# implementations of attention, and whether they take a mask
MASKED = {None: True, "sdpa": True, "flash_attention_2": False, "flash_attention_3": False}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LINEARS = (*QKV, "o_proj", *GATE_UP, "down_proj")
LAYER = {*LINEARS, "input_layernorm", "post_attention_layernorm"}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model with decoder layers like Llama's."""

    hidden: int
    intermediate: int
    layers: int
    query_width: int  # of all heads
    kv_width: int
    head_norms: bool  # queries and keys are normalized
    vocabulary: int
    linear: int  # parameters that may be quantized
    others: int  # all other parameters: embeddings, output projection or score head, norms, biases
    width: int  # bytes of a number
    quantization: str | None = None  # key of `QUANTIZED`

    @property
    def bytes(self) -> float:
        """Bytes of the weights."""
        return self.linear * QUANTIZED.get(cast(str, self.quantization), self.width) + self.others * self.width

    @property
    def dequantized(self) -> int:
        """Bytes of the largest quantized weight when a product reads it."""
        return 0 if self.quantization is None else self.hidden * self.intermediate * self.width

    def forward(self, tokens: int, adapter_width: int = 0) -> int:
        """Bytes in use at a time in a forward without gradients."""
        mlp = self.intermediate * (2 * (self.width + adapter_width) if adapter_width else 3 * self.width)
        attention = self.width * (4 * self.query_width + 2 * self.kv_width)
        # embeddings, the layer's input, the residual stream, normalized states, and what an adapter casts
        around = 4 * self.width * self.hidden + (adapter_width * self.hidden if adapter_width > self.width else 0)
        return tokens * (around + max(mlp, attention)) + self.dequantized

    def logits(self, tokens: int, chunk: int, exact_kl: bool) -> int:
        """Bytes over the vocabulary in `token_logprobs`: a chunk's product, logits, derivative, and reference."""
        rows = min(tokens, max(1, chunk // self.vocabulary))
        product = 0 if self.width == 4 else self.width  # in float32 it is the logits
        return rows * self.vocabulary * (product + 4 + 4 + (4 if exact_kl else 0))

    def saved(self, ranks: Mapping[str, int], rows: int, length: int, masked: bool) -> int:
        """Bytes that a layer saves for its backward; a frozen weight needs none of its inputs."""
        norms = 8 * self.hidden + (4 * (self.query_width + self.kv_width) if self.head_norms else 0)  # in float32
        # inputs of LoRA's A, one per group, and its outputs
        lora = self.hidden * sum(any(x in ranks for x in group) for group in (QKV, GATE_UP)) + sum(ranks.values())
        # queries, output, keys and values; a mask needs the last two repeated for all heads
        attention = 2 * self.query_width + 2 * (self.query_width if masked else self.kv_width)
        swiglu = (4 if "down_proj" in ranks else 3) * self.intermediate
        mask = self.width * rows * length**2 if masked else 0  # each layer has a copy of its own
        return rows * length * (norms + self.width * (lora + attention + swiglu)) + mask


class AdapterSizes(NamedTuple):
    """Sizes of a LoRA adapter."""

    parameters: int
    ranks: Mapping[str, int]  # by kind of linear layer, e.g. "q_proj"


class Phase(NamedTuple):
    """Memory at the peak of a phase: load, generate, forward, score or update."""

    name: str
    parts: Mapping[str, float]  # bytes

    @property
    def bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a run on one process."""

    args: PPOConfig
    base: ModelSizes
    adapter: AdapterSizes  # of the policy
    rewards: tuple[ModelSizes | AdapterSizes, ...] = ()  # that take memory
    processes: int = 1
    prompt_length: int = PROMPT_LENGTH
    masked: bool = True  # attention takes a mask because rows differ in length
    on_gpu: bool = True
    settings: tuple[dict[str, Any], ...] = ()  # changed by a proposal

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Memory at the peak of each phase, from the second rollout on."""
        args, base, adapter, width, on_gpu = self.args, self.base, self.adapter, self.base.width, self.on_gpu
        plan = args.plan(self.processes)
        rows, completions = plan.micro_batch_size, plan.completions_per_process
        sampled = min(args.per_device_generation_batch_size or completions, completions)
        prompt, response = self.prompt_length, args.max_completion_length
        length, chunk = prompt + response, CHUNK_LOGITS["cuda" if on_gpu else "cpu"]
        adapters, read = 1 + (args.critic == "adapter"), (len(side_layers(base.layers)) + 1) * base.hidden
        heads = {"none": 0, "side": 2 * SIDE_WIDTH * (read + 2) + SIDE_WIDTH + 1}
        trained = adapters * adapter.parameters + heads.get(args.critic, base.hidden + 1)
        exact = args.kl_estimator == "exact"
        kl_in_reward, kl_in_loss = (exact and args.kl_placement != x for x in ("loss", "reward"))
        models = [reward for reward in self.rewards if isinstance(reward, ModelSizes)]
        reward_adapters = [reward for reward in self.rewards if isinstance(reward, AdapterSizes)]
        offloaded = args.offload_rewards and on_gpu

        # 1. In use all the time
        resident: dict[str, float] = {
            "base weights": base.bytes,
            "reward models": 0 if offloaded else sum(model.bytes for model in models),
            "reward adapters": 4 * sum(reward.parameters + base.hidden for reward in reward_adapters),
            "policy adapter": 4 * adapter.parameters,
            "critic": 4 * (trained - adapter.parameters),
            "optimizer states": OPTIMIZERS[OptimizerNames(args.optim).value] * trained,
        }
        # ids of sequences, prompts and completions, and eleven numbers per completion token
        rollout = completions * (8 * length + 8 * prompt + (8 + 44) * response)
        copies: float = 2 * adapter.parameters if width < 4 else 0  # autocast keeps 16-bit copies until it ends
        training: dict[str, float] = {"rollout": rollout, "autocast copies": adapters * copies}

        # 2. Sampling: a cache that is copied layer by layer for every token, and copies of the logits
        cache: float = 2 * width * base.kv_width * base.layers * sampled  # per position
        copied = cache / (2 * base.layers) * (length - 1)  # a layer's keys
        sampling = max(copied, sampled * base.vocabulary * (width + 24 + (16 if args.top_p < 1 else 0)))
        generate: list[dict[str, float]] = [
            {"KV cache": cache * prompt, "activations": base.forward(sampled * prompt), "autocast copies": copies},
            {"KV cache": cache * length, "sampling": sampling + base.dequantized, "autocast copies": copies},
        ]
        if args.generation_backend == "vllm":  # has keys and values of its own
            generate = [{"autocast copies": copies}]

        # 3. Scoring, one reward at a time; reward adapters compute in float32
        tokens = min(args.per_device_reward_batch_size, completions) * length
        scoring = [model.forward(tokens) + (model.bytes if offloaded else 0) for model in models]
        scoring += [base.forward(tokens, 4) for _ in reward_adapters]

        # 4. Projections to the vocabulary, and float32 derivatives by hidden states
        states = width * base.hidden * base.layers * rows * length * (args.critic == "side")  # for the critic to read
        forward = base.forward(rows * length, width) + states
        projected = base.logits(rows * response, chunk, kl_in_reward) + 2 * width * base.hidden * rows * response
        kept = 4 * base.hidden * rows * response * (1 + (args.entropy_coef != 0) + kl_in_loss)
        kept += 4 * rows * response * {"none": 0, "side": read + 4 * SIDE_WIDTH}.get(args.critic, base.hidden)
        projecting = base.logits(rows * response, chunk, kl_in_loss) + kept

        # 5. Backward: what the trunk saved for it, and gradients within a layer
        layer = base.saved(adapter.ranks, rows, length, self.masked)
        trunk = base.layers * layer
        backward = 2 * width * rows * length * (base.hidden + base.intermediate) + base.dequantized
        if args.gradient_checkpointing:  # inputs of layers and of the last norm; a float32 norm's input is the layer's
            trunk = rows * length * base.hidden * (base.layers * width + 4)
            backward += layer - (4 * base.hidden * rows * length if width == 4 else 0)
        # all gradients from an earlier micro-batch, or those of a layer; DDP has them in buckets too
        gradients, buckets = 4 * trained, 4 * trained if self.processes > 1 else 0
        early = buckets + (gradients if plan.gradient_accumulation_steps > 1 else gradients / base.layers)

        moments: dict[str, list[dict[str, float]]] = {
            "load": [{"weight before quantization": base.dequantized, "optimizer states": 0}],
            "generate": generate,
            "forward": [training | {"activations": forward}, training | {"logits": projected}],
            "score": [{"activations": peak, "rollout": rollout} for peak in scoring or [0]],
            "update": [
                training | {"activations": trunk + states, "gradients": early},
                training | {"activations": trunk, "logits": projecting, "gradients": early},
                training | {"activations": adapters * trunk + backward, "logits": kept, "gradients": early},
                training | {"gradients": float(gradients + buckets)},  # the optimizer's step
            ],
        }
        peaks = {name: max(parts, key=lambda x: sum((resident | x).values())) for name, parts in moments.items()}
        return tuple(Phase(name, {x: y for x, y in (resident | parts).items() if y}) for name, parts in peaks.items())

    @property
    def peak_phase(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def peak(self) -> float:
        """Bytes of tensors at the peak."""
        return self.peak_phase.bytes

    @property
    def needed(self) -> float:
        """Bytes that the device must have; on a GPU with an assumed context and fragmentation."""
        return self.peak * (1 + FRAGMENTATION) + CUDA_CONTEXT if self.on_gpu else self.peak

    def share_of_vllm(self, memory: float) -> float:
        """Bytes that a colocated vLLM adds to the peak, on a device of `memory` GiB; asleep it keeps its base only."""
        if self.args.generation_backend != "vllm" or self.args.vllm_mode == "server":
            return 0
        share = self.args.vllm_gpu_memory_utilization * memory * GIB
        generate = next(phase for phase in self.phases if phase.name == "generate")
        asleep = max(replace(self.base, quantization=None).bytes, generate.bytes + share - self.peak)
        return min(asleep, share) if self.args.vllm_enable_sleep_mode else share

    def fits(self, memory: float) -> bool:
        """Return `True` if the run fits in `memory` GiB."""
        return self.needed + self.share_of_vllm(memory) <= memory * GIB

    def proposals(self, memory: float) -> list["MemoryEstimate"]:
        """Add changes, each of which lowers the peak, until the run fits in `memory` GiB."""
        plan = self.args.plan(self.processes)
        completions, minibatch = plan.completions_per_process, plan.mini_batch_size
        sampled = min(self.args.per_device_generation_batch_size or completions, completions)
        in_8_bits = any(isinstance(x, ModelSizes) and x.quantization == "int8" for x in self.rewards)
        sizes = [size for size in range(plan.micro_batch_size - 1, 0, -1) if minibatch % size == 0]
        samples = [size for size in range(sampled - 1, 0, -1) if completions % size == 0]
        # the least costly first, each with its values from the largest
        changes: list[list[dict[str, Any]]] = [
            [{"gradient_checkpointing": True}],
            [{"per_device_train_batch_size": x, "gradient_accumulation_steps": minibatch // x} for x in sizes],
            [{"per_device_generation_batch_size": size} for size in samples],
            [{"load_in_4bit": True, "use_bnb_nested_quant": True}] if self.base.quantization is None else [],
            [] if in_8_bits else [{"offload_rewards": True}],  # 8-bit models cannot be moved
            [{"optim": "adamw_8bit"}],
        ]
        steps, run = list["MemoryEstimate"](), self
        while not run.fits(memory):
            tried = [[run.changed(value) for value in values] for values in changes if values]
            # of each setting the largest value that fits, else the smallest
            chosen = (next((x for x in values if x.fits(memory)), values[-1]) for values in tried)
            better = next((x for x in chosen if x.needed < run.needed), None)
            if better is None:
                break
            steps.append(run := better)
        return steps

    def changed(self, setting: dict[str, Any]) -> "MemoryEstimate":
        """Estimate the run with another change."""
        args = copy(self.args)
        args.__dict__.update(setting)
        base = replace(self.base, quantization="4bit double") if "load_in_4bit" in setting else self.base
        return replace(self, args=args, base=base, settings=(*self.settings, setting))


def estimate_memory(
    model: str | PreTrainedConfig | PreTrainedModel,
    args: PPOConfig,
    *,
    reward_funcs: Any = None,
    monitor_funcs: Any = None,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | str | None = None,
    prompt_length: int = PROMPT_LENGTH,
    same_length: bool = False,
    device: str = "cuda",
) -> MemoryEstimate:
    """Estimate the memory of a run on one process, by phase and part. Only configs are read, no weights.

    Args:
        model: Base model, or its config.
        args ([`PPOConfig`]): Config of the run.
        reward_funcs: As of [`PPOTrainer`]. A `PreTrainedConfig` is a classifier that you load, in the config's dtype.
        monitor_funcs: As of [`PPOTrainer`].
        quantization_config: As of [`PPOTrainer`].
        peft_config: As of [`PPOTrainer`].
        prompt_length (`int`, *optional*, defaults to `512`): Tokens of the longest prompt.
        same_length (`bool`, *optional*, defaults to `False`): Whether all sequences have the same length.
        device (`str`, *optional*, defaults to `"cuda"`): `"cuda"` or `"cpu"`.

    Returns:
        [`MemoryEstimate`]: Its `peak` counts tensors, its `needed` is what the device must have.

    Raises:
        `ValueError`: If the memory of a setting or an architecture is not known.
    """
    # 1. Check for settings that the formulas do not cover.
    if prompt_length < 1:
        raise ValueError(f"`prompt_length` must be at least 1, got {prompt_length}.")
    config: Any = AutoConfig.from_pretrained(model, **hub_kwargs(args)) if isinstance(model, str) else model
    options, width = cast(dict, args.model_init_kwargs or {}), compute_dtype(args).itemsize
    dtype = model.dtype if isinstance(model, PreTrainedModel) else options.get("dtype") or compute_dtype(args)
    config, attention = getattr(config, "config", config), options.get("attn_implementation")
    dtype = str(config.dtype or "float32" if dtype == "auto" else dtype).removeprefix("torch.")
    supported = {
        "device": (device, ("cuda", "cpu")),
        "optim": (OptimizerNames(args.optim).value, OPTIMIZERS),
        "attn_implementation": (attention, MASKED),
        "dtype": (dtype, ("float32",) if width == 4 else ("bfloat16", "float16")),
        "every_n_layers": (cast(dict, args.gradient_checkpointing_kwargs or {}).get("every_n_layers"), (None,)),
    } | {name: (getattr(args, name) or None, (None,)) for name in ("deepspeed", "fsdp")}
    for name, (value, values) in supported.items():
        if value not in values:
            raise ValueError(f"`{name}` must be {' or '.join(map(str, values))} to be estimated, got {value}.")

    # 2. Read sizes of models and adapters. Functions, judges and remote rewards take no memory.
    base, rewards = on_meta(config, trust_remote_code=args.trust_remote_code), list[ModelSizes | AdapterSizes]()
    for reward in (*as_list(reward_funcs), *as_list(monitor_funcs)):
        if isinstance(reward, RewardAdapter):
            reward_config = PeftConfig.from_pretrained(reward.path)
            reward_config.modules_to_save = None  # the score head, which is counted apart
            rewards.append(adapter_sizes(base, reward_config))
        elif isinstance(reward, str):
            loaded_as = {"none": None, "int8": "int8"}.get(str(args.reward_quantization), "4bit double")
            loaded = AutoConfig.from_pretrained(reward, trust_remote_code=args.trust_remote_code)
            rewards.append(model_sizes(on_meta(loaded, True, args.trust_remote_code), width, loaded_as))
        elif isinstance(reward, PreTrainedConfig | PreTrainedModel):
            size = getattr(torch, str(reward.dtype or "float32").removeprefix("torch.")).itemsize
            loaded = getattr(reward, "config", reward)
            rewards.append(model_sizes(on_meta(loaded, True, args.trust_remote_code), size))
    adapter = PeftConfig.from_pretrained(peft_config) if isinstance(peft_config, str) else peft_config
    quantization = quantization_config or getattr(config, "quantization_config", None)
    return MemoryEstimate(
        args=args,
        base=model_sizes(base, width, quantization and _quantization(quantization)),
        adapter=adapter_sizes(base, adapter or default_peft_config()),
        rewards=tuple(rewards),
        processes=args.world_size,
        prompt_length=prompt_length,
        masked=MASKED[attention] and not same_length,
        on_gpu=device == "cuda",
    )


def _quantization(config: Any) -> str:
    """Key of `QUANTIZED` for a quantization config, which is a `dict` in a saved model's config."""
    settings = config if isinstance(config, dict) else config.to_dict()
    if settings["quant_method"] != "bitsandbytes":
        raise ValueError(f"Only quantization by bitsandbytes is estimated, got {settings['quant_method']!r}.")
    in_4_bits = "4bit double" if settings.get("bnb_4bit_use_double_quant") else "4bit"
    return "int8" if settings.get("load_in_8bit") else in_4_bits


def on_meta(config: PreTrainedConfig, classifier: bool = False, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, not quantized."""
    config = copy(config)
    vars(config).pop("quantization_config", None)
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def model_sizes(model: PreTrainedModel, width: int, quantization: str | None = None) -> ModelSizes:
    """Read the sizes of a model, whose layers must be like Llama's."""
    layers: list[Any] = list(getattr(model.base_model, "layers", []))
    for layer in layers or [nn.Module()]:
        names = {name.split(".")[-2] for name, _ in layer.named_parameters()} - {"q_norm", "k_norm"}
        if names != LAYER:
            needed = f"its `layers` must have {', '.join(sorted(LAYER))}, got {', '.join(sorted(names)) or 'none'}"
            raise ValueError(f"{type(model).__name__} cannot be estimated: {needed}; measure a few steps instead.")
    attention, mlp = layers[0].self_attn, layers[0].mlp.gate_proj
    linear = sum(x.weight.numel() for layer in layers for x in layer.modules() if isinstance(x, nn.Linear))
    return ModelSizes(
        *(mlp.in_features, mlp.out_features, len(layers)),
        *(attention.q_proj.out_features, attention.k_proj.out_features, hasattr(attention, "q_norm")),
        vocabulary=model.config.get_text_config().vocab_size,
        linear=linear,
        others=model.num_parameters() - linear,
        width=width,
        quantization=quantization,
    )


def adapter_sizes(model: PreTrainedModel, peft_config: PeftConfig) -> AdapterSizes:
    """Read the sizes of an adapter by adding it to a copy of a model."""
    if not isinstance(peft_config, LoraConfig):
        raise ValueError(f"Only LoRA is estimated, got {peft_config.peft_type}; use a `LoraConfig`.")
    for name in ("use_dora", "modules_to_save", "target_parameters"):
        if getattr(peft_config, name, None):
            raise ValueError(f"`{name}={getattr(peft_config, name)!r}` is not estimated; omit it.")
    peft_config = copy(peft_config)
    peft_config.inference_mode = False  # True in saved configs, which freezes the adapter
    with torch.device("meta"):
        policy = get_peft_model(deepcopy(model), peft_config)
    modules = {name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)}
    ranks = {name.rpartition(".")[2]: max(module.r.values()) for name, module in modules.items()}
    if ranks.keys() - {*LINEARS}:
        raise ValueError(f"Only adapters on {', '.join(LINEARS)} are estimated, got {', '.join(ranks)}.")
    return AdapterSizes(policy.get_nb_trainable_parameters()[0], ranks)
