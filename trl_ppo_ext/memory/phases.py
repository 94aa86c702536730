"""What a run will need: arithmetic on sizes. Nothing is loaded, and no device is asked.

Activations are those of decoder layers like Llama's, with attention by `scaled_dot_product_attention` and LoRA on a
frozen base: a frozen weight asks for nothing to be kept for a gradient of its own, but the inputs of LoRA's A, norms,
SwiGLU's factors, and attention's queries, keys, values, output and log-sum-exp are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..generation.growing_cache import BLOCK
from .sizes import AdapterSizes, ModelSizes, weight_bytes

# bytes of optimizer state for each trained number; paged states lie in host memory where the GPU is full
OPTIMIZERS = {
    "adamw_torch": 8.0,
    "adamw_torch_fused": 8.0,
    "adamw_8bit": 2.0,
    "adamw_bnb_8bit": 2.0,
    "paged_adamw": 0.0,
    "paged_adamw_32bit": 0.0,
    "paged_adamw_8bit": 0.0,
    "sgd": 0.0,
    "adagrad": 4.0,
    "rmsprop": 4.0,
    "lion_32bit": 4.0,
    "lion_8bit": 1.0,
    "paged_lion_32bit": 0.0,
    "paged_lion_8bit": 0.0,
}
SMALLEST_8BIT = 4096  # smaller tensors keep 32-bit states
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True)
class RewardSizes:
    """A reward that takes memory."""

    model: ModelSizes | None = None  # a classifier of its own
    width: int = 2  # bytes in which it computes
    quantization: str | None = None  # how it is loaded
    adapter: AdapterSizes | None = None  # or an adapter on the policy's base


@dataclass(frozen=True)
class Workload:
    """All numbers that the estimate reads."""

    base: ModelSizes  # the base
    adapter: AdapterSizes  # the policy's adapter, and the critic's if it has one
    width: int  # bytes in which the base is kept and computes
    chunk: int  # logits that exist at a time in [token_logprobs]
    prompt: int  # tokens of the longest prompt
    response: int  # tokens of the longest completion
    micro_batch: int  # completions in one forward and backward
    completions: int  # completions of a rollout, on one process
    mini_batch: int  # completions of an optimizer step, on one process
    generation_batch: int  # completions sampled at a time
    reward_batch: int = 16  # completions that a reward model scores at a time
    rewards: tuple[RewardSizes, ...] = ()  # rewards that take memory
    quantization: str | None = None  # "nf4", "fp4", "int8" or None
    double_quantization: bool = False  # whether quantisation constants are quantised
    autocast: bool = False  # whether adapters are float32 beside a base in 16 bits
    checkpointing: bool = False  # whether activations are recomputed
    critic: str = "head"  # "head", "adapter" or "none"
    optimizer: str = "adamw_torch"  # name of the optimizer
    averaged: bool = False  # whether there is a moving average of the policy's adapter
    entropy: bool = False  # whether gradients flow through entropies
    exact_kl: tuple[bool, bool] = (False, False)  # whether the exact KL is computed, in the reward and in the loss
    ptx: int = 0  # tokens of a supervised row; 0 without
    top_p: bool = False  # whether sampling sorts the vocabulary
    masked: bool = True  # whether rows differ in length, so that attention takes a mask
    processes: int = 1  # processes that train together
    on_gpu: bool = True  # whether kernels are a GPU's
    offloaded: tuple[bool, bool] = (False, False)  # whether reward models, and the rollout, wait in main memory

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.response

    @property
    def adapters(self) -> int:
        """Adapters that are trained."""
        return 2 if self.critic == "adapter" else 1

    @property
    def trained(self) -> int:
        """Numbers that are trained."""
        head = 0 if self.critic == "none" else self.base.hidden + 1
        return self.adapters * self.adapter.parameters + head


@dataclass(frozen=True)
class Phase:
    """What is alive at the peak of a phase."""

    name: str  # "load", "generate", "forward", "score" or "update"
    parts: Mapping[str, float]  # bytes by part

    @property
    def bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def saved_in_layer(load: Workload, rows: int, length: int) -> float:
    """What a layer keeps for its backward."""
    base, width, ranks = load.base, load.width, load.adapter.ranks
    norms = 2 * (4 * base.hidden + 4)  # in float32
    if base.head_norms:
        norms += 4 * (base.query_width + base.kv_width + base.heads + base.kv_heads)
    inputs = base.hidden * sum(any(name in ranks for name in group) for group in (QKV, GATE_UP))
    keys = base.query_width if load.masked else base.kv_width  # repeated for each group of heads
    attention = 2 * base.query_width + 2 * keys
    swiglu = (4 if "down_proj" in ranks else 3) * base.intermediate
    inner = sum(ranks.values())
    per_token = norms + width * (inputs + attention + swiglu + inner) + 4 * base.heads
    mask = width * rows * length**2 if load.masked else 0  # as a bias of each layer
    return rows * length * per_token + mask


def passing_through_layer(sizes: ModelSizes, width: int, tokens: int, adapter_width: int = 0) -> float:
    """Most that a layer holds at a time in a forward without gradients."""
    mlp = sizes.intermediate * (2 * width + 2 * adapter_width if adapter_width else 3 * width)
    attention = width * (4 * sizes.query_width + 2 * sizes.kv_width)
    # embeddings, the layer's input, the residual stream, what is normalised, and rotary positions
    around = 4 * sizes.hidden + 2 * sizes.head_dim
    cast = adapter_width * sizes.hidden if adapter_width > width else 0  # of an adapter's input
    return tokens * (cast + width * around + max(mlp, attention))


def backward_of_layer(load: Workload, tokens: int) -> float:
    """Gradients that exist at a time within a layer, besides what was saved."""
    base = load.base
    return tokens * load.width * (2 * base.hidden + 2 * base.intermediate)


def dequantized(load: Workload) -> float:
    """The largest weight of a quantised base, as a product takes it."""
    return 0.0 if load.quantization is None else load.width * load.base.largest_linear


def logits(load: Workload, tokens: int, exact_kl: bool) -> float:
    """Numbers over the vocabulary that [`token_logprobs`] works in."""
    vocabulary = load.base.vocabulary
    rows = min(tokens, max(1, load.chunk // (vocabulary * (2 if exact_kl else 1))))
    product = load.width if load.width < 4 else 0  # in float32 it is the logits
    return rows * vocabulary * (product + 4 + 4 + (4 if exact_kl else 0))


def adapters_in_16_bits(load: Workload) -> float:
    """Copies that autocast makes, and keeps until it ends."""
    return 2 * load.adapters * load.adapter.parameters if load.autocast else 0


def rollout_bytes(load: Workload) -> float:
    """Token ids, and eleven numbers for each response token: of the samples, and of the rollout learned from."""
    return load.completions * (8 * load.length + 8 * load.prompt + 8 * load.response + 44 * load.response)


def resident_parts(load: Workload) -> dict[str, float]:
    """What is there all the time, optimizer states among it."""
    adapters = [r.adapter.parameters + load.base.hidden for r in load.rewards if r.adapter is not None]
    return {
        "base weights": weight_bytes(load.base, load.width, load.quantization, load.double_quantization),
        "reward models": 0 if load.offloaded[0] else sum(map(_classifier, load.rewards)),
        "reward adapters": 4 * sum(adapters),
        "policy adapter": 4 * load.adapter.parameters,
        "critic": 4 * (load.trained - load.adapter.parameters),
        "averaged weights": 4 * load.adapter.parameters if load.averaged else 0,
        "optimizer states": optimizer_bytes(load),
    }


def _classifier(reward: RewardSizes) -> int:
    return 0 if reward.model is None else weight_bytes(reward.model, reward.width, reward.quantization, double=True)


def optimizer_bytes(load: Workload) -> float:
    """Memory of the optimizer's states."""
    each = OPTIMIZERS[load.optimizer]
    if "8bit" not in load.optimizer or not each:
        return each * load.trained
    large = sum(x for x in load.adapter.tensors if x >= SMALLEST_8BIT) * load.adapters
    # a float32 for each block of 256
    return large * (each + each * 4 / 256) + (load.trained - large) * 4 * each


