"""The page and its picture."""

from dataclasses import replace
from xml.etree import ElementTree

from magnetar.protocol.ids import Position
from magnetar.reads import Visibility
from magnetar.spark.audit.dag_picture import generations, picture
from magnetar.spark.audit.report import Report, page, rule_lines, segment_rows
from magnetar.spark.audit.violations import KEPT_EACH, Findings, Rule, Violation
from magnetar.spark.range_facts import join_ranges
from tests.unit.magnetar.spark.audit.topic_facts import entry, seen, snapshot

SEEN = {0: seen(0, [entry((10, 0), [("a", b"<1>")])])}


def test_report_without_violations_says_so() -> None:
    told = page(Report(snapshot(), Findings(), SEEN))
    assert "no violation" in told
    assert "Violations</h2>" not in told


def test_report_lists_and_draws_violations() -> None:
    findings = Findings()
    findings.add(Violation(Rule.V3, "A <b> is missing.", 1, Position(11, 4)))
    findings.cannot_tell("Headers that were collected.", 3)
    told = page(Report(snapshot(), findings, SEEN))
    assert "A &lt;b&gt; is missing." in told
    assert "11:4" in told
    assert "Headers that were collected." in told
    drawn = picture(snapshot(), SEEN, findings.violations)
    assert "V3: 1" in drawn


def test_picture_has_every_segment_and_edge() -> None:
    drawn = ElementTree.fromstring(picture(snapshot(), SEEN, ()))
    kinds = [each.tag.rpartition("}")[2] for each in drawn.iter()]
    assert kinds.count("rect") == 3
    assert kinds.count("line") == 2
    assert generations(snapshot()) == {0: 0, 1: 1, 2: 1}


def test_report_counts_violations_beyond_its_bound() -> None:
    findings = Findings()
    for number in range(KEPT_EACH + 5):
        findings.add(Violation(Rule.V4, f"{number}", 0))
    assert len(findings.violations) == KEPT_EACH
    assert {name: bad for name, _, _, bad in rule_lines(findings)}["V4"] == KEPT_EACH + 5
    assert "5 more" in page(Report(snapshot(), findings, SEEN))


def test_report_counts_hidden_rows_without_their_transactions() -> None:
    stored = [
        entry((10, 0), [("a", b"1")]),
        entry((10, 1), [("a", b"2"), ("a", b"3")], txn="1_1", visibility=Visibility.ABORTED),
    ]
    parts = [replace(seen(0, [each]), transactions={}) for each in stored]
    report = Report(snapshot(), Findings(), {0: join_ranges(parts)})
    assert segment_rows(report)[0][4:6] == ("3", "2")
