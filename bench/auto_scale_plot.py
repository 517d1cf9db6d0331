"""Active segments and rates of a topic over time, as text, Markdown and a picture.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

COLUMNS: Final = 72
WIDTH, HEIGHT, MARGIN = 720, 300, 46


@dataclass(frozen=True)
class Point:
    """The topic in one second: seconds since the start, active segments, messages/s."""

    at_s: float
    segments: int
    sent: float
    read: float


def text_plot(points: Sequence[Point]) -> str:
    """Draw segments as bars, and below them the rates, in eighths of the highest one."""
    step = max(1, -(-len(points) // COLUMNS))
    shown = points[::step]
    most = max(point.segments for point in shown)
    peak = max(max(point.sent, point.read) for point in shown) or 1
    lines = [f"active segments, up to {most}; a column is {step} s"]
    for level in range(most, 0, -1):
        bar = "".join("#" if point.segments >= level else " " for point in shown)
        lines.append(f"{level:>4} |{bar}")
    lines.append(f"     +{'-' * len(shown)}  {points[-1].at_s:.0f} s")
    lines.append(f"messages/s, in eighths of {peak:.0f}")
    for name, rates in (("sent", [p.sent for p in shown]), ("read", [p.read for p in shown])):
        lines.append(f"{name} |{''.join(str(round(rate / peak * 8)) for rate in rates)}")
    return "\n".join(lines)


def markdown(points: Sequence[Point], changes: Sequence[tuple[str, str]]) -> str:
    """The plot, and each change with its reason."""
    causes = "\n".join(f"- {kind}: {cause}" for kind, cause in changes)
    return f"# Segments and rates over time\n\n```\n{text_plot(points)}\n```\n\n{causes}\n"


def svg_plot(points: Sequence[Point]) -> str:
    """The same as a picture: segments as steps, the rates as lines."""
    until_s = max(points[-1].at_s, 1)
    most = max(point.segments for point in points) + 1
    peak = max(max(point.sent, point.read) for point in points) * 1.1 or 1

    def x(at_s: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * at_s / until_s

    def y(share: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share

    steps, before = [], points[0].segments
    for point in points:
        steps += [(x(point.at_s), y(before / most)), (x(point.at_s), y(point.segments / most))]
        before = point.segments
    sent = [(x(point.at_s), y(point.sent / peak)) for point in points]
    read = [(x(point.at_s), y(point.read / peak)) for point in points]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _line(steps, "#1f5fa8", 2.5),
        _line(sent, "#c0392b", 1.2),
        _line(read, "#3a8f4d", 1.2),
        f'<text x="{MARGIN}" y="20" fill="#1f5fa8">active segments, up to {most - 1}</text>',
        f'<text x="{MARGIN + 190}" y="20" fill="#c0392b">messages/s sent, up to '
        f"{max(point.sent for point in points):.0f}</text>",
        f'<text x="{MARGIN + 400}" y="20" fill="#3a8f4d">read by the stream consumer</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 14}" text-anchor="end">{until_s:.0f} s</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'
