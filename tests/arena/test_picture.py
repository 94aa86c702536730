"""Learning curves of benchmarks/picture.py."""

import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from picture import COLUMNS, HEIGHT, WIDTH, Curve, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_has_a_point_per_rollout_and_a_panel_per_task():
    panels = {"token": [Curve("PPO", "#000000", [0.0, 0.5, 1.0])], "chain": [Curve("PPO", "#000000", [0.5])]}
    root = ElementTree.fromstring(picture(panels, rollout=256))
    first, second = (line.get("points").split() for line in root.findall(f"{SVG}polyline"))
    assert (len(first), len(second)) == (3, 1)
    assert first[-1] == f"{WIDTH - 10:.1f},30.0"  # the optimum, at the end of the run
    assert second[0].endswith(",165.0")  # half of it
    texts = [x.text for x in root.findall(f"{SVG}text")]
    assert texts.count("PPO") == 1 and "768" in texts and "token" in texts


def test_more_panels_than_columns_have_rows():
    panels = {f"task {n}": [Curve("PPO", "#000000", [1.0])] for n in range(COLUMNS + 1)}
    root = ElementTree.fromstring(picture(panels, rollout=256))
    assert root.get("viewBox") == f"0 0 {WIDTH * COLUMNS + 200} {2 * HEIGHT}"
    first, *_, last = (line.get("points") for line in root.findall(f"{SVG}polyline"))
    assert (first, last) == (f"{WIDTH - 10:.1f},30.0", f"{WIDTH - 10:.1f},{HEIGHT + 30:.1f}")
