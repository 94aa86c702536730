"""Invalid input raises with the value, the need and a remedy, before anything is loaded if possible."""

import gc
from types import SimpleNamespace
from unittest.mock import Mock

import httpx2
import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import CHAT_TEMPLATE, config, length_reward, llama, prompts, tokenizer
from torch import nn
from transformers import BitsAndBytesConfig, Gemma2Config, Gemma2ForCausalLM, TrainingArguments

from trl_ppo_ext import PPOTrainer, arguments
from trl_ppo_ext import trainer as trainers
from trl_ppo_ext.modeling import loading
from trl_ppo_ext.rewards import RewardError
from trl_ppo_ext.tracking import completions


def case(name, error, message, **given):
    """`given` holds each invalid argument, or a function that makes it."""
    return pytest.param(given, error, message, id=name)


def build(tmp_path, given, **settings):
    arguments = {
        "model": llama,
        "reward_funcs": [length_reward],
        "args": config(tmp_path, **settings),
        "train_dataset": prompts,
        "processing_class": tokenizer,
    }
    made = {k: v() if callable(v) and not isinstance(v, nn.Module) else v for k, v in (arguments | given).items()}
    return PPOTrainer(**made)


def needs_target(completions, target, **kwargs):
    return target


# ---- PPOConfig ----


WHOLE = (
    "max_completion_length num_ppo_epochs num_mini_batches num_generations generation_batch_size "
    "per_device_reward_batch_size per_device_train_batch_size gradient_accumulation_steps"
).split()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_estimator": "k4"}, r"`kl_estimator` must be one of 'k1', 'k2', 'k3', 'exact', got 'k4'"),
        ({"reward_quantization": "int4"}, r"`reward_quantization` must be one of 'nf4', 'fp4', 'int8', .*got 'int4'"),
        ({"temperature": 0}, r"`temperature` must be above 0, got 0"),
        ({"temperature": -1.0}, r"`temperature` must be above 0, got -1.0"),
        ({"repetition_penalty": 0.0}, r"`repetition_penalty` must be above 0, got 0.0"),
        ({"cliprange": 0.0}, r"`cliprange` must be above 0, got 0.0"),
        ({"cliprange_value": -0.2}, r"`cliprange_value` must be above 0, got -0.2"),
        ({"kl_coef": -0.1}, r"`kl_coef` must be at least 0, got -0.1"),
        ({"vf_coef": -0.1}, r"`vf_coef` must be at least 0, got -0.1"),
        ({"missing_eos_penalty": -1.0}, r"`missing_eos_penalty` must be at least 0, got -1.0"),
        ({"top_k": -1}, r"`top_k` must be at least 0, got -1"),
        ({"bf16_full_eval": True}, r"`bf16_full_eval=True` is not supported: it would cast the adapters in place"),
        ({"accelerator_config": {"even_batches": False}}, r"`accelerator_config` must leave .*even_batches=False"),
        ({"lam": 1.5}, r"`lam` must be between 0 and 1, got 1.5"),
        ({"lam": float("nan")}, r"`lam` must be finite, got nan"),
        ({"reward_weights": [1.0, float("nan")]}, r"`reward_weights` must be finite, got \[1.0, nan\]"),
        ({"reward_on_error": 1e20}, r"`reward_on_error` must be .*within ±1e\+09, got 1e\+20"),
        ({"reward_on_error": True}, r"`reward_on_error` must be str or float, got True .*on are booleans"),
        ({"reward_timeout": 0}, r"`reward_timeout` must be above 0, got 0"),
        ({"gamma": -0.1}, r"`gamma` must be between 0 and 1, got -0.1"),
        ({"top_p": 1.1}, r"`top_p` must be above 0 and at most 1, got 1.1"),
        ({"min_p": 1.5}, r"`min_p` must be between 0 and 1, got 1.5"),
        *[({name: 0}, rf"`{name}` must be at least 1, got 0") for name in WHOLE],
        *[({name: 1.5}, rf"`{name}` must be int.*, got 1.5 \(float\)") for name in WHOLE],
        ({"generation_kwargs": {"temperature": 0.5}}, r"`generation_kwargs` holds `temperature`.*set the field"),
        ({"generation_kwargs": {"penalty_alpha": 0.6}}, r"`generation_kwargs` holds `penalty_alpha`.*remove it"),
        ({"auto_find_batch_size": True}, r"`auto_find_batch_size=True` is not.*set `per_device_train_batch_size`"),
        ({"remove_unused_columns": True}, r"`remove_unused_columns` must be False"),
        (
            {"generation_batch_size": 96, "num_mini_batches": 5},
            r"`generation_batch_size` must be a multiple of 20 \(num_mini_batches 5 .*got 96; use 80 or 100",
        ),
        (
            {"generation_batch_size": 96, "num_mini_batches": 4, "per_device_train_batch_size": 5},
            r"must be a multiple of 20 .*per_device_train_batch_size 5 × 1 processes\), got 96; use 80 or 100",
        ),
        (
            {"generation_batch_size": 96, "num_mini_batches": 4, "gradient_accumulation_steps": 5},
            r"`gradient_accumulation_steps` must be 6 for a `generation_batch_size` of 96 .*, got 5; remove one",
        ),
        (
            {"num_generations": 3},
            r"num_generations=3` does not divide the rollout of 8 completions .*4 × .*1 × .*2 × 1 processes.*"
            r"use one of \[1, 2, 4, 8\], or change",
        ),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_invalid_settings_raise_by_name_and_value(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


# ---- PPOTrainer: arguments ----


def without(*tokens):
    def make():
        made = tokenizer()
        for token in tokens:
            setattr(made, token, None)
        return made

    return make


def model_that_never_stops():
    model = llama()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def ready_peft_model(**kwargs):
    return lambda: get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **kwargs))


