"""Checks of V6 and V7: batches, epochs and positions of queries, as groups and keys record them.

Pure.  Only queries that wrote to the topic or read it are checked.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

from magnetar.protocol.txn_id import TxnId
from magnetar.spark.audit.snapshot import Snapshot, State, TransactionState
from magnetar.spark.audit.violations import Findings, Rule, Violation

__all__ = ["check_batches", "check_positions"]


class _Query(NamedTuple):
    """A query, under a transaction key of one owner at one coordinator.

    Keys of the same name at another owner or coordinator are other keys.
    """

    coordinator: int
    owner: str
    key: str
    query: str

    def __str__(self) -> str:
        owner = f" of {self.owner!r}" if self.owner else ""
        return f"Query {self.query!r} under key {self.key!r}{owner}"


def check_batches(snapshot: Snapshot, findings: Findings) -> None:
    """Check that batch numbers of each query rise by one, and that epochs never fall (V6)."""
    for query, groups in _by_query(snapshot).items():
        for before, after in pairwise(groups):
            findings.count_check(Rule.V6)
            if _may_be_collected(before, after, snapshot):
                findings.cannot_tell(
                    "Batches between groups of which the first ended so long ago that the headers "
                    "between them may have been collected."
                )
                continue
            what = _batch_fault(before, after)
            if what is not None:
                findings.add(Violation(Rule.V6, f"{query}: {what}.", txn=after.txn))


def _may_be_collected(
    before: TransactionState, after: TransactionState, snapshot: Snapshot
) -> bool:
    """Whether batches are missing between them whose headers may have been collected."""
    # Ended headers are collected in any order: a header that could have been collected by now says
    # nothing of later ones.
    assert before.commit is not None, "only groups that committed"
    assert after.commit is not None, "only groups that committed"
    has_hole = after.commit.batch > before.commit.batch + 1
    return has_hole and (before.kept_until_ms or 0) <= snapshot.taken_ms


def _batch_fault(before: TransactionState, after: TransactionState) -> str | None:
    first, second = before.commit, after.commit
    assert first is not None, "only groups that committed"
    assert second is not None, "only groups that committed"
    if second.batch == first.batch:
        return f"batch {first.batch} was committed twice, by {before.txn} and {after.txn}"
    if second.batch < first.batch:
        return f"batch {second.batch} was committed after batch {first.batch}"
    if second.batch > first.batch + 1:
        return f"there is no batch between {first.batch} and {second.batch}"
    if (after.epoch or 0) < (before.epoch or 0):
        return (
            f"batch {second.batch} is of epoch {after.epoch}, the one before it of {before.epoch}"
        )
    return None


def check_positions(snapshot: Snapshot, findings: Findings) -> None:
    """Check that positions never go back, and that keys agree with their last group (V7)."""
    for key in snapshot.keys:
        if key.last is None or key.last_group is None:
            continue
        header = snapshot.transactions.get(key.last_group)
        findings.count_check(Rule.V7)
        if header is None or header.state is State.OPEN:
            continue  # Keys are read after the headers: the group may have committed meanwhile.
        commit = header.commit
        if header.state is not State.COMMITTED or commit is None:
            findings.add(
                Violation(
                    Rule.V7,
                    f"Key {key.key!r} says that its last batch was committed by {key.last_group}, "
                    f"which is {header.state.value}.",
                    txn=header.txn,
                )
            )
        elif (commit.query, commit.batch, commit.positions) != (
            key.last.query,
            key.last.batch,
            key.last.positions,
        ):
            findings.add(
                Violation(
                    Rule.V7,
                    f"Key {key.key!r} has other positions or another batch than its last group.",
                    txn=header.txn,
                )
            )
    for query, groups in _by_query(snapshot).items():
        for before, after in pairwise(groups):
            findings.count_check(Rule.V7)
            if _positions_go_back(before, after):
                findings.add(
                    Violation(
                        Rule.V7,
                        f"{query}: its positions go back between {before.txn} and {after.txn}.",
                        txn=after.txn,
                    )
                )


def _by_query(snapshot: Snapshot) -> Mapping[_Query, Sequence[TransactionState]]:
    """Groups that committed, in the order in which they ended."""
    found: dict[_Query, list[TransactionState]] = {}
    for header in snapshot.transactions.values():
        if header.state is State.COMMITTED and header.commit is not None:
            coordinator = TxnId.parse(header.txn).most
            query = _Query(coordinator, header.owner, header.key or "", header.commit.query)
            found.setdefault(query, []).append(header)
    topics = {each.topic for each in snapshot.segments.values()}
    for query, groups in list(found.items()):
        if not any(_touches(each, topics, snapshot.topic) for each in groups):
            del found[query]
        # A key has one coordinator, whose numbers rise, and one open group at a time: the numbers
        # give the order, whatever the clocks of brokers say.
        groups.sort(key=lambda each: TxnId.parse(each.txn).least)
    return found


def _touches(header: TransactionState, segments: set[str], topic: str) -> bool:
    """Whether a group wrote to the topic, or its query reads it."""
    commit = header.commit
    assert commit is not None, "only groups that committed"
    counted = (*commit.winners.values(), commit.totals or {})
    if any(name in segments for counts in counted for name in counts):
        return True
    return any(read == topic for read, _, _ in _places(header))


def _positions_go_back(before: TransactionState, after: TransactionState) -> bool:
    """Whether a segment that both name is at an earlier place afterwards."""
    first, second = _places(before), _places(after)
    return any(second[where] < place for where, place in first.items() if where in second)


def _places(header: TransactionState) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """Places by topic, name and segment, of positions that are cuts; others are ignored."""
    assert header.commit is not None, "only groups that committed"
    text = header.commit.positions
    if not text:
        return {}
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    found: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for cut in cast("list[object]", document if isinstance(document, list) else [document]):
        if not isinstance(cut, dict) or not isinstance(cut.get("pos"), dict):
            continue
        for segment, place in cut["pos"].items():
            at = _place(place)
            if at is not None:
                found[str(cut.get("topic")), str(cut.get("name")), str(segment)] = at
    return found


def _place(value: object) -> tuple[int, ...] | None:
    """A place in a cut, as a tuple that compares; None: the positions are no cuts."""
    if value == "END":
        return (2**63,)
    if not isinstance(value, list) or not all(isinstance(part, int) for part in value):
        return None
    return tuple(value)
