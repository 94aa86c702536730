"""Memory of a run, estimated from configs.

Weights are counted on models built on the meta device. Activations are formulas for decoder layers like Llama's, with LoRA
on a frozen base and attention by `scaled_dot_product_attention`.
"""

import math
import re
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, cast

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

from .arguments import as_list
from .config import PPOConfig
from .generation.growing_cache import BLOCK
from .modeling.loading import compute_dtype, default_peft_config, hub_kwargs
from .modeling.logprobs import CHUNK_LOGITS
from .ppo.batch_plan import BatchPlan
from .rewards import RewardAdapter

PROMPT_LENGTH = 512
GIB = 2**30
CUDA_CONTEXT, FRAGMENTATION = 0.6 * GIB, 0.05  # assumed, not measured: context, and what the allocator cannot use
_GPUS_BY_GIB = {  # usable, as nvidia-smi reports it
    10.0: "RTX 3080",
    12.0: "RTX 3060, RTX 4070",
    15.0: "T4",
    16.0: "V100 16GB, RTX 4060 Ti 16GB, RTX 4080, RTX 5070 Ti, RTX 5080",
    22.5: "A10, A10G, L4",
    24.0: "RTX 3090, RTX 4090",
    31.8: "RTX 5090",
    32.0: "V100 32GB",
    40.0: "A100 40GB",
    45.0: "L40S",
    48.0: "RTX A6000",
    79.6: "H100",
    80.0: "A100 80GB",
    140.4: "H200",
}
GPUS = {name: memory for memory, names in _GPUS_BY_GIB.items() for name in names.split(", ")}
OPTIMIZERS = {  # bytes of state per trained parameter; paged states move to main memory when the GPU is full
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), 8.0),
    **dict.fromkeys(("adagrad", "rmsprop", "lion_32bit"), 4.0),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), 2 * (1 + 4 / 256)),  # with a float32 per block
    **dict.fromkeys(("lion_8bit",), 1 + 4 / 256),
    **dict.fromkeys(("sgd", "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit"), 0.0),
    **dict.fromkeys(("paged_lion_32bit", "paged_lion_8bit"), 0.0),
}
_MASKED = {None: True, "sdpa": True, "flash_attention_2": False, "flash_attention_3": False}
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_LINEARS = {"self_attn": (*_QKV, "o_proj"), "mlp": (*_GATE_UP, "down_proj")}
_LAYER = {f"{part}.{name}" for part, names in _LINEARS.items() for name in names}
_NORMS = {"input_layernorm", "post_attention_layernorm"}
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}


