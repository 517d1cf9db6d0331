"""The snapshot, while the topic is in use."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from weakref import WeakSet

import pytest

from magnetar.errors import TopicNotFound
from magnetar.layout import Layout, Segment
from magnetar.protocol.ids import LATEST, Position
from magnetar.spark.admin import AdminRest
from magnetar.spark.audit.records import take_snapshot, trimmed_since
from magnetar.spark.audit.transaction_checks import check_claims
from magnetar.spark.audit.violations import Findings

TOPIC = "topic://public/default/t"
SEGMENT = "segment://public/default/t/0000-ffff-0"
FIRST = Position(1, 0)


@dataclass
class OneSegment:
    """A topic of one segment, which is asked for by the audit."""

    lost: bool = False
    earliest: Position = FIRST
    pruned: bool = False

    def layout(self, topic: str) -> Layout:
        return Layout(0, [Segment(0, 0, 0xFFFF, True, (), (), SEGMENT)])

    def plan_range(self, segment_topic: str) -> SimpleNamespace:
        if self.pruned:
            raise TopicNotFound(f"There is no {segment_topic}.")
        at = self.earliest
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
            for txn in open_now:
                yield {"txnId": txn, "status": "OPEN"}
        elif "/records/" in path:
            claims = [{"txnId": txn, "epoch": 1, "floor": "1:0"} for txn in open_now]
            yield {"segment": SEGMENT, "claims": claims, "aborted": {}}

    def get(self, path: str) -> object:
        return {"ledgers": []}


def test_claims_of_transactions_begun_during_the_snapshot_are_clean() -> None:
    records, findings = take_snapshot(TOPIC, OneSegment(), BusyRest()), Findings()
    assert records.segments[0].claims
    check_claims(records, findings)
    assert findings.is_clean, findings.violations


@pytest.mark.parametrize("lost", [False, True])
def test_segment_record_says_whether_its_beginning_was_trimmed(lost: bool) -> None:
    assert take_snapshot(TOPIC, OneSegment(lost), BusyRest()).segments[0].trimmed is lost


def test_trimming_during_the_audit_is_known_afterwards() -> None:
    before = take_snapshot(TOPIC, OneSegment(), BusyRest())
    assert trimmed_since(before, OneSegment()) == before
    rolled = trimmed_since(before, OneSegment(earliest=Position(2, 0)))
    assert rolled == before, "an empty ledger is no data"
    later = trimmed_since(before, OneSegment(lost=True, earliest=Position(2, 0))).segments[0]
    assert (later.trimmed, later.trimmed_to) == (True, Position(2, 0))
    gone = trimmed_since(before, OneSegment(pruned=True)).segments[0]
    assert (gone.trimmed, gone.trimmed_to) == (True, LATEST)


class Told(dict[str, object]):
    """A line of REST; who still has it can be seen."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__  # type: ignore[assignment]


class ManyGroups(BusyRest):
    """Of a broker with many groups that have committed."""

    most = 0
    """Lines that were held at once."""

    def lines(self, path: str) -> Iterator[dict[str, object]]:
        held: WeakSet[Told] = WeakSet()
        for number in range(50 if path.endswith("/committed") else 0):
            commit = {"query": "q", "batch": number, "winners": {"1": {SEGMENT: [1, "2"]}}}
            group = {"transactionKey": "k", "group": {"commit": commit}, "owner": "o"}
            told = Told({"txnId": f"1_{number}", "status": "COMMITTED", **group})
            held.add(told)
            self.most = max(self.most, len(held))
            yield told
            del told

    def find(self, path: str) -> object:
        assert "key=k&owner=o" in path
        return {"key": "k", "owner": "o", "epoch": 1}


def test_snapshot_keeps_each_header_once() -> None:
    rest = ManyGroups()
    records = take_snapshot(TOPIC, OneSegment(), rest)
    assert len(records.transactions) == 50
    assert [key.key for key in records.keys] == ["k"]
    assert rest.most <= 2
