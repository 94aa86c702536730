"""TRL's tests of GRPOTrainer pass under our names, or have a reason not to."""

import io
import os
import re
import tarfile
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import trl
import trl_suite

# TRL's source distributions have no tests since 0.24, so they are those of the release on GitHub
ARCHIVE = f"https://github.com/huggingface/trl/archive/refs/tags/v{trl.__version__}.tar.gz"
TESTS = "tests/test_grpo_trainer.py"
# pattern of names: reason
REASONS = {
    "_vlm|VLM": "images",
    "vllm|rollout_func": "vLLM and rollout functions",
    "liger": "log-probs are fused already, without liger",
    "compute_entropy|off_policy_mask|bonus|prepare_input|log_extra": "private methods of GRPOTrainer",
    r"loss_types\[[bcsv]|token_summed": "losses of GRPO that are not PPO's clipped one",
    "entropy_filter|sync_ref|lm_head_to|adaptive_entropy|normalize_then": "refused with a reason in docs/from_grpo.md",
    "static_entropy": "`policy_loss` is `loss/policy`",
    "Cohere2|Gemma2": "capped or scaled logits",
    "Nemotron|trust_remote_code": "models for which there is no stand-in",
    "mask_truncated_completions": "the stand-ins lack ids of Qwen's vocabulary; GRPOTrainer fails on them too",
    "with_generation_kwargs": "beams are not sampled from the policy",
    "evaluate_with_eval_dataset": "an evaluation makes no update, so it has no `eval_loss`",
    "init_with_eval_dataset": "`trainer.eval_dataset` is the tokenized one",
    "requires_dispatch_batches|keeps_map_style_train_workers": "batches are row numbers; both settings do no harm",
    "no_reward_source|all_rewards_none": "the message is worded otherwise",
    "dataset_required": "a trainer without `train_dataset` can evaluate",
}


@pytest.fixture(scope="module")
def test_file(tmp_path_factory) -> Path:
    """TRL's test file, from the checkout that TRL_SOURCE names, or downloaded."""
    if checkout := os.environ.get("TRL_SOURCE"):
        return Path(checkout, TESTS)
    try:
        with urllib.request.urlopen(ARCHIVE, timeout=30) as response:
            content = io.BytesIO(response.read())
    except OSError as error:
        pytest.skip(f"{ARCHIVE} cannot be fetched ({error}); set TRL_SOURCE to a checkout of TRL")
    file = tmp_path_factory.mktemp("trl") / Path(TESTS).name
    with tarfile.open(fileobj=content) as archive:
        file.write_bytes(archive.extractfile(f"trl-{trl.__version__}/{TESTS}").read())
    return file


@pytest.mark.slow
def test_tests_of_grpo_pass_or_have_a_reason(test_file, tmp_path):
    trl_suite.build_hub(tmp_path)
    results = trl_suite.run(test_file, tmp_path)
    print(Counter(outcome for outcome, _ in results.values()))
    failures = {name: message for name, (outcome, message) in results.items() if outcome in ("failure", "error")}
    assert not {name: x for name, x in failures.items() if not any(re.search(reason, name) for reason in REASONS)}
    # a reason without a failure is out of date
    assert not [reason for reason in REASONS if not any(re.search(reason, name) for name in failures)]
    assert sum(outcome == "passed" for outcome, _ in results.values()) >= 50
