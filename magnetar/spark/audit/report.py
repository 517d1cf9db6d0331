"""The report of an audit: lines for a terminal, and a page with a picture of the DAG.

Pure.  The page stands alone (no script, nothing is fetched).  Same findings, same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from magnetar.spark.audit.audited import AuditedSegment, AuditState
from magnetar.spark.audit.dag_picture import picture
from magnetar.spark.audit.snapshot import Snapshot
from magnetar.spark.audit.violations import Findings, Rule, Violation
from magnetar.spark.range_facts import SeenRange

__all__ = ["Report", "page", "rule_lines", "segment_rows"]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;color:#1b1f24}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #d0d7de;padding:.3em .7em;"
    "text-align:left;vertical-align:top}td.n,th.n{text-align:right}"
    ".bad{color:#b3261e;font-weight:600}.good{color:#1a7f37}.dim{color:#656d76}"
)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one audit."""

    snapshot: Snapshot
    findings: Findings
    seen: Mapping[int, SeenRange] = field(default_factory=dict)
    """Facts by segment id."""
    took_s: float = 0.0
    scan_s: float = 0.0
    """The part of it that read and decoded all entries."""
    before: Mapping[int, AuditedSegment] = field(default_factory=dict)
    """Segments that an earlier audit found right, and this one did not read again."""
    audited: AuditState | None = None
    """Segments that later audits need not read; None if there were violations."""

    @property
    def rows(self) -> int:
        """Rows that were scanned."""
        return sum(each.rows for each in self.seen.values())

    def headline(self) -> str:
        """The result in one sentence."""
        found = sum(self.findings.counts.values())
        verdict = "no violation" if not found else f"{found:,} violations"
        sentence = (
            f"{verdict}: {self.snapshot.topic}, {len(self.seen)} segments, {self.rows:,} rows, "
            f"{len(self.snapshot.transactions):,} transactions"
        )
        before = sum(each.readable.messages for each in self.before.values())
        if self.before:
            sentence += f"; audited before: {len(self.before)} segments, {before:,} rows"
        return sentence


def rule_lines(findings: Findings) -> Sequence[tuple[str, str, int, int]]:
    """A row for each rule: name, what must hold, number of checks, number of violations."""
    return [(rule.name, rule.value, findings.checked[rule], findings.counts[rule]) for rule in Rule]


def segment_rows(report: Report) -> Sequence[tuple[str, ...]]:
    """A row for each segment: id, range, state, entries, rows, hidden rows, violations.

    Of one that was audited before only the rows are known that readers get.
    """
    by_segment: dict[int, int] = {}
    for violation in report.findings.violations:
        if violation.segment_id is not None:
            by_segment[violation.segment_id] = by_segment.get(violation.segment_id, 0) + 1
    rows = []
    for segment_id, segment in sorted(report.snapshot.segments.items()):
        seen = report.seen.get(segment_id)
        before = report.before.get(segment_id)
        state = "sealed" if segment.sealed else "active"
        shown = 0 if seen is None else seen.rows
        rows.append(
            (
                str(segment_id),
                f"{segment.hash_start:04x}-{segment.hash_end:04x}",
                state if before is None else f"{state}, audited before",
                "" if before is not None else f"{0 if seen is None else seen.entries:,}",
                f"{shown if before is None else before.readable.messages:,}",
                "" if before is not None else f"{0 if seen is None else seen.hidden:,}",
                f"{by_segment.get(segment_id, 0):,}",
            )
        )
    return rows


def page(report: Report) -> str:
    """The report as one HTML page."""
    findings = report.findings
    verdict = "good" if findings.is_clean else "bad"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>Audit of {escape(report.snapshot.topic)}</title><style>{_STYLE}</style>",
        f"<h1>Audit of {escape(report.snapshot.topic)}</h1>",
        f'<p class="{verdict}">{escape(report.headline())}</p>',
        picture(report.snapshot, report.seen, findings.violations),
        "<h2>Rules</h2>",
        _table(
            ("Rule", "What must hold", "Checked", "Broken"),
            [(name, what, f"{n:,}", f"{bad:,}") for name, what, n, bad in rule_lines(findings)],
        ),
        "<h2>Segments</h2>",
        _table(
            ("Segment", "Range", "State", "Entries", "Rows", "Not readable", "Violations"),
            segment_rows(report),
        ),
    ]
    if findings.violations:
        parts += ["<h2>Violations</h2>", _violations(findings)]
    if findings.unchecked:
        parts += [
            "<h2>What could not be checked</h2>",
            _table(
                ("What", "How often"),
                [(why, f"{times:,}") for why, times in sorted(findings.unchecked.items())],
            ),
        ]
    parts.append(f'<p class="dim">Took {report.took_s:.1f} s.</p></html>')
    return "\n".join(parts) + "\n"


def _violations(findings: Findings) -> str:
    shown = sorted(findings.violations, key=_order)
    table = _table(
        ("Rule", "Segment", "At", "What"),
        [
            (
                each.rule.name,
                "" if each.segment_id is None else str(each.segment_id),
                "" if each.position is None else f"{each.position[0]}:{each.position[1]}",
                each.what,
            )
            for each in shown
        ],
    )
    missing = sum(findings.counts.values()) - len(shown)
    return table + (f"<p>{missing:,} more are counted above.</p>" if missing else "")


def _order(violation: Violation) -> tuple[str, int, tuple[int, int], str]:
    segment = -1 if violation.segment_id is None else violation.segment_id
    at = (-1, -1) if violation.position is None else tuple(violation.position)
    return violation.rule.name, segment, (at[0], at[1]), violation.what


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for row in rows:
        cells = (
            f'<td class="n">{escape(cell)}</td>'
            if cell.replace(",", "").isdigit()
            else f"<td>{escape(cell)}</td>"
            for cell in row
        )
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table>"])
