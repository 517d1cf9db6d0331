"""An offloaded ledger reads as the ledger did: from a directory and from S3."""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from config.bounds import OFFLOAD_BLOCK_BYTES
from magnetar.protocol.ids import LedgerId
from storage.ledger.store import LedgerError, NoSuchEntry, ReadableLedger
from storage.offload.block_cache import BlockCache, CachedBlock
from storage.offload.cold_ledgers import ColdLedgers
from storage.offload.context import Location, OffloadContext, data_key, index_key, parse_location
from storage.offload.errors import OffloadedDataCorrupt, OffloadedDataLost, OffloadFailed
from storage.offload.format import BLOCK_HEAD_BYTES, Block, Index, encode_block, encode_index
from storage.offload.path_objects import PathObjects
from storage.offload.reading import OffloadedLedger

NAME = "public/default/persistent/t"


class Given(ReadableLedger):
    """A ledger that has these entries."""

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.entries = entries

    @property
    def ledger_id(self) -> LedgerId:
        return LedgerId(7)

    @property
    def last_add_confirmed(self) -> int:
        return len(self.entries) - 1

    @property
    def length(self) -> int:
        return sum(map(len, self.entries))

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        found: list[bytes] = []
        for entry in self.entries[first : last + 1]:
            max_bytes -= len(entry)
            if found and max_bytes < 0:
                break
            found.append(entry)
        return found


def entries_of(seed: int, count: int, most: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice([0, 1, 100, rng.randint(0, most)])) for _ in range(count)]


async def copied(
    cold: ColdLedgers, location: Location, entries: Sequence[bytes]
) -> tuple[OffloadContext, OffloadedLedger]:
    context = cold.new_context(location)
    await cold.write(Given(entries), context, NAME, 5)
    return context, await cold.open(7, context)


@pytest.fixture
def cold() -> ColdLedgers:
    return ColdLedgers(random.Random(1), {"magnetar/cluster": b"c"})


async def test_offloaded_ledger_reads_as_the_original(
    cold: ColdLedgers, location: Location
) -> None:
    entries = [
        *entries_of(1, 400, 80_000),
        random.Random(2).randbytes(2 * OFFLOAD_BLOCK_BYTES),
        b"",
    ]
    context, ledger = await copied(cold, location, entries)
    local = Given(entries)
    assert (ledger.last_add_confirmed, ledger.length) == (401, local.length)
    assert len(ledger.index.blocks) > 5
    rng = random.Random(3)
    for _ in range(60):
        first = rng.randrange(402)
        last = rng.randrange(first, 402)
        room = rng.choice([0, 1, 1000, 3_000_000])
        assert await ledger.read(first, last, max_bytes=room) == await local.read(
            first, last, max_bytes=room
        )
    at, found = 0, list[bytes]()
    while at < len(entries):
        some = await ledger.read(at, len(entries) - 1, max_bytes=50_000)
        found += some
        at += len(some)
    assert found == entries
    await cold.require_whole(7, context, 402, local.length)
    await cold.close()


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 3), (-1, 0), (2, 1)])
async def test_nothing_else_is_readable(
    cold: ColdLedgers, tmp_path: Path, first: int, last: int
) -> None:
    _, ledger = await copied(cold, parse_location(str(tmp_path)), [b"a", b"b", b"c"])
    with pytest.raises(NoSuchEntry):
        await ledger.read(first, last, max_bytes=100)


async def test_copies_are_listed_and_deleted(cold: ColdLedgers, location: Location) -> None:
    context, ledger = await copied(cold, location, [b"a"] * 10)
    other, _ = await copied(cold, location, [b"b"] * 10)
    keys = {each.key for each in await cold.objects_of_copies(location)}
    assert keys == {
        make(uid, 7) for make in (data_key, index_key) for uid in (context.uid, other.uid)
    }
    await cold.delete(7, context)
    await cold.delete(7, context)
    assert {each.key for each in await cold.objects_of_copies(location)} == {
        data_key(other.uid, 7),
        index_key(other.uid, 7),
    }
    with pytest.raises(OffloadedDataLost, match=r"restore it"):
        await cold.open(7, context)
    with pytest.raises(OffloadedDataLost, match=r"restore it"):
        await ledger.read(0, 9, max_bytes=100)
    assert await (await cold.open(7, other)).read(0, 0, max_bytes=1) == [b"b"]


async def test_reading_in_order_prefetches_the_next_blocks(
    cold: ColdLedgers, tmp_path: Path
) -> None:
    entries = [random.Random(n).randbytes(300_000) for n in range(40)]
    _, ledger = await copied(cold, parse_location(str(tmp_path)), entries)
    for number, entry in enumerate(entries):
        assert await ledger.read(number, number, max_bytes=1) == [entry]
    assert cold.cache.misses <= 2
    assert cold.cached_bytes == ledger.index.data_bytes
    await cold.close()


async def test_the_cache_is_bounded_and_fetches_once() -> None:
    cache, fetched = BlockCache(100), list[int]()

    async def fetch(number: int) -> CachedBlock:
        await asyncio.sleep(0)
        fetched.append(number)
        return CachedBlock(number, [], 40, None)

    async def get(number: int) -> int:
        return (await cache.get(number, partial(fetch, number))).first_entry

    assert list(await asyncio.gather(get(1), get(1), get(2))) == [1, 1, 2]
    assert await get(1) == 1
    assert await get(3) == 3
    assert cache.size_bytes == 80
    assert await get(1) == 1
    assert fetched == [1, 2, 3]
    assert await get(2) == 2
    assert fetched == [1, 2, 3, 2]


