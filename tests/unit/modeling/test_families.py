"""Models of the families that are trained today, and the table of docs/models.md."""

import pytest
import torch
import transformers
from families import FAMILIES, PAGE, build, page
from peft import PeftModel
from runs_of_tiny import trainer
from safetensors.torch import load_file

from trl_ppo_ext.modeling.loading import name_of_loader

CONSTRAINTS = PAGE.parents[1] / "constraints.txt"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
SETTINGS = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "max_completion_length": 12,
    "per_device_train_batch_size": 16,
    "num_mini_batches": 1,
    "num_ppo_epochs": 1,
    "logging_steps": 1,
}


def lengths(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_samples_as_it_scores_and_is_published(tmp_path, family):
    """Published whole: the saved adapter on a plain base has the logits of the run."""
    build(family).save_pretrained(tmp_path / "base")
    loader = getattr(transformers, name_of_loader(build(family)))
    run = trainer(tmp_path / "run", model=str(tmp_path / "base"), reward_funcs=lengths, **SETTINGS)
    run.train()
    first, second = [log for log in run.state.log_history if "ratio/mean" in log]
    for log in (first, second):
        # of a rollout's only step, before it is taken
        assert log["ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
    assert first["approx_kl"] > 1e-4  # after the step
    expected = logits(run.model)
    run.save_model(tmp_path / "saved")
    assert all(
        x.isfinite().all()
        for x in load_file(tmp_path / "saved" / "adapter_model.safetensors").values()
    )
    base = loader.from_pretrained(tmp_path / "base")
    assert (logits(base) - expected).abs().max() > 1e-3
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path / "saved")), expected, atol=1e-6, rtol=0
    )


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in CONSTRAINTS.read_text().split(),
    reason="the page is about the versions of constraints.txt",
)
def test_table_of_the_page_is_that_of_these_models():
    assert PAGE.read_text() == page(), "write it anew by `python tests/families.py`"
