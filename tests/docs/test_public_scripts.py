"""Scripts with the structure of public GRPO runs on one GPU train by two names, or the error says
what to change.

They are written anew, with rows and sizes that are tiny: what counts is which arguments, fields and
habits they have.
"""

import math
import sys
from pathlib import Path

import pytest
import stand_ins
import tiny
import yaml
from test_from_grpo import with_two_names_changed

import trl_ppo_ext

# ---- a notebook on grade-school math: five rewards on tags, text that is printed, a config without
# sizes of a rollout

GSM8K_DEMO = """
import re
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Answer in tags: <reasoning> </reasoning> <answer> </answer>"

def between_tags(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()

def get_questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(lambda x: {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": x["question"]}],
        "answer": x["answer"].split("####")[1].strip(),
    })

dataset = get_questions()

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    print("-" * 20, f"Question: {question}", f"Answer: {answer[0]}", f"Response: {responses[0]}", sep="\\n")
    return [2.0 if between_tags(r) == a else 0.0 for r, a in zip(responses, answer)]

def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if between_tags(c[0]["content"]).isdigit() else 0.0 for c in completions]

def soft_format_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if re.match(r"<reasoning>.*?</reasoning>", c[0]["content"]) else 0.0 for c in completions]

def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [0.125 * c[0]["content"].count("<") - 0.001 * len(c[0]["content"]) for c in completions]

model_name = "Qwen/Qwen2.5-1.5B-Instruct"
training_args = GRPOConfig(
    output_dir="outputs/Qwen-1.5B-GRPO", run_name="Qwen-1.5B-GRPO-gsm8k", learning_rate=5e-6, adam_beta1=0.9,
    adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1, lr_scheduler_type="cosine", logging_steps=1, bf16=True,
    per_device_train_batch_size=1, gradient_accumulation_steps=4, num_generations=16, max_prompt_length=256,
    max_completion_length=8, num_train_epochs=1, max_steps=1, save_steps=100, max_grad_norm=0.1, report_to="wandb",
    log_on_each_node=False,
)
peft_config = LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
                         task_type="CAUSAL_LM", lora_dropout=0.05)
model = AutoModelForCausalLM.from_pretrained(
    model_name, dtype=torch.float32, attn_implementation="sdpa", device_map=None
)
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
trainer = GRPOTrainer(
    model=model, processing_class=tokenizer,
    reward_funcs=[xmlcount_reward_func, soft_format_reward_func, int_reward_func, correctness_reward_func],
    args=training_args, train_dataset=dataset, peft_config=peft_config,
)
trainer.train()
"""

# ---- a game of numbers: text prompts that the template and a beginning of the answer made, a
# parser, a resumed run

