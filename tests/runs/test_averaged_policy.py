"""The averaged policy of recipes/averaged_policy.py: its closed form, its files, and resumed
runs."""

import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from runs_of_tiny import trainer
from safetensors.torch import load_file
from tiny import llama, prompts
from transformers import TrainerCallback

from trl_ppo_ext.rewards import RewardError

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from averaged_policy import AveragedPolicy

SETTINGS = {"max_steps": 6, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}


def policy_of(built):
    return {name: x.detach().clone() for name, x in built.model.policy_parameters().items()}


class Weights(TrainerCallback):
    """The policy's weights at the beginning and after every optimizer step."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.seen = [{name: x.detach().clone() for name, x in model.policy_parameters().items()}]

    def on_step_end(self, args, state, control, model, **kwargs):
        self.seen.append(
            {name: x.detach().clone() for name, x in model.policy_parameters().items()}
        )


def closed_form(seen, decay):
    steps = len(seen) - 1
    average = {name: decay**steps * x.double() for name, x in seen[0].items()}
    for number, weights in enumerate(seen[1:], 1):
        share = (1 - decay) * decay ** (steps - number)
        average = {name: x + share * weights[name].double() for name, x in average.items()}
    return average


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaged")
    mean = AveragedPolicy(0.7)
    weights = Weights()
    # updates that `target_kl` skips: the average moves at skipped steps, too
    built = trainer(folder, callbacks=[mean, weights], target_kl=0.01, num_ppo_epochs=4, **SETTINGS)
    built.train()
    assert any(log["stopped_early"] for log in built.state.log_history if "stopped_early" in log)
    return built, mean, weights.seen, folder


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_out_of_range_raises(decay):
    with pytest.raises(ValueError, match="`decay` must be at least 0 and below 1"):
        AveragedPolicy(decay)


def test_average_has_its_closed_form(averaged):
    built, mean, seen, _ = averaged
    expected = closed_form(seen, 0.7)
    assert mean.averages.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(mean.averages[name].double(), x, rtol=0, atol=1e-6)
    last = policy_of(built)
    assert max((last[name] - x).abs().max().item() for name, x in expected.items()) > 1e-3


def test_average_without_decay_is_the_policy(tmp_path):
    mean = AveragedPolicy(0.0)
    built = trainer(tmp_path, callbacks=[mean], max_steps=2)
    built.train()
    assert all(torch.equal(mean.averages[name], x) for name, x in policy_of(built).items())


def test_average_of_bf16_weights_is_float32():
    weights = {"x": torch.ones(3, dtype=torch.bfloat16)}
    model = type("Model", (), {"policy_parameters": lambda self: weights})()
    mean = AveragedPolicy(0.999)
    mean.on_train_begin(None, None, None, model)
    weights["x"].fill_(2.0)
    mean.on_step_end(None, None, None, model)
    torch.testing.assert_close(mean.averages["x"], torch.full((3,), 1.001))  # no bf16 number


def test_average_is_a_plain_adapter_beside_each_checkpoint(averaged):
    _, _, seen, folder = averaged
    base = llama()
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        for step, place in [
            (2, folder / "checkpoint-2"),
            (4, folder / "checkpoint-4"),
            (6, folder),
        ]:
            expected = closed_form(seen[: step + 1], 0.7)
            model = PeftModel.from_pretrained(base, place / "ema")
            loaded = {name: x for name, x in model.named_parameters() if "lora" in name}
            assert loaded.keys() == expected.keys()
            for name, x in expected.items():
                torch.testing.assert_close(loaded[name].double(), x, rtol=0, atol=1e-6)
            mean = model(input_ids=ids).logits
            base = model.unload()
    assert (
        mean - PeftModel.from_pretrained(base, folder / "checkpoint-6")(input_ids=ids).logits
    ).abs().max() > 1e-3


def test_swapped_uses_the_average_and_restores_the_weights(averaged):
    built, mean, *_ = averaged
    before = policy_of(built)
    for error in (None, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt), mean.swapped(built.model):
            assert all(torch.equal(mean.averages[name], x) for name, x in policy_of(built).items())
            raise error or KeyboardInterrupt
        assert all(torch.equal(before[name], x) for name, x in policy_of(built).items())
    with mean.swapped(built.model):
        assert built.evaluate(prompts(4))["eval_kl"] != 0


@pytest.mark.parametrize("saved", [1, 4], ids=["within a rollout", "between rollouts"])
def test_average_resumes_bit_for_bit(tmp_path, saved):
    whole = AveragedPolicy(0.7)
    again = AveragedPolicy(0.7)
    one = trainer(tmp_path / "whole", callbacks=[whole], **SETTINGS)
    one.train()
    other = trainer(tmp_path / "again", callbacks=[again], **SETTINGS)
    other.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{saved}"))
    assert all(torch.equal(again.averages[name], x) for name, x in whole.averages.items())
    losses = [[log["loss"] for log in x.state.log_history if "loss" in log] for x in (one, other)]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    files = [tmp_path / name / "ema" / "adapter_model.safetensors" for name in ("whole", "again")]
    ours, theirs = map(load_file, files)
    assert all(torch.equal(theirs[name], x) for name, x in ours.items())


def test_average_resumes_after_an_error(tmp_path):
    """The checkpoint of an error has the average, though no save was due."""

    def fails(completion_ids, **kwargs):
        fails.calls += 1
        if fails.calls == fails.fails_at:
            raise RuntimeError("an outage")
        return [float(len(ids)) for ids in completion_ids]

    def run(folder, fails_at, **resume):
        fails.calls = 0
        fails.fails_at = fails_at
        mean = AveragedPolicy(0.7)
        built = trainer(tmp_path / folder, reward_funcs=fails, callbacks=[mean], max_steps=8)
        built.train(**resume)
        return mean.averages

    whole = run("whole", None)
    with pytest.raises(RewardError):
        run("failed", 2)
    again = run("failed", None, resume_from_checkpoint=True)
    assert all(torch.equal(again[name], x) for name, x in whole.items())
