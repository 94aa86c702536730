"""Invalid input raises with the value, the need and a remedy, before anything is loaded if
possible."""

import functools
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import (
    byte_tokenizer,
    config,
    length_reward,
    llama,
    prompts,
    tokenizer,
    with_mapped_logits,
)
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from trl_ppo_ext import PPOConfig, PPOTrainer, StepResult, arguments
from trl_ppo_ext import trainer as trainers
from trl_ppo_ext.episodes import Environments
from trl_ppo_ext.modeling import ActorCritic
from trl_ppo_ext.ppo import metrics
from trl_ppo_ext.tracking import completions


def build(tmp_path, given, **settings):
    arguments = {
        "model": llama,
        "reward_funcs": [length_reward],
        "args": config(tmp_path, **settings),
        "train_dataset": prompts,
        "processing_class": tokenizer,
    }
    made = {
        k: v() if callable(v) and not isinstance(v, nn.Module) else v
        for k, v in (arguments | given).items()
    }
    return PPOTrainer(**made)


def needs_target(completions, target, **kwargs):
    return target


def test_curriculum_for_a_stream_raises(tmp_path):
    with pytest.raises(
        ValueError, match=r"`curriculum` does not work with a stream.*; pass a `Dataset`"
    ):
        build(
            tmp_path, {"train_dataset": prompts().to_iterable_dataset(), "curriculum": lambda: max}
        )


# ---- PPOConfig ----


@pytest.mark.parametrize(
    "name, value",
    [
        ("kl_coef", 0.5),
        ("beta", 0.5),
        ("critic", "none"),
        ("epsilon", 0.1),
        # of TrainingArguments, which a rollout is planned by
        ("gradient_accumulation_steps", 3),
        ("per_device_train_batch_size", 3),
    ],
)
def test_field_cannot_be_set_after_the_construction(tmp_path, name, value):
    """What follows from it, e.g. whether the reference is read, would not."""
    for args in (config(tmp_path), config(tmp_path).without_rewards()):
        args.learning_rate = 1e-4  # nothing follows from it
        setattr(args, name, getattr(args, name))
        with pytest.raises(ValueError, match=rf"^`{name}` of the config cannot change.*PPOConfig"):
            setattr(args, name, value if getattr(args, name) != value else "side")


def test_steps_of_accelerate_cannot_change_a_planned_rollout(tmp_path):
    steps = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    for _ in range(2):  # the Trainer writes a number of 1 into it
        build(tmp_path, {}, accelerator_config=steps)
    assert steps == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    with pytest.raises(ValueError, match=r"^`num_steps` .* `gradient_accumulation_steps`"):
        config(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}})


def test_fields_that_nothing_follows_may_be_set_after_the_construction(tmp_path):
    """As commands and scripts of TRL do."""
    args = config(tmp_path)
    args.model_init_kwargs = {"dtype": "float32"}
    built = build(tmp_path, {"args": args})
    built.args.num_generations_eval = 2  # is read where it is used
    built.evaluate(prompts(2))


def test_fields_of_a_subclass_may_be_set_after_the_construction(tmp_path):
    @dataclass
    class Own(PPOConfig):
        task: str | None = None

        def __post_init__(self):
            super().__post_init__()
            self.task = self.task or "reverse"

    args = Own(str(tmp_path), use_cpu=True)
    args.task = "length"
    args = args.without_rewards()
    args.task = "reverse"
    with pytest.raises(ValueError, match=r"^`gamma` of the config cannot change"):
        args.gamma = 0.9


class Sets(TrainerCallback):
    """A schedule that a callback writes into the config."""

    def on_step_end(self, args, state, control, **kwargs):
        args.temperature *= 0.9


