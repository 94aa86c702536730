"""Scripts that people run with GRPO train with PPO after two names are changed.

They are short versions of scripts of TRL, its documentation and courses, with the settings that these have.
"""

import re
import sys
from pathlib import Path

import pytest
import stand_ins
import trl

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SMALL = "--per_device_train_batch_size 2 --max_completion_length 8 --max_steps 2 --num_generations 2".split()
TRL_GRPO = Path(trl.__file__).parent / "scripts" / "grpo.py"
FILE = f"""\
model_name_or_path: {MODEL}
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [think_format_reward, get_soft_overlong_punishment]
output_dir: out
learning_rate: 1.0e-5
per_device_train_batch_size: 2
num_generations: 2
max_completion_length: 8
max_steps: 2
num_iterations: 2
beta: 0.04
epsilon: 0.2
loss_type: grpo
use_vllm: false
gradient_checkpointing: true
use_peft: true
lora_r: 8
"""
FLAGS = f"""--model_name_or_path {MODEL} --dataset_name trl-lib/DeepMath-103K --output_dir out --learning_rate 1e-5
--reward_funcs think_format_reward --beta 0.0 --log_completions --use_peft
--lora_target_modules q_proj v_proj""".split()

GSPO = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import think_format_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=model_args.dtype
    )
    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])

    def make_conversation(example):
        return {
            "prompt": [
                {"role": "system", "content": "w1 w2"},
                {"role": "user", "content": example["problem"]},
            ],
        }

    train_dataset = train_dataset.map(make_conversation).remove_columns(["messages", "problem"])
    eval_dataset = eval_dataset.map(make_conversation).remove_columns(["messages", "problem"])
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
"""
GSPO_FLAGS = f"""--model_name_or_path {MODEL} --output_dir gspo --learning_rate 1e-5 --dtype bfloat16 --use_peft
--lora_target_modules q_proj v_proj --log_completions --importance_sampling_level sequence --epsilon 3e-4
--epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 4""".split()

QUICKSTART = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")


def reward_num_unique_letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


training_args = GRPOConfig(output_dir="Qwen2.5-0.5B-GRPO", max_completion_length=8, max_steps=2, num_generations=2,
                           per_device_train_batch_size=2)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_num_unique_letters,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
trainer.save_model()
"""

GSM8K = """\
import re

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "w1 w2 w3"


def extract_hash_answer(text):
    return text.split("####")[1].strip() if "####" in text else None


data = load_dataset("openai/gsm8k", "main")["train"]
data = data.map(lambda x: {
    "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
    "answer": extract_hash_answer(x["answer"]),
})


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    q = prompts[0][-1]["content"]
    print("-" * 20, f"Question: {q}", f"Answer: {answer[0]}", f"Response: {responses[0]}")
    return [2.0 if r == a else 0.0 for r, a in zip(responses, answer)]


def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if completion[0]["content"].isdigit() else 0.0 for completion in completions]


def soft_format_reward_func(completions, **kwargs) -> list[float]:
    matches = [re.match("<reasoning>.*?</reasoning>", completion[0]["content"]) for completion in completions]
    return [0.5 if match else len(completion[0]["content"]) / 100 for match, completion in zip(matches, completions)]


model_name = "Qwen/Qwen2.5-1.5B-Instruct"
training_args = GRPOConfig(
    output_dir="outputs/Qwen-1.5B-GRPO",
    run_name="Qwen-1.5B-GRPO-gsm8k",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_steps=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=2,
    save_steps=100,
    max_grad_norm=0.1,
    log_on_each_node=False,
    use_vllm=False,
)
peft_config = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
    task_type="CAUSAL_LM",
    lora_dropout=0.05,
)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16, device_map=None)
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[soft_format_reward_func, int_reward_func, correctness_reward_func],
    args=training_args,
    train_dataset=data,
    peft_config=peft_config,
)
trainer.train()
"""

