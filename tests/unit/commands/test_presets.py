"""Presets: each value has its source, and each preset gives a config with the sizes of its
paper."""

import re
from pathlib import Path

import pytest
import yaml

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.commands.launch import parse

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "variants.md"
FILES = {path.stem: path for path in sorted((ROOT / "trl_ppo_ext" / "presets").glob("*.yaml"))}
PRESETS = {name: yaml.safe_load(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
# name: prompts of a rollout, completions of an optimizer step, optimizer steps that a rollout feeds
SIZES = {
    "instructgpt": (512, 64, 8),
    "n_plus": (512, 512, 4),
    "vapo": (512, 512, 16),
    "orz": (128, 8192, 1),
    "dapo": (512, 512, 16),
}


def config(name, tmp_path):
    return PPOConfig(tmp_path, use_cpu=True, bf16=False, **PRESETS[name])


def test_page_lists_every_preset_and_no_other():
    listed = re.findall(r"^\| \[`(\w+)`\]", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == list(PRESETS) == sorted(SIZES)


def test_unknown_preset_is_refused_with_the_known_ones():
    message = (
        "Unknown preset 'n-plus'; choose one of 'dapo', 'instructgpt', 'n_plus', 'orz', 'vapo'."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        PPOConfig.preset("n-plus")


def test_preset_takes_overrides_by_names_of_trl(tmp_path):
    """Nobody can remove what a preset has written."""
    laptop = {"use_cpu": True, "bf16": False}
    given = {"beta": 0.01, "epsilon": 0.3, "epsilon_high": 0.4, "num_iterations": 2}
    given |= {"loss_type": "grpo", "delta": 2.0, "generation_kwargs": {"temperature": 0.5}}
    made = PPOConfig.preset("dapo", tmp_path, **given, **laptop)
    clip = made.cliprange, made.cliprange_high, made.dual_clip
    assert (made.kl_coef, *clip, made.num_ppo_epochs) == (0.01, 0.3, 0.4, 2.0, 2)
    assert (made.loss_aggregation, made.temperature) == ("sequence_mean", 0.5)


def test_mappings_of_a_preset_are_merged(tmp_path):
    laptop = {"use_cpu": True, "bf16": False}
    for own in ({"warmup_steps": 5}, '{"warmup_steps": 5}'):
        made = PPOConfig.preset("vapo", tmp_path, critic_kwargs=own, **laptop)
        options = made.critic_options
        assert (options.warmup_steps, options.lam_length_alpha) == (5, 0.05)


def test_steps_per_generation_replace_the_size_of_a_presets_rollout(tmp_path):
    made = PPOConfig.preset("n_plus", tmp_path, steps_per_generation=16, use_cpu=True, bf16=False)
    assert (made.num_mini_batches, made.generation_batch_size) == (16, None)


def test_override_that_is_no_json_is_refused_by_the_config(tmp_path):
    with pytest.raises(ValueError, match="critic_kwargs"):
        PPOConfig.preset("vapo", tmp_path, critic_kwargs='{"warmup_steps": }', use_cpu=True)


def test_override_of_none_is_not_given(tmp_path):
    made = PPOConfig.preset("n_plus", tmp_path, beta=None, use_cpu=True, bf16=False)
    assert made.kl_coef == PRESETS["n_plus"]["kl_coef"]


@pytest.mark.parametrize(
    "written, typed, field, value",
    [
        ("kl_coef: 0.3", ["--beta", "0.1"], "kl_coef", 0.1),
        ("beta: 0.3", ["--kl_coef", "0.1"], "kl_coef", 0.1),
        ("beta: 0.3", ["--init_kl_coef", "0.1"], "kl_coef", 0.1),
        ("temperature: 0.9", ["--generation_kwargs", '{"temperature": 0.5}'], "temperature", 0.5),
        ("generation_kwargs: {temperature: 0.9}", ["--temperature", "0.5"], "temperature", 0.5),
        ("generation_kwargs: {temperature: 0.9}", ["--top_p", "0.5"], "temperature", 0.9),
        ("whiten_advantages: true", ["--scale_rewards", "group"], "whiten_advantages", True),
    ],
)
def test_command_line_wins_over_another_name_in_the_file(tmp_path, written, typed, field, value):
    """And changes nothing else."""
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: m\ndataset_name: d\n{written}\n")
    line = [str(file), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    _, args, _ = parse("trl-ppo train", line + typed, "")
    assert getattr(args, field) == value


@pytest.mark.parametrize("of_file", ["{lam: 0.9, warmup_steps: 3}", "'{\"lam\": 0.9}'"])
def test_mappings_of_a_file_are_merged_with_those_of_the_line(tmp_path, of_file):
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: m\ndataset_name: d\ncritic_kwargs: {of_file}\n")
    line = [str(file), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    _, args, _ = parse("trl-ppo train", [*line, "--critic_kwargs", '{"warmup_steps": 5}'], "")
    assert (args.critic_options.lam, args.critic_options.warmup_steps) == (0.9, 5)


def test_arguments_of_another_schedule_are_not_merged(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model_name_or_path: m\ndataset_name: d\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs: {min_lr: 1.0e-6}\n"
    )
    line = [str(file), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    line += ["--lr_scheduler_type", "cosine_with_restarts"]
    _, args, _ = parse("trl-ppo train", [*line, "--lr_scheduler_kwargs", '{"num_cycles": 2}'], "")
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


def test_preset_takes_overrides_of_its_fields(tmp_path):
    made = PPOConfig.preset("n_plus", tmp_path, use_cpu=True, bf16=False, learning_rate=1e-4)
    assert (made.learning_rate, made.adam_epsilon) == (1e-4, 1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_source_of_every_value(name):
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    # not keys of mappings
    values = [line for line in lines if not line.startswith("#") and not line.endswith(":")]
    assert len(values) >= len(PRESETS[name]) and all(
        re.fullmatch(r" *\w+: \S+  # \S.*", line) for line in values
    )


@pytest.mark.parametrize("name", PRESETS)
def test_rates_of_a_preset_are_ten_times_those_of_its_paper(name):
    """Adapters are trained, and papers give rates of full fine-tuning."""
    text = FILES[name].read_text(encoding="utf-8")
    rates = re.findall(r"^\w*learning_rate: (\S+)  # 10 × (\S+) of ", text, re.MULTILINE)
    assert len(rates) == sum("learning_rate" in field for field in PRESETS[name]) > 0
    assert all(float(rate) == pytest.approx(10 * float(paper)) for rate, paper in rates)
    assert "https://thinkingmachines.ai/blog/lora/" in text


@pytest.mark.parametrize("name", PRESETS)
def test_config_keeps_the_values_of_its_preset(name, tmp_path):
    made = config(name, tmp_path)
    assert {field: getattr(made, field) for field in PRESETS[name]} == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_sizes_of_its_paper(name, tmp_path):
    plan = config(name, tmp_path).plan(num_processes=1)
    assert (plan.prompts, plan.mini_batch_size, plan.optimizer_steps) == SIZES[name]


@pytest.mark.parametrize("name, iterations", [("instructgpt", 10), ("dapo", 20)])
def test_warmup_in_rollouts_is_converted_to_optimizer_steps(name, iterations):
    assert PRESETS[name]["warmup_steps"] == iterations * SIZES[name][2]


@pytest.mark.parametrize(
    "name, episodes, rollout", [("instructgpt", 256_000, 512), ("n_plus", 1_000_000, 512)]
)
def test_page_lists_the_optimizer_steps_of_the_papers_episodes(name, episodes, rollout):
    [row] = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| [`{name}`]")
    ]
    assert f"`max_steps={episodes // rollout * SIZES[name][2]}`" in row
