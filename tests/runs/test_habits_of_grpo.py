"""Scripts treat the trainer as a GRPOTrainer, and its model as a model."""

import json
import logging
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from processes import finished, start
from runs_of_tiny import rollouts_of, trainer, weights, write_completions
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import EarlyStoppingCallback
from trl import BEMACallback, GRPOTrainer, LogCompletionsCallback, SyncRefModelCallback

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.tracking.reading import RUN_LOG


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a critic on an adapter of its own and a classifier, after one rollout."""
    classifier = llama(classifier=True)
    built = PPOTrainer(
        llama(),
        [length_reward, classifier],
        config(
            tmp_path_factory.mktemp("run"),
            critic="adapter",
            logging_steps=100,
            logging_first_step=False,
        ),
        prompts(),
        processing_class=tokenizer(),
        reward_processing_classes=[None, tokenizer()],
    )
    built.train()
    return built


@pytest.fixture
def inputs():
    return {
        "input_ids": torch.tensor([[4, 5, 6]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
    }


# ---- the model


def test_model_generates_as_the_trained_policy(trained, inputs):
    ids = trained.model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=31)
    assert ids.shape == (1, 7)
    logits = trained.model(input_ids=ids[:, :-1]).logits
    assert torch.equal(logits.argmax(-1)[0, 2:], ids[0, 3:])
    with trained.model.disable_adapter():
        assert not torch.equal(trained.model(ids[:, :-1]).logits, logits)


def test_model_generates_with_its_cache_in_training(trained, inputs):
    """Layers that are recomputed would drop it in silence, and read the last token alone."""
    expected = trained.model.eval().generate(
        **inputs, max_new_tokens=4, do_sample=False, eos_token_id=31
    )
    model = trained.model.train()
    model.gradient_checkpointing_enable()
    try:
        generated = model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=31)
        assert torch.equal(generated, expected) and model.training
    finally:
        model.gradient_checkpointing_disable()


def test_model_keeps_its_generation_config(trained):
    trained.evaluate(prompts(2))
    assert (
        trained.model.generation_config is trained.model.policy.get_base_model().generation_config
    )
    assert trained.model.generation_config.eos_token_id == 1


def test_saved_pretrained_adapter_loads_with_peft(trained, inputs, tmp_path):
    trained.model.save_pretrained(tmp_path)
    # neither the critic's adapter nor a reference
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    loaded = PeftModel.from_pretrained(llama(), str(tmp_path))
    assert torch.equal(loaded(**inputs).logits, trained.model(**inputs).logits)


def test_merged_model_equals_the_policy(tmp_path, inputs):
    built = trainer(tmp_path)
    built.train()
    expected = built.model(**inputs).logits
    merged = built.model.merge_and_unload()
    assert type(merged) is type(llama())
    torch.testing.assert_close(merged(**inputs).logits, expected)


def test_trainer_finds_no_plain_model(trained):
    """Attributes that it acts on, such as `is_quantized`, are those of the base."""
    for name in (
        "is_quantized",
        "hf_device_map",
        "main_input_name",
        "quantization_method",
        "tie_weights",
        "nothing",
    ):
        assert not hasattr(trained.model, name)


def test_model_has_what_the_policy_has(trained):
    policy = trained.model.policy
    assert trained.model.num_parameters() == policy.num_parameters() > 0
    assert trained.model.active_adapters == ["default"]
    assert trained.model.lm_head is policy.get_base_model().lm_head
    assert trained.model.is_gradient_checkpointing is False
    assert trained.tokenizer is trained.processing_class and trained.ref_model is None


def test_callback_of_trl_logs_completions(tmp_path):
    built = trainer(tmp_path, eval_dataset=prompts(4), gradient_checkpointing=True, max_steps=2)
    callback = LogCompletionsCallback(built, freq=1)
    built.add_callback(callback)
    built.train()
    assert [(int(row[0]), row[1]) for row in callback.table[::4]] == [
        (1, prompts(4)[0]["prompt"]),
        (2, "w0"),
    ]


@pytest.mark.parametrize("callback", [BEMACallback(), SyncRefModelCallback(None, None)])
def test_callbacks_that_copy_models_are_refused(tmp_path, callback):
    with pytest.raises(ValueError, match=rf"`{type(callback).__name__}` copies whole models"):
        trainer(tmp_path, callbacks=[callback]).train()


# ---- the trainer


def test_trainer_names_its_rewards(trained):
    function, classifier = trained.reward_funcs
    assert function is length_reward
    assert classifier.config.num_labels == 1
    assert trained.reward_func_names == ["length_reward", "LlamaForSequenceClassification"]
    assert trained.reward_processing_classes[0] is None
    assert trained.reward_processing_classes[1].pad_token == "<pad>"


def test_predict_returns_metrics(trained):
    before = weights(trained)
    logged = len(trained.state.log_history)
    metrics = trained.predict(prompts(4)).metrics
    assert {"test_reward", "test_kl", "test_rewards/length_reward/mean"} <= metrics.keys()
    assert len(trained.state.log_history) == logged
    assert all(torch.equal(x, before[name]) for name, x in weights(trained).items())


def test_evaluate_accepts_a_list_of_rows(trained):
    rows = prompts(4)
    assert trained.evaluate(rows.to_list())["eval_reward"] == trained.evaluate(rows)["eval_reward"]


def test_evaluation_data_may_be_replaced(tmp_path):
    built = trainer(tmp_path, eval_dataset={"a": prompts(4), "b": prompts(3)}, max_steps=1)
    first = built.evaluate()["eval_a_reward"]
    built.eval_dataset = prompts(4)
    assert built.evaluate()["eval_reward"] == first


def test_callback_that_stopped_a_run_does_not_stop_the_next(tmp_path):
    settings = {"max_steps": 8, "eval_steps": 6, "eval_strategy": "steps"}
    stops = EarlyStoppingCallback(1)
    built = trainer(
        tmp_path,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        dataset=prompts(8),
        eval_dataset=prompts(4),
        metric_for_best_model="eval_reward",
        callbacks=[stops],
        **settings,
    )
    stops.early_stopping_patience_counter = 1  # after an earlier training
    built.train()
    assert built.state.global_step == 8


def test_completions_are_logged_under_any_prefix(trained):
    trained.evaluate(prompts(2), metric_key_prefix="test")
    *_, entry = Path(trained.args.output_dir, RUN_LOG).read_text().splitlines()
    assert json.loads(entry)["mode"] == "eval_test" and not trained._samples


def test_model_card_takes_the_arguments_of_trl(trained):
    trained.create_model_card("my-model", "trl-lib/tldr", "mine")
    card = ModelCard.load(f"{trained.args.output_dir}/README.md")
    assert card.data.datasets == ["trl-lib/tldr"]
    assert "mine" in card.data.tags
    assert "# my-model" in card.text


def test_run_shorter_than_logging_steps_logs_its_reward(trained):
    (entry,) = [entry for entry in trained.state.log_history if "reward" in entry]
    assert {"train_loss", "kl", "num_tokens"} <= entry.keys()
    assert entry["step"] == 4


def test_summary_holds_only_what_was_not_logged(tmp_path):
    # of 4 steps, two per rollout
    built = trainer(tmp_path, logging_steps=3, logging_first_step=False)
    built.train()
    first, summary = built.state.log_history
    assert first["step"] == 3 and summary["step"] == 4
    assert "reward" in first and "reward" not in summary
    assert "approx_kl" in summary


# ---- what differs is said


@pytest.mark.parametrize("peft_config", [None, LoraConfig(target_modules="all-linear")])
def test_default_adapter_is_announced(tmp_path, peft_config, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    trainer(tmp_path, peft_config=peft_config)
    announced = [record for record in caplog.records if "LoRA of rank 16" in record.getMessage()]
    assert len(announced) == (peft_config is None)


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused_with_a_remedy(tmp_path, column):
    rows = prompts().add_column(column, ["cat.png"] * 16)
    with pytest.raises(
        ValueError, match=rf"`train_dataset` has a column '{column}', but images .*remove_columns"
    ):
        trainer(tmp_path, dataset=rows)


# ---- metrics of GRPO


def equal_in_odd_groups(prompts, completion_ids, **kwargs):
    """Two groups of four, the first without spread."""
    return [0.1 if row < 4 else 0.1 * row for row in range(len(prompts))]


def test_groups_without_spread_are_counted(tmp_path):
    built = trainer(tmp_path, reward_funcs=equal_in_odd_groups, num_generations=4, num_ppo_epochs=1)
    built.train()
    logged = [
        entry["frac_reward_zero_std"] for entry in built.state.log_history if "reward" in entry
    ]
    assert logged == [0.5, 0.5]


def test_terminated_lengths_are_logged(tmp_path):
    built = trainer(tmp_path, dataset=prompts(64), per_device_train_batch_size=32, max_steps=1)
    built.train()
    entry = built.state.log_history[0]
    lowest, mean, highest = (
        entry[f"completions/{name}_terminated_length"] for name in ("min", "mean", "max")
    )
    assert 1 <= lowest < mean < highest <= 8
    write_completions(built, lambda prompts: [[4] * 8] * len(prompts))  # none ends
    assert {
        built.evaluate(prompts(4))[f"eval_completions/{x}_terminated_length"]
        for x in ("min", "mean", "max")
    } == {0}


def test_clip_ratios_per_completion_and_step_times_are_logged(tmp_path):
    """A large rate moves every token beyond the clip in the second epoch."""
    settings = {
        "learning_rate": 1.0,
        "target_kl": None,
        "cliprange": 0.1,
        "whiten_advantages": True,
    }
    built = trainer(
        tmp_path, gradient_accumulation_steps=2, num_mini_batches=1, max_steps=2, **settings
    )
    started = time.perf_counter()
    built.train()
    seconds = time.perf_counter() - started
    first, second = (entry for entry in built.state.log_history if "loss" in entry)
    assert first["clip_ratio/low_min"] == first["clip_ratio/high_max"] == 0
    assert second["clip_ratio/low_min"] <= second["clip_ratio/low_mean"]
    assert second["clip_ratio/high_mean"] < second["clip_ratio/high_max"] <= 1
    assert (
        second["step_time"]
        < first["step_time"]
        < first["step_time"] + second["step_time"]
        < seconds
    )


# ---- evaluation


def recorded_temperatures(built):
    seen = []
    sampler = built.components.player.generator.static_sampler()
    sample = sampler.sample

    def recording(prompts, rooms, temperature, *args):
        seen.append((len(prompts), temperature))
        return sample(prompts, rooms, temperature, *args)

    sampler.sample = recording
    return seen


@pytest.mark.parametrize("cooled, used", [(None, 0.7), (0.2, 0.2), (0.0, 0.0)])
def test_evaluation_samples_at_its_temperature(tmp_path, cooled, used):
    built = trainer(
        tmp_path, temperature=0.7, eval_temperature=cooled, eval_dataset=prompts(4), max_steps=2
    )
    seen = recorded_temperatures(built)
    one = built.evaluate()
    two = built.evaluate()
    assert one["eval_completions/mean_length"] == two["eval_completions/mean_length"]
    built.train()
    assert seen == [(4, used), (4, used), (8, 0.7)]


def test_greedy_evaluation_is_that_of_generate(tmp_path, inputs):
    built = trainer(tmp_path, eval_temperature=0, dataset=prompts(1))
    built.evaluate(prompts(1))
    [completion] = built.components.player.play([built.train_dataset[0]], [0], evaluates=True)
    prompt = torch.tensor([completion.prompt_ids])
    ids = built.model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=1)
    assert completion.completion_ids == ids[0, prompt.shape[1] :].tolist()


def test_rows_of_an_evaluation_are_sampled_several_times(tmp_path):
    prompts_seen = []

    def reward(prompts, **kwargs):
        prompts_seen.extend(prompts)
        return [0.0] * len(prompts)

    built = trainer(
        tmp_path, reward_funcs=reward, num_generations_eval=3, per_device_eval_batch_size=4
    )
    rows = prompts(3)
    for dataset in (rows, rows.to_iterable_dataset()):
        prompts_seen.clear()
        built.evaluate(dataset)
        assert prompts_seen[:9] == [text for text in rows["prompt"] for _ in range(3)]


# ---- rewards, optimizers, the mask of the loss


def test_reward_may_be_a_generator(tmp_path):
    def lengths(completion_ids, **kwargs):
        for ids in completion_ids:
            yield float(len(ids))

    built = trainer(tmp_path, reward_funcs=lengths, max_steps=1)
    built.train()
    entry = built.state.log_history[0]
    assert entry["reward"] == entry["completions/mean_length"]


def test_optimizer_of_the_adapter_gets_the_critic(tmp_path):
    policy = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([x for x in policy.parameters() if x.requires_grad], lr=1e-2)
    built = trainer(tmp_path, model=policy, optimizers=(optimizer, None), max_steps=1)
    before = weights(built)
    built.train()
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    assert any(
        not torch.equal(x, before[name])
        for name, x in weights(built).items()
        if name.startswith("value_head")
    )
    with pytest.raises(ValueError, match=r"`optimizers` lacks "):
        trainer(tmp_path, optimizers=(torch.optim.SGD(llama().parameters()), None))
    policy = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([x for x in policy.parameters() if x.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match=r"critic .* `\(optimizer, None\)`.*`lr_scheduler_type`"):
        trainer(tmp_path, model=policy, optimizers=(optimizer, scheduler))
    trainer(
        tmp_path,
        model=policy,
        optimizers=(optimizer, scheduler),
        critic="none",
        advantage_estimator="rebn",
    )


def test_model_init_kwargs_beside_a_model_warn_of_no_effect(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    trainer(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    assert "`model_init_kwargs` has no effect on a loaded LlamaForCausalLM" in caplog.text


def test_torch_dtype_is_the_dtype_of_a_base(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    built = trainer(
        tmp_path, model=str(tmp_path / "base"), model_init_kwargs={"torch_dtype": torch.bfloat16}
    )
    assert built.actor_critic.dtype == torch.bfloat16


@pytest.mark.parametrize("quantile", [0.2, 0.5, 1.0])
def test_top_entropy_quantile_keeps_the_tokens_of_grpo(tmp_path, quantile):
    built = trainer(tmp_path, top_entropy_quantile=quantile, max_steps=1)
    seen = rollouts_of(built)
    built.train()
    [(rollout, samples)] = seen
    mask = rollout.response_mask
    entropies = samples.tokens.entropies
    grpo = GRPOTrainer.get_high_entropy_mask(built, entropies, mask, 1 - quantile)
    assert torch.equal((rollout.advantages != 0) & mask, grpo)
    assert rollout.value_weights is None and (rollout.targets[mask] != 0).any()


def test_two_ranks_mask_log_and_evaluate_as_one(tmp_path):
    """Completions of other lengths on each rank, and an evaluation whose last batch is not full."""

    def written(prompts):
        return [
            [4 + (sum(ids) * k) % 28 for k in range(1, 2 + sum(ids) % 7)] + [1] for ids in prompts
        ]

    def run(processes):
        AcceleratorState._reset_state(reset_partial_state=True)
        sizes = {
            "per_device_train_batch_size": 8 // processes,
            "num_mini_batches": 1,
            "num_generations_eval": 3,
        }
        built = trainer(tmp_path / str(processes), top_entropy_quantile=0.4, max_steps=2, **sizes)
        write_completions(built, written)
        built.train()
        metrics = built.evaluate(prompts(7))
        if built.is_world_process_zero():
            torch.save(
                (weights(built), built.state.log_history[1] | metrics), tmp_path / f"{processes}.pt"
            )
        built.end()

    for processes in (1, 2):
        assert finished(start(partial(run, processes), processes), 60) == [0] * processes
    (one, logs), (two, others) = (
        torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in (1, 2)
    )
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    names = (
        "clip_ratio/low_min clip_ratio/high_max eval_reward eval_completions/min_terminated_length"
    ).split()
    assert {name: logs[name] for name in names} == pytest.approx(
        {name: others[name] for name in names}
    )


def test_value_after_a_cut_on_one_rank_is_that_of_one_process(tmp_path):
    rows = prompts(8)  # a rollout
    cut = tokenizer()(rows["prompt"][0])["input_ids"]

    def run(processes):
        AcceleratorState._reset_state(reset_partial_state=True)
        sizes = {
            "per_device_train_batch_size": 8 // processes,
            "num_mini_batches": 1,
            "max_steps": 2,
        }
        settings = {"gamma": 0.5, "bootstrap_truncated": True, "max_completion_length": 6}
        built = trainer(tmp_path / str(processes), dataset=rows, **sizes, **settings)
        write_completions(built, lambda batch: [[5] * 6 if ids == cut else [5, 1] for ids in batch])
        built.train()
        if built.is_world_process_zero():
            torch.save((weights(built), built.state.log_history), tmp_path / f"{processes}.pt")
        built.end()

    for processes in (1, 2):
        assert finished(start(partial(run, processes), processes), 60) == [0] * processes
    (one, logs), (two, _) = (torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in (1, 2))
    assert logs[0]["completions/clipped_ratio"] == 1 / 8
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