COUNTDOWN = """
import logging
import os
import random
import re
from dataclasses import dataclass
from datetime import datetime
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

@dataclass
class ScriptArguments:
    dataset_id_or_path: str = "countdown"
    dataset_splits: str = "train"
    tokenizer_name_or_path: str = None

logger = logging.getLogger(__name__)

def format_reward_func(completions, target, **kwargs):
    rewards = []
    for completion, gt in zip(completions, target):
        try:
            completion = "<think>" + completion
            if random.random() < 0.1:
                os.makedirs("completion_samples", exist_ok=True)
                with open(os.path.join("completion_samples", "samples.txt"), "a") as f:
                    f.write(completion)
            rewards.append(1.0 if re.search(r"^<think>([^<]*)</think>", completion) else 0.0)
        except Exception:
            rewards.append(0.0)
    return rewards

def equation_reward_func(completions, target, nums, **kwargs):
    return [0.1 * len(set(c)) if len(numbers) == 3 else 0.0 for c, gt, numbers in zip(completions, target, nums)]

def main():
    parser = TrlParser((ModelConfig, ScriptArguments, GRPOConfig))
    model_args, script_args, training_args = parser.parse_args_and_config()
    logger.info(f"Model parameters {model_args}")
    tokenizer = AutoTokenizer.from_pretrained(
        script_args.tokenizer_name_or_path or model_args.model_name_or_path, revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dataset = Dataset.from_list([{"nums": [k, k + 1, k + 2], "target": 3 * k} for k in range(20)]).shuffle(seed=42)

    def generate_r1_prompt(numbers, target):
        r1_prefix = [
            {"role": "system", "content": "w1 w2"},
            {"role": "user", "content": f"w{numbers[0]} w{numbers[1]} w5"},
            {"role": "assistant", "content": "<think>"},
        ]
        prompt = tokenizer.apply_chat_template(r1_prefix, tokenize=False, continue_final_message=True)
        return {"prompt": prompt, "target": target, "nums": numbers}

    dataset = dataset.map(lambda x: generate_r1_prompt(x["nums"], x["target"]))
    split = dataset.train_test_split(test_size=0.1)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=[format_reward_func, equation_reward_func],
        args=training_args, train_dataset=split["train"], eval_dataset=split["test"],
        peft_config=get_peft_config(model_args),
    )
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    logger.info(f"*** Starting training {datetime.now():%Y-%m-%d} for {training_args.num_train_epochs} epochs***")
    train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(split["train"])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.model.config.use_cache = True
    trainer.save_model(training_args.output_dir)
    training_args.distributed_state.wait_for_everyone()
    tokenizer.save_pretrained(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        trainer.create_model_card({"tags": ["rl", "grpo"]})
    return trainer

trainer = main()
"""
COUNTDOWN_FILE = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": "sdpa",
    "output_dir": "runs/countdown",
    "max_steps": 2,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "learning_rate": 5.0e-7,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "beta": 0.001,
    "max_completion_length": 8,
    "num_generations": 8,
    "use_vllm": False,
    "logging_strategy": "steps",
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "seed": 42,
    "use_peft": True,
    "lora_target_modules": "all-linear",
}

# ---- a registry of rewards, bound to settings by partial and update_wrapper, one with an event
# loop of its own

REGISTRY = """
import asyncio
import math
from functools import partial, update_wrapper
from types import SimpleNamespace
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def get_cosine_scaled_reward(min_value=-1.0, max_value=1.0, max_len=100):
    def cosine_scaled_reward(completions, solution, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        cosines = [math.cos(len(content) * math.pi / max_len) for content in contents]
        return [float(min_value + 0.5 * (max_value - min_value) * (1.0 + cosine)) for cosine in cosines]
    return cosine_scaled_reward

def tag_count_reward(completions, **kwargs):
    return [0.25 * completion[0]["content"].count("</think>") for completion in completions]

def code_reward(completions, num_parallel=2, provider_type="local", enforce_same_language=False, **kwargs):
    async def run(content):
        await asyncio.sleep(0)
        return min(len(content), 10) / 10
    async def run_all():
        return await asyncio.gather(*(run(completion[0]["content"]) for completion in completions))
    try:
        loop = asyncio.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    return loop.run_until_complete(run_all())

def get_reward_funcs(script_args):
    registry = {
        "cosine": get_cosine_scaled_reward(max_len=script_args.cosine_max_len),
        "tag_count": tag_count_reward,
        "code": update_wrapper(partial(code_reward, num_parallel=script_args.parallel), code_reward),
    }
    return [registry[name] for name in script_args.reward_funcs]

script_args = SimpleNamespace(reward_funcs=["cosine", "tag_count", "code"], cosine_max_len=50, parallel=4)
dataset = load_dataset("AI-MO/NuminaMath-TIR", name=None)
dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
for split in dataset:
    if "messages" in dataset[split].column_names:
        dataset[split] = dataset[split].remove_columns("messages")
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct", reward_funcs=get_reward_funcs(script_args),
    args=GRPOConfig("out", num_generations=7, per_device_train_batch_size=16, max_completion_length=8, max_steps=1,
                    scale_rewards=False, loss_type="dr_grpo", logging_steps=1, log_completions=True),
    train_dataset=dataset["train"], eval_dataset=None, callbacks=[],
)
trainer.train()
assert trainer.reward_func_names == ["cosine_scaled_reward", "tag_count_reward", "code_reward"]
"""

# ---- documentation: rewards of two tasks, None for the other one, and one per token ids

MULTI_TASK = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([
    {"prompt": "w1 plus w2", "task": "math"}, {"prompt": "w3 of w4", "task": "coding"},
    {"prompt": "w5 plus w6", "task": "math"}, {"prompt": "w7 of w8", "task": "coding"},
])

