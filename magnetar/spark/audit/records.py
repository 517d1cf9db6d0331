"""The snapshot of an audit: layouts and plans from the client, records over REST."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol, cast
from urllib.parse import quote

from magnetar.errors import TopicNotFound
from magnetar.layout import Layout, Segment
from magnetar.protocol.ids import LATEST, Position
from magnetar.spark.admin import AdminRest, topic_path
from magnetar.spark.audit.snapshot import (
    Claim,
    Commit,
    KeyState,
    SegmentState,
    Snapshot,
    State,
    TransactionState,
)

__all__ = ["Plan", "Planner", "take_snapshot", "trimmed_since"]

TRANSACTIONS = "/admin/v3/transactions"
KEYS = "/admin/v2/transactions/transaction-keys"
_STATES = ("open", "committed", "aborted")
Json = Mapping[str, object]


class Plan(Protocol):
    """The part of a plan that the audit needs."""

    @property
    def earliest(self) -> Position:
        """The first entry that is retained."""
        ...

    @property
    def horizon(self) -> Position:
        """The end, exclusive, of the entries that may be read."""
        ...

    @property
    def raw_end(self) -> Position:
        """The end, exclusive, of the stored entries."""
        ...

    @property
    def sealed(self) -> bool | None:
        """Whether nothing more will come."""
        ...

    @property
    def lost(self) -> bool | None:
        """Whether retention has taken its first entries."""
        ...


class Planner(Protocol):
    """The client, as far as the audit needs it."""

    def layout(self, topic: str) -> Layout:
        """The DAG now."""
        ...

    def plan_range(self, segment_topic: str) -> Plan:
        """Plan the whole of a segment, from its very first entry.

        Raises `TopicNotFound`.
        """
        ...


def take_snapshot(topic: str, client: Planner, rest: AdminRest) -> Snapshot:
    """Read everything but the entries, in the order that `Snapshot` gives.

    A segment that retention deletes meanwhile is left out.  Raises `AdminFailed`, and what the
    client raises.
    """
    ended = frozenset(
        cast("str", header["txnId"])
        for state in _STATES[1:]
        for header in rest.lines(f"{TRANSACTIONS}/headers/{state}")
    )
    layout = client.layout(topic)
    planned: dict[int, Plan] = {}
    for segment_id, segment in sorted(layout.segments.items()):
        try:
            planned[segment_id] = client.plan_range(segment.topic)
        except TopicNotFound:
            continue
    records = {
        cast("str", record["segment"]): record
        for record in rest.lines(f"{TRANSACTIONS}/records/{topic_path(topic)}")
    }
    transactions, keys = _headers(rest)
    segments = {
        segment_id: _segment(
            layout.segments[segment_id],
            plan,
            records.get(layout.segments[segment_id].topic, {}),
            _ledgers(layout.segments[segment_id], rest),
            planned,
        )
        for segment_id, plan in planned.items()
    }
    return Snapshot(
        topic,
        int(time.time() * 1000),
        segments,
        ended,
        transactions,
        tuple(_keys(keys, rest)),
    )


def trimmed_since(snapshot: Snapshot, client: Planner) -> Snapshot:
    """Mark what retention has deleted since the snapshot.  Raises what the client does."""
    segments = {}
    for segment_id, segment in snapshot.segments.items():
        try:
            plan = client.plan_range(segment.topic)
            earliest = plan.earliest if plan.lost else segment.earliest
        except TopicNotFound:
            earliest = LATEST
        if earliest > segment.earliest:
            segment = replace(segment, trimmed=True, trimmed_to=earliest)
        segments[segment_id] = segment
    return replace(snapshot, segments=segments)


def _headers(rest: AdminRest) -> tuple[dict[str, TransactionState], set[tuple[str, str]]]:
    """The headers of all transactions, and the key and owner of each group."""
    found: dict[str, TransactionState] = {}
    keys: set[tuple[str, str]] = set()
    for state in _STATES:
        for record in rest.lines(f"{TRANSACTIONS}/headers/{state}"):
            header = transaction_of(record)
            # A transaction that ends meanwhile is in two answers: its final state counts.
            known = found.get(header.txn)
            if known is None or known.state is State.OPEN:
                found[header.txn] = header
            if header.is_group and header.key is not None:
                keys.add((header.key, header.owner))
    return found, keys


def transaction_of(record: Json) -> TransactionState:
    """The header of a transaction, from the JSON of REST."""
    group = cast("Json | None", record.get("group"))
    commit = None if group is None else cast("Json | None", group.get("commit"))
    return TransactionState(
        cast("str", record["txnId"]),
        State(record["status"]),
        cast("int | None", record.get("finalizedMs")),
        cast("str | None", record.get("transactionKey")),
        cast("int | None", record.get("transactionKeyEpoch")),
        group is not None,
        None if commit is None else commit_of(commit),
        cast("int | None", record.get("keptUntilMs")),
        cast("str | None", record.get("owner")) or "",
    )


def commit_of(record: Json) -> Commit:
    """The commit of a group, from the JSON of REST."""
    winners = cast("Mapping[str, Mapping[str, tuple[int, str]]]", record.get("winners") or {})
    totals = cast("Mapping[str, tuple[int, str]] | None", record.get("totals"))
    return Commit(
        cast("str", record["query"]),
        cast("int", record["batch"]),
        cast("str | None", record.get("positions")),
        {int(index): _counts(counts) for index, counts in winners.items()},
        None if totals is None else _counts(totals),
    )


def _counts(record: Mapping[str, tuple[int, str]]) -> dict[str, tuple[int, int]]:
    return {topic: (messages, int(hashes)) for topic, (messages, hashes) in record.items()}


def _segment(
    segment: Segment, plan: Plan, records: Json, ledgers: Iterable[Json], kept: Mapping[int, Plan]
) -> SegmentState:
    found = list(ledgers)
    return SegmentState(
        segment.segment_id,
        segment.topic,
        tuple(each for each in segment.parent_ids if each in kept),
        tuple(each for each in segment.child_ids if each in kept),
        segment.hash_start,
        segment.hash_end,
        bool(plan.sealed),
        plan.earliest,
        plan.horizon,
        plan.raw_end,
        {
            cast("int", each["ledgerId"]): cast("int", each["entries"])
            for each in found
            if each["timestamp"]
        },
        tuple(
            Claim(
                cast("str", each["txnId"]),
                cast("int", each["epoch"]),
                place_of(cast("str", each["floor"])),
            )
            for each in cast("list[Json]", records.get("claims", []))
        ),
        {
            txn: place_of(up_to)
            for txn, up_to in cast("Mapping[str, str]", records.get("aborted", {})).items()
        },
        sum(bool(each.get("offloaded")) for each in found),
        bool(plan.lost),
    )


def _ledgers(segment: Segment, rest: AdminRest) -> list[Json]:
    domain, _, path = topic_path(segment.topic).partition("/")
    base = "segments" if domain == "segment" else domain
    record = cast("Json", rest.get(f"/admin/v2/{base}/{path}/internalStats"))
    return cast("list[Json]", record["ledgers"])


def _keys(names: Iterable[tuple[str, str]], rest: AdminRest) -> Iterable[KeyState]:
    """The states of these keys, as far as brokers know them."""
    # Only keys of groups with a header: without one there is nothing to compare a key with.
    for key, owner in sorted(names):
        path = f"{KEYS}?key={quote(key, safe='')}&owner={quote(owner, safe='')}"
        found = rest.find(path)
        if found is not None:
            yield key_of(cast("Json", found))


def key_of(record: Json) -> KeyState:
    """A transaction key, from the JSON of REST."""
    last = cast("Json | None", record.get("lastGroup"))
    return KeyState(
        cast("str", record["key"]),
        cast("str | None", record.get("owner")) or "",
        cast("int", record["epoch"]),
        None if last is None else commit_of(last),
        None if last is None else cast("str", last["groupId"]),
    )


def place_of(text: str) -> Position:
    """The position in a text `ledger:entry`."""
    ledger, _, entry = text.partition(":")
    return Position(int(ledger), int(entry))
