"""Learning curves as SVG: share of the optimum over completions, one panel per task."""

from typing import NamedTuple

# of a panel, and panels per row
WIDTH = 400
HEIGHT = 350
COLUMNS = 3
# for readers of dark pages
DARK = (
    "<style>@media (prefers-color-scheme: dark) { rect { fill: #16181c } text { fill: #d9dce1 } "
    'line[stroke="#cccccc"] { stroke: #3c4046 } '
    'polyline, line:not([stroke="#cccccc"]) { filter: brightness(1.5) } }</style>'
)


class Curve(NamedTuple):
    """Share of the optimum after each rollout."""

    name: str
    color: str
    shares: list[float]


def picture(panels: dict[str, list[Curve]], rollout: int, unit: str = "completions") -> str:
    """Draw panels in rows, each as long as its longest curve, with the legend at the right."""
    columns = min(len(panels), COLUMNS)
    size = f"{WIDTH * columns + 200} {HEIGHT * -(-len(panels) // COLUMNS)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" '
        'font-size="13">'
    ]
    parts.append(DARK)
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for number, (title, curves) in enumerate(panels.items()):
        rollouts = max(len(curve.shares) for curve in curves)
        row, column = divmod(number, COLUMNS)
        left = WIDTH * column + 70
        right = WIDTH * (column + 1) - 10
        top = HEIGHT * row + 30
        bottom = HEIGHT * row + 300

        def place(step: float, share: float) -> tuple[float, float]:
            return left + (right - left) * step / rollouts, bottom - (bottom - top) * share  # noqa: B023

        parts.append(
            f'<text x="{(left + right) / 2}" y="{top - 12}" text-anchor="middle" '
            f'font-weight="bold">{title}</text>'
        )
        for share, label in ((0, "0"), (0.5, "50 %"), (1, "optimum")):
            y = place(0, share)[1]
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#cccccc"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
        for step in (0, rollouts // 2, rollouts):
            x = place(step, 0)[0]
            parts.append(
                f'<text x="{x:.0f}" y="{bottom + 18}" '
                f'text-anchor="middle">{step * rollout:,}</text>'
            )
        parts.append(
            f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">{unit}</text>'
        )
        for curve in curves:
            points = " ".join(
                "{:.1f},{:.1f}".format(*place(n + 1, share)) for n, share in enumerate(curve.shares)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{curve.color}" '
                'stroke-width="2.5"/>'
            )
    names = {curve.name: curve for curves in panels.values() for curve in curves}
    for line, curve in enumerate(names.values()):
        if len(panels) == 1 and curve.shares:
            share = f" {curve.shares[-1]:.0%}"
        else:
            share = ""
        x = WIDTH * columns + 10
        y = 50 + 24 * line
        parts.append(
            f'<line x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{curve.color}" '
            'stroke-width="3"/>'
        )
        parts.append(f'<text x="{x + 32}" y="{y}">{curve.name}{share}</text>')
    return "\n".join([*parts, "</svg>\n"])
