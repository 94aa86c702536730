"""Draw docs/roles.svg and docs/data_flow.svg from the tables below: `python docs/diagram.py`."""

from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
TRAINED = "#fde3c8"
FROZEN = "#dbe7f5"
PLAIN = "#ffffff"
STEP = "#f1f1ee"
INK = "#1c1c1c"
LINE = "#5a5a5a"
# each color on dark pages
DARK = {
    TRAINED: "#5c4021",
    FROZEN: "#223a54",
    PLAIN: "#16181c",
    STEP: "#26292e",
    INK: "#e3e5e9",
    LINE: "#9aa0a8",
}


class Box(NamedTuple):
    """A box; the first line of `text` is its title."""

    x: int
    y: int
    width: int
    height: int
    fill: str
    text: str
    dashed: bool = False

    def svg(self) -> str:
        """The box with its text in the middle."""
        title, *lines = self.text.split("\n")
        if self.dashed:
            dash = ' stroke-dasharray="5 4"'
        else:
            dash = ""
        middle = self.x + self.width / 2
        top = self.y + self.height / 2 - 9 * len(lines) + 5
        return "\n".join(
            [
                f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" '
                f'rx="6" fill="{self.fill}" stroke="{LINE}"{dash}/>',
                text(middle, top, title, weight="bold"),
                *(
                    text(middle, top + 18 * n, line, size=13)
                    for n, line in enumerate(lines, start=1)
                ),
            ]
        )


def text(
    x: float, y: float, content: str, size: int = 15, weight: str = "normal", anchor: str = "middle"
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}">'
        f"{escape(content)}</text>"
    )


def arrow(*points: tuple[int, int], dashed: bool = False) -> str:
    """A line through the points, with a head at the last one."""
    path = " ".join(f"{x},{y}" for x, y in points)
    if dashed:
        dash = ' stroke-dasharray="5 4"'
    else:
        dash = ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6"{dash} '
        'marker-end="url(#head)"/>'
    )


def style() -> str:
    """Colors for readers of dark pages."""
    fills = [f'[fill="{light}"] {{ fill: {dark} }}' for light, dark in DARK.items()]
    strokes = f'[stroke="{LINE}"] {{ stroke: {DARK[LINE]} }}'
    rules = " ".join([*fills, strokes])
    return f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def picture(height: int, title: str, parts: list[str]) -> str:
    """An SVG 800 pixels wide, on white, or nearly black on dark pages."""
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto">'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" width="800" '
            f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" '
            'role="img">',
            f"<title>{escape(title)}</title>",
            style(),
            f'<defs>{head}<path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker></defs>',
            f'<rect width="800" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def roles() -> str:
    """Four roles on one frozen base."""
    base = Box(
        20,
        268,
        760,
        62,
        FROZEN,
        "One frozen base model, loaded once\nbf16 or NF4; no gradients, no optimizer state",
    )
    outputs = ["log-probs of the reference", "completions, log-probs", "values", "scores"]
    names = ["Reference", "Policy", "Critic", "Reward"]
    layers = [
        Box(20, 152, 172, 76, PLAIN, "adapter off", dashed=True),
        Box(216, 152, 172, 76, TRAINED, "LoRA adapter"),
        Box(
            412,
            152,
            172,
            76,
            TRAINED,
            "side network\nor head, on the policy's\nstates; or own adapter",
        ),
        Box(608, 152, 172, 76, FROZEN, "LoRA adapter\nand score head"),
    ]
    parts = [base.svg()]
    for box, name, output in zip(layers, names, outputs):
        middle = box.x + box.width // 2
        parts += [
            text(middle, 36, name, size=18, weight="bold"),
            text(middle, 92, output, size=14),
            box.svg(),
        ]
        parts += [arrow((middle, 152), (middle, 104))]
        if name != "Critic":
            parts += [arrow((middle, 268), (middle, 228))]
    parts += [arrow((388, 190), (412, 190)), arrow((498, 268), (498, 228), dashed=True)]
    parts += [
        f'<rect x="20" y="352" width="16" height="16" fill="{TRAINED}" stroke="{LINE}"/>',
        text(44, 365, "trained", size=13, anchor="start"),
        f'<rect x="116" y="352" width="16" height="16" fill="{FROZEN}" stroke="{LINE}"/>',
        text(140, 365, "frozen", size=13, anchor="start"),
        text(
            780,
            365,
            "The reward may also be a function, a 4-bit classifier, a judge or a server.",
            13,
            anchor="end",
        ),
    ]
    return picture(384, "Reference, policy, critic and reward on one frozen base model", parts)


def data_flow() -> str:
    """One iteration of PPO."""
    prompts = Box(20, 24, 140, 62, PLAIN, "Prompts\ntext or chat")
    generate = Box(216, 24, 240, 62, STEP, "1. Generate\nthe policy samples completions")
    completions = Box(512, 24, 224, 62, PLAIN, "Completions\ntoken ids, never re-encoded")
    forward = Box(
        216,
        140,
        240,
        96,
        STEP,
        "3. Forward, no gradients\npolicy: log-probs\ncritic: values\nreference: log-probs",
    )
    score = Box(
        512, 140, 224, 96, STEP, "2. Score\nfunctions, reward models,\nadapters, judges, servers"
    )
    rewards = Box(512, 282, 224, 62, STEP, "4. Token rewards\nscore − kl_coef × KL")
    advantages = Box(216, 282, 240, 62, STEP, "5. Advantages and returns\nGAE, or a group baseline")
    update = Box(
        216,
        390,
        520,
        80,
        TRAINED,
        "6. Update the adapter and the critic\nclipped policy loss + vf_coef × value loss\n"
        "num_ppo_epochs × num_mini_batches optimizer steps",
    )
    parts = [
        box.svg()
        for box in (prompts, generate, completions, forward, score, rewards, advantages, update)
    ]
    parts += [
        arrow((160, 55), (216, 55)),
        arrow((456, 55), (512, 55)),
        arrow((624, 86), (624, 140)),
        arrow((560, 86), (560, 113), (336, 113), (336, 140)),
        arrow((512, 200), (456, 200)),
        arrow((624, 236), (624, 282)),
        arrow((420, 236), (420, 259), (560, 259), (560, 282)),
        arrow((512, 313), (456, 313)),
        arrow((300, 236), (300, 282)),
        arrow((336, 344), (336, 390)),
        arrow((216, 430), (90, 430), (90, 132), (250, 132), (250, 86)),
        text(98, 300, "next rollout", size=13, anchor="start"),
        text(484, 192, "so far", size=12),
        text(490, 252, "log-probs", size=12),
        text(292, 263, "values", size=12, anchor="end"),
    ]
    return picture(
        494, "One iteration: generate, score, forward, token rewards, advantages, update", parts
    )


if __name__ == "__main__":
    (FOLDER / "roles.svg").write_text(roles(), encoding="utf-8")
    (FOLDER / "data_flow.svg").write_text(data_flow(), encoding="utf-8")
