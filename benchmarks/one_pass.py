"""Scoring a micro-batch in one pass against a pass for each role: CPU time of one thread.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/one_pass.py

Prints a table, about a minute. CPU time, not wall time: other processes matter less.
"""

import tempfile
import time
from collections.abc import Callable

import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.modeling import ActorCritic, adapter_weights, load_actor_critic
from trl_ppo_ext.modeling.one_pass import RewardRows, one_pass
from trl_ppo_ext.rewards.model import last_states
from trl_ppo_ext.sequences import Sequences

PROMPT, RESPONSE, VOCABULARY = 32, 32, 1024
SHAPES = [  # base, hidden size, batch, adapters
    *[("fp32", hidden, batch, 4) for hidden in (32, 64, 256) for batch in (4, 8, 32)],
    *[("fp32", hidden, batch, 2) for hidden in (64, 256) for batch in (4, 32)],
    *[(base, 512, batch, 4) for base in ("fp32", "nf4") for batch in (4, 16)],
    *[("nf4", 64, batch, 4) for batch in (4, 32)],
]
ADAPTERS = {2: "policy, none", 4: "policy, none, critic, reward"}


def build(base: str, hidden: int, roles: int, directory: str) -> tuple[ActorCritic, list[str]]:
    """Policy and reference; with four roles the critic and a reward have adapters too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=None,
    )
    model, quantization = LlamaForCausalLM(config), None
    if base == "nf4":
        model.save_pretrained(directory)
        model = directory
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    args = PPOConfig(directory, critic="adapter" if roles == 4 else "head", use_cpu=True, bf16=False, report_to="none")
    built = load_actor_critic(model, args, quantization).eval()
    policy, rewards = built.policy, []
    if roles == 4:
        config = policy.peft_config[built.policy_adapter]
        rewards = [built.add_frozen_adapter("reward", config, adapter_weights(policy, built.policy_adapter))]
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    return built, rewards


def rollout(batch: int) -> tuple[Sequences, list[list[int]]]:
    """Rows of different lengths, and the texts that a reward reads about them."""
    torch.manual_seed(1)

    def rows(longest: int) -> list[list[int]]:
        lengths = torch.linspace(longest // 2, longest, batch).int().tolist()
        return [torch.randint(4, VOCABULARY, (length,)).tolist() for length in lengths]

    prompts, completions = rows(PROMPT), rows(RESPONSE)
    sequences = Sequences.from_token_ids(prompts, completions, pad_token_id=0, device="cpu")
    return sequences, [prompt + completion for prompt, completion in zip(prompts, completions)]


@torch.no_grad()
def separately(built: ActorCritic, rewards: list[str], sequences: Sequences, texts: list[list[int]]) -> None:
    built(sequences, with_entropy=True)
    built.reference_logprobs(sequences)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    for name in rewards:
        with built.adapter(name):
            last_states(built.trunk, ids, mask.long())


def together(built: ActorCritic, rewards: list[str], sequences: Sequences, texts: list[list[int]]) -> None:
    one_pass(built, sequences, [RewardRows(name, texts) for name in rewards])


def milliseconds(*functions: Callable[..., None], given: tuple, seconds: float = 0.8) -> list[float]:
    """The least CPU time of each, taken in turns."""
    best, start = [float("inf")] * len(functions), time.process_time()
    for repeat in range(26):
        for index, function in enumerate(functions):
            begin = time.process_time()
            function(*given)
            if repeat:  # the first only warms up
                best[index] = min(best[index], 1000 * (time.process_time() - begin))
        if repeat >= 2 and time.process_time() - start > seconds:
            break
    return best


def main() -> None:
    torch.set_num_threads(1)
    print("| base | hidden size | batch | adapters | separately, ms | in one pass, ms | times as fast |")
    print("|---|---|---|---|---|---|---|")
    for base, hidden, batch, roles in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            built, rewards = build(base, hidden, roles, directory)
        given = (built, rewards, *rollout(batch))
        apart, fused = milliseconds(separately, together, given=given)
        row = (base, hidden, batch, ADAPTERS[roles], f"{apart:.1f}", f"{fused:.1f}", f"{apart / fused:.2f}")
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