@pytest.mark.parametrize("place", ["head", "frame", "entry", "end"])
async def test_damage_is_an_error_and_never_an_entry(
    cold: ColdLedgers, tmp_path: Path, place: str
) -> None:
    context, ledger = await copied(cold, parse_location(str(tmp_path)), entries_of(4, 300, 60_000))
    path = tmp_path / data_key(context.uid, 7)
    whole = bytearray(path.read_bytes())
    block = ledger.index.blocks[1]
    at = block.offset + {"head": 25, "frame": 130, "entry": 1000, "end": -1}[place]
    whole[at] ^= 1
    path.write_bytes(whole)
    bad = block.first_entry if place != "end" else block.first_entry - 1
    with pytest.raises(OffloadedDataCorrupt, match=r"restore it"):
        await ledger.read(bad, bad, max_bytes=1)
    good = ledger.index.blocks[2].first_entry
    assert len(await ledger.read(good, good, max_bytes=1)) == 1
    path.write_bytes(whole[: block.offset])
    cold.cache._blocks.clear()
    with pytest.raises(OffloadedDataCorrupt, match=r"restore it"):
        await ledger.read(ledger.last_add_confirmed, ledger.last_add_confirmed, max_bytes=1)
    with pytest.raises(OffloadedDataCorrupt, match=r"the ledger is kept"):
        await cold.require_whole(7, context, 300, ledger.length)
    (tmp_path / index_key(context.uid, 7)).write_bytes(b"nothing")
    with pytest.raises(OffloadedDataCorrupt, match=r"restore it"):
        await cold.open(7, context)


class Forgetful(PathObjects):
    """A place that gives back something else."""

    async def read(self, key: str, start: int, length: int) -> bytes:
        found = bytearray(await super().read(key, start, length))
        if not key.endswith("-index"):
            found[len(found) // 2] ^= 4
        return bytes(found)


async def test_a_copy_that_reads_otherwise_does_not_count(
    cold: ColdLedgers, tmp_path: Path
) -> None:
    location = parse_location(str(tmp_path))
    cold._objects[location] = Forgetful(location)
    cold._open_objects = lambda location, size_hint_bytes=0: Forgetful(location)  # type: ignore[method-assign]
    with pytest.raises(OffloadFailed, match="which changes data"):
        await cold.write(Given([b"a" * 100]), cold.new_context(location), NAME, 5)
    assert cold.counters.failures == 1


async def test_a_place_that_cannot_be_used_is_named(cold: ColdLedgers, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    location = parse_location(str(tmp_path / "file"))
    with pytest.raises(OffloadFailed, match="mend it"):
        await cold.write(Given([b"a"]), cold.new_context(location), NAME, 5)


async def test_half_a_file_is_no_object_and_is_found(cold: ColdLedgers, tmp_path: Path) -> None:
    class Failing(Given):
        async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
            raise LedgerError("the disk is gone")

    location = parse_location(str(tmp_path))
    context = cold.new_context(location)
    with pytest.raises(LedgerError):
        await cold.write(Failing([b"a"]), context, NAME, 5)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / (data_key(context.uid, 7) + ".writing")).write_bytes(b"left by a crash")
    assert len(await cold.objects_of_copies(location)) == 1
    await cold.delete(7, context)
    assert list(tmp_path.iterdir()) == []


def pulsar_copy(entries: Sequence[bytes], block_bytes: int) -> tuple[bytes, Index]:
    """As Pulsar writes it: blocks of one size, padded, without checksums."""
    data, blocks, first = bytearray(), list[Block](), 0
    while first < len(entries):
        left = sum(12 + len(entry) for entry in entries[first:])
        size = min(block_bytes, BLOCK_HEAD_BYTES + left)
        fits, end = first, BLOCK_HEAD_BYTES
        while fits < len(entries) and end + 12 + len(entries[fits]) <= size:
            end += 12 + len(entries[fits])
            fits += 1
        _, body = encode_block(first, entries[first:fits])
        head = (
            bytes.fromhex("fbdbabcb")
            + (128).to_bytes(8, "big")
            + size.to_bytes(8, "big")
            + first.to_bytes(8, "big")
        )
        blocks.append(Block(first, len(data)))
        padding = (b"\xfe\xdc\xde\xad" * (size // 4 + 1))[: size - end]
        data += head.ljust(BLOCK_HEAD_BYTES, b"\0") + body + padding
        first = fits
    total = sum(map(len, entries))
    return bytes(data), Index(len(entries), total, len(data), tuple(blocks))


@pytest.mark.parametrize("block_bytes", [5_000_000, 5_000_003, 64 << 20])
async def test_copies_by_pulsar_are_read(
    cold: ColdLedgers, tmp_path: Path, block_bytes: int
) -> None:
    entries = [*entries_of(5, 500, 40_000), random.Random(6).randbytes(3_000_000), b"", b"end"]
    data, index = pulsar_copy(entries, block_bytes)
    context = cold.new_context(parse_location(str(tmp_path)))
    (tmp_path / data_key(context.uid, 7)).write_bytes(data)
    (tmp_path / index_key(context.uid, 7)).write_bytes(encode_index(index))
    ledger = await cold.open(7, context)
    assert ledger.index.checks is None
    local, rng = Given(entries), random.Random(7)
    for _ in range(40):
        first = rng.randrange(len(entries))
        last = rng.randrange(first, len(entries))
        assert await ledger.read(first, last, max_bytes=200_000) == await local.read(
            first, last, max_bytes=200_000
        )
    (tmp_path / data_key(context.uid, 7)).write_bytes(data[:-2])
    cold.cache._blocks.clear()
    with pytest.raises(OffloadedDataCorrupt):
        await ledger.read(len(entries) - 1, len(entries) - 1, max_bytes=1)