OPEN_R1 = """\
import os

from datasets import load_dataset
from transformers import AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from trl import ModelConfig, get_peft_config

training_args = GRPOConfig(
    output_dir="data/Qwen2.5-1.5B-Open-R1-GRPO", do_eval=True, gradient_accumulation_steps=4, learning_rate=2e-5,
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, log_completions=True,
    log_level="info", logging_first_step=True, logging_steps=1, logging_strategy="steps", lr_scheduler_type="cosine",
    max_completion_length=8, max_steps=2, num_generations=4, save_total_limit=1,
    per_device_eval_batch_size=4, per_device_train_batch_size=1, reward_weights=[1.0, 1.0], save_strategy="epoch",
    seed=42, warmup_steps=0.1, beta=0.04, temperature=0.7,
)
model_args = ModelConfig(model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct", dtype="bfloat16")
set_seed(training_args.seed)

last_checkpoint = None
if os.path.isdir(training_args.output_dir):
    last_checkpoint = get_last_checkpoint(training_args.output_dir)

tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
training_args.model_init_kwargs = dict(
    revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=model_args.dtype,
    use_cache=not training_args.gradient_checkpointing,
)
dataset = load_dataset("AI-MO/NuminaMath-TIR")


def format_reward(completions, **kwargs):
    return [float("<think>" in completion[0]["content"]) for completion in completions]


def length_reward(completions, solution, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    reward_funcs=[format_reward, length_reward],
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"].select(range(4)) if training_args.eval_strategy != "no" else None,
    peft_config=get_peft_config(model_args),
    callbacks=[],
    processing_class=tokenizer,
)

checkpoint = None
if training_args.resume_from_checkpoint is not None:
    checkpoint = training_args.resume_from_checkpoint
elif last_checkpoint is not None:
    checkpoint = last_checkpoint
train_result = trainer.train(resume_from_checkpoint=checkpoint)
metrics = train_result.metrics
metrics["train_samples"] = len(dataset["train"])
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()

trainer.model.generation_config.eos_token_id = tokenizer.eos_token_id
trainer.save_model(training_args.output_dir)
kwargs = {"dataset_name": "AI-MO/NuminaMath-TIR", "tags": ["open-r1"]}
if trainer.accelerator.is_main_process:
    trainer.create_model_card(**kwargs)
    trainer.model.config.use_cache = True
    trainer.model.config.save_pretrained(training_args.output_dir)
if training_args.do_eval:
    metrics = trainer.evaluate(dataset["test"].select(range(4)))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
"""

COOKBOOK = """\
from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model_id = "Qwen/Qwen2-0.5B-Instruct"
train_dataset = load_dataset("AI-MO/NuminaMath-TIR", split="train[:5%]")
train_dataset = train_dataset.map(lambda x: {"prompt": [{"role": "user", "content": x["problem"]}]})
train_dataset = train_dataset.remove_columns(["messages", "problem"])

model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map=None)
lora_config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1,
                         target_modules=["q_proj", "v_proj"])
model = get_peft_model(model, lora_config)
model.print_trainable_parameters()


def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content.startswith("<think>") else 0.1 * len(content) for content in contents]


training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO-test",
    learning_rate=1e-5,
    remove_unused_columns=False,  # to access the solution column in accuracy_reward
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    max_steps=2,
    max_completion_length=8,
    num_generations=4,
    per_device_train_batch_size=2,
    logging_steps=10,
    save_strategy="steps",
    save_steps=10,
)
trainer = GRPOTrainer(model=model, reward_funcs=[format_reward], args=training_args, train_dataset=train_dataset)
trainer.train()
trainer.save_model(training_args.output_dir)

trained_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_id), training_args.output_dir)
trained_tokenizer = AutoTokenizer.from_pretrained(training_args.output_dir)
prompt = trained_tokenizer.apply_chat_template(train_dataset["prompt"][0], tokenize=False, add_generation_prompt=True)
inputs = trained_tokenizer(prompt, return_tensors="pt").to(trained_model.device)
print(trained_tokenizer.decode(trained_model.generate(**inputs, max_length=40)[0], skip_special_tokens=True))
"""

COURSE = """\
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("mlabonne/smoltldr")
model_id = "Qwen/Qwen2.5-0.5B"
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))

ideal_length = 50


def reward_len(completions, **kwargs):
    return [-abs(ideal_length - len(completion)) for completion in completions]


training_args = GRPOConfig(
    output_dir="GRPO",
    learning_rate=2e-5,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    max_completion_length=8,
    num_generations=4,
    optim="adamw_torch",
    num_train_epochs=1,
    max_steps=2,
    remove_unused_columns=False,
    logging_steps=1,
)
trainer = GRPOTrainer(
    model=model, reward_funcs=[reward_len], args=training_args, train_dataset=dataset["train"],
)
trainer.train()
merged_model = trainer.model.merge_and_unload()
merged_model.save_pretrained("merged")
tokenizer.save_pretrained("merged")
generator = pipeline("text-generation", model="merged")
print(generator("w1 w2 w3", max_new_tokens=4, do_sample=True, temperature=0.5, min_p=0.1))
"""

