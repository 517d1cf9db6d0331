"""The snapshot, while the topic is in use."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from magnetar.layout import Layout, Segment
from pipeline.admin import AdminRest
from pipeline.audit.records import take_snapshot
from pipeline.audit.transaction_checks import check_claims
from pipeline.audit.violations import Findings
from protocol.ids import Position

TOPIC = "topic://public/default/t"
SEGMENT = "segment://public/default/t/0000-ffff-0"


@dataclass
class OneSegment:
    """A topic of one segment, which is asked for by the audit."""

    lost: bool = False

    def layout(self, topic: str) -> Layout:
        return Layout(0, [Segment(0, 0, 0xFFFF, True, (), (), SEGMENT)])

    def plan_range(self, segment_topic: str) -> SimpleNamespace:
        at = Position(1, 0)
        return SimpleNamespace(earliest=at, horizon=at, raw_end=at, sealed=False, lost=self.lost)


class BusyRest(AdminRest):
    """Of a broker where a transaction begins, and takes its claim, before each answer."""

    def __init__(self) -> None:
        super().__init__("http://unused")
        self.begun = 0

    def lines(self, path: str) -> Iterator[dict[str, object]]:
        self.begun += 1
        open_now = [f"1_{number}" for number in range(self.begun)]
        if path.endswith("/headers/open"):
            yield from ({"txnId": txn, "status": "OPEN"} for txn in open_now)
        elif "/records/" in path:
            claims = [{"txnId": txn, "epoch": 1, "floor": "1:0"} for txn in open_now]
            yield {"segment": SEGMENT, "claims": claims, "aborted": {}}

    def get(self, path: str) -> object:
        return {"ledgers": []}


def test_transactions_that_begin_meanwhile_have_no_claims_without_headers() -> None:
    records, findings = take_snapshot(TOPIC, OneSegment(), BusyRest()), Findings()
    assert records.segments[0].claims
    check_claims(records, findings)
    assert findings.is_clean, findings.violations


@pytest.mark.parametrize("lost", [False, True])
def test_a_segment_says_whether_retention_took_its_beginning(lost: bool) -> None:
    assert take_snapshot(TOPIC, OneSegment(lost), BusyRest()).segments[0].trimmed is lost
