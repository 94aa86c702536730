"""The report reads every kind of log, draws every metric, and shows what a model wrote as text
only."""

import json
import random
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser

import pytest
from test_run_log import run as tiny_run

from trl_ppo_ext.tracking.reading import RUN_LOG, read_run
from trl_ppo_ext.tracking.report import (
    MOST_SHEETS,
    NOT_DRAWN,
    before_and_after,
    write_report,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCRIPT = (
    "</script><script>document.title = 'owned'</script><img src=x "
    "onerror=\"document.title='owned'\"><!-- "
)
# what a run of any kind logs, so that a report has all its plots
LOGGED = (
    "loss grad_norm learning_rate reward reward_std objective rewards/a/mean rewards/a/std "
    "rewards/b/mean rewards/b/std monitor/judge/mean monitor/judge/gap kl kl_per_completion "
    "kl_coef entropy completions/mean_length completions/min_length completions/max_length "
    "completions/clipped_ratio completions/mean_terminated_length completions/repeated_ratio "
    "reward/length_correlation loss/policy loss/value ratio/mean ratio/max "
    "value/explained_variance value/clip_ratio value/grad_norm approx_kl stopped_early "
    "clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean time/generate time/score "
    "time/forward time/update tokens_per_second"
).split()


def begin(step=0, **kwargs):
    names = {
        "model": "base",
        "rewards": ["a", "b"],
        "monitors": ["judge"],
        "max_steps": 1000,
        "changed": [],
    }
    names |= {
        "plan": {"optimizer_steps": 1, "completions": 8},
        "trainer_config": {},
        "environment": {},
    }
    return {"kind": "run", "time": 1.0, "step": step, "config": {"kl_coef": 0.05}} | names | kwargs


def metrics(step, **values):
    return {"kind": "metrics", "time": 2.0, "step": step, "metrics": values}


def completions(step, rows, mode="train"):
    return {"kind": "completions", "time": 2.0, "step": step, "mode": mode, "rows": rows}


def turn(role, text, reward=None, value=None, advantage=None):
    return {"role": role, "text": text, "reward": reward, "value": value, "advantage": advantage}


def row(completion="yes", prompt="why", score=0.5):
    scores = {
        "score": score,
        "rewards": {"a": 1.0, "b": 0.0},
        "monitors": {"judge": None},
        "kl": 0.1,
    }
    return scores | {
        "prompt": prompt,
        "turns": [turn("", completion, score)],
        "tokens": 3,
        "ended": True,
        "extra": {},
    }


def write(directory, *entries, tail=""):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RUN_LOG).write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)
    return directory


