"""Episodes whose turns a script writes in place of a policy."""

import json
from types import SimpleNamespace

import torch
from tiny import WORDS, byte_tokenizer

from trl_ppo_ext.config import CriticOptions, PPOConfig
from trl_ppo_ext.data import PROMPT_IDS
from trl_ppo_ext.episodes import Environments, Generator
from trl_ppo_ext.episodes.play import EnvironmentPlayer


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def fails() -> str:
    """Fail."""
    raise RuntimeError("no luck")


class Script(Generator):
    """Generator that writes, for each question, one text after another."""

    stop_token_ids = frozenset({2})

    def __init__(self, tokenizer, turns, end="<|im_end|>"):
        self.tokenizer = tokenizer
        self.turns = turns
        self.end = end
        self.calls = []  # rows and budgets of each call

    def generate(self, prompts, rooms=None):
        rooms = rooms or [1000] * len(prompts)
        self.calls.append((len(prompts), list(rooms)))
        written = []
        for ids, room in zip(prompts, rooms):
            text = self.tokenizer.decode(ids)
            turns = next(turns for question, turns in self.turns.items() if question in text)
            reply = turns[min(text.count("<|im_start|>assistant") - 1, len(turns) - 1)]
            written.append(self.tokenizer(reply + self.end)["input_ids"][:room])
        return written

    def has_stopped(self, completion):
        return completion[-1] in self.stop_token_ids


class Echo:
    """Plain environment that repeats the last word, and rewards even ones; three turns make an
    episode."""

    def reset(self, row, seed):
        self.turns = 0
        self.seed = seed
        return f" {WORDS[seed % 8]}"

    def step(self, text):
        self.turns += 1
        if text.split():
            word = text.split()[-1]
        else:
            word = "w0"
        return f" {word} w1", float(int(word.removeprefix("w")) % 2 == 0), self.turns == 3


def write_turns(run, turns):
    """Let a script write the turns of a trainer in place of its policy."""
    run.components.player.generator = Script(run.processing_class, turns)


def rows_of(*questions, **columns):
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    return [
        row | {name: x[number] for name, x in columns.items()} for number, row in enumerate(rows)
    ]


def player_of(turns, rows, tools=None, factory=None, end="<|im_end|>", **settings):
    """A player with a script, and rows with the ids of their prompts."""
    environments = Environments(tools, factory)
    tokenizer = byte_tokenizer()
    args = {
        "max_completion_length": 1000,
        "max_prompt_length": None,
        "overlong_prompts": "error",
        "max_tool_calling_iterations": None,
        "critic": "side",
        "critic_options": CriticOptions(),
        "reference_prompt": None,
        "device": torch.device("cpu"),
        "output_dir": "",
        "process_index": 0,
        "save_strategy": "no",
    }
    args = SimpleNamespace(**args | settings)
    timeout = settings.get("environment_timeout")
    args.other_prompts = PPOConfig.other_prompts.fget(args)
    _, kwargs = environments.prepare(rows, tokenizer, None, 1, timeout)
    for row in rows:
        encoded = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True, **kwargs
        )
        row[PROMPT_IDS] = encoded["input_ids"]
    return EnvironmentPlayer(Script(tokenizer, turns, end), environments, args, None)
