"""Shows an audit in a terminal: its verdict, the rules, the segments, the first violations."""

from typing import Final

from rich.console import Console
from rich.table import Table

from magnetar.spark.audit.report import Report, rule_lines, segment_rows

__all__ = ["show"]

SHOWN: Final = 20


def show(report: Report, console: Console | None = None) -> None:
    """Print the report."""
    out = console or Console()
    colour = "green" if report.findings.is_clean else "red"
    out.print(f"[{colour}]{report.headline()}[/{colour}]", highlight=False)
    rules = Table("Rule", "What must hold", "Checked", "Broken")
    for name, what, looked, broken in rule_lines(report.findings):
        rules.add_row(name, what, f"{looked:,}", f"{broken:,}", style="red" if broken else None)
    out.print(rules)
    segments = Table("Segment", "Range", "State", "Entries", "Rows", "Not readable", "Violations")
    for row in segment_rows(report):
        segments.add_row(*row)
    out.print(segments)
    for violation in report.findings.violations[:SHOWN]:
        where = "" if violation.segment_id is None else f" segment {violation.segment_id}"
        if violation.position is not None:
            where += f" at {violation.position[0]}:{violation.position[1]}"
        out.print(f"{violation.rule.name}{where}: {violation.what}", markup=False, highlight=False)
    for why, times in report.findings.unchecked.items():
        out.print(f"Not checked ({times:,}): {why}", markup=False, highlight=False)
    out.print(f"Took {report.took_s:.1f} s, the scan {report.scan_s:.1f} s.", highlight=False)
