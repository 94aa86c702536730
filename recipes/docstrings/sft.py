"""Stage 1: a tokenizer and a Llama of about a million parameters, both trained from scratch on the docstrings."""

import os

from accelerate import PartialState
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

OPENING = '\n    """'
VOCABULARY = 2048
MAX_LENGTH = 96


def to_prompt(signature: str) -> str:
    """Turn a signature into a prompt."""
    return signature + OPENING


def train_tokenizer(corpus: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer on signatures and docstrings.

    The opening quotes are one token that merges with nothing, so that the tokens of a prompt always open
    the tokens of prompt and completion.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,  # one more for the opening
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row[key] for row in corpus for key in ("signature", "docstring")), trainer)
    tokenizer.add_tokens([AddedToken(OPENING, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=256
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train_sft(corpus: list[dict[str, str]], output_dir: str | os.PathLike) -> None:
    """
    Train the supervised model and save it with its tokenizer.

    Args:
        corpus (`list[dict[str, str]]`):
            Training rows with the keys `signature` and `docstring`.
        output_dir (`str` or `os.PathLike`):
            Directory to save to.
    """
    state = PartialState()
    if state.is_main_process and not os.path.exists(os.path.join(output_dir, "tokenizer.json")):
        train_tokenizer(corpus).save_pretrained(output_dir)
    state.wait_for_everyone()
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    set_seed(0)
    rows = [{"prompt": to_prompt(row["signature"]), "completion": row["docstring"]} for row in corpus]
    args = SFTConfig(
        output_dir=str(output_dir),
        num_train_epochs=1.5,
        per_device_train_batch_size=max(32 // PartialState().num_processes, 1),  # 32 in all
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.01,
        max_length=MAX_LENGTH,
        # the loss covers the signature too: the corpus is small, and signatures use the same words
        completion_only_loss=False,
        train_sampling_strategy="group_by_length",
        bf16=False,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=200,  # an interrupted stage resumes from here
        save_total_limit=1,
        logging_steps=200,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=new_model(tokenizer), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))
    trainer.save_model()
