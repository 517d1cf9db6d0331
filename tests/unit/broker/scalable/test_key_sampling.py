"""Where the entries of a sample of keys come from."""

from broker.scalable.key_sampling import places, sample_keys
from config.bounds import KEY_SAMPLE_AGE_MS, KEY_SAMPLE_ENTRIES, KEY_SAMPLE_READS, KEY_SAMPLE_SPAN
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import key_hash
from storage.managed_ledger.ledger_map import LedgerInfo
from tests.unit.broker.scalable.node import TOPIC, Node
from tests.unit.broker.scalable.test_auto_scaler import write_keys


def test_places_are_spread_over_the_newest_entries() -> None:
    found = places([LedgerInfo(1, 40_000), LedgerInfo(2, 0), LedgerInfo(3, 30_000)])
    assert len(found) == KEY_SAMPLE_READS
    assert found == sorted(found, reverse=True)
    assert found[0].ledger_id == 3
    assert found[-1] == Position(1, 40_000 - (KEY_SAMPLE_SPAN - 30_000) + KEY_SAMPLE_SPAN % 32)


def test_few_entries_are_read_once_each() -> None:
    assert places([]) == []
    assert places([LedgerInfo(1, 0)]) == []
    assert places([LedgerInfo(1, 3)]) == [Position(1, 0)]
    assert places([LedgerInfo(1, 20)]) == [
        Position(1, 20 - KEY_SAMPLE_ENTRIES),
        Position(1, 20 - 2 * KEY_SAMPLE_ENTRIES),
        Position(1, 0),
    ]


async def test_old_entries_count_only_without_newer_ones(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    topic = await node.segment(0)
    await write_keys(node, 0, ["old"] * 20)
    node.clock.ms += KEY_SAMPLE_AGE_MS + 1
    assert (await sample_keys(topic, node.clock.now_ms())).keyed == {key_hash(b"old"): 20}
    await write_keys(node, 0, ["new"] * 16)
    assert (await sample_keys(topic, node.clock.now_ms())).keyed == {key_hash(b"new"): 16}


async def test_a_sample_counts_the_bytes_of_entries_too(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    topic = await node.segment(0)
    await write_keys(node, 0, ["small"] * 9)
    await write_keys(node, 0, ["large"], payload=b"m" * 10_000)
    sample = await sample_keys(topic, node.clock.now_ms())
    assert sample.keyed == {key_hash(b"small"): 9, key_hash(b"large"): 1}
    assert sample.top_share == 0.9
    assert sample.keyed_bytes[key_hash(b"large")] > 10_000
    assert sample.by_bytes.top_share > 0.9
