"""A GRPO script becomes a PPO script by changing two names.

The scripts are those of the page, and short versions of scripts of TRL's documentation and courses.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest
import stand_ins
import trl
import trl.scripts.grpo
import yaml
from pages import ROOT, blocks

import trl_ppo_ext

PAGE = ROOT / "docs" / "from_grpo.md"
SCRIPTS = [block.code for block in blocks(PAGE) if block.code.startswith("# train_")]


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
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
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

merged_model = trainer.model.merge_and_unload()
merged_model.save_pretrained("merged")
trained_tokenizer.save_pretrained("merged")
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

USERS = {
    "open-r1": OPEN_R1,
    "cookbook": COOKBOOK,
    "notebook": NOTEBOOK,
    "reward model": REWARD_MODEL,
}


def with_two_names_changed(script: str) -> str:
    """Import our two names beside what else comes from TRL."""

    def imports(match: re.Match) -> str:
        names = [name for name in re.split(r"[\s,()]+", match[2]) if name]
        ours = [
            name.replace("GRPO", "PPO") for name in names if name in ("GRPOConfig", "GRPOTrainer")
        ]
        others = [name for name in names if name not in ("GRPOConfig", "GRPOTrainer")]
        lines = {"trl": others, "trl_ppo_ext": ours}
        return "\n".join(
            f"{match[1]}from {module} import {', '.join(x)}" for module, x in lines.items() if x
        )

    script = re.sub(r"^( *)from trl import (\([^)]*\)|.*)$", imports, script, flags=re.MULTILINE)
    return re.sub(r"\bGRPO(Config|Trainer)\b", r"PPO\1", script)


def test_documented_scripts_differ_only_in_two_names():
    grpo, ppo = SCRIPTS
    assert with_two_names_changed(grpo).replace("train_grpo", "train_ppo") == ppo
    assert ppo != grpo


@pytest.mark.parametrize("name", ["documented", *USERS])
def test_grpo_script_trains_with_two_names_changed(name, working_directory, monkeypatch):
    if name == "documented":
        pytest.importorskip("math_verify")
    stand_ins.install(monkeypatch, trains=name == "documented")
    namespace = {"__name__": "__main__"}
    exec(
        compile(with_two_names_changed(USERS.get(name, SCRIPTS[0])), "script.py", "exec"), namespace
    )
    trainer = namespace["trainer"]
    assert type(trainer) is trl_ppo_ext.PPOTrainer
    assert trainer.state.global_step == trainer.args.max_steps
    assert {"reward", "entropy", "completions/mean_length"} <= trainer.state.log_history[0].keys()


IN_A_FILE = {
    "model_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
    "dataset_name": "trl-lib/tldr",
    "reward_funcs": ["my_rewards.brevity"],
    "output_dir": "out",
    "max_steps": 2,
    "max_completion_length": 4,
    "per_device_train_batch_size": 2,
    "use_vllm": False,
    "loss_type": "grpo",
    "steps_per_generation": 2,
}
ON_A_LINE = "--beta 0.04 --epsilon 0.1 --num_iterations 1 --scale_rewards none --num_generations 4"


@pytest.mark.parametrize("place", ["file", "line"])
def test_script_of_trl_heeds_every_field_of_grpo(place, working_directory, monkeypatch):
    """`trl/scripts/grpo.py` drops keys of the file that its config class lacks."""
    Path("my_rewards.py").write_text(
        "def brevity(completions, **kwargs):\n    return [-float(len(c)) for c in completions]\n"
    )
    if place == "file":
        settings = IN_A_FILE | {"vllm_gpu_memory_utilization": 0.5}
    else:
        settings = IN_A_FILE
    flags = ON_A_LINE.split()
    if place == "file":
        settings |= {k[2:]: yaml.safe_load(v) for k, v in zip(flags[::2], flags[1::2])}
        flags = []
    Path("grpo.yaml").write_text(yaml.safe_dump(settings))
    stand_ins.install(monkeypatch, trains=False)
    trainers = []
    train = trl_ppo_ext.PPOTrainer.train
    monkeypatch.setattr(
        trl_ppo_ext.PPOTrainer,
        "train",
        lambda self, **kw: trainers.append(self) or train(self, **kw),
    )
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--config", "grpo.yaml", *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = with_two_names_changed(inspect.getsource(trl.scripts.grpo))
    exec(compile(script, "grpo.py", "exec"), {"__name__": "__main__"})
    [trainer] = trainers
    args = trainer.args
    assert trainer.state.global_step == 2 and Path("out", "adapter_model.safetensors").exists()
    assert (args.kl_coef, args.cliprange, args.num_ppo_epochs, args.num_mini_batches) == (
        0.04,
        0.1,
        1,
        2,
    )
    assert (args.loss_aggregation, args.whiten_advantages) == ("sequence_mean", False)
    sys.modules.pop("my_rewards")
