"""Random configurations, killed and resumed, end as if nothing had happened."""

import random

import pytest
from test_kills import killed_runs


def random_settings(seed):
    """Settings of `killed_runs`, drawn."""
    pick = random.Random(seed).choice
    settings = {
        "rows": pick([1, 2, 5, 20]),
        "per_device_train_batch_size": pick([1, 2, 4]),
        "gradient_accumulation_steps": pick([1, 2, 3]),
        "num_mini_batches": pick([1, 2]),
        "num_ppo_epochs": pick([1, 2, 3]),
        "logging_strategy": pick(["steps", "epoch"]),
        "logging_steps": pick([1, 3, 4]),
        "save_strategy": pick(["steps", "steps", "epoch"]),
        "save_steps": pick([1, 2, 5]),
        "save_total_limit": pick([None, 1, 2]),
        "lr_scheduler_type": pick(["linear", "cosine", "constant_with_warmup"]),
        "optim": pick(["adamw_torch", "adafactor", "sgd"]),
        "normalize_rewards": pick([True, False]),
        "target_kl": pick([None, 1e-3]),
        **pick(
            [
                {"critic": "head"},
                {"critic": "adapter"},
                {"critic": "none", "advantage_estimator": "reinforce"},
            ]
        ),
        **pick(
            [
                {"max_steps": 18},
                {"max_steps": 18, "stream": True},
                {"max_steps": -1, "num_train_epochs": 2.5},
            ]
        ),
    }
    evaluation = pick(["no", "steps", "epoch"])
    if evaluation != "no":
        settings |= {"eval_strategy": evaluation, "eval_steps": pick([1, 3])}
        best = {
            "metric_for_best_model": "eval_reward",
            "greater_is_better": True,
            "patience": pick([2, 3]),
        }
        settings |= pick([{}, best])
    if settings["rows"] == 20 and settings["max_steps"] < 0:
        settings["num_ppo_epochs"] = 1  # otherwise it takes hundreds of steps
    return settings


@pytest.mark.slow
def test_random_configurations_resume_exactly(tmp_path):
    drawn = {f"{seed}": random_settings(seed) for seed in range(40)}
    scenarios = {
        seed: (1, ("SIGKILL", "SIGTERM")[int(seed) % 2], "all", 2, own)
        for seed, own in drawn.items()
    }
    runs, stderr = killed_runs(tmp_path, scenarios)
    for seed, settings in drawn.items():
        for run in runs[seed]:
            assert run["ended"] == [0] and run["equal"], (run, settings, stderr[-4000:])