def _generate(load: Workload) -> dict[str, float]:
    base, rows = load.base, load.generation_batch
    cache = 2 * rows * load.length * base.kv_width * load.width * base.layers
    early = cache * min(-(-load.prompt // BLOCK) * BLOCK, load.length) / load.length  # it grows by blocks
    sampling = rows * base.vocabulary * (load.width + 12 + (16 if load.top_p else 0))
    prefill = passing_through_layer(base, load.width, rows * load.prompt)  # adapters add to what is there
    # a layer's keys, copied to larger memory
    copied = cache / (2 * base.layers) * ((load.length - 1) // BLOCK * BLOCK) / load.length
    at_the_end = cache + max(copied, sampling) >= early + prefill
    return {
        "KV cache": cache if at_the_end else early,
        "sampling": max(copied, sampling) if at_the_end else 0,
        "activations": 0 if at_the_end else prefill,
        "dequantised weight": dequantized(load),
        "autocast copies": adapters_in_16_bits(load) / load.adapters,
    }


def _forward(load: Workload) -> dict[str, float]:
    tokens, responses = load.micro_batch * load.length, load.micro_batch * load.response
    layer = passing_through_layer(load.base, load.width, tokens, load.width) + dequantized(load)
    final = 2 * load.width * responses * load.base.hidden + logits(load, responses, load.exact_kl[0])
    return {
        "activations": layer if layer >= final else 0,
        "logits": final if final > layer else 0,
        "rollout": rollout_bytes(load),
        "autocast copies": adapters_in_16_bits(load),
    }


def _score(load: Workload) -> dict[str, float]:
    tokens = min(load.reward_batch, load.completions) * load.length

    def one(reward: RewardSizes) -> float:
        """What a reward holds at a time while it scores, itself where it comes from main memory."""
        if reward.model is None:
            return passing_through_layer(load.base, load.width, tokens, 4) + dequantized(load)  # outside of autocast
        largest = 0 if reward.quantization is None else reward.width * reward.model.largest_linear
        moved = _classifier(reward) if load.offloaded[0] else 0
        return moved + passing_through_layer(reward.model, reward.width, tokens) + largest

    return {"activations": max(map(one, load.rewards), default=0), "rollout": rollout_bytes(load)}


def saved_by_trunk(load: Workload, rows: int, length: int) -> float:
    """What a forward through all layers keeps for its backward."""
    base, tokens = load.base, rows * length
    final_norm = tokens * (4 * base.hidden + 4)
    if load.checkpointing:
        return base.layers * load.width * tokens * base.hidden + final_norm
    nothing_before = tokens * (4 * base.hidden + 4)  # the first norm stands before all that is trained
    return base.layers * saved_in_layer(load, rows, length) - nothing_before + final_norm


def _update(load: Workload) -> dict[str, float]:
    base, rows = load.base, load.micro_batch
    tokens, responses = rows * load.length, rows * load.response
    trunk = saved_by_trunk(load, rows, load.length)
    ptx = saved_by_trunk(load, rows, load.ptx) if load.ptx else 0.0
    kept_of_each = 1 + load.entropy + load.exact_kl[1] + (load.critic != "none")  # by the hidden state, in float32
    derivatives = 4 * base.hidden * rows * (load.response * kept_of_each + load.ptx)
    gradients = 4 * load.trained
    accumulates = load.micro_batch < load.mini_batch
    recomputed = 0.0
    if load.checkpointing:
        again = 4 * base.hidden * tokens if load.width == 4 else 0  # in float32 the first norm keeps the layer's input
        recomputed = saved_in_layer(load, rows, load.length) - again
    temporary = backward_of_layer(load, tokens) + dequantized(load) + recomputed
    projecting = logits(load, max(responses, rows * load.ptx), load.exact_kl[1])
    # candidates for the peak: projecting the policy's states, and beginning the backward
    forward = {"activations": trunk, "logits": projecting + derivatives}
    backward = {"activations": load.adapters * trunk + ptx + temporary, "logits": derivatives}
    if load.ptx:
        forward = {"activations": load.adapters * trunk + ptx, "logits": derivatives + projecting}
    worst = max(forward, backward, key=lambda x: sum(x.values()))
    during = gradients if accumulates else gradients / base.layers
    step = {"activations": 0.0, "logits": 0.0}
    if gradients > sum(worst.values()) + during:
        worst, during = step, gradients
    return {
        **worst,
        "gradients": during + (gradients if load.processes > 1 else 0),
        "rollout": 0 if load.offloaded[1] else rollout_bytes(load),
        "autocast copies": adapters_in_16_bits(load),
    }


def phases(load: Workload) -> list[Phase]:
    """What is alive in each phase, from the second rollout on."""
    resident = resident_parts(load)
    loading = {key: x for key, x in resident.items() if key != "optimizer states"}
    found = [Phase("load", loading | {"weight before quantisation": dequantized(load)})]
    for name, parts in (("generate", _generate), ("forward", _forward), ("score", _score), ("update", _update)):
        found.append(Phase(name, resident | parts(load)))
    return [Phase(x.name, {key: y for key, y in x.parts.items() if y}) for x in found]