NOTEBOOK = """\
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
rows = [{"prompt": [{"role": "user", "content": f"w{i} w{i + 1}"}], "ground_truth": f"w{i + 2}"} for i in range(16)]


class PrintRewards(TrainerCallback):
    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "reward" in logs:
            print(state.global_step, logs["reward"], logs["reward_std"], logs["completions/mean_length"], logs["kl"])


def exact(completions, ground_truth, trainer_state=None, log_metric=None, **kwargs):
    scores = [float(c[0]["content"] == truth) for c, truth in zip(completions, ground_truth)]
    log_metric("exact", sum(scores) / len(scores))
    return scores


async def length(completions, **kwargs):
    return [-0.1 * len(c[0]["content"]) for c in completions]


trainer = GRPOTrainer(
    "Qwen/Qwen3-0.6B",
    reward_funcs=[exact, length],
    args=GRPOConfig(
        output_dir="notebook", max_steps=2, num_generations=2, per_device_train_batch_size=2, learning_rate=1e-5,
        max_completion_length=8, logging_steps=1, beta=0.04, num_iterations=1, scale_rewards=False,
        loss_type="dr_grpo", top_k=None, mask_truncated_completions=False, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=2, reward_weights=[1.0, 0.5], chat_template_kwargs={"enable_thinking": False},
    ),
    train_dataset=Dataset.from_list(rows),
    eval_dataset=Dataset.from_list(rows[:2]),
    processing_class=tokenizer,
    callbacks=[PrintRewards()],
)
print(trainer.evaluate())
trainer.train()
print(trainer.evaluate(), trainer.reward_func_names)
trainer.model.eval()
inputs = tokenizer.apply_chat_template(
    rows[0]["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(trainer.model.device)
with torch.no_grad():
    output = trainer.model.generate(**inputs, max_new_tokens=8, do_sample=True, temperature=0.7)
    logits = trainer.model(**inputs).logits
print(tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True), logits.shape)
trainer.model.save_pretrained("adapter")
"""

REWARD_MODEL = """\
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

reward_model = AutoModelForSequenceClassification.from_pretrained("my-reward-model", num_labels=1)
reward_tokenizer = AutoTokenizer.from_pretrained("my-reward-model")
dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")
splits = dataset.train_test_split(test_size=4, seed=0)


def brevity(completion_ids, **kwargs):
    return [1.0 / len(ids) for ids in completion_ids]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[reward_model, brevity],
    reward_processing_classes=[reward_tokenizer, None],
    args=GRPOConfig(
        "rm", max_steps=4, num_generations=4, per_device_train_batch_size=4, max_completion_length=8,
        reward_weights=[1.0, 0.2], epsilon=0.2, epsilon_high=0.28, num_iterations=2, delta=None, disable_dropout=True,
        eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_reward", greater_is_better=True, report_to=[], logging_steps=1,
    ),
    train_dataset=splits["train"],
    eval_dataset=splits["test"],
)
trainer.train()
print(trainer.predict(splits["test"]).metrics)
"""

SCRIPTS = {
    "trl grpo with a file": (None, ["--config", "grpo.yaml"]),
    "trl grpo with flags": (None, FLAGS + SMALL),
    "gspo": (GSPO, GSPO_FLAGS + SMALL),
    "quickstart": (QUICKSTART, []),
    "gsm8k": (GSM8K, []),
    "open-r1": (OPEN_R1, []),
    "cookbook": (COOKBOOK, []),
    "course": (COURSE, []),
    "notebook": (NOTEBOOK, []),
    "reward model": (REWARD_MODEL, []),
}


def with_two_names_changed(script: str) -> str:
    """Import our two names beside what else comes from TRL."""

    def imports(match: re.Match) -> str:
        names = [name for name in re.split(r"[\s,()]+", match[2]) if name]
        ours = [name.replace("GRPO", "PPO") for name in names if name in ("GRPOConfig", "GRPOTrainer")]
        others = [name for name in names if name not in ("GRPOConfig", "GRPOTrainer")]
        lines = {"trl": others, "trl_ppo_ext": ours}
        return "\n".join(f"{match[1]}from {module} import {', '.join(x)}" for module, x in lines.items() if x)

    script = re.sub(r"^( *)from trl import (\([^)]*\)|.*)$", imports, script, flags=re.MULTILINE)
    return re.sub(r"\bGRPO(Config|Trainer)\b", r"PPO\1", script)


@pytest.mark.parametrize("trainer_class", ["PPOTrainer", pytest.param("GRPOTrainer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_with_two_names_changed(name, trainer_class, working_directory, monkeypatch):
    script, flags = SCRIPTS[name]
    stand_ins.install(monkeypatch, trains=False)
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    Path("grpo.yaml").write_text(FILE, encoding="utf-8")
    if script is None:
        script = TRL_GRPO.read_text(encoding="utf-8").replace("    main(script_", "    trainer = main(script_")
        script = re.sub(r"(?s)(\n        trainer\.end\(\))", r"\1\n    return trainer", script)
    namespace: dict = {"__name__": "__main__"}
    if trainer_class == "PPOTrainer":
        script = with_two_names_changed(script)
    exec(compile(script, "script.py", "exec"), namespace)
    trainer = namespace["trainer"]
    assert type(trainer).__name__ == trainer_class
    assert trainer.state.global_step == trainer.args.max_steps