def questions(*texts):
    return lambda: Dataset.from_dict({"prompt": list(texts)})


def needs_answer(completions, answer, **kwargs):
    return [0.0] * len(completions)


KNOWN_FROM_ARGUMENTS = [
    # data
    case(
        "no prompt column",
        ValueError,
        r"`train_dataset` needs a column \"prompt\".*\['answer', 'question'\].*rename_column",
        train_dataset=lambda: Dataset.from_dict({"question": ["w1"], "answer": ["w2"]}),
    ),
    case(
        "no column that the reward needs",
        ValueError,
        r"`needs_answer` cannot be called: .*`answer`.*`train_dataset` \(`target`\).*add a missing column",
        reward_funcs=lambda: needs_answer,
    ),
    case(
        "empty prompt",
        ValueError,
        r"Row 2 of `train_dataset`: .*empty; drop it",
        train_dataset=questions("w1", "w2", ""),
    ),
    case(
        "empty chat",
        ValueError,
        r"Row 1 of `train_dataset`: .*empty; drop it",
        train_dataset=lambda: Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1"}], []]}),
        processing_class=lambda: tokenizer(chat_template=CHAT_TEMPLATE),
    ),
    case(
        "prompt longer than the context",
        ValueError,
        r"Row 1 of `train_dataset`: .*60 tokens, .*64 minus max_completion_length=8 leaves 56\. Set `overlong_prompts",
        train_dataset=questions("w1", "w1 " * 60),
    ),
    case("empty dataset", ValueError, r"`train_dataset` is empty.*at least one prompt", train_dataset=questions()),
    case(
        "list of text",
        TypeError,
        r"`train_dataset` must be a `datasets.Dataset`.*a list of dicts, got list",
        train_dataset=["w1"],
    ),
    case("DatasetDict", TypeError, r"dict.*dataset\['train'\]", train_dataset=lambda: DatasetDict(train=prompts())),
    case("dict of datasets", TypeError, r"dict.*dataset\['train'\]", train_dataset=lambda: {"train": prompts()}),
    case(
        "evaluation prompts are checked too",
        ValueError,
        r"Row 0 of `eval_dataset\['hard'\]`: The prompt is empty",
        eval_dataset=lambda: {"easy": prompts(), "hard": Dataset.from_dict({"prompt": [""]})},
    ),
    case(
        "an evaluation set without a column of a reward",
        ValueError,
        r"`needs_target` cannot be called: .*`target`.* the other columns of `eval_dataset\['hard'\]` \(none\)",
        reward_funcs=[needs_target],
        eval_dataset=lambda: {"easy": prompts(), "hard": Dataset.from_dict({"prompt": ["w1"]})},
    ),
    # tokenizer
    case(
        "no EOS at all",
        ValueError,
        r"[Nn]either .*EOS.*set `tokenizer.eos_token`",
        processing_class=without("eos_token"),
        model=model_that_never_stops,
    ),
    case("tokenizer by name", TypeError, r"`processing_class`.*got str", processing_class="gpt2"),
    case("no tokenizer for a model without a name", ValueError, r"`processing_class`", processing_class=None),
    # rewards
    case("no reward", ValueError, r"`reward_funcs` is empty; pass a function", reward_funcs=[]),
    case("no reward at all", ValueError, r"`reward_funcs` is empty; pass a function", reward_funcs=None),
    case("reward that is a number", TypeError, r"must be a function, a sequence classifier.*got 3", reward_funcs=3),
    case(
        "as many tokenizers as rewards",
        ValueError,
        r"`reward_processing_classes` has 2 entries for 1 rewards; they must match",
        reward_processing_classes=[None, None],
    ),
    # model and adapter
    case("model that is a number", TypeError, r"`model` must be a model id or path.*got int", model=3),
    case("model of plain torch", TypeError, r"`model` must be a model id or path.*got Linear", model=nn.Linear(2, 2)),
    case(
        "model without an output projection",
        ValueError,
        r"causal language model",
        model=lambda: llama(classifier=True),
    ),
    case(
        "prompt learning",
        ValueError,
        r"`peft_config` must put .*got .*PROMPT_TUNING.*virtual tokens; use `LoraConfig`",
        peft_config=PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    ),
    case("peft_config as a dict", TypeError, r"`peft_config`.*got dict", peft_config={"r": 16}),
    case(
        "PeftModel and peft_config",
        ValueError,
        r"`peft_config` must be None when `model` has an adapter.*pass the base model",
        model=ready_peft_model(),
        peft_config=LoraConfig(),
    ),
    case(
        "loaded model and quantization_config",
        ValueError,
        r"`quantization_config` needs a `model` that is a string, got a loaded LlamaForCausalLM; pass the model's id",
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
    ),
    # args and unknown arguments
    case(
        "args of another trainer",
        TypeError,
        r"`args` must be a `trl_ppo_ext.PPOConfig`, got TrainingArguments",
        args=lambda: TrainingArguments("unused", use_cpu=True),
    ),
    case("args as a dict", TypeError, r"`args` must be a `trl_ppo_ext.PPOConfig`, got dict", args={}),
    case("reward_model", TypeError, r"no argument `reward_model`.*pass it in `reward_funcs`", reward_model=None),
    case("ref_model", TypeError, r"no argument `ref_model`.*remove it: the reference is", ref_model=None),
    case("value_model", TypeError, r"no argument `value_model`.*remove it: the critic is", value_model=None),
    case("tokenizer", TypeError, r"no argument `tokenizer`.*renamed to `processing_class`", tokenizer=tokenizer),
    case("config", TypeError, r"no argument `config`.*renamed to `args`", config=None),
    case("unknown argument", TypeError, r"PPOTrainer has no argument `max_length`", max_length=3),
]


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("a model was built before the arguments were checked")

    monkeypatch.setattr("trl_ppo_ext.trainer.load_actor_critic", refuse)
    monkeypatch.setattr("trl_ppo_ext.trainer.build_rewards", refuse)


