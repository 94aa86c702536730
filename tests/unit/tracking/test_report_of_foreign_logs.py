"""The report of a damaged or foreign log is a sentence, and never a traceback."""

import json

import pytest
from test_report import begin, completions, metrics, row, write

from trl_ppo_ext.commands.main import main
from trl_ppo_ext.tracking.reading import RUN_LOG

GOOD = [begin(), metrics(1, reward=1.0), completions(1, [row()])]


def without(entry, name):
    return {key: x for key, x in entry.items() if key != name}


FOREIGN = {
    "start without a plan": [without(begin(), "plan"), *GOOD[1:]],
    "start without a config": [without(begin(), "config"), *GOOD[1:]],
    "start without a step": [*GOOD, without(begin(), "step")],
    "start of a step that is text": [*GOOD, begin("3")],
    "plan that is a list": [begin(plan=[1]), *GOOD[1:]],
    "plan with no steps": [begin(plan={"optimizer_steps": 0, "completions": 8}), *GOOD[1:]],
    "metrics without a step": [GOOD[0], without(GOOD[1], "step"), metrics(2, reward=1.0)],
    "metrics of another form": [
        GOOD[0],
        {"kind": "metrics", "time": 2.0, "step": 1, "metrics": [1.0]},
    ],
    "a number beyond floats": [GOOD[0], metrics(1, reward=10**400)],
    "metrics without a time": [*GOOD, without(GOOD[1], "time")],
    "time that is text": [*GOOD, GOOD[1] | {"time": "noon"}],
    "completions without rows": [*GOOD[:2], without(GOOD[2], "rows")],
    "rows that are text": [*GOOD[:2], completions(1, "rows")],
    "a row without turns": [*GOOD[:2], completions(1, [without(row(), "turns")])],
    "a row of another form": [*GOOD[:2], completions(1, [{"text": "yes"}])],
    "a score that is text": [*GOOD[:2], completions(1, [row(score="high")])],
}


def report(directory, capsys):
    status = main(["report", str(directory)])
    return status, capsys.readouterr().err


@pytest.mark.parametrize("form", FOREIGN)
def test_log_of_another_form_is_named_in_a_sentence(tmp_path, capsys, form):
    status, printed = report(write(tmp_path, *FOREIGN[form]), capsys)
    assert status == 2 and printed.count("\n") == 1
    assert f"{RUN_LOG}` must be the log of a run of this package" in printed and printed.endswith(
        "of another run.\n"
    )
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 99, b"\xff\xfe\n", b"[1]\n", b"1\n", b"null\n", b"{}\n", b"[" * 99_999]
)
def test_file_without_a_start_is_named(tmp_path, capsys, content):
    (tmp_path / RUN_LOG).write_bytes(content + b"\n")
    status, printed = report(tmp_path, capsys)
    assert (
        status == 2 and f"must have a non-empty {RUN_LOG}" in printed and printed.count("\n") == 1
    )


@pytest.mark.parametrize(
    "line", ["null", "[1]", "7", '"text"', "{}", '{"step": 3}', '{"kind": "run", "st', "[" * 99_999]
)
def test_damaged_line_is_skipped(tmp_path, capsys, line):
    write(tmp_path, *GOOD)
    with open(tmp_path / RUN_LOG, "a") as file:
        file.write(f"{line}\n{json.dumps(metrics(2, reward=5.0))}\n")
    assert report(tmp_path, capsys)[0] == 0