def test_callback_that_sets_a_field_loses_nothing(tmp_path):
    """The rollout's log-probs are of the earlier temperature."""
    built = build(tmp_path, {"callbacks": [Sets()]}, max_steps=4)
    with pytest.raises(ValueError, match=r"^`temperature` of the config cannot change") as error:
        built.train()
    assert built.state.global_step == 1 and "checkpoint-1" in error.value.__notes__[0]
    again = build(tmp_path, {}, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


def test_rewards_cannot_be_replaced(tmp_path):
    built = build(tmp_path, {})
    with pytest.raises(AttributeError, match=r"reward_funcs.*cannot be set.*a trainer with these"):
        built.reward_funcs = [needs_target]
    assert built.reward_funcs == (length_reward,)


def test_attributes_of_grpo_that_change_nothing_are_refused(tmp_path):
    built = build(tmp_path, {})
    with pytest.raises(AttributeError, match=r"`beta` of GRPOTrainer cannot be set.*`kl_target`"):
        built.beta = 0.1
    with pytest.raises(AttributeError, match=r"`args` cannot be replaced.*build another trainer"):
        built.args = config(tmp_path, max_completion_length=3)
    with pytest.raises(AttributeError, match=r"no attribute `_metrics`.*use `log_metric`"):
        built._metrics["train"]["mine"].append(1.0)
    assert not hasattr(built, "generation_config") and not hasattr(built, "unheard_of")


def test_subclass_with_a_method_of_grpo_is_refused(tmp_path, nothing_is_loaded):
    class Mixin:
        def _calculate_rewards(self, *inputs):
            return 0

    class Mine(Mixin, PPOTrainer):
        pass

    with pytest.raises(
        TypeError, match=r"Mixin defines `_calculate_rewards`.*use a reward function"
    ):
        Mine(llama(), length_reward, config(tmp_path), prompts(), processing_class=tokenizer())


class Tooled:
    def reset(self, **columns):
        return None

    def look(self) -> StepResult:
        """Look around."""
        return StepResult("nothing", reward=1.0)


@pytest.mark.parametrize("factory", [None, Tooled])
def test_run_whose_tools_may_pay_is_told_that_it_has_no_critic(
    tmp_path, factory, caplog, monkeypatch
):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    args = config(tmp_path, reference_prompt="shown", kl_coef=1.0)
    settled = arguments.without_rewards(args, Environments(None, factory))
    assert settled.critic == "none"
    assert ("there is no critic. If the tools pay" in caplog.text) == (factory is Tooled)


def test_policy_without_its_adapter_is_not_trained_on(tmp_path):
    built = build(tmp_path, {})
    built.train()
    merged = built.model.merge_and_unload()
    with pytest.raises(ValueError, match="no adapter any more; train and call `save_model"):
        built.train()
    assert build(tmp_path / "next", {"model": merged}).train().global_step


def test_model_of_another_trainer_is_named(tmp_path, nothing_is_loaded):
    model = object.__new__(ActorCritic)
    with pytest.raises(TypeError, match=r"`model` is that of another trainer.*`peft_config`"):
        build(tmp_path, {"model": lambda: model})


def test_replaced_training_data_are_refused(tmp_path):
    built = build(tmp_path, {})
    built.train_dataset = prompts(5)
    with pytest.raises(ValueError, match=r"`train_dataset` was replaced .*build another trainer"):
        built.train()


@pytest.mark.parametrize(
    "settings", [{"num_generations": 2}, {"critic": "none", "advantage_estimator": "rebn"}]
)
def test_dropped_groups_need_groups(tmp_path, settings):
    with pytest.raises(
        ValueError,
        match=(
            "`drop_equal_groups=True` needs `critic='none'` and an `advantage_estimator` over "
            "groups"
        ),
    ):
        config(tmp_path, drop_equal_groups=True, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"multi_objective_aggregation": "normalize_then_sum"},
        {
            "reference_prompt": "answer",
            "kl_coef": 1.0,
            "kl_placement": "loss",
            "kl_estimator": "k2",
        },
        {"kl_coef": 0.05},
    ],
    ids=["each reward", "no reward", "KL"],
)
def test_dropped_groups_are_those_that_teach_nothing(tmp_path, settings):
    with pytest.raises(ValueError, match=r"but .* add differences; remove one of them"):
        config(tmp_path, drop_equal_groups=True, critic="none", num_generations=2, **settings)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"advantage_estimator": "rloo"}, "`advantage_estimator='grpo'`, got 'rloo'."),
        ({"normalize_rewards": True}, "rewards as they are: omit `normalize_rewards`"),
    ],
)
def test_rewards_normalized_apart_name_what_is_in_their_way(tmp_path, settings, needed):
    apart = {"multi_objective_aggregation": "normalize_then_sum", "num_generations": 2}
    with pytest.raises(ValueError, match=re.escape(f"'normalize_then_sum'` needs {needed}")):
        config(tmp_path, critic="none", **apart | settings)