def math_reward_func(prompts, completions, task, **kwargs):
    return [float("w1" in c) if t == "math" else None for p, c, t in zip(prompts, completions, task)]

def coding_reward_func(prompts, completions, task, **kwargs):
    return [float(len(c.split())) if t == "coding" else None for p, c, t in zip(prompts, completions, task)]

def reward_len(completion_ids, **kwargs):
    return [-abs(20 - len(ids)) for ids in completion_ids]

trainer = GRPOTrainer("Qwen/Qwen2-0.5B-Instruct", [math_reward_func, coding_reward_func, reward_len],
                      GRPOConfig("out", max_steps=1, logging_steps=1, max_completion_length=8,
                                 per_device_train_batch_size=4, num_generations=2), dataset)
trainer.train()
"""

# ---- rewards normalized apart, as in GDPO

SEVERAL_REWARDS = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def correctness(completions, answer, **kwargs):
    return [float(a.split()[-1] in c) for c, a in zip(completions, answer)]

def brevity(completions, **kwargs):
    return [-10.0 * len(c) for c in completions]

def tags(completions, **kwargs):
    return [0.01 * len(set(c.split())) for c in completions]

dataset = load_dataset("openai/gsm8k", "main", split="train").rename_column("question", "prompt")
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[correctness, brevity, tags], train_dataset=dataset,
    args=GRPOConfig("gdpo", multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5, 0.5],
                    num_generations=4, per_device_train_batch_size=4, max_completion_length=8, max_steps=1,
                    scale_rewards="group", beta=0.0, logging_steps=1, epsilon_high=0.28),
)
trainer.train()
"""

# ---- a notebook of an accelerated loader, without it: an adapter is added before, steps of one
# row, counters

NOTEBOOK_OF_A_LOADER = """
import re
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

max_seq_length, lora_rank = 64, 8
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
model = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=lora_rank * 2, task_type="CAUSAL_LM",
                                         target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
dataset = Dataset.from_list([
    {"prompt": [{"role": "system", "content": "w1"}, {"role": "user", "content": f"w{k}"}], "answer": str(k)}
    for k in range(12)
])
tokenized = dataset.map(lambda x: {"tokens": tokenizer.apply_chat_template(
    x["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)}, batched=True)
maximum_length = max(len(tokens) for tokens in tokenized["tokens"])
match_format = re.compile(r"</think>.*?<SOLUTION>(.+?)</SOLUTION>", flags=re.DOTALL)

def match_format_exactly(completions, **kwargs):
    return [3.0 if match_format.search(completion[0]["content"]) else 0.0 for completion in completions]

PRINTED_TIMES = 0

def check_numbers(prompts, completions, answer, **kwargs):
    global PRINTED_TIMES
    if PRINTED_TIMES % 5 == 0:
        print("*" * 20 + f"Question: {prompts[0][-1]['content']}", completions[0][0]["content"])
    PRINTED_TIMES += 1
    return [1.5 if true in completion[0]["content"] else -0.1 for completion, true in zip(completions, answer)]

max_prompt_length = maximum_length + 1
training_args = GRPOConfig(
    temperature=1.0, learning_rate=5e-6, weight_decay=0.001, warmup_ratio=0.1, lr_scheduler_type="linear",
    optim="adamw_torch_fused", logging_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1,
    num_generations=6, max_prompt_length=max_prompt_length, max_completion_length=8, max_steps=2, save_steps=100,
    report_to="none", output_dir="outputs", top_k=None, min_p=0.1,
)
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[match_format_exactly, check_numbers],
                      args=training_args, train_dataset=dataset)
trainer.train()
model.save_pretrained("grpo_saved_lora")
tokenizer.save_pretrained("grpo_saved_lora")
"""

# ---- continuous batching: fields are set on the parsed config, the dataset is mapped to new
# columns only

