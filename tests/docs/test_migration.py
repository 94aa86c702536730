"""Everything that TRL's last PPO had stands in the table, and what the table names is there."""

import dataclasses
import inspect

import pytest
from pages import ROOT, spans, table_after, tables

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.arguments import REMOVED_ARGUMENTS
from trl_ppo_ext.commands.arguments import REMOVED_FIELDS
from trl_ppo_ext.commands.train import TrainScriptArguments

PAGE = ROOT / "docs" / "from_trl_ppo.md"
METRICS = ROOT / "docs" / "metrics.md"

# of trl 1.12.0, trl/experimental/ppo: the last release with PPO, written out since it is no dependency
OLD_ARGUMENTS = """args processing_class model ref_model reward_model train_dataset value_model data_collator
eval_dataset optimizers callbacks peft_config""".split()
OLD_FIELDS = """learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty sft_model_path
world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size
push_to_hub reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator
cliprange vf_coef cliprange_value gamma lam ds3_gather_for_generation""".split()
# of its base class, trl/trainer/base_config.py: what it redefines of TrainingArguments
OLD_BASE_FIELDS = """logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel
torch_empty_cache_steps""".split()
OLD_METRICS = """eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg val/ratio
val/ratio_var val/num_eos_tokens lr episode""".split()
OF_THE_TRAINER = {"learning_rate", "epoch", "loss", "grad_norm"}  # logged by transformers

FIELDS = {field.name for field in dataclasses.fields(PPOConfig)}
ARGUMENTS = set(inspect.signature(PPOTrainer).parameters) - {"unknown"}
NEW = FIELDS | ARGUMENTS | {"world_size"}  # a property of TrainingArguments


def rows(heading):
    return {spans(old)[0]: (new, known) for old, new, known in table_after(PAGE, heading)}


def documented_metrics():
    """Names in the table of metrics; `/std` after `a/mean` is `a/std`."""
    found = set()
    for row in [row for table in tables(METRICS)[:1] for row in table[1:]]:
        first = None
        for name in spans(row[0]):
            if name.startswith("/") and first is not None:
                name = f"{first.rsplit('/', 1)[0]}{name}"
            first = first or name
            found.add(name)
    return found


@pytest.mark.parametrize(
    "heading, old",
    [
        ("Arguments of `PPOTrainer`", OLD_ARGUMENTS),
        ("Fields of `PPOConfig`", OLD_FIELDS + OLD_BASE_FIELDS),
        ("Metrics", OLD_METRICS),
    ],
)
def test_every_old_name_has_its_row(heading, old):
    assert sorted(rows(heading)) == sorted(old)


@pytest.mark.parametrize("heading", ["Arguments of `PPOTrainer`", "Fields of `PPOConfig`"])
def test_every_new_name_can_be_passed(heading):
    named = {name for new, _ in rows(heading).values() for name in spans(new)}
    assert named
    assert not named - NEW


def test_every_new_metric_is_documented():
    named = {name for new, _ in rows("Metrics").values() for name in spans(new)}
    assert not named - documented_metrics() - OF_THE_TRAINER
    assert {"kl_per_completion", "clip_ratio/high_mean", "completions/clipped_ratio"} <= documented_metrics()


@pytest.mark.parametrize("heading", ["Arguments of `PPOTrainer`", "Fields of `PPOConfig`", "Metrics"])
def test_a_name_without_successor_says_why(heading):
    for old, (new, known) in rows(heading).items():
        assert spans(new) or (new == "–" and known), old


def test_a_name_that_is_said_to_be_the_same_is_the_same():
    """A field that was there and is here must not be given as gone."""
    for heading, old in (("Fields of `PPOConfig`", OLD_FIELDS + OLD_BASE_FIELDS), ("Metrics", OLD_METRICS)):
        for name in set(old) & (FIELDS | documented_metrics()) - {"use_liger_kernel"}:  # refused
            assert name in spans(rows(heading)[name][0]), name


def test_old_arguments_that_are_refused_by_name_are_those_of_the_table():
    gone = {old for old in OLD_ARGUMENTS if old not in ARGUMENTS}
    assert gone <= set(REMOVED_ARGUMENTS)


def test_old_fields_that_are_refused_by_name_are_those_of_the_table():
    """And what the command line says of one names what the table names."""
    known = FIELDS | {entry.name for entry in dataclasses.fields(TrainScriptArguments)}
    assert set(REMOVED_FIELDS) == {old for old in OLD_FIELDS if old not in known}
    in_a_file = {"model": {"model_name_or_path"}, "world_size": set()}  # one is called otherwise, one cannot be set
    table = rows("Fields of `PPOConfig`")
    for old, remedy in REMOVED_FIELDS.items():
        for name in spans(table[old][0]):
            assert in_a_file.get(name, {name}) <= set(spans(remedy)), old
        assert set(spans(remedy)) <= NEW | {"model_name_or_path", "eos_token_id", "PeftModel"}, old


def test_fields_of_grpo_that_have_another_name_exist():
    from trl import GRPOConfig

    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    for old, new, known in table_after(ROOT / "docs" / "from_grpo.md", "What differs"):
        assert set(spans(old)) <= theirs, old
        assert set(spans(new)) <= FIELDS, new
        assert spans(new) or known