@pytest.mark.parametrize(("given", "error", "message"), KNOWN_FROM_ARGUMENTS)
def test_invalid_arguments_raise_before_loading(tmp_path, nothing_is_loaded, given, error, message):
    with pytest.raises(error, match=message):
        build(tmp_path, given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_weights": [1.0, 2.0]}, r"`args.reward_weights` has 2 entries for 1 rewards; they must match"),
        ({"reward_weights": []}, r"`args.reward_weights` has 0 entries for 1 rewards; they must match"),
        (
            {"model_init_kwargs": {"dtype": "float32"}},
            r"`model_init_kwargs` needs a `model` that is a string, got a loaded LlamaForCausalLM; pass",
        ),
        (
            {"max_completion_length": 64},
            r"max_completion_length=64 leaves no room for a prompt in the model's context of 64 tokens; lower it",
        ),
    ],
    ids=["reward_weights", "no reward_weights", "model_init_kwargs", "max_completion_length"],
)
def test_settings_that_contradict_arguments_raise(tmp_path, nothing_is_loaded, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, {}, **settings)


@pytest.mark.parametrize(
    ("stage", "deepspeed", "settings", "message"),
    [
        (0, {}, {}, r"would apply NaN or inf gradients without ZeRO.*set ZeRO's `stage` to 1, 2 or 3"),
        (2, {"bf16": {"check_grad_overflow": False}}, {}, r"or with `check_grad_overflow` False; set ZeRO's `stage`"),
        (
            2,
            {},
            {"critic_kwargs": {"warmup_steps": 3}},
            r"`critic_kwargs={'warmup_steps': 3}` is not supported.*use a `critic_init`",
        ),
        (2, {}, {"fp16": True}, r"`fp16=True` is not supported with DeepSpeed.*use `bf16`"),
        (2, {"scheduler": {}}, {}, r"DeepSpeed's `scheduler` does not.*set `lr_scheduler_type`"),
        (
            2,
            {"optimizer": {}},
            {"critic_learning_rate": 1e-3},
            r"`critic_learning_rate` needs.*remove DeepSpeed's `optimizer`",
        ),
    ],
    ids=["no ZeRO", "overflow", "warmup_steps", "fp16", "scheduler", "critic_learning_rate"],
)
def test_unsupported_settings_of_deepspeed_raise(
    tmp_path, nothing_is_loaded, monkeypatch, stage, deepspeed, settings, message
):
    args = config(tmp_path, **settings)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage, hf_ds_config=SimpleNamespace(config=deepspeed))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=message):
        build(tmp_path, {"args": args})


