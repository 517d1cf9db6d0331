"""Checks of V1, V2, V3 and V5: rows of each transaction beside its header, claims, aborted set.

Pure.  A committed transaction that had not ended before the cut is left to a later audit.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from magnetar.protocol.txn_id import TxnId
from magnetar.spark.audit.snapshot import (
    SegmentState,
    Snapshot,
    State,
    group_of,
    index_of,
)
from magnetar.spark.audit.violations import Findings, Rule, Violation
from magnetar.spark.range_facts import NO_ROWS, PLAIN, SeenTransaction, Tally

__all__ = ["Expected", "check_claims", "check_counts", "check_seen", "expected_of_groups"]

_IN_PIECES: Final = (
    "Rows of transactions with messages in pieces that lie across ranges: they were not assembled."
)
_ENCRYPTED: Final = (
    "Rows of transactions with encrypted entries: they cannot be counted without the keys."
)
_TRIMMED: Final = "Rows of transactions in ledgers that retention has taken."

Expected = Mapping[tuple[str, str], Tally]
"""Rows that a writer has reported as stored, by transaction and segment topic."""


def check_seen(seen: SeenTransaction, snapshot: Snapshot, findings: Findings) -> None:
    """Check the visibility of one transaction's rows in one segment (V1, V2, V5)."""
    if seen.txn == PLAIN:
        _check_plain(seen, findings)
        return
    state = snapshot.state_of(seen.txn)
    segment = snapshot.segments[seen.segment_id]
    is_marked = seen.txn in segment.aborted
    findings.count_check(Rule.V2)
    if state is State.ABORTED and seen.readable.messages:
        _add_violation(
            findings,
            Rule.V2,
            seen,
            f"{seen.readable.messages} rows of it are readable, though it was aborted",
        )
    # Behind the horizon it tells nothing: the transaction may have ended before the scan came.
    if state is State.OPEN and seen.readable.messages and seen.first < segment.horizon:
        _add_violation(
            findings,
            Rule.V2,
            seen,
            f"{seen.readable.messages} rows of it are readable, though it is open",
        )
        if seen.txn not in segment.claimed:
            findings.count_check(Rule.V5)
            _add_violation(findings, Rule.V5, seen, "it is open and has rows here, but no claim")
    if state is State.COMMITTED and snapshot.was_over(seen.txn):
        findings.count_check(Rule.V1)
        if seen.aborted.messages or is_marked:
            _add_violation(
                findings,
                Rule.V1,
                seen,
                f"{seen.aborted.messages} rows of it are hidden as "
                "aborted, though it was committed",
            )
    if state is State.MISSING:
        _check_missing(seen, segment, findings, is_marked=is_marked)


def _check_plain(seen: SeenTransaction, findings: Findings) -> None:
    findings.count_check(Rule.V1)
    if seen.aborted.messages:
        _add_violation(
            findings,
            Rule.V1,
            seen,
            f"{seen.aborted.messages} rows of no transaction are hidden as aborted",
        )


def _check_missing(
    seen: SeenTransaction, segment: SegmentState, findings: Findings, *, is_marked: bool
) -> None:
    """Check rows of a transaction without a header, as far as the aborted set and claims tell."""
    # A collected header leaves no counts to compare with, so the rest is reported as unchecked.
    findings.count_check(Rule.V5)
    if seen.txn in segment.claimed:
        _add_violation(findings, Rule.V5, seen, "it has a claim here, but no header any more")
    if is_marked and seen.readable.messages and seen.last <= segment.aborted[seen.txn]:
        _add_violation(
            findings,
            Rule.V2,
            seen,
            f"{seen.readable.messages} rows of it are readable, though they are in the aborted set",
        )
    findings.cannot_tell(
        "Transactions whose headers were collected: their rows were compared with the aborted set "
        "only, as the counts of their writers were in the headers."
    )


def expected_of_groups(snapshot: Snapshot) -> dict[tuple[str, str], Tally]:
    """Rows that the winners of groups committed before the cut have reported as stored."""
    found: dict[tuple[str, str], Tally] = {}
    for header in snapshot.transactions.values():
        if not snapshot.was_over(header.txn) or header.commit is None:
            continue
        for index, counts in header.commit.winners.items():
            for topic, (messages, hashes) in counts.items():
                found[attempt_id(header.txn, index), topic] = Tally(messages, hashes)
    return found


def attempt_id(group: str, index: int) -> str:
    """The id of an attempt of a group."""
    return str(TxnId.parse(group).attempt_of(index))


