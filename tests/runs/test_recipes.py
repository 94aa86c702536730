"""Every template runs with the settings of its file, on tiny models and datasets with the schema
of the Hub's."""

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from http_rewards import serving
from scripted import call, player_of, rows_of
from tiny import CHAT_TEMPLATE, WORDS, byte_tokenizer, tokenizer
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trl_ppo_ext.arguments import as_list
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands import train
from trl_ppo_ext.commands.launch import build_trainer

RECIPES = Path(__file__).parents[2] / "recipes"
TEMPLATES = RECIPES / "templates"
ACCELERATE = sorted((RECIPES / "accelerate").glob("*.yaml"))
PRESETS = sorted((RECIPES.parent / "trl_ppo_ext" / "presets").glob("*.yaml"))
FILES = sorted(TEMPLATES.glob("*/*.yaml"))
IDS = [str(file.relative_to(TEMPLATES)) for file in FILES]
LONG = 128
TOKENS = {"vocab_size": 32, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": None}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GQA = (
    TOKENS
    | SHAPE
    | {"num_key_value_heads": 2, "max_position_embeddings": LONG, "initializer_range": 0.1}
)
BYTES = GQA | {"vocab_size": 259, "eos_token_id": 2, "max_position_embeddings": 4096}
NEOX = TOKENS | SHAPE | {"max_position_embeddings": LONG}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=LONG, **TOKENS))


def distilbert():
    sizes = {
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": LONG,
    }
    labels = {
        "id2label": {0: "NEGATIVE", 1: "POSITIVE"},
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
    }
    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=32, pad_token_id=0, **sizes, **labels)
    )


# by the id that stands in a recipe: the same architecture, tiny
MODELS = {
    "lvwerra/gpt2-imdb": gpt2,
    "lvwerra/distilbert-imdb": distilbert,
    "trl-lib/pythia-1b-deduped-tldr-sft": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)),
    "trl-lib/pythia-1b-deduped-tldr-rm": lambda: GPTNeoXForSequenceClassification(
        GPTNeoXConfig(num_labels=1, **NEOX)
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": lambda: Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=True, **GQA)
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": lambda: Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=True, **BYTES)
    ),
    "Qwen/Qwen2.5-7B-Instruct": lambda: Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=False, **GQA)
    ),
    "Skywork/Skywork-Reward-V2-Llama-3.1-8B": lambda: LlamaForSequenceClassification(
        LlamaConfig(num_labels=1, **GQA)
    ),
}
CHAT = ("Qwen/", "Skywork/")
# config (None: the only one), splits, and rows with the columns that the dataset has
DATASETS = {
    "stanfordnlp/imdb": (
        "plain_text",
        ("train", "test", "unsupervised"),
        lambda n: {"text": f"w{n} w{n + 1}<br /><br />I saw w3 of it .", "label": n % 2},
    ),
    "trl-lib/tldr": (
        None,
        ("train", "validation", "test"),
        lambda n: {
            "prompt": f"SUBREDDIT: r/w{n}\n\nTITLE: w{n}\n\nPOST: w1 w2\n\nTL;DR:",
            "completion": f" w{n}",
        },
    ),
    "openai/gsm8k": (
        "main",
        ("train", "test"),
        lambda n: {
            "question": f"w{n} has w{n + 1} w2 ?",
            "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}",
        },
    ),
    "rajpurkar/squad": (
        None,
        ("train", "validation"),
        lambda n: {
            "question": f"w{n} ?",
            "context": f"w{n} is w1.",
            "answers": {"text": ["w1"], "answer_start": [6]},
        },
    ),
    "trl-lib/ultrafeedback-prompt": (
        None,
        ("train", "test"),
        lambda n: {"prompt": [{"content": f"w{n} w{n + 1} ?", "role": "user"}]},
    ),
}


