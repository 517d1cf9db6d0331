"""Writes behind a gate: nobody waits there longer than the deadline of a write."""

import asyncio
from collections.abc import Sequence

import pytest

from storage.metadata.operations import Put, SequencePut
from storage.metadata.oxia.partitions import PartitionHints
from storage.metadata.oxia.records import ShardRecord
from storage.metadata.oxia.write_issuer import Sequences, WriteIssuer
from storage.metadata.oxia.writes import Write, WriteOperation
from storage.metadata.store import MetadataError
from tests.support.waiting import TIMEOUT_S

SOON_S = 0.05
LATE_S = 100.0


class Backend:
    """Answers reads when the test lets it."""

    def __init__(self) -> None:
        self.sent: list[Write] = []
        self.before: list[asyncio.Future[object]] = []
        self.answer = asyncio.Event()
        self.fault: Exception | None = None

    def send(self, write: Write) -> None:
        self.sent.append(write)

    def unsettled(self, level: str) -> Sequence["asyncio.Future[object]"]:
        return self.before

    async def find(self, key: str, partition: str | None) -> ShardRecord | None:
        await self.answer.wait()
        if self.fault is not None:
            raise self.fault
        return None

    async def children(self, key: str) -> list[str]:
        return []

    async def put_marker(self, key: str, value: bytes) -> None:
        pass


@pytest.fixture
async def backend() -> Backend:
    return Backend()


@pytest.fixture
async def issuer(backend: Backend) -> WriteIssuer:
    return WriteIssuer(backend, Sequences(), PartitionHints())


def write(operation: WriteOperation, for_s: float) -> Write:
    loop = asyncio.get_running_loop()
    return Write(operation, loop.create_future(), put_id="me", deadline=loop.time() + for_s)


def begin(for_s: float) -> Write:
    return write(SequencePut("/s/", b"", "p", (), 0, 1), for_s)


def put(key: str, for_s: float) -> Write:
    return write(Put(key, b"", None, None, None, (), 0, 1), for_s)


async def failed(each: Write) -> str:
    with pytest.raises(MetadataError) as caught:
        await asyncio.wait_for(each.done, TIMEOUT_S)
    return str(caught.value)


async def test_write_behind_a_version_read_fails_at_its_deadline(
    issuer: WriteIssuer, backend: Backend
) -> None:
    first, second, third, later = begin(LATE_S), begin(SOON_S), begin(SOON_S), begin(LATE_S)
    for each in (first, second, third, later):
        issuer.issue(each)
    for each in (second, third):
        assert "nothing of it took effect" in await failed(each)
    assert not first.done.done()
    backend.answer.set()
    await asyncio.wait_for(issuer.flush(), TIMEOUT_S)
    assert backend.sent == [first, later]


async def test_a_look_ends_with_the_deadline_of_its_write(
    issuer: WriteIssuer, backend: Backend
) -> None:
    first, second = begin(SOON_S), begin(LATE_S)
    issuer.issue(first)
    issuer.issue(second)
    assert "it was not sent" in await failed(first)
    backend.answer.set()
    await asyncio.wait_for(issuer.flush(), TIMEOUT_S)
    assert backend.sent == [second]


async def test_so_does_the_wait_for_earlier_writes(issuer: WriteIssuer, backend: Backend) -> None:
    backend.before = [asyncio.get_running_loop().create_future()]
    first = begin(SOON_S)
    issuer.issue(first)
    assert "it was not sent" in await failed(first)
    assert not backend.before[0].done()
    assert backend.sent == []


async def test_a_defect_of_a_look_ends_its_write_and_no_other(
    issuer: WriteIssuer, backend: Backend
) -> None:
    backend.fault = KeyError("a defect")
    first, second = begin(LATE_S), put("/s/x", LATE_S)
    issuer.issue(first)
    issuer.issue(second)
    backend.answer.set()
    assert "nothing of it was written" in await failed(first)
    await asyncio.wait_for(issuer.flush(), TIMEOUT_S)
    assert backend.sent == [second]


async def test_a_defect_of_a_write_that_waited_leaves_the_next_one_its_turn(
    issuer: WriteIssuer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = [begin(LATE_S), put("/s/x", LATE_S), put("/s/y", LATE_S)]
    for each in writes:
        issuer.issue(each)
    first, second, third = writes
    sent: list[Write] = []

    def send(each: Write) -> None:
        if each is second:
            raise KeyError("a defect")
        sent.append(each)

    monkeypatch.setattr(backend, "send", send)
    backend.fault = MetadataError("not now")
    backend.answer.set()
    await failed(first)
    assert "nothing of it was written" in await failed(second)
    assert sent == [third]
