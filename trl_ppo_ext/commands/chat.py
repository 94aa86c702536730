"""`trl-ppo chat`: the base and a trained adapter answer the same prompts, side by side."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, PeftConfig
from peft.utils import CONFIG_NAME
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import has_file, logging

from ..arguments import tokenizer_name
from ..data import encode, row_template_kwargs
from ..episodes.generator import stop_token_ids
from ..modeling.adapters import STATE, read_state
from ..modeling.loading import auto_class
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
        template_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.has_adapter = has_adapter
        self.chats = chats
        self.seed = seed
        self.template_kwargs = template_kwargs or {}
        self.answers = 0
        self.messages = list[dict[str, str]]()

    def answer(self, text: str, sampling: dict[str, Any]) -> str:
        """Answer a message of the conversation, or continue the text."""
        # a prompt is encoded as in training
        if self.chats:
            self.messages.append({"role": "user", "content": text})
            ids = encode(self.messages, self.tokenizer, self.template_kwargs)
        else:
            ids = encode(text, self.tokenizer, {})
        prompt = torch.tensor([ids], device=self.model.device)
        # the same random numbers for both, and others for each answer
        set_seed(self.seed + self.answers)
        self.answers += 1
        with nullcontext() if self.has_adapter else self.model.disable_adapter():
            tokens = self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                tokenizer=self.tokenizer,  # which finds stop strings
                **sampling,
            )
        completion = tokens[0, len(ids) :]
        answer = self.tokenizer.decode(completion, skip_special_tokens=True)
        if self.messages:
            self.messages.append({"role": "assistant", "content": answer})
        return answer


def load(
    run_dir: str, dtype: str, trust_remote_code: bool = False
) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
    """Load an adapter on its base and its tokenizer, with PEFT and transformers only, and the
    training's arguments of the chat template."""
    if Path(run_dir).exists() and not Path(run_dir, CONFIG_NAME).is_file():
        raise ValueError(
            f"`{run_dir}` must have an adapter ({CONFIG_NAME}); pass the `output_dir` of a run "
            "after `trainer.save_model()`, or one of its checkpoints."
        )
    logging.disable_progress_bar()
    trusted = {"trust_remote_code": trust_remote_code}
    peft_config = PeftConfig.from_pretrained(run_dir)
    base = peft_config.base_model_name_or_path
    base_config = AutoConfig.from_pretrained(base, revision=peft_config.revision, **trusted)

    class OfBase(AutoPeftModelForCausalLM):
        _target_class = auto_class(base_config)  # some have images, too

    model = OfBase.from_pretrained(run_dir, dtype=dtype, **trusted).eval()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name(base, run_dir), **trusted)
    # an adapter of another trainer has no state
    state = read_state(run_dir) if has_file(run_dir, STATE) else {}
    settings = state.get("settings", {})
    # as in training: its stops and those of both, and no filter or penalty of the base's own config
    stops = stop_token_ids(
        tokenizer,
        model.generation_config,
        vocab_size=model.config.get_text_config().vocab_size,
        others=settings.get("stop_token_ids"),
    )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    plain = GenerationConfig(
        eos_token_id=stops or None,
        pad_token_id=pad,
        stop_strings=settings.get("stop_strings"),
    )
    model.generation_config = model.get_base_model().generation_config = plain
    if torch.cuda.is_available():
        model = model.to("cuda")
    # an earlier version did not save them
    return model, tokenizer, state.get("chat_template_kwargs") or {}


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
    if options.temperature < 0:
        raise ValueError(
            f"`--temperature` must be at least 0, which is greedy, got {options.temperature:g}."
        )
    model, tokenizer, template_kwargs = load(
        options.run_dir, options.dtype, options.trust_remote_code
    )
    template_kwargs = row_template_kwargs(
        {"chat_template_kwargs": options.chat_template_kwargs}, template_kwargs
    )
    sampling: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    if options.temperature > 0:
        # `generate` has a filter of its own, the 50 most probable tokens
        sampling |= {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    console = Console(file=sys.stdout)
    has_template = tokenizer.chat_template is not None or "chat_template" in template_kwargs
    chats = has_template and not options.plain
    if options.chat_template_kwargs and not chats:
        raise ValueError(
            "`--chat_template_kwargs` needs a chat template, got "
            f"{'`--plain`' if options.plain else 'a tokenizer without one'}; remove it."
        )
    voices = [
        Voice(
            model,
            tokenizer,
            has_adapter=name == "adapter",
            chats=chats,
            seed=options.seed,
            template_kwargs=template_kwargs,
        )
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
