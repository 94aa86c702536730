"""Loading the base: what must not differ from one forward to the next."""

import pytest
import torch
from tiny import config, llama
from transformers import FalconConfig, FalconForCausalLM, OPTConfig, OPTForCausalLM

from trl_ppo_ext.modeling import load_actor_critic
from trl_ppo_ext.sequences import Sequences

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def falcon():
    """Reads its rates off the config in every forward."""
    return FalconForCausalLM(FalconConfig(**SIZES, attention_dropout=0.5, hidden_dropout=0.5))


def opt():
    """Leaves out whole layers."""
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.9, dropout=0.5))


def test_a_model_that_names_a_trunk_which_it_has_not_is_refused(tmp_path):
    model = llama()
    model.base_model_prefix = "language_model"  # as some text models cut out of larger ones do
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM must have the attribute `language_model`.*use a model whose class has it"
    ):
        load_actor_critic(model, config(tmp_path))


@pytest.mark.parametrize("make", [falcon, opt])
def test_dropout_is_off_wherever_its_rate_is_kept(tmp_path, make):
    torch.manual_seed(0)
    built = load_actor_critic(make(), config(tmp_path))
    sequences = Sequences.from_token_ids([[4, 5], [6]], [[7, 8, 9], [10, 11, 12]], 0, "cpu")
    scored, trained = (built.train(mode)(sequences).logprobs for mode in (False, True))
    assert torch.equal(scored, trained)


@pytest.mark.parametrize("kwargs", [None, {"ignore_mismatched_sizes": True}])
def test_base_without_all_weights_raises(tmp_path, kwargs):
    if kwargs is None:
        llama().model.save_pretrained(tmp_path / "base")  # without its output projection
    else:
        llama(vocab_size=40).save_pretrained(tmp_path / "base")
        llama().config.save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match=r"must be a causal .*lack [12] weights, which would be random: .*lm_head.weight"
    ):
        load_actor_critic(str(tmp_path / "base"), config(tmp_path, model_init_kwargs=kwargs))
