"""V1, V2, V5: rows against headers, claims and aborted sets."""

from collections.abc import Iterable, Iterator

import pytest

from magnetar.protocol.ids import Position
from magnetar.reads import StoredEntry, Visibility
from magnetar.spark.audit.snapshot import Claim, Commit, Snapshot, State
from magnetar.spark.audit.transaction_checks import (
    attempt_id,
    check_claims,
    check_counts,
    check_seen,
    expected_of_groups,
)
from magnetar.spark.audit.violations import Findings, Rule
from magnetar.spark.range_facts import Tally
from tests.unit.magnetar.spark.audit.topic_facts import (
    entry,
    group,
    header,
    seen,
    segment,
    snapshot,
    tally,
)

ROWS = [("a", b"1"), ("b", b"2")]
HIDDEN = Visibility.ABORTED


def broken(records: Snapshot, entries: Iterable[StoredEntry], segment_id: int = 0) -> set[Rule]:
    findings = Findings()
    scanned = seen(segment_id, entries)
    for each in scanned.transactions.values():
        check_seen(each, records, findings)
    check_counts(expected_of_groups(records), scanned.transactions.values(), records, findings)
    check_claims(records, findings)
    return {rule for rule, count in findings.counts.items() if count}


def test_consistent_transactions_are_clean() -> None:
    records = snapshot(
        header(1, State.COMMITTED),
        header(2, State.ABORTED),
        header(3, State.OPEN),
        segments=[
            segment(
                0,
                aborted={"1_2": Position(10, 2)},
                claims=(Claim("1_3", 1, Position(10, 2)),),
            )
        ],
    )
    assert not broken(
        records,
        [
            entry((10, 0), ROWS),
            entry((10, 1), ROWS, txn="1_1", first=2),
            entry((10, 2), ROWS, txn="1_2", first=4, visibility=HIDDEN),
            entry((10, 3), ROWS, txn="1_3", first=6, visibility=Visibility.OPEN),
        ],
    )


@pytest.mark.parametrize(
    ("state", "visibility", "rules"),
    [
        (State.COMMITTED, HIDDEN, {Rule.V1}),
        (State.ABORTED, Visibility.READABLE, {Rule.V2}),
        (State.OPEN, Visibility.READABLE, {Rule.V2, Rule.V5}),
    ],
)
def test_rows_that_contradict_their_header_are_violations(
    state: State, visibility: Visibility, rules: set[Rule]
) -> None:
    records = snapshot(header(1, state))
    assert broken(records, [entry((10, 0), ROWS, txn="1_1", visibility=visibility)]) == rules


def test_readable_rows_of_an_open_transaction_are_a_violation() -> None:
    claimed = segment(0, claims=(Claim("1_1", 1, Position(10, -1)),))
    records = snapshot(header(1, State.OPEN), segments=[claimed])
    assert broken(records, [entry((10, 0), ROWS, txn="1_1")]) == {Rule.V2}


def test_transaction_committed_before_its_rows_are_read_is_clean() -> None:
    horizon = segment(0, horizon=Position(10, 1), claims=(Claim("1_1", 1, Position(10, 0)),))
    records = snapshot(header(1, State.OPEN), segments=[horizon])
    rows = [entry((10, 0), ROWS), entry((10, 1), ROWS, txn="1_1", first=2)]
    assert not broken(records, rows)


def test_transaction_ended_after_the_cut_is_left_to_the_next_audit() -> None:
    records = snapshot(header(1, State.COMMITTED), over=())
    assert not broken(records, [entry((10, 0), ROWS, txn="1_1", visibility=HIDDEN)])


def test_committed_transaction_in_the_aborted_set_is_a_violation() -> None:
    marked = segment(0, aborted={"1_1": Position(10, 0)})
    records = snapshot(header(1, State.COMMITTED), segments=[marked])
    assert broken(records, [entry((10, 0), ROWS)]) == {Rule.V1}


def test_aborted_set_decides_where_the_header_is_gone() -> None:
    marked = segment(0, aborted={"1_1": Position(10, 0)})
    records = snapshot(segments=[marked])
    assert not broken(records, [entry((10, 0), ROWS, txn="1_1", visibility=HIDDEN)])
    assert not broken(snapshot(), [entry((10, 0), ROWS, txn="1_1")])
    assert broken(records, [entry((10, 0), ROWS, txn="1_1")]) == {Rule.V2}


def test_claim_without_a_transaction_is_a_violation() -> None:
    stale = segment(0, claims=(Claim("1_9", 1, Position(10, 0)),))
    assert broken(snapshot(segments=[stale]), [entry((10, 0), ROWS)]) == {Rule.V5}


