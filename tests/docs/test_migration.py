"""Every name of TRL's last PPO has a row in the page on migration, and the names that replace it
exist."""

import ast
import dataclasses
import inspect
import re

import pytest
from pages import ROOT, rows, spans
from trl import GRPOConfig

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.commands.launch import parse
from trl_ppo_ext.commands.train import TrainScriptArguments
from trl_ppo_ext.trl_names import NAMES

PAGE = (ROOT / "docs" / "from_trl_ppo.md").read_text(encoding="utf-8")

# of trl 1.12.0, trl/experimental/ppo: the last release with PPO, written out since it is no
# dependency
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
SECTIONS = {
    "Arguments of `PPOTrainer`": OLD_ARGUMENTS,
    "Fields of `PPOConfig`": OLD_FIELDS + OLD_BASE_FIELDS,
    "Metrics": OLD_METRICS,
}

FIELDS = {field.name for field in dataclasses.fields(PPOConfig)} - NAMES.keys()
ARGUMENTS = set(inspect.signature(PPOTrainer).parameters) - {"unknown"}
NEW = FIELDS | ARGUMENTS | {"world_size"}  # a property of TrainingArguments


def table(heading):
    """The new names and the remark beside each old name."""
    section = re.search(
        rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )[1]
    return {spans(old)[0]: (spans(new), known) for old, new, known in rows(section)[2:]}


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_old_name_has_a_row(heading):
    assert sorted(table(heading)) == sorted(SECTIONS[heading])
    assert all(new or known for new, known in table(heading).values())


@pytest.mark.parametrize("heading", ["Arguments of `PPOTrainer`", "Fields of `PPOConfig`"])
def test_every_new_name_can_be_passed(heading):
    named = table(heading)
    assert {name for new, _ in named.values() for name in new} <= NEW
    # a name that exists here is not listed as gone
    assert not [old for old in set(named) & NEW if old not in named[old][0]]


@pytest.mark.parametrize("old", [old for old in OLD_ARGUMENTS if old not in ARGUMENTS])
def test_old_argument_raises_with_its_replacement(old):
    with pytest.raises(TypeError, match=f"no argument `{old}` .*TRL's old PPOTrainer"):
        PPOTrainer("model", "reward", **{old: None})


# fields of the file of a run are more than those of PPOConfig
KNOWN = FIELDS | {field.name for field in dataclasses.fields(TrainScriptArguments)}


@pytest.mark.parametrize("old", [old for old in OLD_FIELDS if old not in KNOWN])
def test_old_field_sets_its_replacement_or_raises_with_it(old):
    """The message names the same fields as the table."""
    new, note = table("Fields of `PPOConfig`")[old]
    try:
        _, args, *_ = parse(
            "train",
            [
                "--output_dir",
                "out",
                "--use_cpu",
                f"--{old}",
                "3" if NAMES.get(old, (None,))[0] is int else "true",
            ],
            "",
        )
    except ValueError as error:
        assert f"`{old}`" in str(error)
        # `model` in a file; not a setting
        elsewhere = {"sft_model_path": ["model_name_or_path"], "world_size": []}
        assert all(f"`{name}`" in str(error) for name in elsewhere.get(old, new))
    else:
        changed = [
            name
            for name in new
            if getattr(args, name) != PPOConfig.__dataclass_fields__[name].default
        ]
        assert changed == new and (new or "changes nothing" in note)


GRPO_PAGE = (ROOT / "docs" / "from_grpo.md").read_text(encoding="utf-8")


def section(heading):
    return GRPO_PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_every_field_of_grpo_is_on_the_page():
    """In the section on what it does here."""
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    renamed = {
        name: spans(new)
        for old, new, _ in rows(section("Fields with another name"))[2:]
        for name in spans(old)
    }
    single = {
        spans(old)[0]: ast.literal_eval(spans(value)[0])
        for old, value, _ in rows(section("Fields with one value"))[2:]
    }
    idle = set(re.findall(r"`(\w+)`[,.]", section("Fields without effect")))
    assert sorted([*renamed, *single, *idle]) == sorted(theirs & NAMES.keys())
    assert all(new and set(new) <= FIELDS for new in renamed.values())
    for name in theirs & NAMES.keys() - renamed.keys():
        if name in single:
            value = single[name]
        else:
            value = GRPOConfig.__dataclass_fields__[name].default
        args = PPOConfig("out", use_cpu=True, **{name: value})
        assert args.to_dict() == PPOConfig("out", use_cpu=True).to_dict(), name