CONTINUOUS_BATCHING = """
import re
import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

def correctness_reward(completions, reference_answer, **kwargs):
    found = [re.search(r"#### (\\d+)", c if isinstance(c, str) else c[-1]["content"]) for c in completions]
    return [1.0 if x and x[1] == r else 0.0 for x, r in zip(found, reference_answer, strict=False)]

parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
training_args.model_init_kwargs = dict(
    revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=dtype
)
dataset = load_dataset(script_args.dataset_name or "openai/gsm8k", script_args.dataset_config or "main",
                       split=script_args.dataset_train_split)

def make_conversation(example):
    return {"prompt": [{"role": "system", "content": "w1"}, {"role": "user", "content": example["question"]}],
            "reference_answer": example["answer"].split("####")[-1].strip()}

dataset = dataset.map(make_conversation, remove_columns=dataset.column_names)
if training_args.transformers_continuous_batching_config is None:
    training_args.transformers_continuous_batching_config = {"use_cuda_graph": False}
trainer = GRPOTrainer(model=model_args.model_name_or_path, reward_funcs=correctness_reward, args=training_args,
                      train_dataset=dataset, peft_config=get_peft_config(model_args))
trainer.train()
trainer.save_model(training_args.output_dir)
"""
CONTINUOUS_BATCHING_LINE = (
    "--model_name_or_path Qwen/Qwen3-0.6B --output_dir out --num_generations 4 "
    "--max_completion_length 8 --use_peft --log_completions "
    "--use_transformers_continuous_batching --per_device_train_batch_size 4 --max_steps 1"
)

# ---- ratios per sequence, a tiny clip, several updates of a rollout

SEQUENCE_RATIOS = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])

def make_conversation(example):
    return {"prompt": [{"role": "system", "content": "w1"}, {"role": "user", "content": example["problem"]}]}

train_dataset = train_dataset.map(make_conversation, remove_columns=["messages", "problem"])

def accuracy(completions, solution: list[str], **kwargs):
    return [float(s in c[0]["content"]) if s else None for c, s in zip(completions, solution)]

training_args = GRPOConfig(
    output_dir="gspo", importance_sampling_level="sequence", loss_type="grpo", beta=0.0, epsilon=3e-4,
    epsilon_high=4e-4, gradient_accumulation_steps=1, steps_per_generation=4, per_device_train_batch_size=4,
    num_generations=8, max_completion_length=8, max_steps=4, learning_rate=1e-5, logging_steps=1, delta=None,
)
trainer = GRPOTrainer("Qwen/Qwen2-0.5B-Instruct", accuracy, training_args, train_dataset=train_dataset,
                      peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
trainer.train()
"""

# ---- a course: summaries of a length, an adapter, its merged model in a pipeline

SUMMARIES = """
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("mlabonne/smoltldr")
model_id = "Qwen/Qwen2.5-0.5B"
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map=None, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
print(model.print_trainable_parameters())
ideal_length = 50

def reward_len(completions, **kwargs):
    return [-abs(ideal_length - len(completion)) for completion in completions]

training_args = GRPOConfig(
    output_dir="GRPO", learning_rate=2e-5, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    max_prompt_length=512, max_completion_length=8, num_generations=8, optim="adamw_torch", num_train_epochs=1,
    max_steps=1, bf16=False, report_to=["none"], remove_unused_columns=False, logging_steps=1,
)
trainer = GRPOTrainer(model=model, reward_funcs=[reward_len], args=training_args, train_dataset=dataset["train"])
trainer.train()
merged_model = trainer.model.merge_and_unload()
generator = pipeline("text-generation", model=merged_model, tokenizer=tokenizer)
print(generator("w1 w2", max_new_tokens=4, do_sample=True, temperature=0.5, min_p=0.1))
"""

# ---- a base in 4 bits, prepared for training, with clip-higher, no KL, and a punishment of long
# answers

IN_4_BITS = """
import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", quantization_config=bnb_config)
model.config.use_cache = False
model = prepare_model_for_kbit_training(model)

def unique(completions, **kwargs):
    return [float(len(set(c.split()))) for c in completions]

trainer = GRPOTrainer(
    model=model,
    reward_funcs=[unique, get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=2)],
    args=GRPOConfig("dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, loss_type="dapo", num_generations=4,
                    mask_truncated_completions=False, top_entropy_quantile=0.5, per_device_train_batch_size=4,
                    max_completion_length=8, max_steps=1, logging_steps=1, optim="paged_adamw_8bit"),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    processing_class=AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B", padding_side="left"),
    peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
                           target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]),
)
trainer.train()
"""

# ---- a stream of rows, a judge that is asked concurrently, early stopping on an evaluation

STREAM_AND_JUDGE = """
import asyncio
from datasets import Dataset
from transformers import EarlyStoppingCallback
from trl import GRPOConfig, GRPOTrainer

train = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{k % 20}"}], "id": k} for k in range(64)])

class Judge:
    def __init__(self):
        self.limit = asyncio.Semaphore(4)
        self.__name__ = "judge"

    async def ask(self, text):
        async with self.limit:
            await asyncio.sleep(0)
            return len(text) % 3 / 3

    async def __call__(self, prompts, completions, **kwargs):
        return await asyncio.gather(*(self.ask(completion[0]["content"]) for completion in completions))

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B", reward_funcs=Judge(), train_dataset=train.to_iterable_dataset(),
    eval_dataset={"small": train.select(range(2))},
    args=GRPOConfig("judged", max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1, max_completion_length=8,
                    per_device_train_batch_size=2, per_device_eval_batch_size=2, num_generations=2, logging_steps=1,
                    generation_batch_size=4, load_best_model_at_end=True, metric_for_best_model="eval_small_reward",
                    chat_template_kwargs={"enable_thinking": False}),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
"""

# ---- sentiment by a classifier that is a function's, and two that are the trainer's

CLASSIFIERS = """
import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

name = "my-reward-model"
tokenizer, classifier = AutoTokenizer.from_pretrained(name), AutoModelForSequenceClassification.from_pretrained(name)

@torch.no_grad()
def sentiment(prompts, completions, **kwargs):
    texts = [prompt + completion for prompt, completion in zip(prompts, completions)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)
    return classifier(**inputs).logits[:, 0]

dataset = load_dataset("stanfordnlp/imdb", split="train")
dataset = dataset.map(lambda x: {"prompt": " ".join(x["text"].split()[:3])}, remove_columns=["text", "label"])
trainer = GRPOTrainer(
    model="my-sft-model", reward_funcs=[sentiment, "reward-model-2"], train_dataset=dataset,
    args=GRPOConfig("imdb", max_steps=1, num_generations=4, per_device_train_batch_size=4, max_completion_length=8,
                    reward_weights=[0.5, 0.5], logging_steps=1, beta=0.1, use_bias_correction_kl=False),
)
trainer.train()
"""

# ---- rubrics: functions of one completion, bound by decorators that a class keeps

RUBRICS = """
import functools
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

class Parser:
    def parse_answer(self, completion):
        return completion[-1]["content"].split()[-1] if completion[-1]["content"].split() else ""

class Rubric:
    def __init__(self, funcs, weights, parser):
        self.funcs, self.weights, self.parser = funcs, weights, parser

    def get_reward_funcs(self):
        return [self.bind(func) for func in self.funcs]

    def bind(self, func):
        @functools.wraps(func)
        def scored(prompts, completions, answer, **kwargs):
            return [func(completion=c, answer=a, parser=self.parser) for c, a in zip(completions, answer)]
        return scored

def exact(completion, answer, parser):
    return float(parser.parse_answer(completion) == answer)

def words(completion, answer, parser):
    return 0.1 * len(completion[-1]["content"].split())

class Environment:
    def __init__(self):
        self.rubric = Rubric([exact, words], [1.0, 0.2], Parser())

    def get_dataset(self):
        rows = load_dataset("openai/gsm8k", "main", split="train")
        return rows.map(lambda x: {"prompt": [{"role": "user", "content": x["question"]}]}, remove_columns="question")

