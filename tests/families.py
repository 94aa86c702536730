"""Tiny models of the families that are trained today, and docs/models.md: `python
tests/families.py` writes it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.episodes.transformers_generator import why_not_stepped
from trl_ppo_ext.modeling.loading import load_actor_critic, name_of_loader
from trl_ppo_ext.tools.memory import model_sizes, on_meta

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models

```python
from datasets import Dataset
from trl_ppo_ext import PPOConfig, PPOTrainer

prompts = Dataset.from_dict({"prompt": ["Tell me of the sea.", "Tell me of a hill."]})


def reward(completions, **kwargs):
    return [float("blue" in text) for text in completions]


trainer = PPOTrainer("Qwen/Qwen3.5-4B", reward, args=PPOConfig("out"), train_dataset=prompts)
```

The base may be any causal language model of transformers that reads the attention mask, for text alone or with images,
of which the text is trained. A [test](../tests/unit/modeling/test_families.py) builds a tiny one of each class below,
on a CPU with the versions of `constraints.txt`. Each of them trains; in its second rollout the
ratios of new to old log-probs are 1, sampled and scored log-probs are equal to 1e-4 nats, and the saved adapter
has the policy's logits on a plain reload of the base. Weights of real size were not loaded for this table.

- **Packed rows**: a micro-batch has no padding. Otherwise its rows are padded to the longest, and a line of the log
  says why.
- **Steps**: sampling runs one step over static memory, rows that have ended leave the batch while the others are
  sampled, and keys and values are kept between the turns of an episode. Otherwise `generate` samples, each turn reads
  all earlier ones, and a line says why ([Generation](generation.md)). vLLM has a cache of its own.
- **Estimate**: `trl-ppo estimate` knows the memory of its layers. Otherwise measure a few steps.
- A reload takes `AutoModelForCausalLM`, or the class under the table. The model card of a run has the code.

| family | class | packed rows | steps | estimate |
|---|---|---|---|---|
"""
TAIL = """
Loaded by `AutoModelForImageTextToText`: {others}.
"""

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
GEMMA = WINDOW | {"pad_token_id": 0, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = GEMMA | {
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 32,
}
YARN = {  # as in Ministral 3, whose queries also grow with their position
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 16,
    "patch_size": 8,
}

# family: class of the model, class of the config that has its sizes, and other settings
TEXT = {
    "Llama 3": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"num_experts": 4}),
    "Qwen3.5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "Qwen3.5 MoE": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        DELTA
        | EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "Gemma 4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    "LFM2": ("Lfm2ForCausalLM", "Lfm2Config", CONVOLUTION),
    "LFM2 MoE": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        CONVOLUTION | EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    ),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "Ministral 3": (
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {"rope_parameters": YARN},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "OLMo 3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "GLM-4": ("Glm4ForCausalLM", "Glm4Config", {"pad_token_id": 0}),
    "GLM-4 MoE": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        EXPERTS
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "Phi-4-mini": ("Phi3ForCausalLM", "Phi3Config", {}),
    "Granite 4": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    ),
    "HunYuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {}),
    "EXAONE 4": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Seed-OSS": ("SeedOssForCausalLM", "SeedOssConfig", {}),
}
# family: class of the model, its config, the config of its text, that of its images, and settings
# of both
WITH_IMAGES = {
    "Gemma 4 with images": (
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        "Gemma4TextConfig",
        "Gemma4VisionConfig",
        GEMMA4,
    ),
    "Ministral 3 with images": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        "Ministral3Config",
        "PixtralVisionConfig",
        TEXT["Ministral 3"][2],
    ),
}
FAMILIES = [*TEXT, *WITH_IMAGES]


def of_class(name: str, *args, **kwargs):
    return getattr(transformers, name)(*args, **kwargs)


def config_of(family: str) -> tuple[str, PreTrainedConfig]:
    """Class of a family's model, and a tiny config."""
    if family in TEXT:
        model, config, settings = TEXT[family]
        return model, of_class(config, **SIZES | settings)
    model, config, text, vision, settings = WITH_IMAGES[family]
    parts = {
        "text_config": of_class(text, **SIZES | settings).to_dict(),
        "vision_config": of_class(vision, **VISION).to_dict(),
    }
    return model, of_class(config, **parts, tie_word_embeddings=False)


def build(family: str) -> PreTrainedModel:
    """A tiny model of a family, with random weights."""
    torch.manual_seed(0)
    return of_class(*config_of(family)).eval()


def row(family: str, folder: str) -> str:
    """Line of the table, from a model that is loaded as a run loads it."""
    model = build(family)
    args = PPOConfig(folder, use_cpu=True, bf16=False, report_to="none")
    actor_critic = load_actor_critic(model, args)
    actor_critic.prepare_forwards()
    answers = {
        "packed rows": actor_critic.why_not_packed is None,
        "steps": why_not_stepped(actor_critic, GenerationConfig(use_cache=True)) is None,
        "estimate": can_be_estimated(model.config),
    }
    return (
        f"| {family} | `{type(model).__name__}` | "
        f"{' | '.join('yes' if x else 'no' for x in answers.values())} |"
    )


def can_be_estimated(config: PreTrainedConfig) -> bool:
    try:
        model_sizes(on_meta(config), width=2)
    except ValueError:
        return False
    return True


def page() -> str:
    """Text of docs/models.md."""
    with TemporaryDirectory() as folder:
        rows = [row(family, folder) for family in FAMILIES]
    with_images = [build(family) for family in WITH_IMAGES]
    others = [
        type(model).__name__
        for model in with_images
        if name_of_loader(model) != "AutoModelForCausalLM"
    ]
    return (
        HEAD
        + "\n".join(rows)
        + "\n"
        + TAIL.format(others=", ".join(f"`{name}`" for name in others))
    )


if __name__ == "__main__":
    PAGE.write_text(page())
