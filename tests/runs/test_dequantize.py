"""recipes/dequantize.py: the weights of a 4-bit base in a plain checkpoint, verified, or nothing
at all."""

import json
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, llama, qwen2, tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from trl_ppo_ext.checkpoints.files import CheckpointError

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import dequantize as module

IDS = torch.arange(2, 26).reshape(2, 12)


def gpt2():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    # its layers are `Conv1D`
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, initializer_range=0.2))


def load(path, nf4=True, double=False):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    if nf4:
        kwargs = {"quantization_config": config, "device_map": {"": "cpu"}}
    else:
        kwargs = {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **kwargs)


def expected(base):
    """Weights of a 4-bit Llama or Qwen2, read before any forward."""
    weights = {name: x for name, x in base.named_parameters() if x.dtype != torch.uint8}
    layers = {name: x.weight for name, x in base.named_modules() if isinstance(x, Linear4bit)}
    assert len(layers) == 14
    return weights | {
        f"{name}.weight": dequantize_4bit(x.data, x.quant_state) for name, x in layers.items()
    }


@pytest.fixture
def base(tmp_path):
    llama(hidden_size=64).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def origin(directory):
    return json.loads((directory / "dequantized.json").read_text())


def run(base, *more):
    module.main([str(base), str(base.parent / "plain"), "--device", "cpu", *more])


@pytest.mark.parametrize("model, double", [(llama, False), (qwen2, True)])
def test_weights_equal_those_of_the_4_bit_base(tmp_path, model, double):
    model().save_pretrained(tmp_path / "base")
    run(tmp_path / "base", *["--use_bnb_nested_quant"][:double])
    written = load_file(tmp_path / "plain" / "model.safetensors")
    weights = expected(load(tmp_path / "base", double=double))
    assert written.keys() == weights.keys()  # tied embeddings once
    for name, x in written.items():
        assert x.dtype == torch.bfloat16 and torch.equal(x, weights[name]), name
    assert origin(tmp_path / "plain")["double_quant"] is double
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("model", [qwen2, gpt2])
def test_logits_equal_those_of_the_4_bit_base(tmp_path, model):
    model().save_pretrained(tmp_path / "base")
    run(tmp_path / "base")
    models = (
        load(tmp_path / "base"),
        load(tmp_path / "plain", False),
        load(tmp_path / "base", False),
    )
    with torch.no_grad():
        # in eval mode the 4-bit layers would use a kernel with rounded scales
        quantized, plain, original = (
            model.train()(IDS).logits.float().log_softmax(-1) for model in models
        )
    noise, error = ((x - quantized).abs().mean() for x in (plain, original))
    assert noise < 0.01 and error > 10 * noise


def test_base_that_is_saved_in_4_bits_keeps_its_weights(base):
    quantized = load(base, double=True)
    quantized.save_pretrained(base.parent / "nf4")
    weights = expected(quantized)
    run(base.parent / "nf4")
    written = load_file(base.parent / "plain" / "model.safetensors")
    assert written.keys() == weights.keys() and all(
        torch.equal(x, weights[name]) for name, x in written.items()
    )
    assert origin(base.parent / "plain")["double_quant"] is True


def test_tokenizer_and_origin_are_kept(base):
    tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(base)
    # would not be saved
    (base / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    run(base, "--bnb_4bit_quant_type", "fp4", "--dtype", "float32")
    plain = base.parent / "plain"
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (plain / name).read_bytes() == (base / name).read_bytes()
    assert AutoTokenizer.from_pretrained(plain).chat_template == CHAT_TEMPLATE
    assert json.loads((plain / "config.json").read_text())["dtype"] == "float32"
    settings = {"quant_type": "fp4", "double_quant": False, "dtype": "float32"}
    assert origin(plain) == {"base_model": "base", "revision": None} | settings


def test_failed_script_leaves_nothing(base, monkeypatch):
    load_base = module.load_base

    def damaged(path, args, quantization, device):
        model = load_base(path, args, quantization, device)
        if quantization is None:
            model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1
        return model

    monkeypatch.setattr(module, "load_base", damaged)
    with pytest.raises(
        CheckpointError, match=r"`model.layers.1.mlp.up_proj.weight` in the files must equal"
    ):
        run(base)
    assert [path.name for path in base.parent.iterdir()] == ["base"]


def test_files_of_a_killed_script_are_not_kept(base):
    (base.parent / ".saving-plain").mkdir()
    (base.parent / ".saving-plain" / "vocab.json").touch()
    (base.parent / "plain").mkdir()
    run(base)
    files = {
        "config.json",
        "dequantized.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
    }
    assert {path.name for path in (base.parent / "plain").iterdir()} == files


def test_invalid_arguments_raise(base):
    with pytest.raises(ValueError, match="`OUTPUT_DIR` must be empty or missing"):
        module.main([str(base), str(base)])
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a saved adapter"):
        run(base)
    with pytest.raises(ValueError, match="`MODEL` must be a directory or"):
        run(base.parent / "missing")
