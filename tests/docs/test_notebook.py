"""The notebook runs from its first cell to its last, and what it trains works."""

import json

import pytest
from pages import ROOT

NOTEBOOK = ROOT / "recipes" / "notebook" / "first_run.ipynb"


@pytest.mark.slow
def test_notebook_runs_and_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(
                compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"),
                namespace,
            )
    logs = namespace["logs"]
    assert logs[-1]["reward"] > logs[0]["reward"] + 0.3
    assert (tmp_path / "runs" / "notebook" / "ppo" / "report.html").is_file()
    assert "after:" in capsys.readouterr().out


def test_notebook_shows_outputs_of_every_run_cell():
    """On GitHub, nobody runs it."""
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert any(
        "image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]
    )
