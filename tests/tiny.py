"""Tiny models, tokenizers and datasets, built from configs: nothing is downloaded."""

from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerState,
)

from trl_ppo_ext import PPOConfig

WORDS = [f"w{i}" for i in range(28)]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<bos> ' + m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos> assistant ' }}{% endif %}"
)


def tokenizer(words=WORDS, chat_template=None):
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def byte_tokenizer(template="qwen3"):
    """A token per byte, with the special tokens of Qwen and a chat template of TRL."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(special + alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=(Path(trl.__file__).parent / f"chat_templates/{template}.jinja").read_text(
            encoding="utf-8"
        ),
    )


def llama(vocab_size=32, seed=0, dtype=torch.float32, hidden_size=32, classifier=False, **kwargs):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=None,
        **{"max_position_embeddings": 64} | ({"num_labels": 1} if classifier else {}) | kwargs,
    )
    if classifier:
        model = LlamaForSequenceClassification(config)
    else:
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def qwen2(vocab_size=32, seed=0, hidden_size=32, **kwargs):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=None,
        **{"max_position_embeddings": 64} | kwargs,
    )
    return Qwen2ForCausalLM(config).eval()


# of models that scale or cap their logits after the output projection
LOGIT_MAPS = {
    "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
    "gemma3_text": {
        "final_logit_softcapping": 2.0,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 2,
    },
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.0625, "layer_types": ["full_attention"] * 2},
    "granite": {"logits_scaling": 6.0, "residual_multiplier": 0.22},
}


def with_mapped_logits(family, seed=0, **kwargs):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": None, "initializer_range": 0.3}
    config = AutoConfig.for_model(
        family, **sizes | heads | ids | LOGIT_MAPS.get(family, {}) | kwargs
    )
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(rows=16, longest=5):
    texts = [
        " ".join(WORDS[(row + k) % len(WORDS)] for k in range(1 + row % longest))
        for row in range(rows)
    ]
    return Dataset.from_dict({"prompt": texts, "target": [row % 7 for row in range(rows)]})


# keys of mappings, as settings of their own, which tests combine
KEYS = {
    "critic_backprop": ("critic_kwargs", "backprop"),
    "critic_prompt": ("critic_kwargs", "prompt"),
    "value_warmup_steps": ("critic_kwargs", "warmup_steps"),
    "lam_critic": ("critic_kwargs", "lam"),
    "lam_length_alpha": ("critic_kwargs", "lam_length_alpha"),
    "bootstrap_truncated": ("critic_kwargs", "bootstrap_truncated"),
    "vllm_base_model": ("vllm_kwargs", "base_model"),
    "overlap_rollouts": ("vllm_kwargs", "overlap_rollouts"),
    "vllm_concurrency": ("vllm_kwargs", "concurrency"),
    "vllm_max_logp_difference": ("vllm_kwargs", "max_logp_difference"),
}


def nested(settings):
    """Settings of a config, with `KEYS` in their mappings."""
    result = {name: x for name, x in settings.items() if name not in KEYS}
    for name, x in settings.items():
        if name in KEYS and x is not None:
            mapping, key = KEYS[name]
            result[mapping] = (result.get(mapping) or {}) | {key: x}
    return result


def config(output_dir, **kwargs):
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_completion_length": 8,
        "per_device_train_batch_size": 4,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "kl_coef": 0.05,
        "adam_epsilon": 1e-5,  # a smaller one amplifies the rounding of small gradients
        "gradient_checkpointing": False,
    }
    return PPOConfig(str(output_dir), **nested(defaults | kwargs))


def run_with_a_card(args, base_model, adapter, rewards, history, peft_config):
    """What a model card reads of a trainer after three steps."""
    config = LlamaConfig(name_or_path=base_model)
    policy = SimpleNamespace(peft_config={"policy": peft_config}, get_base_model=llama)
    return SimpleNamespace(
        best_step=None,
        logs_before_best=0,
        args=args,
        actor_critic=SimpleNamespace(
            config=config,
            policy=policy,
            policy_adapter="policy",
            reference_adapter=None,
            value_head=SimpleNamespace(kind=args.critic),
        ),
        hub_model_id=adapter,
        reward_func_names=rewards,
        state=TrainerState(global_step=3, log_history=history),
        eval_dataset=None,
    )


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
