"""TRL's own tests of GRPOTrainer, run under our two names.

Models and datasets of `trl-internal-testing` are folders in the working directory, which win over
the Hub.
"""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
from datasets import Dataset
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

HUB = "trl-internal-testing"
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# name: model type, settings that it needs besides the sizes
POLICIES = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {}),
    "small-Qwen2ForCausalLM-2.5": ("qwen2", {}),
    "tiny-Qwen3ForCausalLM": ("qwen3", {"head_dim": 4}),
    "tiny-LlamaForCausalLM-3.2": ("llama", {}),
    "tiny-MistralForCausalLM-0.2": ("mistral", {"sliding_window": None}),
    "tiny-Gemma2ForCausalLM": ("gemma2", {"head_dim": 4}),
    "tiny-Cohere2ForCausalLM": ("cohere2", {}),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", {"head_dim": 4, "num_experts": 4, **EXPERTS}),
    "tiny-GptOssForCausalLM": (
        "gpt_oss",
        {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-Glm4MoeForCausalLM": (
        "glm4_moe",
        {
            "head_dim": 4,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            **EXPERTS,
        },
    ),
}
CLASSIFIERS = {
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", {}),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", {"head_dim": 4}),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", {}),
}
# tests of tools write turns with ids of Qwen's vocabulary (as in qwen.tiktoken): bytes come first,
# then these fmt: off
QWEN = {
    " {": 314,
    " b": 293,
    ' "': 330,
    ">\n": 397,
    "out": 411,
    "de": 450,
    '",': 497,
    "</": 522,
    "name": 606,
    '":': 788,
    " any": 894,
    "sh": 927,
    "'t": 944,
    "text": 1318,
    " know": 1414,
    " don": 1513,
    " won": 2765,
    '{"': 4913,
    ' {"': 5212,
    " tool": 5392,
    "hi": 6023,
    "call": 6659,
    "async": 7692,
    "step": 9520,
    "}}\n": 11248,
    "crement": 13477,
    "tool": 14172,
    " increment": 16252,
    "arguments": 16370,
    "Done": 17453,
    "_tool": 22785,
    "user": 872,
    "assistant": 77091,
    "increment": 35744,
    "multiply": 64648,
    "_multiply": 93054,
    '"}}\n': 95642,
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
}
# fmt: on
OF_TOOLS = ("tiny-Qwen3ForCausalLM", "tiny-Qwen3MoeForCausalLM")  # policies in tests of tools
WORDS = (
    "Beautiful is better than ugly, explicit is better than implicit, and simple is better than "
    "complex."
).split()


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with some ids of Qwen's vocabulary, which encodes other words as bytes."""
    tokenizer = byte_tokenizer()
    alphabet = bytes_to_unicode()
    tokens = {
        "".join(alphabet[byte] for byte in text.encode()): number for text, number in QWEN.items()
    }
    vocabulary = {token: number for number, token in enumerate(alphabet.values())} | tokens
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {
        name: getattr(tokenizer, name) for name in ("eos_token", "pad_token", "chat_template")
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<|im_start|>"], **special
    )


def build_hub(folder: Path) -> None:
    """Write the models and the dataset `zen`."""
    byte_tokens = byte_tokenizer()
    qwen_tokens = qwen_tokenizer()

    def ids(tokens: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, int]:
        return {
            "vocab_size": vocab_size,
            "eos_token_id": tokens.eos_token_id,
            "pad_token_id": tokens.pad_token_id,
        }

    for named, load in (
        (POLICIES, AutoModelForCausalLM),
        (CLASSIFIERS, AutoModelForSequenceClassification),
    ):
        for name, (kind, settings) in named.items():
            torch.manual_seed(0)
            # other tests use ids up to 2,000, and expect that random models emit no EOS
            tokens, size = (qwen_tokens, 151_936) if name in OF_TOOLS else (byte_tokens, 2048)
            if named is CLASSIFIERS:
                labels = {"num_labels": 1}
            else:
                labels = {}
            model = load.from_config(
                AutoConfig.for_model(kind, **SIZES | ids(tokens, size) | settings | labels)
            )
            for parameter in model.parameters():
                parameter.data.normal_(std=0.1) if parameter.ndim > 1 else None
            model.save_pretrained(folder / HUB / name)
            tokens.save_pretrained(folder / HUB / name)
    texts = [" ".join(WORDS[row % 9 : row % 9 + 1 + row % 4]) for row in range(19)]
    rows = {
        "standard_prompt_only": texts,
        "conversational_prompt_only": [[{"role": "user", "content": text}] for text in texts],
    }
    configs = []
    for name, prompts in rows.items():
        for split, chosen in (("train", prompts[:17]), ("test", prompts[17:])):
            Dataset.from_dict({"prompt": chosen}).to_parquet(
                folder / HUB / "zen" / name / f"{split}.parquet"
            )
        files = [{"split": split, "path": f"{name}/{split}.parquet"} for split in ("train", "test")]
        configs.append({"config_name": name, "data_files": files})
    card = f"---\n{json.dumps({'configs': configs})}\n---\n"
    (folder / HUB / "zen" / "README.md").write_text(card, encoding="utf-8")


# of TRL's own module the tests need only these; marks such as `require_vllm` skip
TESTING_UTILS = """
import pytest

class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)

def is_ampere_or_newer(*args):
    return False

def require_peft(test):
    return test

require_bitsandbytes = require_vision = require_jmespath = require_peft

def __getattr__(name):
    if name.startswith("require_"):
        return pytest.mark.skip(reason=name)
    raise AttributeError(name)
"""


# names of GRPOTrainer's inner parts that tests of tools read
PRIVATE = {
    r"patch\.object\(trainer\.model,": "patch.object(trainer.model.policy,",
    r"trainer\._env_tools\[(.*?)\]": r"trainer.components.player.environments.kinds[\1].pool[0].tools.values()",
    r"trainer\._environment_pool\[(.*?)\]": r"trainer.components.player.environments.kinds[\1].pool",
}


def with_our_names(source: str) -> str:
    """Change two names and where they come from, and those of inner parts; ask only trained
    weights to change."""
    source = source.replace(
        "from trl import GRPOConfig, GRPOTrainer", "from trl_ppo_ext import PPOConfig, PPOTrainer"
    )
    source = re.sub(r"\bGRPO(Trainer|Config)\b", r"PPO\1", source)
    for name, ours in PRIVATE.items():
        source = re.sub(name, ours, source)
    return source.replace(
        "in trainer.model.named_parameters()}",
        "in trainer.model.named_parameters() if param.requires_grad}",
    )


def run(test_file: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Outcome and message of each test under our names."""
    suite = folder / "tests"
    suite.mkdir()
    (suite / "__init__.py").touch()
    (suite / "testing_utils.py").write_text(TESTING_UTILS, encoding="utf-8")
    (suite / test_file.name).write_text(
        with_our_names(test_file.read_text(encoding="utf-8")), encoding="utf-8"
    )
    report = folder / "report.xml"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        "not slow",
        f"--junitxml={report}",
        "-c",
        "/dev/null",
    ]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", folder, suite],
        cwd=folder,
        check=False,
    )
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}"
        child = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
        outcomes[name] = ("passed", "") if child is None else (child.tag, child.get("message", ""))
    return outcomes
