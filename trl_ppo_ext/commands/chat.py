"""`trl-ppo chat`: the base and a trained adapter answer the same prompts, side by side."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from peft.utils import CONFIG_NAME
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..episodes.generator import stop_token_ids
from ..redaction import printable

NAMES = ("base", "adapter")
NEW = "/new"  # forgets the conversation
HINT = f"An empty line ends the chat, {NEW} begins another one."


class Voice:
    """One of the two that answer, with its own conversation."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        has_adapter: bool,
        chats: bool,
        seed: int = 0,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.has_adapter = has_adapter
        self.chats = chats
        self.seed = seed
        self.answers = 0
        self.messages = list[dict[str, str]]()

    def answer(self, text: str, sampling: dict[str, Any]) -> str:
        """Answer a message of the conversation, or continue the text."""
        if not self.chats:
            inputs = self.tokenizer(text, return_tensors="pt")
        else:
            self.messages.append({"role": "user", "content": text})
            inputs = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        inputs = inputs.to(self.model.device)
        # the same random numbers for both, and others for each answer
        set_seed(self.seed + self.answers)
        self.answers += 1
        with nullcontext() if self.has_adapter else self.model.disable_adapter():
            tokens = self.model.generate(**inputs, **sampling)
        completion = tokens[0, inputs["input_ids"].shape[1] :]
        answer = self.tokenizer.decode(completion, skip_special_tokens=True)
        if self.messages:
            self.messages.append({"role": "assistant", "content": answer})
        return answer


def load(run_dir: str, dtype: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load an adapter on its base, and its tokenizer, with PEFT and transformers only."""
    if Path(run_dir).exists() and not Path(run_dir, CONFIG_NAME).is_file():
        raise ValueError(
            f"`{run_dir}` must have an adapter ({CONFIG_NAME}); pass the `output_dir` of a run "
            "after `trainer.save_model()`, or one of its checkpoints."
        )
    logging.disable_progress_bar()
    model = AutoPeftModelForCausalLM.from_pretrained(run_dir, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(run_dir)
    # as in training: the stops of both, and no filter or penalty of the base's own config
    stops = stop_token_ids(tokenizer, model.generation_config)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    plain = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad)
    model.generation_config = model.get_base_model().generation_config = plain
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model, tokenizer


def lines(console: Console) -> Iterator[str]:
    """Messages that a person types, until an empty line or the end of the input."""
    console.print(HINT)
    while True:
        try:
            text = console.input("> ")
        except EOFError:
            return
        if not text.strip():
            return
        yield text


def side_by_side(answers: list[str]) -> Table:
    """The two answers, without control characters and markup."""
    table = Table(*NAMES, expand=True)
    table.add_row(*(Text(printable(answer)) for answer in answers))
    return table


def talk(options: argparse.Namespace) -> None:
    """Answer the prompts of the command line, or those that are typed."""
    if not all(text.strip() for text in options.prompt or []):
        raise ValueError("`--prompt` must have text; omit it to type your messages.")
    model, tokenizer = load(options.run_dir, options.dtype)
    sampling: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    if options.temperature > 0:
        # `generate` has a filter of its own, the 50 most probable tokens
        sampling |= {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    console = Console(file=sys.stdout)
    chats = tokenizer.chat_template is not None and not options.plain
    voices = [
        Voice(model, tokenizer, has_adapter=name == "adapter", chats=chats, seed=options.seed)
        for name in NAMES
    ]
    for text in options.prompt or lines(console):
        is_new = text.strip() == NEW
        # each prompt of the command line is a conversation of its own
        if is_new or options.prompt:
            for voice in voices:
                voice.messages.clear()
        if is_new:
            continue
        if options.prompt:
            console.print(Text(f"> {printable(text)}"))
        console.print(side_by_side([voice.answer(text, sampling) for voice in voices]))
