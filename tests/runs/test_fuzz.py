"""Any content of a config file or dataset is used, or refused by name."""

import dataclasses
import json
import math
import os
import re
import tempfile
from typing import get_type_hints

import datasets
import pytest
import yaml
from datasets import IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, WORDS, tokenizer
from transformers import TrainingArguments

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.checkpoints.files import run_settings
from trl_ppo_ext.commands.launch import parse
from trl_ppo_ext.data import PROMPT_IDS, PromptError, tokenize_prompts

fuzz = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def _environment():
    """A config writes variables for Accelerate; those of one example are not for the next test."""
    before = dict(os.environ)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    os.environ.clear()
    os.environ.update(before)


# ---- config files ----

# these start what belongs to the whole process: process groups, compilation, deterministic kernels
OF_THE_PROCESS = set(
    "fsdp fsdp_config deepspeed ddp_backend torch_compile torch_compile_backend "
    "torch_compile_mode full_determinism tf32 use_cpu parallelism_config local_rank".split()
)
FIELDS = sorted(
    field.name
    for field in dataclasses.fields(PPOConfig)
    if field.init and field.name not in OF_THE_PROCESS
)
PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none"}

numbers = [10**12, -(10**12), 2**64, 10**30, math.nan, math.inf, -math.inf, 1e308, 5e-324]
words = [
    "",
    " ",
    "none",
    "null",
    "nan",
    "1e-5",
    "0.5",
    "abc",
    "no",
    "steps",
    "{",
    "[",
    '{"a": 1}',
    "{'a': 1}",
]
odd_words = [
    "\x00",
    "é☃",
    "\u202egro",
    "\ud800",
    "../..",
    "/dev/null/x",
    "k1",
    "adapter",
    "raise",
    "x" * 5000,
]
scalars = st.one_of(
    st.sampled_from([None, True, False, *numbers]),
    st.integers(-3, 20),
    st.floats(-2, 2),
    st.sampled_from([*words, *odd_words]),
    st.text(max_size=8),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)


def read(text):
    """What `parse` makes of a config file: the config, or the error."""
    with tempfile.NamedTemporaryFile(
        "w", suffix=".yaml", encoding="utf-8", errors="surrogatepass"
    ) as file:
        file.write(text)
        file.flush()
        return parse("train", ["--config", file.name], "Train.")[1]


def refusal(given, capsys):
    """None if a config results, else the text of the error; any other exception fails the test."""
    capsys.readouterr()
    try:
        args = read(yaml.safe_dump(PLAIN | given))
    except ValueError as error:
        return str(error)
    except SystemExit as error:  # of the argument parser, which has said why
        assert error.code == 2
        return capsys.readouterr().err
    check_accepted(args)
    return None


def check_accepted(args):
    """A config that is valid once more, holds finite numbers, and can be saved in a checkpoint."""
    args.resolve_values()
    for field in dataclasses.fields(PPOConfig):
        value = getattr(args, field.name, None)
        assert not isinstance(value, float) or math.isfinite(value), field.name
    assert json.loads(json.dumps(run_settings(args))) == run_settings(args)


def names(text, given):
    plain = text.lower().replace("_", "").replace("-", "")
    return any(name.replace("_", "") in plain for name in given)


@settings(fuzz, max_examples=250)
@given(st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=3))
def test_config_file_gives_a_config_or_names_a_field(capsys, given):
    text = refusal(given, capsys)
    # argparse cannot even print an error that holds half a surrogate pair
    assert text is None or names(text, given) or "surrogates not allowed" in text, text