def test_old_deepspeed_raises(tmp_path, nothing_is_loaded, monkeypatch):
    args = config(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2, hf_ds_config=SimpleNamespace(config={}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr("trl_ppo_ext.distributed.version", lambda name: "0.17.1")
    with pytest.raises(ValueError, match=r"DeepSpeed 0\.17\.1 may apply .*install 0\.19\.8 or newer"):
        build(tmp_path, {"args": args})


def test_processes_without_a_group_raise(tmp_path, monkeypatch):
    """Two were launched on CPUs without `use_cpu`: each would train by itself."""
    args = config(tmp_path)
    assert args.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started, but the world size is 1.*`use_cpu=True`"):
        arguments._check_processes(args.n_gpu, args.world_size)  # the only part of the trainer that is reached


def test_data_parallel_raises_with_a_remedy(tmp_path, nothing_is_loaded):
    args = config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"One process sees 2 GPUs.*start one process per GPU with `accelerate"):
        build(tmp_path, {"args": args})


FSDP2 = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.parametrize(
    ("launched", "settings", "arguments", "message"),
    [
        ({"VERSION": "1"}, {}, {}, r"FSDP1 .* unsupported.*`fsdp_version: 2`.*ZeRO-3, or DDP with a 4-bit base"),
        ({"AUTO_WRAP_POLICY": "NO_WRAP"}, {}, {}, r"`fsdp_auto_wrap_policy` must be TRANSFORMER_BASED_WRAP"),
        ({"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, {}, r"`fsdp_auto_wrap_policy` must be TRANSFORMER_BASED_WRAP"),
        (
            {"TRANSFORMER_CLS_TO_WRAP": "Linear"},
            {},
            {},
            r"`fsdp_transformer_layer_cls_to_wrap` and .* unsupported.*remove them",
        ),
        ({"RESHARD_AFTER_FORWARD": "false"}, {}, {}, r"would keep the whole base on every rank; set it true"),
        ({"CPU_RAM_EFFICIENT_LOADING": "true"}, {}, {}, r"adapters without weights on all ranks.*set it false"),
        ({"OFFLOAD_PARAMS": "true"}, {}, {}, r"`fsdp_offload_params` is unsupported; set it false"),
        ({"ACTIVATION_CHECKPOINTING": "true"}, {}, {}, r"set it false, and `gradient_checkpointing=True`"),
        ({}, {"fp16": True}, {}, r"`fp16=True` is unsupported with FSDP; use `bf16`"),
        ({}, {"optim": "adafactor"}, {}, r"`optim='adafactor'` is untested on sharded.*use one of 'adamw_torch'"),
        (
            {},
            {},
            {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
            r"quantized base cannot be sharded by FSDP; use DDP",
        ),
        ({}, {}, {}, r"needs several processes to shard over, got one; start them with `accelerate launch"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, dict) else "",
)
def test_unsupported_settings_of_fsdp_raise(tmp_path, monkeypatch, launched, settings, arguments, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, value in (FSDP2 | launched).items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    llama().save_pretrained(tmp_path / "base")
    model = {"model": str(tmp_path / "base"), "processing_class": tokenizer}
    with pytest.raises(ValueError, match=message):
        build(tmp_path, model | {"args": config(tmp_path, **settings)} | arguments)


def test_fsdp_of_the_config_is_checked_as_the_launchers(tmp_path, nothing_is_loaded, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the config sets it, and it must not stay
    for given, message in (({"version": 1}, "FSDP1 .* unsupported"), ({"cpu_offload": True}, "`fsdp_offload_params`")):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, {"args": config(tmp_path, fsdp=True, fsdp_config=given)})


def test_arguments_are_checked_before_a_model_is_resolved(tmp_path):
    nowhere = str(tmp_path / "no" / "model")
    with pytest.raises(TypeError, match="got 3"):
        build(tmp_path, {"model": nowhere, "reward_funcs": 3, "processing_class": None})
    with pytest.raises(TypeError, match="no argument `ref_model`"):
        build(tmp_path, {"model": nowhere, "ref_model": None, "processing_class": None})


def test_script_for_the_old_trainer_raises_with_what_changed(tmp_path):
    """As TRL 1.12 was called: without `reward_funcs`, which did not exist."""
    old = dict.fromkeys(["ref_model", "reward_model", "value_model"])
    with pytest.raises(TypeError, match=r"`ref_model` \(TRL's old PPOTrainer had\): remove it"):
        PPOTrainer(args=config(tmp_path), processing_class=tokenizer(), model=llama(), train_dataset=prompts(), **old)


def test_pad_token_beyond_the_embedding_raises(tmp_path):
    larger = tokenizer()
    larger.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ValueError, match=r"'\[PAD\]' has the id 32, but .* 32 tokens; set `pad_token` .*'<eos>'"):
        build(tmp_path, {"processing_class": lambda: larger})
    build(tmp_path, {"processing_class": lambda: larger}, pad_token="<eos>")


def test_training_needs_a_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"`train_dataset` must be a dataset to train on, got None"):
        build(tmp_path, {"train_dataset": None}).train()


# ---- properties of a loaded model ----


def model_that_changes_its_logits():
    torch.manual_seed(0)
    settings = Gemma2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_id=1,
        final_logit_softcapping=30.0,
    )
    return Gemma2ForCausalLM(settings)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        case(
            "a pattern that matches lm_head",
            ValueError,
            r"output projection \(`lm_head`\).*Remove `lm_head` from",
            peft_config=LoraConfig(target_modules=r".*(q_proj|lm_head)"),
        ),
        case(
            "PeftModel with an adapter on lm_head",
            ValueError,
            r"output projection \(`lm_head`\).*Remove `lm_head` from",
            model=ready_peft_model(target_modules=["q_proj", "lm_head"]),
        ),
        case(
            "PeftModel that trains lm_head in full",
            ValueError,
            r"output projection \(`lm_head`\).*Remove `lm_head` from",
            model=ready_peft_model(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        ),
        case(
            "reward model with two labels",
            RewardError,
            r"`LlamaForSequenceClassification` has 2 labels",
            reward_funcs=lambda: llama(classifier=True, num_labels=2),
            reward_processing_classes=tokenizer,
        ),
    ],
)
def test_invalid_models_raise_before_training(tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        build(tmp_path, given)


@pytest.mark.parametrize("run", ["train", "evaluate"])
def test_capped_logits_raise_before_a_completion_is_sampled(tmp_path, run):
    trainer = build(tmp_path, {"model": model_that_changes_its_logits, "eval_dataset": prompts})
    trainer.roles.player.generator.generate = lambda prompts: pytest.fail("a completion was sampled")
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM changes its logits.*use a model that does not"):
        getattr(trainer, run)()
    assert trainer.state.global_step == 0


# ---- scores, at the first rollout ----


@pytest.fixture(scope="module")
def frozen_imports():
    """Accelerate collects garbage before every run; without what was imported that is a second less each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_imports")
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (
            [1.0] * 3,
            r"`verdict` returned 3 scores for 8 completions; it must return a list with one entry per completion",
        ),
        (
            [1.0] * 9,
            r"`verdict` returned 9 scores for 8 completions; it must return a list with one entry per completion",
        ),
        (
            [1.0] * 7 + ["good"],
            r"`verdict` returned 'good' for completion 7; a score must be a finite number, or None",
        ),
        (
            [1.0] * 7 + [1e20],
            r"`verdict` returned 1e\+20 for completion 7; a score must be a finite number.*at most 1e\+09",
        ),
        ([float("inf")] * 8, r"`verdict` returned inf for completion 0; a score must be a finite number, or None"),
        (1.0, r"`verdict` returned a float for 8 completions; it must return a list with one entry per completion"),
        (
            None,
            r"`verdict` returned a NoneType for 8 completions; it must return a list with one entry per completion",
        ),
    ],
    ids=["too few", "too many", "text", "too large", "inf", "a bare number", "nothing"],
)
def test_invalid_scores_end_the_run_before_an_update(tmp_path, scores, message):
    def verdict(**kwargs):
        return scores

    trainer = build(tmp_path, {"reward_funcs": [verdict]}, max_steps=1)
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- names ----


@pytest.mark.parametrize("argument", ["model", "reward_funcs"])
def test_name_that_cannot_be_read_fails_at_once(tmp_path, monkeypatch, argument):
    """Loading would ask the Hub five more times, for 23 seconds."""
    asked = []

    def offline(url, **kwargs):
        asked.append((url, kwargs["timeout"]))
        raise httpx2.ConnectError("Name or service not known")

    monkeypatch.setattr(loading, "get_hf_file_metadata", offline)
    with pytest.raises(ValueError, match=rf"`{argument}` must be .*'some/modle' \(Name or .*check its spelling"):
        build(tmp_path, {argument: "some/modle"})
    assert asked == [("https://huggingface.co/some/modle/resolve/main/config.json", loading.ANSWER)]


def test_busy_hub_is_left_to_loading(monkeypatch):
    busy, missing = (httpx2.Response(status, request=httpx2.Request("HEAD", "https://hub")) for status in (503, 404))
    entry = RemoteEntryNotFoundError("no config.json", response=missing)
    for answer in (HfHubHTTPError("", response=busy), httpx2.ReadTimeout(""), entry):
        monkeypatch.setattr(loading, "get_hf_file_metadata", Mock(side_effect=answer))
        loading.check_available("model", "some/model", {})


@pytest.mark.parametrize("name", ["a/b/c", "some/"])
def test_invalid_name_is_refused_without_a_request(monkeypatch, name):
    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda *args, **kwargs: pytest.fail("it was looked up"))
    with pytest.raises(ValueError, match="`model` must be a directory or a model on the Hub"):
        loading.check_available("model", name, {})


def test_tracker_that_is_not_installed_is_named_before_loading(tmp_path, monkeypatch):
    monkeypatch.setattr(completions, "get_available_reporting_integrations", lambda: ["tensorboard"])
    monkeypatch.setattr(trainers, "load_actor_critic", None)
    with pytest.raises(ValueError, match=r"`report_to` names 'wandb', which is not installed"):
        build(tmp_path, {}, report_to="wandb")
