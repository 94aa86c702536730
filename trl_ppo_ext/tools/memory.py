"""Memory of a run, estimated from configs.

Weights are counted on models built on the meta device. Activations are formulas for decoder layers
like Llama's, with LoRA on a frozen base and attention by `scaled_dot_product_attention`. Parts
below 1 % of a real run are omitted.
"""

from collections.abc import Collection, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from pandas import DataFrame
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.training_args import OptimizerNames

from ..arguments import as_list, context_of
from ..batch_plan import BatchPlan
from ..config import PPOConfig
from ..data import prompt_limit
from ..episodes.static_memory import whole_blocks
from ..episodes.static_sampler import BLOCK, BLOCK_ON_CPU, PROMPT_TOKENS
from ..episodes.transformers_generator import KEPT
from ..modeling.critics import SIDE_WIDTH, side_layers
from ..modeling.loading import (
    add_policy_adapter,
    auto_class,
    compute_dtype,
    default_peft_config,
    hub_kwargs,
    model_kwargs,
)
from ..modeling.logprobs import CHUNK_LOGITS
from ..rewards import ProcessReward, RewardAdapter

PROMPT_LENGTH = 512
GIB = 2**30
# assumed, not measured: context, and what the allocator cannot use
CUDA_CONTEXT = 0.6 * GIB
FRAGMENTATION = 0.05
# bytes of a quantized weight: 4 bits have a constant per block of 64, double quantization a
# constant per 256 of these
QUANTIZED = {"int8": 1.0, "4bit": 0.5 + 4 / 64, "4bit double": 0.5 + 1 / 64 + 4 / 64 / 256}
# bytes of state per trained parameter; 8 bits have a constant per block of 256, and paged states
# leave a full GPU
OPTIMIZERS = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adamw_8bit": 2 + 8 / 256,
    "adamw_bnb_8bit": 2 + 8 / 256,
}
OPTIMIZERS |= {"sgd": 0, "paged_adamw": 0, "paged_adamw_32bit": 0, "paged_adamw_8bit": 0}
ATTENTION = (None, "sdpa", "flash_attention_2", "flash_attention_3")
# logits of a sampled token: of the model, in float32, at the temperature; their softmax, and the
# shares and sums of 8 bytes that draw a token
BYTES_PER_LOGIT = 36
# which share their inputs
QKV = {"q_proj", "k_proj", "v_proj"}
GATE_UP = {"gate_proj", "up_proj"}
LAYER = QKV | GATE_UP | {"o_proj", "down_proj", "input_layernorm", "post_attention_layernorm"}


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
        return (
            self.linear * QUANTIZED.get(cast(str, self.quantization), self.width)
            + self.others * self.width
        )

    def forward(self, tokens: int, adapter_width: int = 0) -> int:
        """Bytes in use at a time in a forward without gradients, with an adapter of
        `adapter_width` bytes a number."""
        if adapter_width:
            mlp = 2 * (self.width + adapter_width)
        else:
            mlp = 3 * self.width
        # embeddings, the layer's input, the residual stream, normalized states, and what the
        # adapter casts
        return tokens * ((4 * self.width + adapter_width) * self.hidden + mlp * self.intermediate)

    def saved(self, ranks: Mapping[str, int], rows: int, length: int) -> int:
        """Bytes that a layer saves for its backward; a frozen weight needs none of its inputs."""
        # in float32
        norms = 8 * self.hidden + (4 * (self.query_width + self.kv_width) if self.head_norms else 0)
        # inputs of LoRA's A, one per group, and its outputs
        lora = self.hidden * sum(not group.isdisjoint(ranks) for group in (QKV, GATE_UP)) + sum(
            ranks.values()
        )
        # queries, keys, values, output, without padding too
        attention = 3 * self.query_width + 2 * self.kv_width
        swiglu = (4 if "down_proj" in ranks else 3) * self.intermediate
        return rows * length * (norms + self.width * (lora + attention + swiglu))