def gpu_memory(name: str) -> float:
    """Return a GPU's memory in GiB; "NVIDIA GeForce RTX 4090" and "rtx4090" are the same."""
    known = {_plain(gpu): memory for gpu, memory in GPUS.items()}
    if _plain(name) not in known:
        raise ValueError(f"Unknown `gpu` {name!r}; choose one of {', '.join(GPUS)}, or set `memory` in GiB.")
    return known[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|\W", "", name.lower())


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model with decoder layers like Llama's, and what follows from them."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    query_width: int  # of all heads
    kv_width: int
    head_norms: bool  # queries and keys are normalized
    vocabulary: int
    linears: tuple[tuple[int, int], ...] = field(repr=False)  # [out, in] of the weights that may be quantized
    others: int  # all other parameters: embeddings, output projection or score head, norms, biases
    width: int  # bytes of a number
    quantization: str | None = None  # "nf4", "fp4" or "int8"
    double: bool = False  # double quantization

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        total = self.others * self.width
        for rows, columns in self.linears:
            numbers, blocks = rows * columns, rows * columns // 64
            if self.quantization is None:
                total += numbers * self.width
            elif self.quantization == "int8":  # a float32 per row
                total += numbers + 4 * rows
            elif self.double:  # a byte per block, a float32 per 256 of these, and two tables
                total += numbers // 2 + blocks + 4 * (blocks // 256) + 1092
            else:  # a float32 per block, and a table
                total += numbers // 2 + 4 * blocks + 64
        return total

    @property
    def dequantized(self) -> int:
        """Bytes of the largest quantized weight when a product reads it."""
        return 0 if self.quantization is None else self.width * max(map(math.prod, self.linears))

    def forward(self, tokens: int, adapter_width: int = 0) -> int:
        """Bytes in use at a time within a forward without gradients, which is at most one layer's."""
        width = self.width
        mlp = self.intermediate * (2 * width + 2 * adapter_width if adapter_width else 3 * width)
        attention = width * (4 * self.query_width + 2 * self.kv_width)
        # embeddings, the layer's input, the residual stream, normalized states, and rotary positions
        around = width * (4 * self.hidden + 2 * self.query_width // self.heads)
        cast_input = adapter_width * self.hidden if adapter_width > width else 0
        return tokens * (around + cast_input + max(mlp, attention)) + self.dequantized

    def logits(self, tokens: int, chunk: int, exact_kl: bool) -> int:
        """Bytes over the vocabulary in `token_logprobs`, which works in chunks."""
        rows = min(tokens, max(1, chunk // (self.vocabulary * (2 if exact_kl else 1))))
        product = self.width if self.width < 4 else 0  # in float32 it is the logits
        return rows * self.vocabulary * (product + 4 + 4 + (4 if exact_kl else 0))  # and derivative, and reference's

    def saved_by_layer(self, ranks: Mapping[str, int], rows: int, length: int, masked: bool) -> int:
        """Bytes that a layer saves for its backward; a frozen weight needs none of its inputs."""
        norms = 8 * self.hidden + (4 * (self.query_width + self.kv_width) if self.head_norms else 0)  # in float32
        # inputs of LoRA's A, one per group, and its outputs
        lora = self.hidden * sum(any(x in ranks for x in group) for group in (_QKV, _GATE_UP)) + sum(ranks.values())
        # queries, output, keys and values; a mask needs the last two repeated for all heads
        attention = 2 * self.query_width + 2 * (self.query_width if masked else self.kv_width)
        swiglu = (4 if "down_proj" in ranks else 3) * self.intermediate
        mask = self.width * rows * length**2 if masked else 0  # each layer has a copy of its own
        log_sum_exp = 4 * self.heads
        return rows * length * (norms + self.width * (lora + attention + swiglu) + log_sum_exp) + mask


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes of a LoRA adapter."""

    parameters: int
    ranks: Mapping[str, int]  # by kind of linear layer, e.g. "q_proj"


@dataclass(frozen=True)
class Phase:
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
    ptx_length: int = 0  # tokens of a supervised row; 0 without
    masked: bool = True  # attention takes a mask because rows differ in length
    on_gpu: bool = True
    settings: tuple[dict[str, Any], ...] = ()  # changed by a proposal

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Memory at the peak of each phase, from the second rollout on."""
        args, base, ranks, width = self.args, self.base, self.adapter.ranks, self.base.width
        plan = BatchPlan.from_config(args, self.processes)
        rows, completions = plan.micro_batch_size, plan.completions_per_process
        prompt, response = self.prompt_length, args.max_completion_length
        length, chunk = prompt + response, CHUNK_LOGITS["cuda" if self.on_gpu else "cpu"]
        adapters, head = 2 if args.critic == "adapter" else 1, 0 if args.critic == "none" else base.hidden + 1
        trained = adapters * self.adapter.parameters + head
        offload_rewards, offload_rollout = args.offload_rewards and self.on_gpu, args.offload_rollout and self.on_gpu
        kl_in_reward, kl_in_loss = (
            args.kl_estimator == "exact" and args.kl_placement != x for x in ("loss", "reward")
        )
        # ids of sequences, prompts and completions, and eleven numbers per completion token
        rollout = completions * (8 * length + 8 * prompt + (8 + 44) * response)
        # autocast keeps 16-bit copies of float32 adapters until it ends
        copies = 2 * self.adapter.parameters if width < 4 else 0

        # 1. Load the models; quantization needs a weight in full.
        models = [reward for reward in self.rewards if isinstance(reward, ModelSizes)]
        reward_adapters = [reward for reward in self.rewards if isinstance(reward, AdapterSizes)]
        loaded: dict[str, float] = {
            "base weights": base.bytes,
            "reward models": 0 if offload_rewards else sum(model.bytes for model in models),
            "reward adapters": 4 * sum(adapter.parameters + base.hidden for adapter in reward_adapters),
            "policy adapter": 4 * self.adapter.parameters,
            "critic": 4 * (trained - self.adapter.parameters),
            "averaged weights": 4 * self.adapter.parameters if args.ema_decay is not None else 0,
        }
        resident = loaded | {"optimizer states": OPTIMIZERS[_name(args.optim)] * trained}

        # 2. Generate: at the prefill, or at the end, when a layer's keys are copied to a larger cache.
        sampled = min(args.per_device_generation_batch_size or completions, completions)
        cache = 2 * width * base.kv_width * base.layers * sampled  # per position
        grown = cache / (2 * base.layers) * ((length - 1) // BLOCK * BLOCK)
        sampling = sampled * base.vocabulary * (width + 12 + (16 if args.top_p < 1 else 0))  # copies of the logits
        generate = _largest(
            {
                "KV cache": cache * min(-(-prompt // BLOCK) * BLOCK, length),
                "activations": base.forward(sampled * prompt),
            },
            {"KV cache": cache * length, "sampling": max(grown, sampling), "activations": base.dequantized},
        )

        # 3. Score tokens with policy, critic and reference: within a layer, or projecting the hidden states.
        projecting = 2 * width * base.hidden * rows * response + base.logits(rows * response, chunk, kl_in_reward)
        forward = _largest({"activations": base.forward(rows * length, width)}, {"logits": projecting})

        # 4. Score completions, one reward at a time; adapters compute in float32, outside autocast.
        tokens = min(args.per_device_reward_batch_size, completions) * length
        scoring = [model.forward(tokens) + (model.bytes if offload_rewards else 0) for model in models]
        scoring += [base.forward(tokens, 4) for _ in reward_adapters]

        # 5. Update: projecting the hidden states, in the first layer of the backward, or in the optimizer's step.
        recomputed = bool(args.gradient_checkpointing)
        trunk = base.saved(ranks, rows, length, self.masked, recomputed)
        ptx = base.saved(ranks, rows, self.ptx_length, self.masked, recomputed) if self.ptx_length else 0
        layer = 2 * width * rows * length * (base.hidden + base.intermediate) + base.dequantized
        if recomputed:  # in float32 the first norm saves the layer's input, which is there already
            layer += base.saved_by_layer(ranks, rows, length, self.masked)
            layer -= 4 * base.hidden * rows * length if width == 4 else 0
        # float32 derivatives by hidden states: of log-probabilities, entropies, KL and values
        with_entropy = args.entropy_coef != 0 or args.entropy_target is not None
        derivatives = response * (1 + with_entropy + kl_in_loss + (args.critic != "none")) + self.ptx_length
        kept = 4 * base.hidden * rows * derivatives
        logits = base.logits(rows * max(response, self.ptx_length), chunk, kl_in_loss)
        # all gradients from an earlier micro-batch, or one layer's so far
        gradients = 4 * trained
        so_far = gradients if plan.gradient_accumulation_steps > 1 else gradients / base.layers
        # the critic's adapter runs after the policy's projection, and before that of supervised rows
        first = adapters * trunk + ptx if ptx else trunk
        update = _largest(
            {"activations": first, "logits": logits + kept, "gradients": so_far},
            {"activations": adapters * trunk + ptx + layer, "logits": kept, "gradients": so_far},
            {"gradients": gradients},
        )
        update["gradients"] += gradients if self.processes > 1 else 0  # DDP's buckets

        parts = {
            "load": loaded | {"weight before quantization": base.dequantized},
            "generate": resident | generate | {"autocast copies": copies},
            "forward": resident | forward | {"rollout": rollout, "autocast copies": adapters * copies},
            "score": resident | {"activations": max(scoring, default=0), "rollout": rollout},
            "update": resident
            | update
            | {"rollout": 0 if offload_rollout else rollout, "autocast copies": adapters * copies},
        }
        return tuple(Phase(name, {part: x for part, x in sizes.items() if x}) for name, sizes in parts.items())

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

    def fits(self, memory: float) -> bool:
        """Return `True` if the run fits in `memory` GiB."""
        return self.needed <= memory * GIB

    def proposals(self, memory: float) -> tuple[list["MemoryEstimate"], "MemoryEstimate | None"]:
        """Estimate the run with each setting changed alone, and with the fewest that make it fit in `memory` GiB."""
        alone, changes = [], self.changes()
        for values in changes:
            tried = [self.changed(value) for value in values]
            alone.append(next((estimate for estimate in tried if estimate.fits(memory)), tried[-1]))
        for count in range(1, len(changes) + 1):
            for chosen in combinations(changes, count):
                # if the smallest values do not fit, no others do
                if self.changed(*(values[-1] for values in chosen)).fits(memory):
                    together = (self.changed(*values) for values in product(*chosen))
                    return alone, next(estimate for estimate in together if estimate.fits(memory))
        return alone, None

    def changes(self) -> list[list[dict[str, Any]]]:
        """Settings that need less memory, the least costly first, each with its values from the largest."""
        args, plan = self.args, BatchPlan.from_config(self.args, self.processes)
        mini_batch, completions = plan.mini_batch_size, plan.completions_per_process
        sampled = min(args.per_device_generation_batch_size or completions, completions)
        models = [reward for reward in self.rewards if isinstance(reward, ModelSizes)]
        # 8-bit models cannot be moved
        movable = self.on_gpu and not args.offload_rewards and all(model.quantization != "int8" for model in models)
        changes: list[tuple[Any, list[dict[str, Any]]]] = [
            (not args.gradient_checkpointing, [{"gradient_checkpointing": True}]),
            (
                True,
                [  # the rollout stays the same
                    {"per_device_train_batch_size": size, "gradient_accumulation_steps": mini_batch // size}
                    for size in _divisors(mini_batch, below=plan.micro_batch_size)
                ],
            ),
            (True, [{"per_device_generation_batch_size": size} for size in _divisors(completions, below=sampled)]),
            (self.base.quantization is None, [{"load_in_4bit": True, "use_bnb_nested_quant": True}]),
            (models and movable, [{"offload_rewards": True}]),
            (models, [{"reward_funcs": "adapter:PATH"}]),  # reward models as adapters on the base
            (OPTIMIZERS[_name(args.optim)] >= 4, [{"optim": "adamw_8bit"}]),
        ]
        return [values for applies, values in changes if applies and values]

    def changed(self, *settings: dict[str, Any]) -> "MemoryEstimate":
        """Estimate the run with changed settings."""
        values = {name: value for setting in settings for name, value in setting.items()}
        base = replace(self.base, quantization="nf4", double=True) if values.pop("load_in_4bit", False) else self.base
        rewards = (self.adapter,) * len(self.rewards) if "reward_funcs" in values else self.rewards
        args = copy(self.args)
        vars(args).update(values)
        return replace(self, args=args, base=base, rewards=rewards, settings=settings)


def _largest(*moments: dict[str, float]) -> dict[str, float]:
    return max(moments, key=lambda parts: sum(parts.values()))


def _divisors(number: int, below: int) -> list[int]:
    return [size for size in range(below - 1, 0, -1) if number % size == 0]


def _name(optimizer: Any) -> str:
    return str(getattr(optimizer, "value", optimizer))


def estimate_memory(
    model: str | PreTrainedConfig | PreTrainedModel,
    args: PPOConfig,
    *,
    reward_funcs: Any = None,
    monitor_funcs: Any = None,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | None = None,
    ptx: bool = False,
    prompt_length: int = PROMPT_LENGTH,
    same_length: bool = False,
    device: str = "cuda",
) -> MemoryEstimate:
    """
    Estimate the memory of a run on one process, by phase and part. Only configs are read, no weights.

    Args:
        model (`str`, `PreTrainedConfig` or `PreTrainedModel`):
            Base model, or its config.
        args ([`PPOConfig`]):
            Config of the run.
        reward_funcs (`str`, `PreTrainedConfig`, `PreTrainedModel`, [`RewardAdapter`], `Callable`, or `list`, *optional*):
            Rewards. Models named by a string are quantized by `args.reward_quantization`. A config stands for a
            classifier that you load yourself, in the config's dtype. Functions take no memory.
        monitor_funcs (as `reward_funcs`, *optional*):
            Rewards that are only logged.
        quantization_config (`BitsAndBytesConfig`, *optional*):
            Quantization of the base. Defaults to that of the saved model.
        peft_config (`PeftConfig`, *optional*):
            Config of the policy's adapter. Defaults to LoRA of rank 16.
        ptx (`bool`, *optional*, defaults to `False`):
            Whether there is a `ptx_dataset`.
        prompt_length (`int`, *optional*, defaults to `512`):
            Tokens of the longest prompt.
        same_length (`bool`, *optional*, defaults to `False`):
            Whether all sequences have the same length, so that attention needs no mask.
        device (`str`, *optional*, defaults to `"cuda"`):
            `"cuda"` or `"cpu"`.

    Returns:
        [`MemoryEstimate`]: Its `peak` counts tensors, its `needed` is what the device must have.

    Raises:
        `ValueError`: If the memory of a setting or an architecture is not known.
    """
    init_kwargs = cast(dict, args.model_init_kwargs or {})
    attention = init_kwargs.get("attn_implementation")
    _check(model, args, attention, prompt_length, device)
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, **hub_kwargs(args))
    else:
        config = model if isinstance(model, PreTrainedConfig) else model.config
    dtype = init_kwargs.get("dtype") or compute_dtype(args)
    width = _width(config.dtype if dtype == "auto" else dtype)
    if width != compute_dtype(args).itemsize:
        raise ValueError(
            f"`dtype` must be that of the run, {compute_dtype(args)}, got {dtype}; omit `dtype` or set `bf16`."
        )
    base = on_meta(config, trust_remote_code=args.trust_remote_code)
    funcs = [*as_list(reward_funcs), *as_list(monitor_funcs)]
    rewards = [_reward_sizes(reward, args, base, width) for reward in funcs]
    return MemoryEstimate(
        args,
        model_sizes(base, width, **_quantization(quantization_config or getattr(config, "quantization_config", None))),
        adapter_sizes(base, peft_config or default_peft_config()),
        tuple(sizes for sizes in rewards if sizes is not None),
        processes=args.world_size,
        prompt_length=prompt_length,
        ptx_length=args.ptx_max_length if ptx else 0,
        masked=_MASKED[attention] and not same_length,
        on_gpu=device == "cuda",
    )


def _check(model: Any, args: PPOConfig, attention: str | None, prompt_length: int, device: str) -> None:
    """Raise for arguments that the formulas do not cover."""
    if not isinstance(model, str | PreTrainedConfig | PreTrainedModel):
        raise ValueError(
            f"`model` must be an id or path, a config or a `PreTrainedModel`, got {type(model).__name__}."
        )
    if prompt_length < 1:
        raise ValueError(f"`prompt_length` must be at least 1, got {prompt_length}.")
    choices = {
        "attn_implementation": (attention, _MASKED),
        "optim": (_name(args.optim), OPTIMIZERS),
        "device": (device, ("cuda", "cpu")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"`{name}={value!r}` is not estimated; use one of {', '.join(filter(None, known))}.")
    unknown = {"deepspeed": args.deepspeed, "fsdp": args.fsdp}
    unknown["every_n_layers"] = "every_n_layers" in cast(dict, args.gradient_checkpointing_kwargs or {})
    for name, value in unknown.items():
        if value:
            raise ValueError(f"`{name}` is not estimated; omit it to estimate the run without.")


def _width(dtype: Any) -> int:
    """Bytes of a number; transformers loads float32 if a config has no dtype."""
    return (getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32).itemsize


def _quantization(config: Any) -> dict[str, Any]:
    """Fields of [`ModelSizes`] for a quantization config, which is a `dict` in the config of a saved model."""
    if isinstance(config, dict) and config.get("quant_method") == "bitsandbytes":
        config = BitsAndBytesConfig.from_dict(config)
    if config is None:
        return {}
    if not isinstance(config, BitsAndBytesConfig):
        method = config.get("quant_method") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"Models must be quantized by bitsandbytes to be estimated, got {method!r}.")
    if config.load_in_8bit:
        return {"quantization": "int8"}
    return {"quantization": config.bnb_4bit_quant_type, "double": config.bnb_4bit_use_double_quant}


def _reward_sizes(reward: Any, args: PPOConfig, base: PreTrainedModel, width: int) -> ModelSizes | AdapterSizes | None:
    """Sizes of a reward; functions, judges and remote rewards take no memory."""
    if isinstance(reward, RewardAdapter):
        peft_config = PeftConfig.from_pretrained(reward.path)
        peft_config.modules_to_save = None  # the score head, which is counted apart
        return adapter_sizes(base, peft_config)
    quantization = None
    if isinstance(reward, str):
        reward = AutoConfig.from_pretrained(reward, trust_remote_code=args.trust_remote_code)
        quantization = None if args.reward_quantization == "none" else args.reward_quantization
    elif isinstance(reward, PreTrainedConfig | PreTrainedModel):
        width = _width(reward.dtype)
        reward = getattr(reward, "config", reward)
    else:
        return None
    model = on_meta(reward, classifier=True, trust_remote_code=args.trust_remote_code)
    return model_sizes(model, width, quantization, double=True)


def on_meta(config: PreTrainedConfig, classifier: bool = False, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, not quantized."""
    config = copy(config)
    vars(config).pop("quantization_config", None)
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def model_sizes(
    model: PreTrainedModel, width: int, quantization: str | None = None, double: bool = False
) -> ModelSizes:
    """Read the sizes of a model, whose layers must be like Llama's."""
    layers: list[Any] = list(getattr(getattr(model, model.base_model_prefix, model), "layers", []))
    for layer in layers or [nn.Module()]:
        names = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        if names - _HEAD_NORMS != _LAYER | _NORMS:
            raise ValueError(
                f"{type(model).__name__} cannot be estimated: its decoder layers must have {', '.join(sorted(_LAYER))} "
                f"and two norms, got {', '.join(sorted(names)) or 'no `layers`'}; run a few steps and read "
                "torch.cuda.max_memory_allocated()."
            )
    attention, mlp = layers[0].self_attn, layers[0].mlp
    modules = [module for layer in layers for module in layer.modules()]
    linears = tuple((x.out_features, x.in_features) for x in modules if isinstance(x, nn.Linear))
    return ModelSizes(
        hidden=mlp.gate_proj.in_features,
        intermediate=mlp.gate_proj.out_features,
        layers=len(layers),
        heads=attention.q_proj.out_features // attention.head_dim,
        query_width=attention.q_proj.out_features,
        kv_width=attention.k_proj.out_features,
        head_norms=hasattr(attention, "q_norm"),
        vocabulary=model.config.get_text_config().vocab_size,
        linears=linears,
        others=sum(x.numel() for x in model.parameters()) - sum(map(math.prod, linears)),
        width=width,
        quantization=quantization,
        double=double,
    )


def adapter_sizes(model: PreTrainedModel, peft_config: PeftConfig) -> AdapterSizes:
    """Read the sizes of an adapter by adding it to a copy of a model."""
    if not isinstance(peft_config, LoraConfig):
        raise ValueError(f"The adapter must be LoRA to be estimated, got {peft_config.peft_type}; use a `LoraConfig`.")
    for name in ("use_dora", "modules_to_save", "target_parameters"):
        if getattr(peft_config, name, None):
            raise ValueError(f"`{name}={getattr(peft_config, name)!r}` is not estimated; omit it.")
    peft_config = copy(peft_config)
    peft_config.inference_mode = False  # True in saved configs, which freezes the adapter
    with torch.device("meta"):
        policy = get_peft_model(deepcopy(model), peft_config)
    ranks: dict[str, int] = {}
    for name, module in policy.named_modules():
        if isinstance(module, LoraLayer):
            kind = name.rpartition(".")[2]
            ranks[kind] = max(ranks.get(kind, 0), *module.r.values())
    known = {name for names in _LINEARS.values() for name in names}
    if ranks.keys() - known:
        raise ValueError(f"Adapters must be on {', '.join(known)} to be estimated, got {', '.join(ranks)}.")
    return AdapterSizes(sum(x.numel() for x in policy.parameters() if x.requires_grad), ranks)