def test_rows_of_winners_are_visible_and_of_losers_hidden() -> None:
    topic = segment(0).topic
    records = snapshot(
        group(7, 0, {1: {topic: tally(ROWS)}}),
        segments=[segment(0, aborted={attempt_id("1_7", 2): Position(10, 1)})],
    )
    winner = entry((10, 0), ROWS, txn=attempt_id("1_7", 1))
    loser = entry((10, 1), ROWS, txn=attempt_id("1_7", 2), first=2, visibility=HIDDEN)
    assert not broken(records, [winner, loser])
    shown = loser._replace(visibility=Visibility.READABLE)
    assert Rule.V2 in broken(records, [winner, shown])
    assert Rule.V1 in broken(records, [winner._replace(visibility=HIDDEN), loser])


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (ROWS[:1], Rule.V1),
        ([*ROWS, ("c", b"3")], Rule.V3),
        ([("a", b"1"), ("b", b"x")], Rule.V3),
    ],
)
def test_rows_that_differ_from_the_writers_count_are_a_violation(
    rows: list[tuple[str, bytes]], rule: Rule
) -> None:
    records = snapshot(group(7, 0, {1: {segment(0).topic: tally(ROWS)}}))
    assert broken(records, [entry((10, 0), rows, txn=attempt_id("1_7", 1))]) == {rule}


def test_missing_and_uncounted_rows_are_violations() -> None:
    records = snapshot(group(7, 0, {1: {segment(0).topic: tally(ROWS)}}))
    assert broken(records, [entry((10, 0), ROWS)]) == {Rule.V1}
    elsewhere = [entry((11, 0), ROWS, txn=attempt_id("1_7", 1))]
    assert broken(records, elsewhere, segment_id=1) == {Rule.V1, Rule.V3}


def test_rows_trimmed_with_their_ledger_are_not_missing() -> None:
    topic = segment(1).topic
    whole = tally([*ROWS, ("c", b"3")])
    rows = [entry((11, 0), ROWS, txn=attempt_id("1_1", 1))]
    for kept in ({"earliest": Position(11, 0), "trimmed": True}, {}):
        segments = [segment(1, **kept)]
        records = snapshot(group(1, 0, {1: {topic: whole}}), segments=segments)
        assert broken(records, rows, 1) == (set() if kept else {Rule.V1})
        commit = Commit("q", 0, None, {1: {}}, {topic: whole})
        totals = header(1, State.COMMITTED, key="k", is_group=True, commit=commit)
        records = snapshot(totals, segments=segments)
        assert broken(records, rows, 1) == (set() if kept else {Rule.V1})
    twice = snapshot(group(1, 0, {1: {topic: (1, 7)}}), segments=[segment(1, trimmed=True)])
    assert broken(twice, rows, 1) == {Rule.V3}


def test_totals_of_a_group_are_compared_where_counts_of_attempts_are_gone() -> None:
    topic = segment(0).topic
    told = tally([*ROWS, *ROWS])
    commit = Commit("q", 0, None, {1: {}, 2: {}}, {topic: told})
    records = snapshot(header(7, State.COMMITTED, key="k", is_group=True, commit=commit))
    both = [
        entry((10, 0), ROWS, txn=attempt_id("1_7", 1)),
        entry((10, 1), ROWS, txn=attempt_id("1_7", 2), first=2),
    ]
    assert not broken(records, both)
    assert broken(records, both[:1]) == {Rule.V1}


def test_tally_does_not_depend_on_the_order_of_rows() -> None:
    assert tally(ROWS) == tally(ROWS[::-1]) != Tally()


class CountedClaims(tuple[Claim, ...]):
    """Claims, and how often they were gone through."""

    times = 0

    def __iter__(self) -> Iterator[Claim]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("headers", [True, False])
def test_check_reads_each_claim_once(headers: bool) -> None:
    open_now = range(1, 50)
    claims = CountedClaims(Claim(f"1_{number}", 1, Position(10, 90)) for number in open_now)
    there = [header(number, State.OPEN) for number in open_now]
    records = snapshot(*(there if headers else ()), segments=[segment(0, claims=claims)])
    findings = Findings()
    for number in open_now:
        stored = entry((10, number), ROWS, txn=f"1_{number}")
        check_seen(seen(0, [stored]).transactions[f"1_{number}"], records, findings)
    assert claims.times <= 1
    assert findings.counts[Rule.V5] == (0 if headers else len(open_now))
