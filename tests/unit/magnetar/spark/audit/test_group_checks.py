"""V6, V7: batches, epochs and positions."""

import json
from dataclasses import replace

from magnetar.spark.audit.group_checks import check_batches, check_positions
from magnetar.spark.audit.records import transaction_of
from magnetar.spark.audit.snapshot import KeyState, Snapshot, State
from magnetar.spark.audit.violations import Findings, Rule
from tests.unit.magnetar.spark.audit.topic_facts import (
    T0_MS,
    TOPIC,
    group,
    header,
    segment,
    snapshot,
)

WROTE = {1: {segment(1).topic: (2, 5)}}


def cut(*place: int) -> str:
    return json.dumps([{"v": 1, "topic": TOPIC, "name": "", "pos": {"0": list(place)}}])


def broken(records: Snapshot) -> set[Rule]:
    findings = Findings()
    check_batches(records, findings)
    check_positions(records, findings)
    return {rule for rule, count in findings.counts.items() if count}


def test_consecutive_batches_are_clean() -> None:
    groups = [group(i, i, WROTE, epoch=2 + i // 2, positions=cut(10, i, 0)) for i in range(4)]
    last = groups[-1]
    keys = (KeyState("k", "", 3, last.commit, last.txn),)
    assert not broken(snapshot(*groups, keys=keys))


def test_repeated_missing_and_reversed_batches_are_violations() -> None:
    for batches in ((0, 0), (0, 2), (1, 0)):
        groups = [group(i, batch, WROTE) for i, batch in enumerate(batches)]
        assert broken(snapshot(*groups)) == {Rule.V6}, batches


def test_equal_key_names_of_several_owners_are_different_keys() -> None:
    records = transaction_of(
        {
            "txnId": "1_0",
            "status": "COMMITTED",
            "owner": "tenant-a",
            "transactionKey": "k",
            "group": {"commit": {"query": "q", "batch": 0, "winners": {}}},
        }
    )
    assert records.owner == "tenant-a"
    for batches in ((0, 0), (0, 2), (1, 0)):
        groups = [
            replace(group(i, batch, WROTE, positions=cut(10, 5 - i, 0)), owner=owner)
            for i, (batch, owner) in enumerate(zip(batches, ("tenant-a", "tenant-b"), strict=True))
        ]
        assert not broken(snapshot(*groups)), batches


def test_equal_key_names_at_several_coordinators_are_different_keys() -> None:
    here, there = group(7, 0, WROTE), replace(group(7, 0, WROTE), txn="2_7")
    assert not broken(snapshot(here, there))


def test_violation_names_the_owner_of_the_key() -> None:
    findings = Findings()
    groups = [replace(group(i, 0, WROTE), owner="tenant-a") for i in range(2)]
    check_batches(snapshot(*groups), findings)
    assert [each.what for each in findings.violations] == [
        "Query 'q' under key 'k' of 'tenant-a': batch 0 was committed twice, by 1_0 and 1_1."
    ]


def test_batch_with_a_collected_header_is_not_missing() -> None:
    for kept_until_ms in (T0_MS, None):
        first = replace(group(0, 0, WROTE), kept_until_ms=kept_until_ms)
        records = snapshot(first, group(2, 2, WROTE))
        assert not broken(records)
        assert broken(snapshot(first, group(2, 0, WROTE))) == {Rule.V6}


def test_falling_epoch_is_a_violation() -> None:
    assert broken(snapshot(group(0, 0, WROTE, epoch=4), group(1, 1, WROTE))) == {Rule.V6}


def test_positions_that_go_back_are_a_violation() -> None:
    groups = [group(i, i, WROTE, positions=cut(10, 5 - i, 0)) for i in range(2)]
    assert broken(snapshot(*groups)) == {Rule.V7}


def test_positions_of_another_format_are_ignored() -> None:
    for place in (5, None, "there", ["a"], {"at": 1}):
        text = json.dumps([{"topic": TOPIC, "pos": {"0": place}}])
        assert not broken(snapshot(*(group(i, i, WROTE, positions=text) for i in range(2))))


def test_key_that_contradicts_its_group_is_a_violation() -> None:
    groups = [group(i, i, WROTE, positions=cut(10, i, 0)) for i in range(2)]
    keys = (KeyState("k", "", 3, groups[0].commit, groups[1].txn),)
    assert broken(snapshot(*groups, keys=keys)) == {Rule.V7}


def test_group_committed_during_the_snapshot_is_left_to_the_next_audit() -> None:
    told = group(1, 1, WROTE)
    open_then = header(1, State.OPEN, key="k", is_group=True)
    keys = (KeyState("k", "", 3, told.commit, told.txn),)
    assert not broken(snapshot(group(0, 0, WROTE), open_then, keys=keys))
    aborted = header(1, State.ABORTED, key="k", is_group=True)
    assert broken(snapshot(group(0, 0, WROTE), aborted, keys=keys)) == {Rule.V7}


def test_clock_of_a_broker_behind_its_predecessor_is_no_violation() -> None:
    groups = [replace(group(i, i, WROTE), finalized_ms=100 - i) for i in range(3)]
    assert not broken(snapshot(*groups))


def test_batches_that_neither_read_nor_write_the_topic_are_ignored() -> None:
    elsewhere = {1: {"segment://public/default/other/0000-ffff-0": (2, 5)}}
    assert not broken(snapshot(*(group(i, 0, elsewhere) for i in range(2))))
    read = [group(i, 0, elsewhere, positions=cut(10, i, 0)) for i in range(2)]
    assert broken(snapshot(*read)) == {Rule.V6}