class AdapterSizes(NamedTuple):
    """Sizes of a LoRA adapter."""

    parameters: int
    ranks: Mapping[str, int]  # by kind of linear layer, e.g. "q_proj"


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a run on one process."""

    args: PPOConfig
    base: ModelSizes
    adapter: AdapterSizes  # of the policy
    # of a policy that starts from a saved adapter, a frozen copy of which is the reference
    has_reference: bool = False
    rewards: tuple[ModelSizes | AdapterSizes, ...] = ()  # that take memory
    processes: int = 1
    prompt_length: int = PROMPT_LENGTH
    optimizer: float = 8  # bytes of state per trained parameter
    on_gpu: bool = True

    @cached_property
    def phases(self) -> DataFrame:
        """Bytes of each part at the peak of each phase (sampling, scoring, updates), from the second
        rollout on."""
        moments = {"generate": self._sampling(), "score": self._scoring(), "update": self._update()}
        everywhere = self._resident() | self._kept
        peaks = {
            name: max((everywhere | parts for parts in of_phase), key=lambda x: sum(x.values()))
            for name, of_phase in moments.items()
        }
        return DataFrame(peaks).where(lambda table: table > 0).dropna(how="all")

    @cached_property
    def plan(self) -> BatchPlan:
        """How a rollout is divided."""
        return self.args.plan(self.processes)

    @property
    def length(self) -> int:
        """Tokens of a prompt with its completion."""
        return self.prompt_length + self.args.max_completion_length

    @property
    def batch(self) -> int:
        """Completions that are sampled and scored together, in training or evaluation."""
        completions = self.plan.completions_per_process
        if not self.args.evaluates:
            return completions
        return max(completions, self.args.per_device_eval_batch_size or 0)

    @property
    def trained_adapters(self) -> int:
        """That of the policy, and of a critic that has one."""
        return 1 + (self.args.critic == "adapter")

    @property
    def read_by_side_critic(self) -> int:
        """Numbers per token that the side network reads of the base."""
        # states of layers and of the prompt, and the position
        return (len(side_layers(self.base.layers)) + 2) * self.base.hidden

    @property
    def trained(self) -> int:
        """Trained parameters."""
        side_network = 2 * SIDE_WIDTH * (self.read_by_side_critic + 2) + SIDE_WIDTH + 1
        heads = {"none": 0, "side": side_network}
        head = heads.get(self.args.critic, self.base.hidden + 1)
        return self.trained_adapters * self.adapter.parameters + head

    def _resident(self) -> dict[str, float]:
        """In use all the time."""
        models = [reward for reward in self.rewards if isinstance(reward, ModelSizes)]
        adapters = [reward for reward in self.rewards if isinstance(reward, AdapterSizes)]
        with_heads = sum(reward.parameters + self.base.hidden for reward in adapters)
        copies = 0
        if self.base.width < 4:
            copies = 2 * self.trained_adapters * self.adapter.parameters
        return {
            "base weights": self.base.bytes,
            "reward models": sum(model.bytes for model in models),
            "reward adapters": 4 * with_heads,
            "policy adapter": 4 * self.adapter.parameters,
            "reference adapter": 4 * self.adapter.parameters * self.has_reference,
            "critic": 4 * (self.trained - self.adapter.parameters),
            "optimizer states": self.optimizer * self.trained,
            "autocast copies": copies,
        }

    @property
    def _sampled_at_once(self) -> int:
        return min(self.args.per_device_generation_batch_size or self.batch, self.batch)

    @property
    def _sampler_state(self) -> dict[str, float]:
        """Keys and values, which are allocated before the first token, and copies of the logits for
        one token at a time."""
        columns = whole_blocks(self.length, BLOCK if self.on_gpu else BLOCK_ON_CPU)
        per_token = 2 * self.base.width * self.base.kv_width * self.base.layers
        return {
            "KV cache": per_token * self._sampled_at_once * columns,
            "sampling": self._sampled_at_once * self.base.vocabulary * BYTES_PER_LOGIT,
        }

    @property
    def _kept(self) -> dict[str, float]:
        """What stays on a GPU while the model is trained: a small cache, with the memory of
        graphs."""
        state = self._sampler_state
        is_small = state["KV cache"] <= KEPT and not self.args.dequantize_for_generation
        if self.on_gpu and is_small and self.args.generation_backend != "vllm":
            return state
        return {}

    def _sampling(self) -> list[dict[str, float]]:
        """Prompts, then one token at a time. vLLM has memory of its own."""
        if self.args.generation_backend == "vllm":
            return [{}]
        copies = 0
        if self.args.dequantize_for_generation:
            copies = self.base.width * self.base.linear
        state = self._sampler_state
        limit = max(PROMPT_TOKENS, self.prompt_length)
        tokens = min(self._sampled_at_once * self.prompt_length, limit)
        of_prompts = self.base.forward(tokens, self.base.width)
        prompts = {"KV cache": state["KV cache"], "activations": of_prompts}
        return [{"dequantized base": copies} | part for part in (prompts, state)]

    def _scoring(self) -> list[dict[str, float]]:
        """One reward at a time; adapters compute in float32."""
        tokens = min(self.args.per_device_reward_batch_size, self.batch) * self.length
        forwards = [
            reward.forward(tokens)
            if isinstance(reward, ModelSizes)
            else self.base.forward(tokens, 4)
            for reward in self.rewards
        ]
        return [{"activations": peak} for peak in forwards or [0]]

    def _update(self) -> list[dict[str, float]]:
        """A micro-batch: its forward, the projections to the vocabulary, and its backward."""
        base = self.base
        width = base.width
        rows = self.plan.micro_batch_size
        tokens = rows * self.length
        responses = rows * self.args.max_completion_length

        # 1. what forward saves, and the largest layer of backward
        layer = base.saved(self.adapter.ranks, rows, self.length)
        trunk = base.layers * layer
        backward = 2 * width * tokens * (base.hidden + base.intermediate)
        if self.args.gradient_checkpointing:  # inputs of layers only, and one layer runs again
            trunk = width * base.hidden * base.layers * tokens
            backward += layer

        # 2. states of the responses, in float32, and those that the side critic reads of all tokens
        states = 4 * base.hidden * responses
        of_critic = 0
        if self.args.critic == "side":
            read = self.read_by_side_critic
            states += 4 * responses * (read + 4 * SIDE_WIDTH)
            of_critic = width * len(side_layers(base.layers)) * base.hidden * tokens

        # 3. gradients, which DDP has in buckets too
        gradients = 4 * self.trained * (2 if self.processes > 1 else 1)
        of_earlier = 0  # micro-batches
        if self.plan.gradient_accumulation_steps > 1:
            of_earlier = gradients

        return [
            {"activations": trunk + of_critic, "gradients": of_earlier},
            {
                "activations": trunk,
                "logits": self._logits(responses) + states,
                "gradients": of_earlier,
            },
            {
                "activations": self.trained_adapters * trunk + backward,
                "logits": states,
                "gradients": gradients,
            },
        ]

    def _logits(self, responses: int) -> int:
        """Projections of a chunk to the vocabulary: product (in float32 the logits), logits,
        derivative, reference."""
        limit = CHUNK_LOGITS["cuda" if self.on_gpu else "cpu"]
        chunk = min(responses, max(1, limit // self.base.vocabulary))
        bytes_per_logit = 8
        if self.base.width < 4:
            bytes_per_logit += self.base.width
        if self.args.kl_estimator == "exact":
            bytes_per_logit += 4
        return chunk * self.base.vocabulary * bytes_per_logit

    @property
    def peak(self) -> float:
        """Bytes of tensors at the peak."""
        return self.phases.sum().max()

    @property
    def needed(self) -> float:
        """Bytes that the device must have; on a GPU with an assumed context and fragmentation."""
        if self.on_gpu:
            return self.peak * (1 + FRAGMENTATION) + CUDA_CONTEXT
        return self.peak

    def share_of_vllm(self, memory: float) -> float:
        """Bytes that a colocated vLLM adds to the peak, on a device of `memory` GiB; asleep it
        keeps its base."""
        if self.args.generation_backend != "vllm" or self.args.vllm_mode == "server":
            return 0
        share = self.args.vllm_gpu_memory_utilization * memory * GIB
        asleep = max(self.base_of_vllm, self.phases["generate"].sum() + share - self.peak)
        if self.args.vllm_enable_sleep_mode:
            return min(asleep, share)
        return share

    @property
    def base_of_vllm(self) -> float:
        """Bytes of the base that a colocated vLLM loads, at most: it is not quantized unless
        vLLM does it."""
        quantizes = "quantization" in (self.args.generation_kwargs or {})
        return replace(self.base, quantization=self.base.quantization if quantizes else None).bytes

    def fits(self, memory: float) -> bool:
        """Return `True` if the run fits in `memory` GiB, and the base in the share of a
        colocated vLLM."""
        share = self.share_of_vllm(memory)
        room = self.args.vllm_gpu_memory_utilization * memory * GIB
        return (not share or self.base_of_vllm <= room) and self.needed + share <= memory * GIB


def estimate_memory(
    model: str | PreTrainedConfig,
    args: PPOConfig,
    *,
    reward_funcs: Any = None,
    monitor_funcs: Any = None,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | str | None = None,
    prompt_length: int | None = None,
    device: str = "cuda",
) -> MemoryEstimate:
    """Estimate the memory of a run on one process, by phase and part.

    Only configs are read, no weights.

    Args:
        model: Id or path of the base model, or its config.
        args ([`PPOConfig`]): Config of the run.
        reward_funcs: As of [`PPOTrainer`].
        monitor_funcs: As of [`PPOTrainer`].
        quantization_config: As of [`PPOTrainer`].
        peft_config: As of [`PPOTrainer`].
        prompt_length (`int`, *optional*):
            Tokens of the longest prompt. Defaults to 512, or what the context leaves.
        device (`str`, *optional*, defaults to `"cuda"`): `"cuda"` or `"cpu"`.

    Returns:
        [`MemoryEstimate`]: Its `peak` counts tensors, its `needed` is what the device must have.

    Raises:
        `ValueError`: If the memory of a setting or an architecture is not known.
    """
    located = hub_kwargs(args)
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, **located)
    else:
        config = model
    _check_known(args, config, device)
    if isinstance(peft_config, str):
        adapter = PeftConfig.from_pretrained(peft_config)
    else:
        adapter = peft_config or default_peft_config()
    quantization = (
        quantization_config
        or model_kwargs(args).get("quantization_config")
        or getattr(config, "quantization_config", None)
    )
    base = on_meta(config, trust_remote_code=located["trust_remote_code"])
    rewards = [
        sizes_of_reward(x, base, args) for x in as_list(reward_funcs) + as_list(monitor_funcs)
    ]
    return MemoryEstimate(
        args,
        base=model_sizes(base, compute_dtype(args).itemsize, quantization_of(quantization)),
        adapter=adapter_sizes(base, adapter),
        has_reference=isinstance(peft_config, str),
        rewards=tuple(sizes for sizes in rewards if sizes is not None),
        processes=args.world_size,
        prompt_length=_checked_prompt_length(prompt_length, args, config),
        optimizer=OPTIMIZERS[OptimizerNames(args.optim).value],
        on_gpu=device == "cuda",
    )


def _check_known(args: PPOConfig, config: PreTrainedConfig, device: str) -> None:
    """Raise for settings that the formulas do not cover."""
    options = model_kwargs(args)
    dtype = options.get("dtype") or compute_dtype(args)
    if dtype == "auto":
        dtype = config.dtype or "float32"
    if compute_dtype(args).itemsize == 4:
        dtypes = ["float32"]
    else:
        dtypes = ["bfloat16", "float16"]
    supported: dict[str, tuple[Any, Collection]] = {
        "device": (device, ("cuda", "cpu")),
        "optim": (OptimizerNames(args.optim).value, OPTIMIZERS),
        "attn_implementation": (options.get("attn_implementation"), ATTENTION),
        "dtype": (str(dtype).removeprefix("torch."), dtypes),
        "deepspeed": (args.deepspeed or None, (None,)),
        "fsdp": (args.fsdp or None, (None,)),
    }
    for name, (value, values) in supported.items():
        if value not in values:
            raise ValueError(
                f"`{name}` must be {' or '.join(map(str, values))} to be estimated, got {value}."
            )


def _checked_prompt_length(
    prompt_length: int | None, args: PPOConfig, config: PreTrainedConfig
) -> int:
    """Tokens of the longest prompt, which must fit into the context."""
    context, _ = context_of(config.get_text_config())
    room = prompt_limit(args.max_completion_length, context, args.max_prompt_length)
    if prompt_length is None:
        return min(PROMPT_LENGTH, room)
    if prompt_length > room:
        raise ValueError(
            f"`prompt_length` must be at most {room}, what the model's context leaves beside "
            f"`max_completion_length={args.max_completion_length}`, or `max_prompt_length`, got "
            f"{prompt_length}."
        )
    return prompt_length


def sizes_of_reward(
    reward: Any, base: PreTrainedModel, args: PPOConfig
) -> ModelSizes | AdapterSizes | None:
    """Sizes of a reward model; `None` for functions, judges and remote rewards, which take no
    memory here."""
    if isinstance(reward, RewardAdapter):
        adapter = PeftConfig.from_pretrained(reward.path)
        adapter.modules_to_save = None  # the score head, which is counted apart
        return adapter_sizes(base, adapter)
    if isinstance(reward, str | ProcessReward):
        if isinstance(reward, str):
            model_id = reward
        else:
            model_id = reward.model
        remote_code = {"trust_remote_code": args.trust_remote_code}
        config = AutoConfig.from_pretrained(model_id, **remote_code)
        loaded_as = {None: None, "none": None, "int8": "int8"}.get(
            args.reward_quantization, "4bit double"
        )
        classifier = on_meta(config, True, **remote_code)
        return model_sizes(classifier, compute_dtype(args).itemsize, loaded_as)
    if isinstance(reward, PreTrainedModel | PeftModel):  # with an adapter it raises
        loaded_as = quantization_of(getattr(reward.config, "quantization_config", None))
        classifier = cast(PreTrainedModel, reward)
        if loaded_as is not None and isinstance(reward, PreTrainedModel):
            classifier = on_meta(reward.config, True)  # its weights are packed
        return model_sizes(classifier, reward.dtype.itemsize, loaded_as)
    return None


def quantization_of(settings: Any) -> str | None:
    """Key of `QUANTIZED` for a config of bitsandbytes, saved or given; `None` without one."""
    if settings is None:
        return None
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = settings.get("quant_method", "bitsandbytes")  # by which transformers completes it
    if method != "bitsandbytes":
        raise ValueError(f"Only quantization by bitsandbytes is estimated, got {method!r}.")
    if settings.get("load_in_8bit"):
        return "int8"
    if settings.get("bnb_4bit_use_double_quant"):
        return "4bit double"
    return "4bit"


def on_meta(
    config: PreTrainedConfig, classifier: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model on the meta device, not quantized."""
    config = copy(config)
    vars(config).pop("quantization_config", None)
    if classifier:
        auto = AutoModelForSequenceClassification
    else:
        auto = auto_class(config)
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def model_sizes(model: PreTrainedModel, width: int, quantization: str | None = None) -> ModelSizes:
    """Read the sizes of a model, whose layers must be like Llama's."""
    layers: list[Any] = list(getattr(model.base_model, "layers", []))
    for layer in layers or [nn.Module()]:
        # the module of each, or the name of one that the layer itself has
        modules = [name.rpartition(".")[0] or name for name, _ in layer.named_parameters()]
        names = {module.split(".")[-1] for module in modules} - {"q_norm", "k_norm"}
        if names != LAYER:
            raise ValueError(
                f"{type(model).__name__} cannot be estimated: its `layers` must have "
                f"{', '.join(sorted(LAYER))}, got {', '.join(sorted(names)) or 'none'}; measure a "
                "few steps instead."
            )
    linear = sum(
        x.weight.numel() for layer in layers for x in layer.modules() if isinstance(x, nn.Linear)
    )
    config = model.config.get_text_config()
    attention = layers[0].self_attn
    return ModelSizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=len(layers),
        query_width=attention.q_proj.out_features,
        kv_width=attention.k_proj.out_features,
        head_norms=hasattr(attention, "q_norm"),
        vocabulary=config.vocab_size,
        linear=linear,
        others=model.num_parameters() - linear,
        width=width,
        quantization=quantization,
    )


def adapter_sizes(model: PreTrainedModel, peft_config: PeftConfig) -> AdapterSizes:
    """Read the sizes of an adapter by adding it to a copy of a model."""
    if not isinstance(peft_config, LoraConfig):
        raise ValueError(
            f"Only LoRA is estimated, got {peft_config.peft_type}; use a `LoraConfig`."
        )
    for name in ("use_dora", "modules_to_save", "target_parameters"):
        if getattr(peft_config, name, None):
            raise ValueError(f"`{name}={getattr(peft_config, name)!r}` is not estimated; omit it.")
    with torch.device("meta"):
        policy = add_policy_adapter(deepcopy(model), copy(peft_config))
    modules = {
        name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)
    }
    ranks = {name.rpartition(".")[2]: max(module.r.values()) for name, module in modules.items()}
    return AdapterSizes(sum(x.numel() for x in policy.parameters()) - model.num_parameters(), ranks)
