"""PPO steps of AgileRL 2.58.0's LLMPPO: python benchmarks/peers/agilerl_ppo.py SHAPE DTYPE STEPS
[GENERATE].

GENERATE is `batch` (default: all prompts in one `generate` call) or `each` (one call a prompt, as
AgileRL's own rollout collector drives it without vLLM). Policy, reference and critic are three LoRA
adapters on one frozen base, the critic with a value head of its own; the base is shared. Adapters
are in float32 whatever the base's dtype.
"""

import sys
import tempfile
import time
from itertools import pairwise

import agilerl
import torch
from common import EPOCHS, LORA, model, prompts, report, resident, shape_of, tokenizer
from peft import LoraConfig

# Its LLM modules want `liger-kernel` installed on Linux, and then use Triton kernels, which do not
# run on a CPU. As on the platforms for which it has no Liger, the models keep their stock modules.
agilerl.HAS_LIGER_KERNEL = agilerl.HAS_LIGER_KERNEL and torch.cuda.is_available()
from agilerl.algorithms import LLMPPO

BASELINE = resident()


def agent_of(shape, dtype: torch.dtype) -> LLMPPO:
    """Agent with its defaults, except for sizes, epochs and features that are off in the other
    programs."""
    with tempfile.TemporaryDirectory() as path:
        model(shape, dtype).save_pretrained(path)
        return LLMPPO(
            pad_token_id=0,
            pad_token="<pad>",
            model_name=path,
            model_config={"torch_dtype": dtype},
            batch_size=shape.batch,
            micro_batch_size_per_gpu=shape.batch,
            update_epochs=EPOCHS,
            top_k=0,
            max_output_tokens=shape.response,
            min_output_tokens=shape.response,
            max_model_len=shape.prompt + shape.response,
            hf_generate_chunk_size=shape.batch,
            lora_config=LoraConfig(**LORA),
            gradient_checkpointing=False,
            use_liger_loss=agilerl.HAS_LIGER_KERNEL,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )


def observations(shape, generate: str) -> list[list[dict]]:
    """Four batches of prompts as inputs of `get_action`: one mapping of all rows, or one per
    row."""
    words = tokenizer(shape)
    rows = torch.tensor([words(text)["input_ids"] for text in prompts(shape, 4 * shape.batch)])
    if generate == "batch":
        size = shape.batch
    else:
        size = 1
    return [[{"input_ids": ids} for ids in batch.split(size)] for batch in rows.split(shape.batch)]


def main(name: str, dtype: str, steps: int, generate: str = "batch") -> None:
    if generate not in ("batch", "each"):
        raise ValueError(f"GENERATE is {generate!r}; use 'batch' or 'each'")
    shape = shape_of(name)
    if dtype == "bf16":
        weights = torch.bfloat16
    else:
        weights = torch.float32
    agent = agent_of(shape, weights)
    classifier = (
        model(shape, weights, classifier=True, seed=1).eval().requires_grad_(False).to(agent.device)
    )
    given = observations(shape, generate)
    seconds = []
    lengths = set()
    phases = []
    for step in range(steps):
        ticks = [time.perf_counter()]
        token_ids, masks, _ = agent.get_action(given[step % len(given)])
        ticks.append(time.perf_counter())
        ids = torch.cat(token_ids)
        with torch.no_grad():
            rewards = (
                classifier(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()
            )
        ticks.append(time.perf_counter())
        agent.learn((token_ids, masks, rewards))
        ticks.append(time.perf_counter())
        seconds.append(ticks[-1] - ticks[0])
        phases.append([after - before for before, after in pairwise(ticks)])
        lengths.add(float(ids.shape[1] - shape.prompt))
    means = torch.tensor(phases[1:]).mean(0).tolist()
    report(
        seconds,
        BASELINE,
        phases=dict(zip(("generate", "score", "learn"), means, strict=True)),
        completion_lengths=sorted(lengths),
    )


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:])
