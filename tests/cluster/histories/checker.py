"""Judges histories: one sentence for each thing that must not be.

Rules of a topic, for each reader (who has read up to the last cut):

- nothing that was not written, and no value twice: neither stored twice nor read again;
- nothing of a transaction that failed, nothing before its commit was asked for (aborted, early);
- everything of one that committed (lost); of any either all or nothing (torn);
- for ordered readers, within a key: the order of the sends in a transaction; what ended before
  another one began comes before it; all have the same order.

Across keys nothing says which of two transactions that overlap is first: Pulsar isolates no writes,
so a cycle between keys (Elle's G0) is none here.

Rules of a bank, for ordered readers: before a cut the amounts add up to nothing, and every transfer
is whole.

Rules of a relay: what is made of each message of the source is there once, and of nothing else; if
it is ordered, in the order of the source within each key.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf

from tests.cluster.histories.history import (
    Operation,
    Outcome,
    Reading,
    TopicHistory,
    Write,
)

Written = Mapping[str, tuple[Operation, Write]]
"""By value."""


def topic_anomalies(history: TopicHistory) -> list[str]:
    """What breaks the rules of a topic."""
    written = {write.value: (operation, write) for operation, write in history.written()}
    found: list[str] = []
    for reading in history.readings:
        found += _unwritten_or_twice(reading, written)
        found += _aborted_or_early(reading, written)
        found += _lost_or_torn(reading, history)
        if reading.ordered:
            found += _out_of_order(reading, written)
    return [*found, *_disagreements([each for each in history.readings if each.ordered])]


def bank_anomalies(history: TopicHistory) -> list[str]:
    """What breaks the rules of a bank, beside those of its topic."""
    written = {write.value: (operation, write) for operation, write in history.written()}
    cuts = [operation for operation in history.operations if operation.is_cut]
    return [
        anomaly
        for reading in history.readings
        if reading.ordered
        for cut in cuts
        for anomaly in _at_cut(reading, cut, written)
    ]


def relay_anomalies(source: Reading, output: TopicHistory, *, ordered: bool) -> list[str]:
    """What breaks the rules of a relay, beside those of its output's topic."""
    sources = {write.value: write.source for _, write in output.written() if write.source}
    found: list[str] = []
    for reading in output.readings:
        made = {
            key: [sources[value] for value in values if value in sources]
            for key, values in reading.lists().items()
        }
        found += _made_wrongly(reading.reader, source, made, _makers(output))
        if ordered and reading.ordered:
            found += _made_out_of_order(reading.reader, source, made)
    return found


# Topics


def _unwritten_or_twice(reading: Reading, written: Written) -> Iterator[str]:
    keys = {value: write.key for value, (_, write) in written.items()}
    for read in reading.reads:
        if keys.get(read.value) != read.key:
            yield f"unwritten: {reading.reader} got {read.value} under {read.key}"
    for value, times in Counter(read.value for read in reading.reads).items():
        if times > 1:
            yield f"twice: {reading.reader} got {value} {times} times"


def _aborted_or_early(reading: Reading, written: Written) -> Iterator[str]:
    for read in reading.reads:
        if read.value not in written:
            continue
        operation, _ = written[read.value]
        if operation.outcome is Outcome.FAILED:
            yield f"aborted: {reading.reader} got {read.value}, whose transaction failed"
        elif read.at < operation.commit_at:
            yield f"early: {reading.reader} got {read.value} before its commit was asked for"


def _lost_or_torn(reading: Reading, history: TopicHistory) -> Iterator[str]:
    got = {read.value for read in reading.reads}
    for operation in history.operations:
        missing = [write.value for write in operation.writes if write.value not in got]
        if missing and operation.outcome is Outcome.OK:
            yield f"lost: {reading.reader} got not {', '.join(missing)}, which was committed"
        if missing and len(missing) < len(operation.writes):
            yield (
                f"torn: {reading.reader} got not {', '.join(missing)} of {operation.name} "
                f"({operation.outcome.value}), but the rest"
            )


def _out_of_order(reading: Reading, written: Written) -> Iterator[str]:
    for key, values in reading.lists().items():
        latest: tuple[float, str] = (-inf, "")
        """When the last one of those read so far began."""
        last_of: dict[str, int] = {}
        for value in values:
            if value not in written:
                continue
            operation, write = written[value]
            if operation.ended_at < latest[0]:
                yield (
                    f"order: {reading.reader} got {value} of {key} after {latest[1]}, which was "
                    "begun when that had ended"
                )
            latest = max(latest, (operation.begun_at, value))
            place = operation.writes.index(write)
            if place < last_of.get(operation.name, -1):
                yield f"order: {reading.reader} got {value} of {key} after a later one of its own"
            last_of[operation.name] = place


def _disagreements(readings: Sequence[Reading]) -> Iterator[str]:
    for one, other in pairwise(readings):
        mine, theirs = one.lists(), other.lists()
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                yield f"disagreement: {one.reader} and {other.reader} got {key} otherwise"


# Banks


def _at_cut(reading: Reading, cut: Operation, written: Written) -> Iterator[str]:
    """What was transferred before a cut; judged if all of the cut was read."""
    lists = reading.lists()
    if any(write.value not in lists.get(write.key, ()) for write in cut.writes):
        return
    before = [
        written[value]
        for mark in cut.writes
        for value in lists[mark.key][: lists[mark.key].index(mark.value)]
        if value in written
    ]
    total = sum(write.amount for _, write in before)
    if total:
        yield f"sum: {reading.reader} has {total:+} before {cut.name}"
    moved = Counter(operation.name for operation, _ in before)
    sizes = {operation.name: len(operation.writes) for operation, _ in before}
    for name, count in moved.items():
        if count != sizes[name]:
            yield f"half: {reading.reader} has {count} of {sizes[name]} of {name} before {cut.name}"


# Relays


def _makers(output: TopicHistory) -> dict[str, str]:
    """For each message of the source, the operations that made something of it."""
    began = min((each.begun_at for each in output.operations), default=0.0)
    makers: dict[str, str] = {}
    for operation, write in output.written():
        if write.source:
            times = f"{operation.begun_at - began:.2f} to {operation.ended_at - began:.2f} s"
            maker = f"{operation.name} ({operation.outcome.value}, {times})"
            makers[write.source] = ", ".join(filter(None, (makers.get(write.source), maker)))
    return makers


def _made_wrongly(
    reader: str, source: Reading, made: Mapping[str, list[str]], makers: Mapping[str, str]
) -> Iterator[str]:
    times = Counter(value for values in made.values() for value in values)
    due = Counter(read.value for read in source.reads)
    for value in sorted(due.keys() - times.keys()):
        yield f"not relayed: {reader} got nothing made of {value}"
    for value in sorted(times.keys() - due.keys()):
        yield f"invented: {reader} got what was made of {value}, which nobody reads"
    for value, count in times.items():
        if count > 1:
            yield f"relayed twice: {reader} got {count} made of {value} by {makers.get(value)}"


def _made_out_of_order(
    reader: str, source: Reading, made: Mapping[str, list[str]]
) -> Iterator[str]:
    places: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for key, values in source.lists().items():
        for place, value in enumerate(values):
            places[key].setdefault(value, place)
    for key, values in made.items():
        known = [value for value in values if value in places[key]]
        for before, after in pairwise(known):
            if places[key][after] < places[key][before]:
                yield f"relayed out of order: {reader} got {after} of {key} after {before}"
