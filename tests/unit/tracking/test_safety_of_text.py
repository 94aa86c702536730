"""No secret gets out, and what a model or a name says is shown and not obeyed; errors keep their
causes."""

import ast
import io
import logging
import os
import re
import traceback

import pytest
import torch
import yaml
from http_rewards import RemoteReward
from peft import LoraConfig
from rich.console import Console
from runs_of_tiny import trainer
from tiny import config, length_reward, prompts, run_with_a_card

from trl_ppo_ext import Judge, PPOConfig, PPOTrainer, distributed, redaction
from trl_ppo_ext.checkpoints.hub import BASE_COPY, model_card
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands.launch import parse
from trl_ppo_ext.commands.probe import ProbeConfig
from trl_ppo_ext.data import PromptError, encode
from trl_ppo_ext.episodes import Episode
from trl_ppo_ext.ppo.rollouts import Samples, TokenScores
from trl_ppo_ext.redaction import without_secrets
from trl_ppo_ext.rewards import (
    FunctionReward,
    RewardError,
    Scored,
    ScoringBatch,
    read_scores,
    score_all,
)
from trl_ppo_ext.tracking.completions import (
    LONGEST,
    MOST_TURNS,
    completions_table,
    limited,
    limited_turns,
    print_completions,
)
from trl_ppo_ext.tracking.report import write_report

SECRET = "hf_aVerySecretToken1234"


# ---- secrets ----


def test_a_config_shows_no_token_however_it_is_written_down(tmp_path):
    for of in (PPOConfig, ProbeConfig):
        given = {"hub_token": SECRET, "model_init_kwargs": {"token": SECRET, "revision": "main"}}
        args = of(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **given)
        for shown in (
            repr(args),
            str(args),
            args.to_dict(),
            args.to_json_string(),
            args.to_sanitized_dict(),
        ):
            assert SECRET not in str(shown) and "main" in str(shown)
        assert args.hub_token == SECRET and args.model_init_kwargs["token"] == SECRET
        assert repr(args).startswith(f"{of.__name__}(")


NAMES = (
    "token hf_token accessToken HF_TOKEN api_key apiKey X-Api-Key ssh_key aws_secret_access_key "
    "AWS_SESSION_TOKEN access_key secret-key secret_value clientSecret db_passwd pwd jwt"
).split()
SHAPES = dict.fromkeys(NAMES, "k1") | {  # as they are given in `model_init_kwargs`
    "password": 11111,
    "passphrase": b"k1",
    "auth": ("user", "k1"),
    "basicAuth": ["user", "k1"],
    "api_tokens": ["k1"],
    "apikey": {"of": [b"k1"]},
    "credentials": {"user": "k1", "of": {"k1"}},
    "cookies": {"session": "k1"},
    "Set-Cookie": "a=k1",
    "headers": {"X-Custom": "k1", "X-Number": 11111},
    "extra_headers": [["X-Custom", "k1"]],
    "pairs": [("Authorization", "k1")],
    "proxies": {"https": "http://user:k1@proxy:3128"},
    "proxy": "http://user:p/k1@x@proxy:3128",
    "git": "git+https://k1@host/repo",
    "url": "https://host/file?a=1&X-Amz-Signature=k1&b=2",
    "sas": "https://host/file?sig=k1",
    "link": "https://host/file#access_token=k1",
    "connection": "Host=x;AccountKey=k1;Name=y",
    "arguments": ["--token=k1", "--password='k1'"],
    "json": '{"api_key": "k1", "n": 2}',
}
FORMS = [
    "hf_abcdefghijklmnopqrk1",
    "sk-abcdefghijklmnopqrk1",
    "ghp_abcdefghijklmnopqrk1",
    "AKIAABCDEFGHIJKLMNk1",
]


@pytest.mark.parametrize("deep", [False, True])
def test_secrets_of_every_shape_are_masked(deep):
    forms = {f"plain{number}": form for number, form in enumerate([*FORMS, "Bearer abcdefk1"])}
    for name, value in (SHAPES | forms).items():
        if deep:
            settings = {"a": [{"b": ({name: value},)}]}
        else:
            settings = {name: value}
        hidden = str(without_secrets(settings))
        assert "k1" not in hidden and "11111" not in hidden and name in hidden, (name, hidden)