def save_dataset(folder, config, splits, row):
    """As on the Hub: a file for each split, and a card that says which is which."""
    files = []
    for split in splits:
        Dataset.from_list([row(n) for n in range(9)]).to_parquet(folder / f"{split}.parquet")
        files.append({"split": split, "path": f"{split}.parquet"})
    card = yaml.safe_dump({"configs": [{"config_name": config or "default", "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Models and datasets in folders named as on the Hub."""
    folder = tmp_path_factory.mktemp("hub")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        build().save_pretrained(folder / name)
        words = tokenizer(WORDS, CHAT_TEMPLATE if name.startswith(CHAT) else None)
        (byte_tokenizer("qwen2_5") if "1.5B" in name else words).save_pretrained(folder / name)
    for name, (config, splits, row) in DATASETS.items():
        (folder / name).mkdir(parents=True)
        save_dataset(folder / name, config, splits, row)
    return folder


def stand_ins(file, hub, output_dir, processes=1):
    """What is put in place of a recipe's own: models, dataset, lengths and batch sizes.

    All else is the file's.
    """
    given = yaml.safe_load(file.read_text())
    local = RECIPES.parent / given["dataset_name"]
    ours = {
        "model_name_or_path": hub / given["model_name_or_path"],
        "dataset_name": local if local.is_dir() else hub / given["dataset_name"],
        "output_dir": output_dir,
        "max_steps": 2,
        "eval_steps": 2,
        "eval_rows": 3,
        "logging_steps": 1,
        "max_completion_length": 6,
        "generation_batch_size": 8 * processes,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "use_cpu": "true",
        "disable_tqdm": "true",
    }
    assert Path(ours["model_name_or_path"]).is_dir() and Path(ours["dataset_name"]).is_dir()
    if given.get("reward_funcs") in MODELS:
        ours["reward_funcs"] = hub / given["reward_funcs"]
    return given, {name: str(value) for name, value in ours.items()}


def arguments(ours):
    return [part for name, value in ours.items() for part in (f"--{name}", value)]


@pytest.fixture
def made(monkeypatch):
    """What a run was built from, and its trainer."""
    seen = []

    def build(*given):
        seen.extend([*given[:3], build_trainer(*given)])
        return seen[-1]

    monkeypatch.setattr(train, "build_trainer", build)
    search_path = list(sys.path)
    yield seen
    sys.path[:] = search_path


@pytest.fixture(autouse=True)
def corpus(hub, monkeypatch):
    """The corpus of the search recipe."""
    monkeypatch.syspath_prepend(str(TEMPLATES / "search"))
    monkeypatch.setattr("search.CORPUS", str(hub / "rajpurkar/squad"))


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_recipe_runs_with_the_settings_of_its_file(file, hub, tmp_path, made):
    given, ours = stand_ins(file, hub, tmp_path / "run")
    assert cli.main(["train", "--config", str(file), *arguments(ours)]) == 0
    *parsed, trainer = made
    for name in given.keys() - ours.keys():
        (found,) = [getattr(each, name) for each in parsed if hasattr(each, name)]
        found = getattr(found, "value", found)
        assert found == (as_list(given[name]) if isinstance(found, list) else given[name]), name
    log = trainer.state.log_history
    assert trainer.state.global_step == 2 and trainer.state.num_input_tokens_seen > 0
    steps = [entry for entry in log if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2] and all(
        math.isfinite(entry["loss"]) for entry in steps
    )
    assert any("eval_reward" in entry for entry in log)
    # the first step is exact on every architecture
    assert log[0]["kl"] == 0 and log[0]["ratio/max"] == 1
    assert math.isfinite(log[0]["reward"])
    saved = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "checkpoint-2",
    } <= saved
    assert ("value_head.safetensors" in saved) == (
        given["critic"] != "none" if "critic" in given else True
    )
    check_quantised(given, trainer)


def check_quantised(given, trainer):
    base = trainer.actor_critic.policy.get_base_model()
    assert any(isinstance(module, Linear4bit) for module in base.modules()) == given.get(
        "load_in_4bit", False
    )
    for reward in trainer.reward_funcs:
        if isinstance(reward, torch.nn.Module):
            quantised = any(isinstance(module, Linear4bit) for module in reward.modules())
            assert quantised == (given["reward_quantization"] == "nf4")


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_recipe_has_a_dry_run(file, hub, tmp_path, made, capsys):
    _, ours = stand_ins(file, hub, tmp_path / "run")
    assert cli.main(["train", "--config", str(file), *arguments(ours), "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "2 optimizer steps" in said and "The first prompt" in said and not made
    # sizes of GPT-2 and GPT-NeoX are not known to the estimate, which says so
    assert ("not estimated" in said) == any(part in str(file) for part in ("sentiment", "tldr"))
    assert not (tmp_path / "run" / "adapter_config.json").exists()


def test_tldr_has_the_settings_of_n_plus():
    given = yaml.safe_load((TEMPLATES / "tldr" / "ppo.yaml").read_text())
    paper = yaml.safe_load((PRESETS[0].parent / "n_plus.yaml").read_text())
    assert {name: given[name] for name in paper} == paper


def test_tables_tell_templates_from_recipes_that_were_run():
    """A template says first that its full size was never run, and what to check before it is."""
    page = (RECIPES / "README.md").read_text()
    links = re.findall(r"^\| \[\w+\]\((\S+)\) ", page, re.MULTILINE)
    listed = {link.removeprefix("templates/").split("/")[0] for link in links}
    assert listed == {file.parent.name for file in RECIPES.glob("**/README.md")} - {"recipes"} | {
        "notebook"
    }
    for link in links:
        text = (RECIPES / link).read_text()
        second_paragraph = text.split("\n\n")[1:2]
        is_template = second_paragraph == ["**A template:** its full size was never run."]
        assert is_template == link.startswith("templates/"), link
        assert is_template == ("not measured at full size" in text), link
        if is_template:
            section = text.split("\n## Check first\n")[1].split("\n## ")[0]
            assert 3 <= len(re.findall(r"^- ", section, re.MULTILINE)) <= 6, link


def test_gsm8k_rewards_parse_answers(monkeypatch):
    monkeypatch.syspath_prepend(str(TEMPLATES / "gsm8k"))
    from gsm8k_task import answered, correct, number

    assert [
        number(text) for text in ("#### 1,234", "#### -2.5", "####$7", "72", "#### 1 #### 3 .")
    ] == [
        1234.0,
        -2.5,
        7.0,
        None,
        3.0,
    ]
    same = ("#### **18**", "#### `18`", "#### $18.00.", "#### 18 eggs", "#### 18 - that is all")
    assert {number(text) for text in same} == {18.0}
    assert {number(text) for text in ("#### -$5", "#### $-5", "#### \u22125")} == {-5.0}
    terms = ("#### 12 - 5 = 7", "#### 1/2", "#### 3:00", "#### 1e3", "#### 2 * 3")
    no_digit_at_the_start = ("#### - 5", "#### $")
    assert {number(text) for text in (*terms, *no_digit_at_the_start)} == {None}
    said = [
        [{"role": "assistant", "content": text}] for text in ("so #### 4", "so 4", "so #### 5", "")
    ]
    assert correct(completions=said, answer=["2+2=<<2+2=4>>4\n#### 4"] * 4, prompts=[]) == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert correct(completions=said[1:2], answer=["nothing"]) == [0.0]
    assert answered(completions=said) == [1.0, 0.0, 1.0, 0.0]


# ---- tools and environments ----


def test_calculator_evaluates_arithmetic_and_nothing_else(monkeypatch):
    monkeypatch.syspath_prepend(str(TEMPLATES / "calculator"))
    from calculator import calculate, correct

    expressions = {
        "(3 + 4) * 2.5": "17.5",
        "0.1 + 0.2": "0.3",
        " -7 // 2 % 3 ": "2",
        "123456 * 1000": "123456000",
    }
    assert {text: calculate(text) for text in expressions} == expressions
    assert calculate(12) == "12"  # JSON of the policy may have a number
    for text in (
        "__import__('os').getcwd()",
        "2 ** 9",
        "'a' * 9",
        "True + 1",
        "[1][0]",
        "x",
        "1j",
        "1 if 1 else 2",
    ):
        with pytest.raises(ValueError, match="only numbers"):
            calculate(text)
    for text in ("1 +", "1 / 0", "1" * 201):
        with pytest.raises((SyntaxError, ArithmeticError, ValueError)):
            calculate(text)
    said = [
        [{"content": "#### 4"}, {"content": text}] for text in ("so #### 4", "so 4", "#### 5", "")
    ]
    assert correct(completions=said, answer=["2+2=<<2+2=4>>4\n#### 4"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_wordle_marks_letters_and_rewards_each_guess(monkeypatch):
    monkeypatch.syspath_prepend(str(TEMPLATES / "wordle"))
    from wordle import Wordle, marks

    assert marks("crane", "crane") == "GGGGG"
    assert marks("eerie", "there") == "Y-Y-G" and marks("llama", "hello") == "YY---"
    game = Wordle()
    game.reset({"secret": "crane"}, seed=0)
    assert game.step("<guess>Crown</guess>") == ("c r o w n\nG G - - Y", 0.2, False)
    # places are paid once
    assert game.step("<guess>crown</guess> <guess>crimp</guess>")[1:] == (0.0, False)
    assert game.step("crane")[1:] == (-0.1, False)
    assert game.step("<guess> crane </guess>")[1:] == (1.0, True)
    game.reset({"secret": "crane"}, seed=0)
    assert [game.step("")[2] for _ in range(6)] == [False] * 5 + [True]
    words = {
        split: (TEMPLATES / "wordle" / "words" / f"{split}.csv").read_text().split()[1:]
        for split in ("train", "test")
    }
    assert all(re.fullmatch("[a-z]{5}", word) for split in words.values() for word in split)
    assert not set(words["train"]) & set(words["test"])


PASSAGES = [
    "Lima is the capital of Peru.",
    "The capital of Chad is N'Djamena.",
    "A capital is a city of a country.",
]


def test_search_ranks_passages_and_rewards_turns(monkeypatch):
    import search

    index = search.BM25(PASSAGES)
    assert index.top("Capital of Peru", 1) == PASSAGES[:1] and index.top("nothing known", 2) == []
    monkeypatch.setattr(search, "index", lambda: index)
    monkeypatch.setattr(search, "PASSAGES", 1)
    find = call("search", query="Peru")
    right = call("answer", text="the lima!")
    turns = {"Chad": [find, call("answer", text="Lima")], "Peru": [find, find, right, "too late"]}
    answers = [{"text": ["N'Djamena"]}, {"text": ["Lima"]}]
    rows = [
        search.to_prompt({"question": f"The capital of {name}?"}) | {"answers": x}
        for name, x in zip(turns, answers)
    ]
    chad, peru = player_of(turns, rows, factory=search.Search).play(rows, [7, 7])
    assert [reward for _, reward in peru.rewards] == [0.2, 0.0, 1.0] and peru.messages[1][
        "content"
    ] == PASSAGES[0]
    assert [reward for _, reward in chad.rewards] == [0.0, 0.0] and peru.turns == 3


def test_search_pays_one_answer_and_ends_after_the_last_search(monkeypatch):
    import search

    monkeypatch.setattr(search, "index", lambda: search.BM25(PASSAGES))
    find = call("search", query="Peru")
    guesses = [call("answer", text=text) for text in ("Chad", "Lima")]
    turns = {
        "guess": ["\n".join(guesses)],
        "late": [find] * search.SEARCHES + guesses[1:],
        "search on": [find] * (search.SEARCHES + 1) + guesses[1:],
        "year": [call("answer", text=1990)],
        "letter": [call("answer", text="")],
    }
    texts = ["Lima", "Lima", "Lima", "1990", "A"]
    rows = rows_of(*turns, answers=[{"text": [text]} for text in texts])
    episodes = player_of(turns, rows, factory=search.Search).play(rows, [7] * len(rows))
    totals = [sum(reward for _, reward in episode.rewards) for episode in episodes]
    assert totals == pytest.approx([0.0, 1.2, 0.2, 1.0, 0.0])


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(RECIPES)])
    import offline

    return offline


@pytest.mark.parametrize("name", ["calculator", "wordle", "search"])
def test_offline_twin_samples_turns_from_beginning_to_end(name, offline, tmp_path):
    twin = offline.build(name, str(tmp_path), max_steps=2, num_mini_batches=1, num_ppo_epochs=2)
    twin.train()
    logs = twin.state.log_history[0]
    assert logs["ratio/max"] == 1 and logs["episodes/turns"] > 1
    assert name == "wordle" or (
        logs["tools/call_frequency"] > 0 and logs["tools/failure_frequency"] == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "wordle", "search"])
def test_offline_twin_learns_what_its_readme_says(name, offline, tmp_path):
    twin = offline.build(name, str(tmp_path))
    twin.train()
    text = (TEMPLATES / name / "README.md").read_text()
    first, last = map(float, re.search(r"from ([\d.-]+)\s+to ([\d.]+\d)", text).groups())
    rewards = [entry["reward"] for entry in twin.state.log_history if "reward" in entry]
    assert rewards[0] == pytest.approx(first, abs=0.15) and rewards[-1] > last - 0.2


QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
}
QWEN_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
QWEN_1_5B = QWEN_7B | {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
QWEN_1_5B |= {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN_0_5B = QWEN_1_5B | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
QWEN_0_5B |= {"num_attention_heads": 14}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_labels": 1}


@pytest.mark.parametrize(
    "file, shape",
    [
        ("calculator/ppo", QWEN_1_5B),
        ("wordle/ppo", QWEN_1_5B),
        ("search/ppo", QWEN_1_5B),
        ("gsm8k/critic", QWEN_0_5B),
        ("gsm8k/grpo", QWEN_0_5B),
        ("chat_qlora_24gb/ppo", QWEN_7B),
    ],
)
def test_recipe_for_24_gb_needs_what_its_readme_says(file, shape, tmp_path, capsys):
    """With the real models' shapes: nothing of theirs is needed but their configs."""
    Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path / "policy")
    LlamaConfig(**LLAMA_8B, architectures=["LlamaForSequenceClassification"]).save_pretrained(
        tmp_path / "reward"
    )
    config = TEMPLATES / f"{file}.yaml"
    page = " ".join((config.parent / "README.md").read_text().split())
    stated, prompt_length = re.search(
        r"[Aa]bout (\d+) GiB[^.]* prompts of ([\d,]+) tokens", page
    ).groups()
    command = [
        "estimate",
        "--config",
        str(config),
        "--model_name_or_path",
        str(tmp_path / "policy"),
    ]
    if shape is QWEN_7B:
        command += ["--reward_funcs", str(tmp_path / "reward")]
    assert (
        cli.main([*command, "--memory", "24", "--prompt_length", prompt_length.replace(",", "")])
        == 0
    )
    shown = capsys.readouterr().out
    assert "fits in" in shown
    assert float(re.search(r"([\d.]+) GiB with context", shown)[1]) == pytest.approx(
        float(stated), rel=0.1
    )


# ---- how processes are started ----


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda file: file.stem)
def test_accelerate_config_is_read_by_accelerate(file):
    config = load_config_from_file(str(file))
    kind = {"ddp": "MULTI_GPU", "multi_node": "MULTI_GPU", "cpu_2_processes": "MULTI_GPU"}.get(
        file.stem, "NO"
    )
    kind = {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}.get(file.stem, kind)
    assert config.distributed_type.value == kind
    assert config.fsdp_config.get("fsdp_version") == (2 if file.stem == "fsdp2" else None)
    assert config.use_cpu == file.stem.startswith("cpu")
    assert config.deepspeed_config.get("zero_stage") == {"zero2": 2, "zero3": 3}.get(file.stem)
    assert config.num_machines == (2 if file.stem == "multi_node" else 1)


def start(config, options, told, **variables):
    """What a README says, with what makes it run on CPUs."""
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [*launcher, str(RECIPES / "ppo.py"), *told]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def finish(process):
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said[-6000:]
    return said


TWO = ["--num_processes", "2", "--mixed_precision", "no"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options", [("cpu_2_processes", []), ("zero2", TWO), ("zero3", TWO), ("fsdp2", TWO)]
)
def test_two_processes_launch_as_in_the_readme(hub, tmp_path, name, options):
    file = TEMPLATES / "chat_multi_gpu" / "ppo.yaml"
    _, ours = stand_ins(file, hub, tmp_path / "run", processes=2)
    with contextlib.ExitStack() as stack:
        variables = {}
        if name in ("zero3", "fsdp2"):
            _, port = stack.enter_context(serving())
            variables["REWARD_SERVER"] = f"http://127.0.0.1:{port}/ok/recipe/classify"
            variables["REWARD_MODEL"] = str(ours["reward_funcs"])
            ours["reward_funcs"] = "served_reward.reward"
        told = ["--config", str(file), *arguments(ours)]
        assert "Saved in" in finish(
            start(RECIPES / "accelerate" / f"{name}.yaml", options, told, **variables)
        )
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    settings = json.loads((tmp_path / "run" / "ppo_state.json").read_text())["settings"]
    assert settings["num_processes"] == 2
    assert settings["zero_stage"] == {"zero2": 2, "zero3": 3}.get(name)
    assert settings["fsdp_version"] == (2 if name == "fsdp2" else None)
