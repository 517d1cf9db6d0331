"""The DAG of a topic as a picture (SVG): a box for each segment, as wide as its range of hashes.

Pure.  A row for each generation, the oldest on top; a line from each parent to its children.  A box
shows its number of rows and, in red, the rules that are broken in it.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

from magnetar.protocol.key_hash import KEY_SPACE
from magnetar.spark.audit.snapshot import SegmentState, Snapshot
from magnetar.spark.audit.violations import Violation
from magnetar.spark.range_facts import SeenRange

__all__ = ["generations", "picture"]

WIDTH: Final = 960
_ROW: Final = 96
_BOX: Final = 58
_GAP: Final = 4


class _Box(NamedTuple):
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def generations(snapshot: Snapshot) -> dict[int, int]:
    """The number of ancestors of each segment, on its longest path."""
    found: dict[int, int] = {}
    for segment_id in sorted(snapshot.segments):
        parents = snapshot.segments[segment_id].parent_ids
        found[segment_id] = 1 + max((found.get(parent, -1) for parent in parents), default=-1)
    return found


def picture(
    snapshot: Snapshot, seen: Mapping[int, SeenRange], violations: Sequence[Violation]
) -> str:
    """The picture, to be put into a page."""
    level = generations(snapshot)
    boxes = {
        segment_id: _place(segment, level[segment_id])
        for segment_id, segment in snapshot.segments.items()
    }
    broken: dict[int, dict[str, int]] = {}
    for violation in violations:
        if violation.segment_id is not None:
            rules = broken.setdefault(violation.segment_id, {})
            rules[violation.rule.name] = rules.get(violation.rule.name, 0) + 1
    height = _ROW * (1 + max(level.values(), default=0))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" role="img" font-family="system-ui,sans-serif" font-size="12">',
        "<title>Segments by hash range, oldest on top</title>",
    ]
    for segment_id, segment in sorted(snapshot.segments.items()):
        lines += [
            _edge(boxes[segment_id], boxes[child]) for child in segment.child_ids if child in boxes
        ]
    for segment_id, segment in sorted(snapshot.segments.items()):
        rows = seen[segment_id].rows if segment_id in seen else 0
        lines.append(_draw_box(boxes[segment_id], segment, rows, broken.get(segment_id, {})))
    return "\n".join([*lines, "</svg>"])


def _place(segment: SegmentState, level: int) -> _Box:
    scale = WIDTH / KEY_SPACE
    x = segment.hash_start * scale
    width = (segment.hash_end + 1 - segment.hash_start) * scale
    return _Box(x + _GAP / 2, level * _ROW + _GAP, max(width - _GAP, 2.0))


def _edge(parent: _Box, child: _Box) -> str:
    return (
        f'<line x1="{parent.middle:.1f}" y1="{parent.y + _BOX:.1f}" x2="{child.middle:.1f}" '
        f'y2="{child.y:.1f}" stroke="#8c959f"/>'
    )


def _draw_box(box: _Box, segment: SegmentState, rows: int, broken: Mapping[str, int]) -> str:
    fill = "#ffebe9" if broken else "#dafbe1" if not segment.sealed else "#f6f8fa"
    line = "#b3261e" if broken else "#8c959f"
    state = "sealed" if segment.sealed else "active"
    if segment.offloaded_ledgers:
        state += ", offloaded"
    broken_rules = "  ".join(f"{rule}: {times}" for rule, times in sorted(broken.items()))
    parts = [
        f'<g><title>{escape(segment.topic)}</title><rect x="{box.x:.1f}" y="{box.y:.1f}" '
        f'width="{box.width:.1f}" height="{_BOX}" rx="4" fill="{fill}" stroke="{line}"/>'
    ]
    for row, (text, colour) in enumerate(
        (
            (f"{segment.segment_id} ({state})", "#1b1f24"),
            (f"{rows:,} rows", "#656d76"),
            (broken_rules, "#b3261e"),
        )
    ):
        if text and box.width >= 7 * len(text):
            parts.append(
                f'<text x="{box.middle:.1f}" y="{box.y + 18 + 16 * row:.1f}" text-anchor="middle" '
                f'fill="{colour}">{escape(text)}</text>'
            )
    return "".join([*parts, "</g>"])