def test_values_in_errors_are_short_and_no_secrets():
    for value in ("k1", b"k1", {"user": "k1"}):
        assert "k1" not in redaction.shown("apikey", value)
    assert (
        "k1" in redaction.shown("hotkey", "k1") and len(redaction.shown("name", "k" * 1000)) < 100
    )


def test_settings_without_secrets_are_unchanged():
    names = (
        "pad_token eos_token bos_token_id stop_token revision tokens key_size keys max_new_tokens "
        "hotkey secretary"
    )
    plain = dict.fromkeys([*names.split(), "X-Request-Id"], "k1") | {
        "use_auth_token": True,
        "hub_token": None,
    }
    plain |= {
        "url": "https://host:80/a?b=c",
        "at": "me@host",
        "n": 3,
        "path": "/a/sk-1/b@c",
        "size": (1, 2),
    }
    plain |= {"dtype": torch.float32, "tokenizers": {"token_ids": [1]}}
    assert without_secrets(plain) == plain


def test_errors_escape_control_characters_and_mask_secrets(capsys, monkeypatch):
    def fails(**_):
        raise OSError("\x1b]0;title\x07 at http://user:hunter2@proxy:80")

    scores = read_scores("r", OSError("\x1b[31mred at http://user:hunter2@proxy:80"), [1])
    assert r"\x1b[31mred at http://***@proxy:80" in str(scores.failures[0])
    monkeypatch.setattr("trl_ppo_ext.tracking.report.write_report", lambda *given: fails())
    assert cli.main(["report", "x"]) == 2
    error = capsys.readouterr().err
    assert r"\x1b]0;title\x07 at http" in error and error.strip().isprintable()


# ---- length ----


@pytest.mark.parametrize(
    "prompt", ["w1 " * 10**5, [{"role": "user", "content": "w1 " * 10**5}] * 9]
)
def test_error_about_a_prompt_is_short_for_any_prompt(prompt):
    """And for any message of the template."""

    def fails(*args, **kwargs):
        raise ValueError("no\n" * 10**5)

    class Failing(list):
        chat_template = "{{ x }}"
        __hash__ = object.__hash__
        __call__ = fails
        apply_chat_template = fails

    with pytest.raises(PromptError, match="no\n") as caught:
        encode(prompt, Failing(), {})
    assert 300 < len(str(caught.value)) < 900


def test_the_error_of_a_process_reaches_the_others_shortened(monkeypatch):
    told = []
    monkeypatch.setattr(
        distributed,
        "gather_object",
        lambda given: told.extend(given) or [*given, "OSError: no room"],
    )
    with pytest.raises(OSError, match=r"^x+$"):
        distributed.on_every_rank(lambda: (_ for _ in ()).throw(OSError("x" * 10**6)), OSError)
    assert told[0].startswith("OSError: xxx") and len(told[0]) < 600
    with pytest.raises(distributed.OtherRankError, match="on rank 1: OSError: no room"):
        distributed.on_every_rank(lambda: 1, OSError)