NAN = float("nan")
OUT_OF_RANGE = {
    "temperature": (0, -1.0),
    **dict.fromkeys(["repetition_penalty", "cliprange", "cliprange_value"], (0.0,)),
    **dict.fromkeys(["kl_coef", "vf_coef", "missing_eos_penalty"], (-0.1,)),
    "top_k": (-1,),
    "top_p": (0.0, 1.1),
    "min_p": (1.5,),
    "gamma": (-0.1, 1.5),
    "lam": (1.5, NAN),
    "reward_weights": ([1.0, NAN],),
    "reward_on_error": ("0.0", True),
    "kl_estimator": ("k4",),
    "reward_quantization": ("int4",),
    **dict.fromkeys(
        ["num_ppo_epochs", "num_mini_batches", "num_generations", "generation_batch_size"], (0, 1.5)
    ),
    **dict.fromkeys(["per_device_train_batch_size", "gradient_accumulation_steps"], (0,)),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, x) for name, values in OUT_OF_RANGE.items() for x in values]
)
def test_value_out_of_range_raises_by_name(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be .*got '?{re.escape(str(value))}"):
        config(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        (
            {"generation_kwargs": {"top_k": 5}, "top_k": 3},
            "`generation_kwargs`.*sets `top_k` to 5.*is 3.*remove one",
        ),
        ({"generation_kwargs": {"do_sample": False}}, "`generation_kwargs`.*`do_sample`.*remove"),
        (
            {"generation_kwargs": {"penalty_alpha": 0.6}},
            "`generation_kwargs`.*`penalty_alpha`.*remove",
        ),
        (
            {"auto_find_batch_size": True},
            "`auto_find_batch_size=True`.*`per_device_train_batch_size`",
        ),
        (
            {"generation_batch_size": 96, "num_mini_batches": 5},
            "`generation_batch_size`.*20.*96; use 80 or 100",
        ),
        (
            {"generation_batch_size": 96, "num_mini_batches": 4, "gradient_accumulation_steps": 5},
            "`gradient_accumulation_steps` must be 6 .*96.*5; remove one",
        ),
        ({"num_generations": 3}, r"num_generations=3.*8 completions.*use one of \[1, 2, 4, 8\]"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_raise_with_a_remedy(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


# ---- PPOTrainer: arguments ----


def without_eos():
    model = llama()
    made = tokenizer()
    made.eos_token = model.config.eos_token_id = model.generation_config.eos_token_id = None
    return {"model": model, "processing_class": lambda: made}


def ready_peft_model(**kwargs):
    return lambda: get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **kwargs))


def evaluation_rows(prompt):
    return lambda: {"easy": prompts(), "hard": Dataset.from_dict({"prompt": [prompt]})}


PROMPT_TUNING = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
# each invalid argument, or a function that makes it; tests/unit/test_data.py has more of the rows
KNOWN_FROM_ARGUMENTS = [
    (
        ValueError,
        r"`needs_target`.*`target`.*`eval_dataset\['hard'\]`",
        {"reward_funcs": [needs_target], "eval_dataset": evaluation_rows("w1")},
    ),
    (
        TypeError,
        r"dict.*dataset\['train'\]",
        {"train_dataset": lambda: DatasetDict(train=prompts())},
    ),
    (
        ValueError,
        r"Row 0 of `eval_dataset\['hard'\]`: The prompt is empty",
        {"eval_dataset": evaluation_rows([])},
    ),
    (ValueError, "EOS.*set `tokenizer.eos_token`", without_eos()),
    (TypeError, "`processing_class`.*got str", {"processing_class": "gpt2"}),
    (ValueError, "`processing_class`", {"processing_class": None}),
    (ValueError, "`reward_funcs` is empty; pass", {"reward_funcs": []}),
    (ValueError, "has 2 entries for 1 rewards", {"reward_processing_classes": [None, None]}),
    (TypeError, "`model` must be .*got int", {"model": 3}),
    (ValueError, "causal language model", {"model": lambda: llama(classifier=True)}),
    (ValueError, "`peft_config` .*PROMPT_TUNING; use `LoraConfig`", {"peft_config": PROMPT_TUNING}),
    (TypeError, "`peft_config`.*got dict", {"peft_config": {"r": 16}}),
    (
        ValueError,
        "`peft_config` must be None",
        {"model": ready_peft_model(), "peft_config": LoraConfig()},
    ),
    (
        ValueError,
        "`quantization_config` has no effect on a loaded model",
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
    ),
    # tests/docs/test_migration.py has the arguments of TRL
    (
        TypeError,
        "`args`.*TrainingArguments",
        {"args": lambda: TrainingArguments("x", use_cpu=True)},
    ),
    (TypeError, "no argument `max_length`", {"max_length": 3}),
]


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("a model was built before the arguments were checked")

    monkeypatch.setattr("trl_ppo_ext.trainer.load_actor_critic", refuse)
    monkeypatch.setattr("trl_ppo_ext.trainer.load_rewards", refuse)


@pytest.mark.parametrize("name", arguments.OF_TURNS)
def test_fields_of_turns_are_told_without_them(tmp_path, caplog, monkeypatch, name):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    PPOTrainer(
        llama(),
        length_reward,
        config(tmp_path, **{name: 5}),
        prompts(),
        processing_class=tokenizer(),
    )
    assert f"these fields have no effect: {name}." in caplog.text


@pytest.mark.parametrize(
    ("error", "message", "given"), KNOWN_FROM_ARGUMENTS, ids=lambda x: x if str(x) == x else ""
)
def test_invalid_arguments_raise_before_loading(tmp_path, nothing_is_loaded, given, error, message):
    with pytest.raises(error, match=message):
        build(tmp_path, given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_weights": [1.0, 2.0]}, "reward_weights` has 2 entries for 1 rewards"),
        ({"max_completion_length": 64}, "max_completion_length=64 .*64 tokens; lower it"),
    ],
    ids=str,
)
def test_settings_that_contradict_arguments_raise(tmp_path, nothing_is_loaded, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, {}, **settings)


@pytest.mark.parametrize(
    ("stage", "deepspeed", "settings", "message"),
    [
        (0, {}, {}, "NaN or inf gradients.*`stage`"),
        (
            2,
            {"bf16": {"check_grad_overflow": False}},
            {},
            "NaN or inf gradients.*remove `check_grad_overflow`",
        ),
        (
            2,
            {},
            {"critic_kwargs": {"warmup_steps": 3}},
            "`critic_kwargs.*warmup_steps.*`critic_init`",
        ),
        (2, {}, {"fp16": True}, "`fp16=True`.*`bf16`"),
        (2, {"scheduler": {}}, {}, "`scheduler`.*`lr_scheduler_type`"),
        (
            2,
            {"optimizer": {}},
            {"critic_learning_rate": 1e-3},
            "`critic_learning_rate`.*`optimizer`",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_of_deepspeed_raise(
    tmp_path, nothing_is_loaded, monkeypatch, stage, deepspeed, settings, message
):
    args = config(tmp_path, **settings)
    args.deepspeed_plugin = SimpleNamespace(
        zero_stage=stage, hf_ds_config=SimpleNamespace(config=deepspeed)
    )
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=message):
        build(tmp_path, {"args": args})


def test_processes_without_a_group_raise(tmp_path, monkeypatch):
    """Two were launched on CPUs without `use_cpu`: each would train by itself."""
    args = config(tmp_path)
    assert args.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"2 processes were started, but the world size is 1.*`use_cpu=True`"
    ):
        # all that is reached of the trainer
        arguments.settle_trainer_arguments(*[None] * 3, args, *[None] * 7)


def test_data_parallel_raises_with_a_remedy(tmp_path, nothing_is_loaded):
    args = config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(
        ValueError, match=r"One process sees 2 GPUs.*start one process per GPU with `accelerate"
    ):
        build(tmp_path, {"args": args})


FSDP2 = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.parametrize(
    ("launched", "settings", "arguments", "message"),
    [
        ({"VERSION": "1"}, {}, {}, "FSDP1 .*`fsdp_version: 2`"),
        ({"AUTO_WRAP_POLICY": "NO_WRAP"}, {}, {}, "`fsdp_auto_wrap_policy` must be TRANSFORMER"),
        (
            {"TRANSFORMER_CLS_TO_WRAP": "Linear"},
            {},
            {},
            "`fsdp_transformer_layer_cls_to_wrap` must be omitted",
        ),
        ({"IGNORED_MODULES": "lm_head"}, {}, {}, "`fsdp_ignored_modules` must be omitted"),
        ({"RESHARD_AFTER_FORWARD": "false"}, {}, {}, "`fsdp_reshard_after_forward` must be true"),
        (
            {"CPU_RAM_EFFICIENT_LOADING": "true"},
            {},
            {},
            "`fsdp_cpu_ram_efficient_loading` must be false",
        ),
        ({"OFFLOAD_PARAMS": "true"}, {}, {}, "`fsdp_offload_params` must be false"),
        (
            {"ACTIVATION_CHECKPOINTING": "true"},
            {},
            {},
            "must be false; set `gradient_checkpointing=True`",
        ),
        ({}, {"fp16": True}, {}, "`fp16=True`.*`bf16`"),
        ({}, {"optim": "adafactor"}, {}, "`optim` must be .*'adamw_torch'"),
        (
            {},
            {},
            {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
            "quantized base.*DDP",
        ),
        ({}, {}, {}, "needs several processes.*`accelerate launch"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, dict) else "",
)
def test_unsupported_settings_of_fsdp_raise(
    tmp_path, monkeypatch, launched, settings, arguments, message
):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, value in (FSDP2 | launched).items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    llama().save_pretrained(tmp_path / "base")
    model = {"model": str(tmp_path / "base"), "processing_class": tokenizer}
    with pytest.raises(ValueError, match=message):
        build(tmp_path, model | {"args": config(tmp_path, **settings)} | arguments)


def test_fsdp_of_the_config_is_checked_as_the_launchers(tmp_path, nothing_is_loaded, monkeypatch):
    # the config sets it, and it must not stay
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    for given, message in (
        ({"version": 1}, "FSDP1 .* unsupported"),
        ({"cpu_offload": True}, "`fsdp_offload_params`"),
    ):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, {"args": config(tmp_path, fsdp=True, fsdp_config=given)})


def test_pad_token_beyond_the_embedding_raises(tmp_path):
    larger = tokenizer()
    larger.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(
        ValueError, match=r"'\[PAD\]' has the id 32, but .* 32 tokens; set `pad_token` .*'<eos>'"
    ):
        build(tmp_path, {"processing_class": lambda: larger}, pad_token="[PAD]")
    assert (
        build(tmp_path, {"processing_class": lambda: larger}).processing_class.pad_token == "<eos>"
    )


@pytest.mark.parametrize("eos", [[1, 32], [1, -1]])
def test_eos_that_the_model_lacks_ends_nothing(tmp_path, eos):
    model = llama()
    model.generation_config.eos_token_id = eos
    run = build(tmp_path, {"model": lambda: model})
    run.train()
    assert run.components.player.generator.stop_token_ids == {1}


def test_model_without_any_of_the_eos_is_refused(tmp_path):
    larger = tokenizer()
    larger.add_special_tokens({"eos_token": "<|im_end|>"})
    model = llama()
    model.generation_config.eos_token_id = None
    parts = {"processing_class": lambda: larger, "model": lambda: model}
    with pytest.raises(ValueError, match="No EOS token ends a completion"):
        build(tmp_path, parts)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def logs_a_metric(completion_ids, log_metric, **kwargs):
    return length_reward(completion_ids)


def logs_by_keyword(completion_ids, **kwargs):
    kwargs["log_metric"]("own", 1.0)
    return length_reward(completion_ids)


def logging_wrapper(function):
    @functools.wraps(function)
    def wrapper(completion_ids, log_metric, **others):
        log_metric("own", 1.0)
        return function(completion_ids)

    return wrapper


def passes_on(completion_ids, **kwargs):
    return logs_a_metric(completion_ids, **kwargs)


@pytest.mark.parametrize(
    "evaluation", [prompts, lambda: {"easy": prompts(), "hard": prompts()}], ids=["one", "two"]
)
@pytest.mark.parametrize(
    "metric", ["eval_rewrad", "loss", "eval_rewards/length/mean", "monitor/x/mean"]
)
def test_best_metric_that_is_never_logged_raises_before_the_run(tmp_path, metric, evaluation):
    settings = EVALUATED | {"metric_for_best_model": metric}
    given = {"eval_dataset": evaluation}
    with pytest.raises(
        ValueError,
        match=rf"`metric_for_best_model` must be .*got '{metric}'; did you mean 'eval_.*rew",
    ):
        build(tmp_path, given, **settings)
    with pytest.raises(ValueError, match="did you mean"):
        build(
            tmp_path,
            given | {"callbacks": [EarlyStoppingCallback(2)]},
            **settings | {"load_best_model_at_end": False},
        )
    build(tmp_path, given | {"reward_funcs": [logs_a_metric]}, **settings)  # it may log it
    for function in (logs_by_keyword, logging_wrapper(length_reward), passes_on):
        build(tmp_path, given | {"reward_funcs": [function]}, **settings)
    # it may add it
    build(tmp_path, given | {"callbacks": [type("Own", (TrainerCallback,), {})()]}, **settings)
    build(tmp_path, given, **settings | {"eval_strategy": "no"})


@pytest.mark.parametrize(
    "settings", [{"eval_on_start": True}, {"eval_strategy": "steps", "eval_steps": 1}]
)
def test_run_without_rows_to_evaluate_is_refused(tmp_path, settings):
    strategy = settings.get("eval_strategy", "no")
    with pytest.raises(
        ValueError,
        match=rf"is '{strategy}' and .*nothing to evaluate; pass an `eval_dataset`",
    ):
        build(tmp_path, {}, **settings)


def test_every_metric_of_an_evaluation_may_choose_the_best_model(tmp_path):
    watched = [lambda completions, **kwargs: [1.0] * len(completions)]
    for evaluation, folder in ((prompts(), "one"), ({"easy": prompts()}, "two")):
        given = {
            "eval_dataset": lambda evaluation=evaluation: evaluation,
            "monitor_funcs": lambda: watched,
        }
        built = build(tmp_path / folder, given, **EVALUATED, kl_coef=0.1)
        for name in built.evaluate().keys() - {"epoch"}:
            built.args.metric_for_best_model = name
            metrics.check_best_metric(
                built.args,
                built.eval_dataset,
                built.components.rewards,
                built.components.monitors,
                environments=None,
            )


@pytest.mark.parametrize(
    "metric",
    [
        "eval_value/explained_variance",
        "eval_tools/call_frequency",
        "eval_sampling/logp",
        "eval_completions/mean_lenght",
        "eval_kl",
    ],
)
def test_best_metric_of_what_a_run_lacks_is_refused(tmp_path, metric):
    """A critic is not evaluated, and there is neither an environment nor a reference."""
    settings = EVALUATED | {"kl_coef": 0.0, "metric_for_best_model": metric}
    with pytest.raises(ValueError, match="must be a metric of the evaluation"):
        build(tmp_path, {"eval_dataset": prompts}, **settings)


def test_comparison_with_the_sampler_chooses_no_model_at_another_temperature(tmp_path):
    """It is logged where an evaluation samples as it scores."""
    metric = "eval_sampling/sampling_logp_difference/mean"
    settings = EVALUATED | {"metric_for_best_model": metric}
    build(tmp_path, {"eval_dataset": prompts}, **settings)
    with pytest.raises(ValueError, match="must be a metric of the evaluation"):
        build(tmp_path, {"eval_dataset": prompts}, **settings, eval_temperature=0.0)


def test_best_metric_of_a_reward_that_is_not_there_is_refused(tmp_path):
    """A distillation would keep its first checkpoint."""
    rows = prompts().map(lambda row: {"shown": "w1 " + row["prompt"]})
    settings = EVALUATED | {
        "reference_prompt": "shown",
        "kl_coef": 1.0,
        "metric_for_best_model": "eval_reward",
    }
    given = {
        "reward_funcs": lambda: None,
        "train_dataset": lambda: rows,
        "eval_dataset": lambda: rows,
    }
    with pytest.raises(ValueError, match=r"constant in a run without rewards; use e.g. 'eval_kl'"):
        build(tmp_path, given, **settings)
    build(
        tmp_path,
        given,
        **settings | {"metric_for_best_model": "eval_kl", "greater_is_better": False},
    )


@pytest.mark.parametrize(
    "settings, says",
    [({}, True), ({"stop_token_ids": [2]}, False), ({"stop_strings": ["x"]}, False)],
)
def test_end_of_turn_that_stops_nothing_warns_before_training(
    tmp_path, caplog, monkeypatch, settings, says
):
    """A base model with a chat template: its EOS is another token than that of the template."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    built = byte_tokenizer()
    built.eos_token = built.pad_token = "<|endoftext|>"
    model = llama(vocab_size=len(built))
    model.generation_config.eos_token_id = built.eos_token_id
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]] * 4})
    PPOTrainer(model, length_reward, config(tmp_path, **settings), chats, processing_class=built)
    assert (
        "ends an answer with '<|im_end|>'" in caplog.text
        and "Add 2 to `stop_token_ids`" in caplog.text
    ) == says


def test_training_needs_a_dataset(tmp_path):
    with pytest.raises(
        ValueError, match=r"`train_dataset` must be a dataset to train on, got None"
    ):
        build(tmp_path, {"train_dataset": None}).train()


# ---- properties of a loaded model ----


@pytest.mark.parametrize(
    "given",
    [
        {"peft_config": LoraConfig(target_modules=r".*(q_proj|lm_head)")},
        {"model": ready_peft_model(target_modules=["q_proj"], modules_to_save=["lm_head"])},
    ],
    ids=["pattern", "trained in full"],
)
def test_adapter_on_the_output_projection_raises(tmp_path, given):
    with pytest.raises(ValueError, match="output projection; remove `lm_head`"):
        build(tmp_path, given)


@pytest.mark.parametrize("run", ["train", "evaluate"])
def test_unknown_map_of_logits_raises_before_any_sampling(tmp_path, run):
    # which multiplies, where Granite divides
    model = with_mapped_logits("hyperclovax", logits_scaling=3.0)
    trainer = build(tmp_path, {"model": model, "eval_dataset": prompts})
    trainer.actor_critic.sample = lambda *args, **kwargs: pytest.fail("a completion was sampled")
    with pytest.raises(
        ValueError, match=r"HyperCLOVAXForCausalLM changes its logits.*use another model"
    ):
        getattr(trainer, run)()
    assert trainer.state.global_step == 0


# ---- names ----


@pytest.mark.parametrize("argument", ["model", "reward_funcs"])
def test_name_that_cannot_be_read_raises_by_argument(tmp_path, nothing_is_loaded, argument):
    with pytest.raises(
        ValueError,
        match=rf"`{argument}` must be a directory or a model .*'./modle' .*check its spel",
    ):
        build(tmp_path, {argument: "./modle"})


def test_tracker_that_is_not_installed_is_named_before_loading(tmp_path, monkeypatch):
    monkeypatch.setattr(
        completions, "get_available_reporting_integrations", lambda: ["tensorboard"]
    )
    monkeypatch.setattr(trainers, "load_actor_critic", None)
    with pytest.raises(ValueError, match=r"`report_to` names 'wandb', which is not installed"):
        build(tmp_path, {}, report_to="wandb")
