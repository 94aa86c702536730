"""A problem small enough that everything can be enumerated: the best policy is known, and so is
every objective.

Responses have at most two tokens, and EOS ends one early: 91 responses for a vocabulary of 10 (or
one token: 10). With a tabulated reward r the best KL-regularised policy is π*(y|x) ∝
π_ref(y|x)·exp(r(x, y)/β), with J* = β·log Σ π_ref·exp(r/β). A reference that sees more is
π_ref(y|s), with what it is shown for s. What the model itself can reach is found by exact gradient
ascent on J with the same adapter.
"""

import copy
import time

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_ppo_ext import PPOConfig, PPOTrainer

VOCABULARY = 10
EOS = 1
PAD = 0
BETA = 0.5
PROMPTS = 6
RESPONSES = {
    1: [[a] for a in range(VOCABULARY)],
    2: [[EOS]] + [[a, b] for a in range(VOCABULARY) if a != EOS for b in range(VOCABULARY)],
}


def tokenizer():
    inner = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=str(PAD), eos_token=str(EOS))


def model(seed, **kwargs):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
        **kwargs,
    )
    return LlamaForCausalLM(config).eval()


def lora():
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class Problem:
    def __init__(self, seed, length=2):
        self.length = length
        self.responses = RESPONSES[length]
        generator = torch.Generator().manual_seed(1000 + seed)
        first = torch.randperm(VOCABULARY - 2, generator=generator)[:PROMPTS] + 2
        second = torch.randint(2, VOCABULARY, (PROMPTS,), generator=generator)
        self.prompts = torch.stack([first, second], 1)
        hints = torch.randint(
            2, VOCABULARY, (PROMPTS, 1), generator=torch.Generator().manual_seed(2000 + seed)
        )
        self.shown = torch.cat([hints, self.prompts], 1)  # to a reference that sees more
        self.rewards = torch.randn(PROMPTS, len(self.responses), generator=generator)
        self.index = {tuple(response): i for i, response in enumerate(self.responses)}
        self.prompt_index = {" ".join(map(str, p.tolist())): i for i, p in enumerate(self.prompts)}

    def dataset(self):
        shown = [" ".join(map(str, x.tolist())) for x in self.shown]
        return Dataset.from_dict({"prompt": list(self.prompt_index), "shown": shown})

    def reward(self, prompts, completion_ids, **kwargs):
        rows = [self.prompt_index[prompt] for prompt in prompts]
        return [
            float(self.rewards[row, self.index[tuple(ids)]])
            for row, ids in zip(rows, completion_ids)
        ]

    def logprobs(self, policy, prompts=None):
        """log π(y|x) of all responses to all prompts, `[prompts, responses]`, by plain forwards
        of the model."""
        length = self.length
        responses = self.responses
        prompts = self.prompts if prompts is None else prompts
        start = prompts.shape[1]
        padded = torch.tensor(
            [response + [PAD] * (length - len(response)) for response in responses]
        )
        counts = torch.tensor(
            [[1] * len(response) + [0] * (length - len(response)) for response in responses]
        )
        ids = torch.cat(
            [prompts.repeat_interleave(len(responses), 0), padded.repeat(PROMPTS, 1)], 1
        )
        logits = policy(input_ids=ids).logits[:, start - 1 : start - 1 + length].log_softmax(-1)
        token = logits.gather(2, ids[:, start:, None])[..., 0]
        return (token * counts.repeat(PROMPTS, 1)).sum(1).reshape(PROMPTS, -1)

    def objective(self, logprobs, reference):
        """J(π) = E[r − β·log(π/π_ref)], averaged over prompts."""
        return (logprobs.exp() * (self.rewards - BETA * (logprobs - reference))).sum(1).mean()

    def best(self, reference):
        """J* = β·log Σ π_ref·exp(r/β), averaged over prompts."""
        return BETA * (reference + self.rewards / BETA).logsumexp(1).mean()


def exact_ascent(problem, base, steps=600, learning_rate=3e-3, reference=None):
    """The best objective that gradient ascent on J itself reaches with the same adapter."""
    policy = get_peft_model(copy.deepcopy(base), lora())
    if reference is None:
        with torch.no_grad():
            reference = problem.logprobs(base)
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        loss = -problem.objective(problem.logprobs(policy), reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return -loss.item()


def gap(seed, output_dir, max_steps=1400, length=2, ascent_steps=600, prepare=None, **settings):
    """Train with PPO and say how far it ends from what exact ascent reaches: (J_exact − J_PPO)/(J*
    − J_ref).

    `prepare` changes the trainer before it trains.
    """
    problem = Problem(seed, length)
    base = model(seed)
    # which reads the base from disk, and has no kernel for heads of 16
    if settings.get("use_vllm"):
        base = model(seed, head_dim=32)
        base.save_pretrained(f"{output_dir}/base")
        settings["vllm_kwargs"] = {"base_model": f"{output_dir}/base"}
    with torch.no_grad():
        start = problem.logprobs(base)
        if settings.get("reference_prompt"):
            reference = problem.logprobs(base, problem.shown)
        else:
            reference = start
    exact = exact_ascent(problem, base, ascent_steps, reference=reference)
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 400,
        "seed": seed,
        "learning_rate": 3e-3,
        "max_steps": max_steps,
        "max_completion_length": length,
        "per_device_train_batch_size": 512,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "kl_coef": BETA,
        "critic": "head",
        "normalize_values": False,
        "cliprange": 0.2,
        "vf_coef": 0.1,
        "adam_epsilon": 1e-5,
        "target_kl": None,
        "cliprange_value": None if settings.get("critic") == "none" else 0.2,
    }
    if settings.get("critic") != "none":  # one λ for policy and critic
        defaults |= {"lam": 0.95}
        settings["critic_kwargs"] = {"lam": 0.95} | settings.get("critic_kwargs", {})
    trainer = PPOTrainer(
        model=base,
        reward_funcs=problem.reward,
        args=PPOConfig(str(output_dir), **(defaults | settings)),
        train_dataset=problem.dataset(),
        processing_class=tokenizer(),
        peft_config=lora(),
    )
    if prepare is not None:
        prepare(trainer)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        reached = problem.objective(
            problem.logprobs(trainer.actor_critic.policy.eval()), reference
        ).item()
    best = problem.best(reference).item()
    away = problem.objective(start, reference).item()
    numbers = {"ppo": reached, "exact": exact, "best": best, "reference": away, "seconds": seconds}
    return {"gap": (exact - reached) / (best - away), **numbers}