env = Environment()
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct", reward_funcs=env.rubric.get_reward_funcs(), train_dataset=env.get_dataset(),
    args=GRPOConfig("rubric", reward_weights=env.rubric.weights, num_generations=6, max_steps=1, logging_steps=1,
                    per_device_train_batch_size=1, gradient_accumulation_steps=2, max_completion_length=8,
                    num_iterations=2, beta=0.01, adam_beta2=0.99, lr_scheduler_type="constant_with_warmup",
                    warmup_steps=10, max_grad_norm=0.01, save_strategy="steps", save_only_model=False),
)
trainer.train()
assert trainer.reward_func_names == ["exact", "words"]
"""

# ---- a policy that calls a tool, with rewards that read its calls and the answers

TOOL_CALLS = """
import sqlite3
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def query(sql_command: str) -> list[tuple]:
    \"\"\"
    Execute a read-only command.

    Args:
        sql_command: The command.

    Returns:
        Rows of the result.
    \"\"\"
    return sqlite3.connect(":memory:").execute(sql_command).fetchall()

def structure_reward(completions, **kwargs):
    return [0.1 if any(turn.get("tool_calls") for turn in c) else -0.01 * len(c[-1]["content"]) for c in completions]

def correctness_reward(completions, answer, **kwargs):
    return [float(a in c[-1]["content"].lower()) for c, a in zip(completions, answer, strict=False)]

dataset = Dataset.from_list([{"question": f"Is {k} even?", "answer": "yes" if k % 2 else "no"} for k in range(8)])
dataset = dataset.map(lambda x: {"prompt": [{"role": "user", "content": x["question"]}]}, remove_columns=["question"])
training_args = GRPOConfig("agent", max_steps=1, logging_steps=1, per_device_train_batch_size=2, num_generations=2,
                           max_completion_length=16, max_tool_calling_iterations=2, log_completions=True,
                           num_completions_to_print=2)
training_args.chat_template_kwargs = {"enable_thinking": False}
trainer = GRPOTrainer(model="byte-policy", train_dataset=dataset, eval_dataset=None, tools=[query],
                      reward_funcs=[correctness_reward, structure_reward], args=training_args)
trainer.train()
"""

# ---- a game whose methods are tools, and a reward that reads its instances

GAME = """
import random
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

class Game:
    def reset(self, **kwargs) -> str:
        self.board, self.score = [0] * 4, 0.0
        self._spawn()
        return f"score={self.score} {self.board}"

    def move(self, direction: str) -> str:
        \"\"\"
        Play one move.

        Args:
            direction: One of "left", "right".

        Returns:
            Feedback.
        \"\"\"
        if direction not in ("left", "right"):
            raise ValueError("Invalid direction.")
        self.score += 1
        self._spawn()
        return f"score={self.score} {self.board}"

    def _spawn(self) -> None:
        self.board[random.randrange(4)] += 2

def reward_score(environments, **kwargs):
    return [env.score for env in environments]

def short(completions, **kwargs):
    return [-0.01 * len(c[-1]["content"]) for c in completions]

trainer = GRPOTrainer(
    model="byte-policy",
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Play."}] for _ in range(16)]}),
    reward_funcs=[reward_score, short],
    args=GRPOConfig("game", chat_template_kwargs={"enable_thinking": False}, logging_steps=1, log_completions=True,
                    num_completions_to_print=2, max_completion_length=16, per_device_train_batch_size=2,
                    gradient_accumulation_steps=2, max_steps=1),
    environment_factory=Game, peft_config=LoraConfig(),
)
trainer.train()
"""

# ---- a function that samples by itself and passes what an environment paid

ROLLOUT_FUNC = """
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")

def rollout_func(prompts, trainer):
    prompt_ids, completion_ids, rewards = [], [], []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        inputs = trainer.processing_class(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = trainer.model.generate(**inputs, max_new_tokens=6, do_sample=True)
        ids = output[0, inputs["input_ids"].shape[1]:].tolist()
        prompt_ids.append(inputs["input_ids"][0].tolist())
        completion_ids.append(ids)
        rewards.append(float(len(ids)))
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "env_reward": rewards}