def check_counts(
    expected: Expected,
    seen: Iterable[SeenTransaction],
    snapshot: Snapshot,
    findings: Findings,
    before: Collection[int] = (),
) -> None:
    """Compare the rows of each transaction with the count of its writer (V1, V3).

    `seen` is iterated once, and only totals of groups are kept.  Segments in `before` were not
    read, as an earlier audit had read them.
    """
    topics = {
        each.topic: each for each in snapshot.segments.values() if each.segment_id not in before
    }
    counted = {txn for txn, _ in expected}
    unseen = {key for key in expected if key[1] in topics}
    totals: dict[tuple[str, str], SeenTransaction] = {}
    for there in seen:
        topic = snapshot.segments[there.segment_id].topic
        reported = expected.get((there.txn, topic))
        if reported is not None:
            unseen.discard((there.txn, topic))
            _compare(there.txn, topics[topic], reported, there, findings)
        elif there.txn in counted:
            _add_violation(
                findings,
                Rule.V3,
                there,
                f"{there.all.messages} rows of it are where its writer counted none",
            )
        if there.txn != PLAIN and index_of(there.txn):
            _add_total(totals, there, topic, snapshot)
    for txn, topic in sorted(unseen):
        _compare(txn, topics[topic], expected[txn, topic], None, findings)
    _check_totals(totals, topics, snapshot, findings)


def _add_total(
    totals: dict[tuple[str, str], SeenTransaction],
    there: SeenTransaction,
    topic: str,
    snapshot: Snapshot,
) -> None:
    """The totals by segment of groups whose header has no counts by winner."""
    group = group_of(there.txn)
    header = snapshot.transactions.get(group)
    commit = None if header is None else header.commit
    if commit is not None and commit.totals is not None and index_of(there.txn) in commit.winners:
        known = totals.get((group, topic))
        totals[group, topic] = there if known is None else known.plus(there)


def _compare(
    txn: str,
    segment: SegmentState,
    reported: Tally,
    there: SeenTransaction | None,
    findings: Findings,
) -> None:
    findings.count_check(Rule.V1)
    findings.count_check(Rule.V3)
    all_rows = NO_ROWS if there is None else there.all
    if all_rows == reported:
        return
    unchecked = _why_fewer(reported.messages, there, segment)
    if unchecked is not None:
        findings.cannot_tell(unchecked)
        return
    if all_rows.messages != reported.messages:
        lacks = reported.messages - all_rows.messages
        what = (
            f"its writer stored {reported.messages} rows, {all_rows.messages} are there: "
            f"{abs(lacks)} {'are missing' if lacks > 0 else 'are too many'}"
        )
        rule = Rule.V1 if lacks > 0 else Rule.V3
    else:
        what, rule = f"its {reported.messages} rows are not those that its writer stored", Rule.V3
    position = None if there is None else there.first
    findings.add(Violation(rule, f"Transaction {txn}: {what}.", segment.segment_id, position, txn))


def _why_fewer(messages: int, there: SeenTransaction | None, segment: SegmentState) -> str | None:
    """Why fewer rows than `messages` need not be wrong; None: it is wrong, or they are no fewer."""
    if messages <= (0 if there is None else there.all.messages):
        return None
    if there is not None and messages <= there.whole:
        return _ENCRYPTED if there.encrypted else _IN_PIECES
    return _TRIMMED if segment.trimmed else None


def _check_totals(
    totals: Mapping[tuple[str, str], SeenTransaction],
    topics: Mapping[str, SegmentState],
    snapshot: Snapshot,
    findings: Findings,
) -> None:
    for header in snapshot.transactions.values():
        commit = header.commit
        if commit is None or commit.totals is None or not snapshot.was_over(header.txn):
            continue
        for topic, (messages, hashes) in commit.totals.items():
            if topic not in topics:
                continue
            seen = totals.get((header.txn, topic))
            there = NO_ROWS if seen is None else seen.all
            findings.count_check(Rule.V1)
            unchecked = _why_fewer(messages, seen, topics[topic])
            if there != Tally(messages, hashes) and unchecked is not None:
                findings.cannot_tell(unchecked)
            elif there != Tally(messages, hashes):
                findings.add(
                    Violation(
                        Rule.V1,
                        f"Group {header.txn}: its winners stored {messages} rows, "
                        f"{there.messages} are there, or they are not the same.",
                        topics[topic].segment_id,
                        None,
                        header.txn,
                    )
                )


def check_claims(snapshot: Snapshot, findings: Findings) -> None:
    """Check claims without a header (V5), and committed transactions in aborted sets (V1)."""
    for segment in snapshot.segments.values():
        for claim in segment.claims:
            findings.count_check(Rule.V5)
            if snapshot.state_of(claim.txn) is State.MISSING:
                findings.add(
                    Violation(
                        Rule.V5,
                        f"A claim of epoch {claim.epoch} is left of transaction {claim.txn}, which "
                        "has no header.",
                        segment.segment_id,
                        claim.floor,
                        claim.txn,
                    )
                )
        for txn, up_to in segment.aborted.items():
            findings.count_check(Rule.V1)
            if snapshot.state_of(txn) is State.COMMITTED:
                findings.add(
                    Violation(
                        Rule.V1,
                        f"Transaction {txn} was committed and is in the aborted set.",
                        segment.segment_id,
                        up_to,
                        txn,
                    )
                )


def _add_violation(findings: Findings, rule: Rule, seen: SeenTransaction, what: str) -> None:
    txn = f"Transaction {seen.txn}" if seen.txn else "Rows without transaction"
    findings.add(Violation(rule, f"{txn}: {what}.", seen.segment_id, seen.first, seen.txn or None))