@pytest.mark.parametrize("value", [{"a": {"b": [None]}}, 2.5, True], ids=repr)
def test_fields_refuse_values_of_other_types_by_name(capsys, value):
    """One value at a time, so that the name must be that of the field."""
    own = {field.name for field in dataclasses.fields(PPOConfig)} - {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    accepted = set()
    for name in sorted(own):
        text = refusal({name: value}, capsys)
        accepted |= {name} if text is None else set()
        assert text is None or names(text, [name]), (name, text)
    hints = get_type_hints(PPOConfig)
    fitting = {
        "2.5": lambda hint: "float" in str(hint),
        "True": lambda hint: "bool" in str(hint),
        "{'a': {'b': [None]}}": lambda hint: "dict" in str(hint),
    }.get(repr(value), lambda hint: False)
    assert all(fitting(hints[name]) or name == "scale_rewards" for name in accepted), accepted


@pytest.mark.parametrize(
    "given, message",
    [
        ({"eval_strategy": False}, "`eval_strategy`.*False.*quote"),
        ({"learning_rate": [1e-4]}, "`learning_rate`.*a list"),
        ({"fp16": "maybe"}, "fp16"),
        ({"save_steps": None}, "`save_steps`.*None"),
        ({"seed": -1}, "`seed`"),
        ({"max_steps": 0}, "`max_steps`.*`num_train_epochs`"),
        ({"generation_kwargs": "temperature=1"}, "`generation_kwargs`.*mapping"),
        ({"deepspeed": "null"}, "`deepspeed`.*path"),
        ({"accelerator_config": 1}, "`accelerator_config`.*got 1"),  # a file descriptor!
        ({"fsdp_config": "nowhere.json"}, "`fsdp_config`.*mapping"),
        ({"lr_scheduler_type": "sine"}, "`lr_scheduler_type`.*'linear'.*'sine'"),
        ({"output_dir": "runs\0"}, "`output_dir`.*NUL"),
        ({"lora_r": "eight"}, "lora_r"),
        ({"dtype": "float8"}, "`dtype`.*'auto'"),
        ({1: 2}, "strings"),
        ({"learning_rat": 1}, "`learning_rat`.*did you mean `learning_rate`"),
        ({"env": [1]}, "`env`"),
    ],
    ids=repr,
)
def test_invalid_values_raise_with_the_needed_type(capsys, given, message):
    text = refusal(given, capsys)
    assert text is not None
    assert re.search(message, " ".join(text.split())), text


@settings(fuzz, max_examples=60)
@given(st.one_of(st.text(max_size=30), st.binary(max_size=20).map(lambda b: b.decode("latin-1"))))
def test_any_text_gives_a_config_or_a_value_error(capsys, text):
    try:
        check_accepted(read(text + "\nuse_cpu: true\nbf16: false\n"))
    except (ValueError, SystemExit):
        capsys.readouterr()


def test_invalid_config_creates_nothing(tmp_path, capsys):
    wanted = {"output_dir": str(tmp_path / "run"), "num_generations": 3, "generation_batch_size": 8}
    assert "num_generations=3" in refusal(wanted, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [["hf_verysecret"], {"a": "hf_verysecret"}, "hf_verysecret\0"])
def test_errors_do_not_show_tokens(capsys, value):
    for name in ("hub_token", "model_init_kwargs"):
        text = refusal({name: value}, capsys) or ""
        assert "verysecret" not in text


# ---- dataset rows ----

TEXT = tokenizer()
CHAT = tokenizer(chat_template=CHAT_TEMPLATE)
STRICT = tokenizer(
    chat_template=(
        "{{ raise_exception('roles must alternate') if messages|length > 1 else 'w1 w2' }}"
    )
)
odd = st.sampled_from(
    [
        "",
        " ",
        "<eos>",
        "w1 <eos> w2 <pad>",
        "\x00",
        "\x1b[31mred",
        "\ud800",
        "a\ud83d",
        "\u202ew1",
        "{{ 7 * 7 }}",
    ]
)
odder = st.sampled_from(
    ["{% raw %}", "\ufdfd", "\r\n\t", "w1\x85w2", "\U0001f469\u200d\U0001f467", "w1 " * 3000]
)
texts = st.one_of(odd, odder, st.text(max_size=10), st.sampled_from(WORDS))
roles = st.one_of(
    st.sampled_from(["user", "assistant", "system", "wizard", ""]), st.none(), st.integers(), texts
)
contents = st.one_of(
    texts, st.none(), st.integers(), st.lists(st.dictionaries(texts, texts, max_size=1), max_size=2)
)
messages = st.one_of(
    st.fixed_dictionaries({"role": roles, "content": contents}),
    st.fixed_dictionaries({"role": st.just("user"), "content": texts}),
    st.dictionaries(st.sampled_from(["role", "content", "name"]), contents, max_size=3),
    st.none(),
    texts,
)
odd_prompts = st.one_of(
    texts,
    st.lists(messages, max_size=3),
    st.none(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.lists(st.lists(texts, max_size=2), max_size=2),
    st.dictionaries(texts, texts, max_size=2),
)


ARGS = PPOConfig(use_cpu=True, max_completion_length=8)


def check_rows(rows, of):
    """Every row has its ids, or the first unusable one is named."""
    stream = IterableDataset.from_generator(lambda: iter(rows))
    done = []
    try:
        for row in tokenize_prompts(stream, of, "train_dataset", ARGS, chat_template_kwargs={}):
            done.append(row)
    except PromptError as error:
        bad = [
            index for index in range(len(rows)) if f"Row {index} of `train_dataset`" in str(error)
        ]
        assert len(str(error)) < 1500
        assert (
            len(bad) == 1 or 'needs a column "prompt"' in str(error) or "is empty" in str(error)
        ), str(error)
        if bad:
            return bad[0]
        return -1
    assert len(done) == len(rows)
    for row in done:
        assert row[PROMPT_IDS] and all(
            type(token) is int and 0 <= token < len(of) for token in row[PROMPT_IDS]
        )
    return None


@settings(fuzz, max_examples=300)
@given(st.lists(odd_prompts, min_size=1, max_size=4), st.sampled_from([TEXT, CHAT, STRICT]))
def test_rows_are_tokenized_or_refused_by_number(prompts, of):
    bad = check_rows([{"prompt": prompt} for prompt in prompts], of)
    alone = [check_rows([{"prompt": prompt}], of) for prompt in prompts]
    assert bad == next((index for index, refused in enumerate(alone) if refused is not None), None)


@pytest.mark.parametrize("missing", [{}, {"prompt": None}], ids=str)
def test_stream_with_missing_prompts_raises(missing):
    assert check_rows([{"prompt": "w1 w2"}, missing], TEXT) is not None