def reward_from_env(completions, **kwargs):
    return [float(reward) for reward in kwargs.get("env_reward", [])] or [0.0] * len(completions)

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B", processing_class=tokenizer, reward_funcs=reward_from_env, rollout_func=rollout_func,
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{k}"}] for k in range(8)]}),
    args=GRPOConfig("echo", max_steps=1, logging_steps=1, per_device_train_batch_size=2, num_generations=2,
                    gradient_accumulation_steps=1, max_completion_length=8),
)
trainer.train()
"""

SCRIPTS = {
    "demo on gsm8k": GSM8K_DEMO,
    "countdown": COUNTDOWN,
    "registry of rewards": REGISTRY,
    "multi-task": MULTI_TASK,
    "several rewards": SEVERAL_REWARDS,
    "notebook of a loader": NOTEBOOK_OF_A_LOADER,
    "continuous batching": CONTINUOUS_BATCHING,
    "sequence ratios": SEQUENCE_RATIOS,
    "summaries": SUMMARIES,
    "4 bits": IN_4_BITS,
    "stream and judge": STREAM_AND_JUDGE,
    "classifiers": CLASSIFIERS,
    "rubrics": RUBRICS,
    "tool calls": TOOL_CALLS,
    "game": GAME,
    "rollout_func": ROLLOUT_FUNC,
}


@pytest.fixture
def place(working_directory, monkeypatch):
    """The working directory, with a policy for tools and the arguments of the scripts that parse
    them."""
    tokenizer = tiny.byte_tokenizer()
    policy = tiny.llama(vocab_size=len(tokenizer), hidden_size=16, max_position_embeddings=4096)
    policy.generation_config.eos_token_id = policy.config.eos_token_id = tokenizer.eos_token_id
    policy.save_pretrained("byte-policy")
    tokenizer.save_pretrained("byte-policy")
    Path("countdown.yaml").write_text(yaml.safe_dump(COUNTDOWN_FILE))
    stand_ins.install(monkeypatch, trains=False)
    return working_directory


ARGUMENTS = {
    "countdown": ["--config", "countdown.yaml"],
    "continuous batching": CONTINUOUS_BATCHING_LINE.split(),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_public_script_trains_with_two_names_changed(name, place, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", *ARGUMENTS.get(name, [])])
    namespace = {"__name__": "__main__"}
    exec(compile(with_two_names_changed(SCRIPTS[name]), "script.py", "exec"), namespace)
    trainer = namespace["trainer"]
    assert type(trainer) is trl_ppo_ext.PPOTrainer
    assert trainer.state.global_step == trainer.args.max_steps
    first = next(entry for entry in trainer.state.log_history if "reward" in entry)
    scored = [name for name in trainer.reward_func_names if f"rewards/{name}/mean" in first]
    # tools and the game of the last scripts may pay nothing
    assert math.isfinite(first["reward"]) and set(trainer.reward_func_names) - set(scored) <= {
        "tools",
        "Game",
    }


# what older scripts have, and GRPOConfig of today refuses too, or what is another way of training
OLD = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig("out", max_completion_length=8, {setting})
trainer = GRPOTrainer("Qwen/Qwen3-0.6B", lambda completions, **kwargs: [0.0] * len(completions), args,
                      load_dataset("trl-lib/tldr", split="train"){argument})
"""


@pytest.mark.parametrize(
    ("setting", "argument", "message"),
    [
        ("vllm_device='cuda:0'", "", "`vllm_device` .*see `vllm_mode`"),
        ("evaluation_strategy='steps'", "", "`evaluation_strategy` .*it is `eval_strategy`"),
        ("overwrite_output_dir=True", "", "`overwrite_output_dir` .*`resume_from_checkpoint`"),
        ("use_liger_loss=True", "", "`use_liger_loss` .*fused already"),
        ("loss_type='bnpo'", "", "`loss_type` must be one of 'dapo'"),
        (
            "sync_ref_model=True",
            "",
            "`sync_ref_model` must be False .*the reference is the frozen base",
        ),
        ("num_mini_batches=1, per_device_train_batch_size=3, num_generations=8", "", "use one of"),
        ("", ", ref_model='x'", "`ref_model` .*the adapter switched off"),
        ("", ", tokenizer=None", "`tokenizer` .*renamed to `processing_class`"),
        (
            "use_vllm=True, stop_strings=['</answer>']",
            "",
            "`stop_strings` needs .*`stop_token_ids`",
        ),
    ],
    ids=str,
)
def test_script_that_cannot_run_names_what_to_change(place, setting, argument, message):
    script = with_two_names_changed(OLD.format(setting=setting, argument=argument))
    with pytest.raises((ValueError, TypeError), match=message):
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