def test_a_run_writes_prints_and_logs_no_secret(base, tmp_path, monkeypatch, caplog, capfd):
    """Two servers that fail, a proxy, and tokens for Hub and model: nothing of it in any file,
    log or output."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "run" / "logs"))
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    password = SECRET[3:]  # of no known form
    once = {"api_key_env": "JUDGE_KEY", "timeout": 2.0, "max_retries": 0}
    judge = Judge("http://127.0.0.1:9/v1", "m", "{completion}", **once)
    remote = RemoteReward("http://127.0.0.1:9", base, name="remote", **once)
    args = config(
        tmp_path / "run",
        hub_token=SECRET,
        model_init_kwargs={
            "token": SECRET,
            "proxies": {"https": f"http://user:{password}@proxy:3128"},
        },
        report_to="tensorboard",
        log_completions=True,
        reward_on_error="skip",
        max_reward_failures=1.0,
        save_strategy="steps",
        save_steps=2,
        max_steps=2,
    )
    built = PPOTrainer(base, [length_reward, judge, remote], args, prompts())
    built.train()
    built.save_model()
    built.create_model_card(tags=["mine"])
    write_report(tmp_path / "run", tmp_path / "run" / "report.html")
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 10 and "proxies" in (tmp_path / "run" / "run_log.jsonl").read_text()
    assert not [file for file in files if password.encode() in file.read_bytes()]
    output = capfd.readouterr()
    for shown in (
        caplog.text,
        output.out,
        output.err,
        built.state.log_history,
        repr(args),
        repr(judge),
        repr(remote),
    ):
        assert password not in str(shown)
    with pytest.raises(RewardError) as caught:
        PPOTrainer(base, [judge], config(tmp_path / "other"), prompts()).train()
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)


def test_errors_of_the_command_line_do_not_repeat_a_token(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    for wrong in (
        {"hub_token": [SECRET]},
        {"model_init_kwargs": [{"token": SECRET}]},
        {"model_init_kwargs": SECRET},
    ):
        file.write_text(yaml.safe_dump({"use_cpu": True, "bf16": False} | wrong))
        with pytest.raises(ValueError) as caught:
            parse("train", ["--config", str(file)], "Train.")
        assert SECRET not in str(caught.value) and next(iter(wrong)) in str(caught.value)


# ---- model cards ----

HOSTILE = [
    "a|b`c`",
    "x\n---\nlicense: evil\n---\n# Owned",
    "<script>alert(1)</script>",
    "[click](https://evil.example) ![x](https://evil.example/x.png)",
    "\x1b[31mred\x07\u202e",
    '"); import os; os.system("touch owned")  # ',
    "{{ 7 * 7 }}{% for x in y %}",
]


def card(tmp_path, text, **settings):
    args = config(tmp_path, **settings)
    lora = LoraConfig(r=4, target_modules=text)
    history = [{f"rewards/{text}/mean": 1.0, "reward": 2.0}]
    metadata = {"tags": [text], "model_name": text, "license": text}
    return str(
        model_card(
            run_with_a_card(args, text, text, [text], history, lora), str(tmp_path), **metadata
        )
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_a_model_card_holds_names_and_obeys_none(tmp_path, text):
    plain = card(tmp_path, "plain").splitlines()
    hostile = card(tmp_path, text).splitlines()
    front = hostile.index("---", 1)
    metadata = yaml.safe_load("\n".join(hostile[1:front]))
    assert metadata["license"] == text and text in metadata["tags"]
    body = hostile[front + 1 :]
    expected = plain[plain.index("---", 1) + 1 :]
    assert len(body) == len(expected)  # no line more, and each is what it was
    for line, like in zip(body, expected):
        assert all(c.isprintable() for c in line)
        if line.startswith(("base =", "adapter =")):  # of the code, see below
            continue
        cells = re.findall(r"(?<!\\)\|", line)
        assert len(cells) == like.count("|") and line[:2] == like[:2]
        prose = re.sub(r"`[^`]*`", "", line)
        assert "<script" not in prose and not re.search(r"(?<!\\)\]\(https?://evil", prose)
        assert prose.count("`") == re.sub(r"`[^`]*`", "", like).count("`")
    assert "49" not in "\n".join(body) or "{{" not in text
    code = "\n".join(body).split("```python\n")[1].split("```")[0]
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    # what is no id on the Hub may be a path, of which no more than the folder is named
    assert strings == [BASE_COPY, os.path.basename(os.path.normpath(text))]


# ---- the table of completions ----


@pytest.fixture
def table(monkeypatch):
    """Prints the table of one completion."""

    def printed(text, names=("reward",), extra=None, encoding="utf-8", messages=()):
        yes = torch.ones(1, dtype=torch.bool)
        scores = torch.ones(1, len(names))
        at_tokens = torch.ones(1, 1)
        unpaid = torch.zeros(1)
        scored = Scored(
            scores, at_tokens, yes[:, None], yes, yes, unpaid, is_whole=yes, foresight={}
        )
        episode = Episode(
            text, [1], completion_ids=[1], starts=[0], messages=list(messages), completion=text
        )
        batch = ScoringBatch([text], [list(messages) or text], [[1]], episodes=[episode])
        samples = Samples(
            None,
            None,
            batch,
            scored,
            torch.zeros(1, 0),
            extra or {},
            TokenScores(torch.zeros(1, 1)),
            None,
            None,
        )
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        console = Console(file=stream, width=200, force_terminal=False)
        monkeypatch.setattr("trl_ppo_ext.tracking.completions.Console", lambda: console)
        print_completions(completions_table(samples, list(names), [], 7), 7, 1)
        stream.flush()
        return stream.buffer.getvalue().decode(encoding)

    return printed


@pytest.mark.parametrize(
    "text, seen",
    [
        ("[red]x[/red] [/]", "[red]x[/red] [/]"),
        ("[link=https://evil.example]x[/link]", "[link=https://evil.example]x[/link]"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07\x9b2J\r\x08", r"\x1b]0;title\x07\x9b2J\r\x08"),
        ("a\x00b\x7f", r"a\x00b\x7f"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("half \ud800", r"half \ud800"),
        ("snow ☃ 日本 \u200d", "snow ☃ 日本 \u200d"),
        (":smile: **bold** `code` <b>", ":smile: **bold** `code` <b>"),
    ],
    ids=ascii,
)
def test_what_a_model_wrote_is_shown_and_not_obeyed(table, text, seen):
    """As a prompt, a completion, a message, a column's name and its value, and the name of a
    reward."""
    for shown in (
        table(text),
        table([{"role": "user", "content": text}]),
        table("w1", names=[text]),
        table("w1", extra={text: [text]}),
        table("w1", messages=[{"role": "tool", "content": text}]),
    ):
        assert seen in shown
        assert all(c.isprintable() or c in "\n\u200d" for c in shown), ascii(shown)


def test_a_terminal_that_knows_ascii_alone_gets_codes(table):
    assert r"snow \u2603 \U0001f600" in table("snow ☃ 😀", encoding="ascii")


def test_messages_without_content_and_very_long_text_are_shown(table):
    assert "assistant:" in table([{"role": "assistant", "tool_calls": []}])
    assert limited("x" * (LONGEST + 123), LONGEST) == "x" * LONGEST + "... (123 more characters)"
    assert len(table("x" * 10**6)) < 10 * LONGEST
    assert (
        len(table("w1", messages=[{"role": "tool", "content": "x" * 10**4}] * 999)) < 10 * LONGEST
    )


def test_long_episodes_keep_short_turns_and_both_ends():
    turns = [{"role": "tool", "text": "x" * (5 if n % 2 else 900)} for n in range(6)]
    texts = [turn["text"] for turn in limited_turns(turns, 300)]
    assert texts == ["x" * 95 + "... (805 more characters)", "x" * 5] * 3
    assert limited_turns(turns, 2715) == turns
    many = [{"role": "tool", "text": str(n)} for n in range(999)]
    texts = [turn["text"] for turn in limited_turns(many, 10**4)]
    assert len(texts) == MOST_TURNS + 1 and (texts[0], texts[-1]) == ("0", "998")
    assert texts[MOST_TURNS // 2] == f"({999 - MOST_TURNS} turns omitted)"


# ---- exceptions of rewards ----


def test_exception_in_a_reward_keeps_its_cause_on_every_path(tmp_path):
    def fails(**_):
        return 1 / 0

    async def fails_later(**_):
        raise KeyError("later")

    batch = ScoringBatch(prompts=["a"] * 4, completions=["b"] * 4, completion_ids=[[1]] * 4)
    for function, cause in ((fails, ZeroDivisionError), (fails_later, KeyError)):
        for on_error in ("raise", "skip"):
            with pytest.raises(RewardError, match=function.__name__) as caught:
                score_all(
                    [FunctionReward(function)],
                    batch,
                    None,
                    on_error,
                    0.5,
                    lambda x: x,
                    torch.device("cpu"),
                )
            chain = []
            error = caught.value
            while error is not None:
                chain.append(type(error))
                error = error.__cause__
            assert chain[-1] is cause and len(chain) >= 2
        with pytest.raises(RewardError) as caught:
            trainer(tmp_path, reward_funcs=function).train()
        assert (
            isinstance(caught.value.__cause__, cause)
            and caught.value.__cause__.__traceback__ is not None
        )