def long_run(directory, steps=1000, **kwargs):
    """A run with every metric at every step, and as many completions as a run writes, all of the
    longest."""
    draw = random.Random(0)
    entries = [begin(max_steps=steps, **kwargs)]
    for step in range(1, steps + 1):
        entries.append(metrics(step, **{name: draw.gauss(1, 1) for name in LOGGED}))
    for step in range(1, steps + 1, max(steps // 60, 1)):
        text = "".join(draw.choices("abcdefgh <>&'", k=2_000))
        entries.append(completions(step, [row(text, prompt=text)] * 16))
    return write(directory, *entries)


# ---- reading ----


def test_cut_lines_are_skipped(tmp_path):
    """By a run that was killed while it wrote, or that is writing now."""
    run = write(tmp_path / "run", begin(), metrics(1, reward=1.0), tail='{"cut": \n')
    with open(run / RUN_LOG, "a") as file:
        file.write(
            json.dumps(metrics(2, reward=2.0)) + "\n" + json.dumps(metrics(3, reward=3.0))[:-9]
        )
    assert read_run(run).curves["reward"].values.tolist() == [1.0, 2.0]


def test_steps_after_a_resume_replace_earlier_ones(tmp_path):
    first = [metrics(step, reward=float(step), loss=0.0) for step in range(1, 9)]
    again = [metrics(step, reward=10.0 * step) for step in range(6, 8)]
    sheets_before = [completions(5, [row("kept")]), completions(8, [row("gone")])]
    read = read_run(write(tmp_path / "run", begin(), *first, *sheets_before, begin(5), *again))
    assert read.curves["reward"].to_dict() == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 60, 7: 70}
    # what lay after the resume is gone altogether
    assert read.curves["loss"].index.tolist() == [1, 2, 3, 4, 5]
    assert [sheet.rows[0]["turns"][0]["text"] for sheet in read.sheets] == ["kept"]
    assert read.resumed_at == [5]


def test_new_run_replaces_an_earlier_one_in_its_directory(tmp_path):
    old = [begin(), metrics(1, reward=1.0), metrics(9, reward=9.0), completions(9, [row()])]
    read = read_run(
        write(tmp_path / "run", *old, begin(config={"kl_coef": 1.0}), metrics(1, reward=5.0))
    )
    assert (
        read.curves["reward"].values.tolist() == [5.0] and not read.sheets and not read.resumed_at
    )
    assert read.start["config"] == {"kl_coef": 1.0}


def test_empty_directory_raises_an_error_with_the_remedy(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="output_dir"):
            read_run(place)


# ---- the page ----


class Tags(HTMLParser):
    """All tags of a page, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.scripts = []
        self.text = []
        self.inside = None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text.append(data)


def page_of(directory, output):
    return write_report(directory, output).read_text()


def test_page_of_a_long_run_is_small_and_needs_no_network(tmp_path):
    output = write_report(long_run(tmp_path / "run"), tmp_path / "new" / "there.html")
    assert output.stat().st_size < 5e6
    parsed = Tags(output.read_text())
    assert not {"link", "iframe", "img", "object", "base"} & {tag for tag, _ in parsed.tags}
    assert not [
        attrs
        for _, attrs in parsed.tags
        if "src" in attrs or not attrs.get("href", "#").startswith("#")
    ]
    (policy,) = [attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none';")
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


def test_every_metric_is_drawn(tmp_path):
    own = {"my_metric": 1.0, "eval_reward": 2.0, "eval_other_reward": 2.0, "rewards/a/failed": 0.0}
    read = read_run(
        write(tmp_path / "run", begin(), metrics(1, **dict.fromkeys(LOGGED, 1.0), **own))
    )
    shown = "".join(Tags(page_of(tmp_path / "run", tmp_path / "report.html")).text)
    assert not [name for name in read.curves if NOT_DRAWN.fullmatch(name)]
    assert {name for name in read.curves if name not in shown} == {"rewards/a/failed"}


def test_html_and_scripts_in_logs_show_as_text(tmp_path):
    name = f"judge{SCRIPT}"
    entries = [
        begin(model=SCRIPT, config={"note": {"x": SCRIPT}, SCRIPT: 1}),
        metrics(1, **{f"monitor/{name}/mean": 1.0, SCRIPT: 1}),
    ]
    rows = [row(SCRIPT, prompt=SCRIPT) | {"monitors": {name: 1.0}, "extra": {SCRIPT: SCRIPT}}]
    place = write(
        tmp_path / "<img src=x onerror=alert(1)>",
        *entries,
        metrics(2, reward=1.0),
        completions(1, rows),
    )
    honest = write(tmp_path / "run", begin(), metrics(1, reward=1.0), completions(1, [row()]))
    parsed = Tags(page_of(place, tmp_path / "report.html"))
    plain = Tags(page_of(honest, tmp_path / "plain.html"))
    assert len(parsed.scripts) == len(plain.scripts)
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert not [attrs for _, attrs in parsed.tags if any(key.startswith("on") for key in attrs)]
    for text in (
        SCRIPT,
        f"{SCRIPT}: {SCRIPT}",
        f"monitored {name} ",
        place.name,
        f"{{'x': {SCRIPT!r}}}",
    ):
        assert text in "".join(parsed.text)


def test_turns_of_episodes_show_apart_with_their_numbers(tmp_path):
    turns = [
        turn("assistant", "left", 0.0, 0.75, 0.25),
        turn("tool", SCRIPT),
        turn("assistant", "right", 1.0, -0.5, 0.125),
    ]
    hostile = [turn(SCRIPT, SCRIPT)]
    rows = [row() | {"turns": turns}, row() | {"turns": hostile}, row("alone")]
    place = write(tmp_path / "run", begin(), metrics(1, reward=1.0), completions(1, rows))
    text = page_of(place, tmp_path / "report.html")
    parsed = Tags(text)
    assert "img" not in {tag for tag, _ in parsed.tags} and len(parsed.scripts) == len(
        Tags(text.replace(SCRIPT, "")).scripts
    )
    heads = re.findall(r'<div class="scores turn">(.*?)</div>', text, re.DOTALL)
    shown = [" ".join(re.sub("<[^>]*>", " ", head).split()) for head in heads]
    assert shown[:3] == [
        "assistant reward 0 value 0.75 advantage 0.25",
        "tool",
        "assistant reward 1 value -0.5 advantage 0.125",
    ]
    assert len(shown) == 4  # the last row is no episode
    meters = [attrs for tag, attrs in parsed.tags if tag == "meter"]
    assert meters == [{"min": "-0.5", "max": "0.75", "value": value} for value in ("0.75", "-0.5")]
    assert [parsed.text.count(word) for word in ("left", "right", SCRIPT, "alone")] == [1, 1, 3, 1]


def test_completions_are_of_the_first_and_the_last_step(tmp_path):
    sheets = [completions(step, [row()]) for step in range(1, 61)]
    page = page_of(write(tmp_path / "run", begin(), *sheets), tmp_path / "report.html")
    steps = [int(step) for step in re.findall(r"<summary>step (\d+)</summary>", page)]
    assert (steps[0], steps[-1], len(steps)) == (
        1,
        60,
        MOST_SHEETS,
    ) and "Nothing is logged yet" in page


def test_completions_of_equal_prompts_are_side_by_side(tmp_path):
    def sheet(step, prompts, mode="train"):
        rows = [row(f"{prompt} at {step} ({mode})", prompt) for prompt in prompts]
        return completions(step, rows, mode)

    sheets = [sheet(1, "abc"), sheet(5, "bcd"), sheet(9, "cbd")]
    place = write(tmp_path / "run", begin(), *sheets)
    pairs = before_and_after(read_run(place).sheets)
    assert [[x.row["turns"][0]["text"] for x in pair] for pair in pairs] == [
        ["c at 1 (train)", "c at 9 (train)"],
        ["b at 1 (train)", "b at 9 (train)"],
    ]
    # those of two evaluations say more than those of training
    write(tmp_path / "run", begin(), *sheets, sheet(2, "xy", "eval"), sheet(8, "yz", "eval"))
    (pair,) = before_and_after(read_run(place).sheets)
    assert [x.row["turns"][0]["text"] for x in pair] == ["y at 2 (eval)", "y at 8 (eval)"]
    page = page_of(place, tmp_path / "report.html")
    assert page.count('<div class="pair">') == 1
    # of prompts that were cut, nobody knows whether they are the same
    cut = [f"{'a' * 20}... (100 more characters)"]
    assert (
        before_and_after(read_run(write(place, begin(), sheet(1, cut), sheet(5, cut))).sheets) == []
    )
    write(tmp_path / "run", begin(), *sheets)
    assert before_and_after([]) == before_and_after(read_run(place).sheets[:1]) == []


def test_header_says_whether_a_run_goes_on_stopped_or_ended_with_its_best(tmp_path):
    place = tmp_path / "run"

    def header(*entries):
        write(place, begin(max_steps=20), metrics(16, reward=1.0), *entries)
        return "".join(Tags(page_of(place, tmp_path / "report.html")).text)

    end = {"kind": "end", "time": 3.0, "step": 16}
    best = {"kind": "best", "time": 3.0, "step": 4}
    assert "step 16 of 20 so far, written" in header()
    assert "step 16 of 20, stopped early, written" in header(end)
    text = header(best, end)
    assert "stopped early, with the weights of step 4, its best checkpoint, written" in text
    # a run that was resumed goes on
    assert "step 16 of 20 so far, resumed" in header(end, begin(16, max_steps=20)).replace(
        ", written 1970-01-01 00:00 UTC", ""
    )


def test_page_begins_with_a_verdict_and_groups_consequences(tmp_path):
    """They are listed below their cause."""
    for logs, values, kind, expected in (
        (2, {}, "early", "Too early to judge: 2 of at least 10 rollouts, 2 of at least 5 logs."),
        (
            2,
            {"skipped_steps": 1.0},
            "problem",
            "Non-finite gradients. The reward has too few logs.",
        ),
        (12, {}, "good", "The reward rises from 1 to 11.5."),
        (
            12,
            {"reward": 0.0, "reward_std": 0.0, "entropy": 2.0},
            "problem",
            "All completions get the same reward. The",
        ),
    ):
        logged = [metrics(step, **{"reward": float(step)} | values) for step in range(1, logs + 1)]
        page = page_of(write(tmp_path / "run", begin(), *logged), tmp_path / "report.html")
        (verdict,) = re.findall(r'<p class="advice (\w+)"><b>(.*?)</b></p>', page)
        assert verdict[0] == kind and verdict[1].startswith(expected), verdict
        assert page.count('<article class="advice problem">') == (kind == "problem")
    assert re.findall(r"<li>(.*?) \(<code>reward</code> at 0\)", page) == [
        "The policy hardly changes",
        "The reward does not rise",
    ]


def test_page_shows_the_runs_size_and_marks_changed_settings(tmp_path):
    plan = {"optimizer_steps": 4, "completions": 128}
    entries = [
        metrics(step, num_tokens=1e3 * step) | {"time": 2.0 + 100 * step} for step in (1, 10)
    ]
    config = {"config": {"kl_coef": 0.05, "gamma": 1.0}, "changed": ["gamma"]}
    again = [
        begin(8, plan=plan, time=5_000.0, **config),
        metrics(12, num_tokens=12_345.0) | {"time": 5_100.0},
    ]
    place = write(tmp_path / "run", begin(plan=plan), *entries, *again)
    page = page_of(place, tmp_path / "report.html")
    text = "".join(Tags(page).text)
    # without the pause, and step 10
    assert "3 rollouts, 384 completions, 12,300 tokens in 0:03:21" in text
    assert re.findall(r'<tr class="changed"><th scope="row">(.*?)</th>', page) == ["gamma"]


def test_report_of_a_real_run_has_its_parts(tmp_path):
    tiny_run(tmp_path / "run", max_steps=2, eval_strategy="steps", eval_steps=2)
    page = page_of(tmp_path / "run", tmp_path / "report.html")
    shown = "".join(Tags(page).text)
    for text in (
        "step 2 of 2",
        "1 rollouts, 8 completions, ",
        "monitor/parity/mean",
        "eval_reward",
        "packages",
    ):
        assert text in shown
    assert re.findall(r"<summary>(step .*)</summary>", page) == ["step 1", "step 2, evaluation"]


# ---- in a browser ----

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# it stays open as long as it can be debugged
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --v=0 "
    "--remote-debugging-port=0"
).split()
# what is there when all plots are, which takes as long as the machine needs
FACTS = """<script nonce="{nonce}">
const facts = () => ({
  states: plots.map((plot) => plot.dataset.state || "waiting"),
  title: document.title,
  cards: document.querySelectorAll(".card").length,
  images: document.querySelectorAll("img[src=x]").length,
  text: document.body.textContent.includes("<img src=x onerror="),
});
const asked = setInterval(() => {
  const now = facts();
  if (now.states.some((state) => state === "waiting" || state === "drawing")) return;
  clearInterval(asked);
  console.log("facts: " + JSON.stringify(now));
}, 100);
</script></body>"""


def opened(page, profile, width, height):
    """What a browser has after it drew the page, and what else it said on the console."""
    nonce = re.search(r'<script nonce="([^"]+)"', page.read_text())[1]
    asking = page.with_suffix(".asking.html")
    asking.write_text(page.read_text().replace("</body>", FACTS.replace("{nonce}", nonce)))
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    browser = subprocess.Popen([*command, asking.as_uri()], stderr=subprocess.PIPE, text=True)
    end = threading.Timer(240, browser.kill)
    end.start()
    said = []
    try:
        for line in browser.stderr:
            if answer := re.search(r'"facts: (\{.*\})", source: ', line):
                return json.loads(answer[1]), said
            # the first is of Bokeh when it starts; the second no error but a notice, of sizes that
            # settle a frame later
            if "CONSOLE" in line and not re.search("log level|ResizeObserver loop", line):
                said.append(line)
    finally:
        end.cancel()
        browser.kill()
        browser.communicate()
    pytest.fail(f"The browser ended before it drew the page. It said: {said}")


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(BROWSERS)}")
@pytest.mark.parametrize(
    ("width", "height"), [pytest.param(390, 4_000, marks=pytest.mark.slow), (1280, 9_000)]
)
def test_browser_draws_all_plots_without_foreign_scripts(tmp_path, width, height):
    """And without errors."""
    place = long_run(tmp_path / "run", steps=40)
    with open(place / RUN_LOG, "a") as file:
        file.write(json.dumps(metrics(40, **{f"monitor/{SCRIPT}/mean": 1.0})) + "\n")
        file.write(json.dumps(completions(40, [row(SCRIPT, prompt=SCRIPT)])) + "\n")
    output = write_report(place, tmp_path / "report.html")
    number = output.read_text().count("data-plot=")
    facts, said = opened(output, tmp_path / "profile", width, height)
    assert said == []
    # also those that are not in view, for a print
    assert number > 20 and facts["states"] == ["drawn"] * number
    assert facts["cards"] > 0 and facts["text"]
    assert facts["images"] == 0 and facts["title"] != "owned"
