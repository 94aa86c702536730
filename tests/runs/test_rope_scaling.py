"""Rotary frequencies that change with the longest row of a forward: no run crosses the length
where they do."""

from types import SimpleNamespace

import pytest
import torch
from runs_of_tiny import sequences, trainer
from tiny import config, llama
from transformers import Phi3Config

from trl_ppo_ext.arguments import context_of
from trl_ppo_ext.data import PromptError
from trl_ppo_ext.modeling.loading import load_actor_critic

ORIGINAL = 16
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0}
SCALINGS = {
    "longrope": {"rope_parameters": LONG, "max_position_embeddings": 64},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL},
}


def row(length):
    return [4 + n % 20 for n in range(4)], [5 + 3 * n % 20 for n in range(length - 4)]


@pytest.mark.parametrize("kind", SCALINGS)
def test_logprobs_depend_on_no_other_row_within_the_context(tmp_path, kind):
    built = load_actor_critic(llama(**SCALINGS[kind]), config(tmp_path))

    def logprobs(*lengths):
        rows = [row(length) for length in lengths]
        with torch.no_grad():
            return built(sequences(*map(list, zip(*rows)))).logprobs[0, : lengths[0] - 4]

    alone = logprobs(9)
    torch.testing.assert_close(logprobs(9, ORIGINAL), alone, rtol=0, atol=1e-5)
    # beyond it they do
    assert (logprobs(9, ORIGINAL + 1) - alone).abs().max() > 1e-3


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(
    "length, message", [(12, "The prompt has 5 tokens, but the context of 16"), (16, "no room")]
)
def test_run_beyond_the_original_context_raises(tmp_path, kind, length, message):
    trainer(tmp_path, llama(**SCALINGS[kind]), max_completion_length=11)
    with pytest.raises(
        PromptError, match=rf"{message}.* rope scaling '{kind}' changes the log-probs"
    ):
        trainer(tmp_path, llama(**SCALINGS[kind]), max_completion_length=length)


def test_context_is_the_shortest_over_layers():
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    scaling = {name: LONG[name] for name in ("rope_type", "short_factor", "long_factor")}
    phi = Phi3Config(**sizes, rope_parameters=scaling, original_max_position_embeddings=ORIGINAL)
    assert context_of(phi)[0] == ORIGINAL
    layers = {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}, "other": None}
    assert (
        context_of(SimpleNamespace(max_position_embeddings=64, rope_parameters=layers))[0]
        == ORIGINAL
    )
    assert context_of(SimpleNamespace(rope_parameters=LONG))[0] == ORIGINAL
    yarn = LONG | {"rope_type": "yarn"}
    assert context_of(SimpleNamespace(max_position_embeddings=64, rope_parameters=yarn)) == (64, "")
    assert context_of(SimpleNamespace()) == (None, "")
