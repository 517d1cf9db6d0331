"""Following one shard's notifications through defects and from a late start."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from config import bounds
from magnetar.protocol.backoff import Backoff
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import CallFailed
from storage.metadata.oxia.errors import Action, Failure
from storage.metadata.oxia.notifications import NotificationFollower
from storage.metadata.oxia.shards import Shards
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S, until

SHARD = 7


class Leader:
    """Tells batches behind the offset that it is asked for; with `fault` it breaks off once."""

    def __init__(self) -> None:
        self.address = "one:1"
        self.batches: list[pb.NotificationBatch] = []
        self.asked: list[int | None] = []
        self.fault: Exception | None = None

    def change(self, *keys: str) -> None:
        batch = pb.NotificationBatch(shard=SHARD, offset=len(self.batches) + 1)
        for key in keys:
            batch.notifications[key].type = pb.KEY_DELETED
        self.batches.append(batch)

    def backoff(self) -> Backoff:
        return Backoff(bounds.OXIA_BACKOFF_MIN_S, bounds.OXIA_BACKOFF_MAX_S)

    def peer(self, _shard_id: int) -> "Leader":
        return self

    async def pause(self, _failure: Failure, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    async def notifications(
        self, _shard_id: int, after_offset: int | None
    ) -> AsyncIterator[pb.NotificationBatch]:
        self.asked.append(after_offset)
        if after_offset is None:
            after_offset = len(self.batches)
            yield pb.NotificationBatch(shard=SHARD, offset=after_offset)
        while True:
            for batch in self.batches[after_offset:]:
                yield batch
                after_offset = batch.offset
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
            await asyncio.sleep(0.001)


class Told:
    """What a listener was told; with `fault` it breaks once."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fault: Exception | None = None
        self.faulty_gaps = 0

    def notified(self, _shard_id: int, batch: pb.NotificationBatch) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.told += batch.notifications

    def gap(self, _shard_id: int) -> None:
        if self.faulty_gaps:
            self.faulty_gaps -= 1
            raise KeyError("another defect")
        self.told.append("gap")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "OXIA_BACKOFF_MIN_S", 0.001)


async def follow(leader: Leader, told: Told, *, late: bool = False) -> NotificationFollower:
    shards = cast("Shards", leader)
    made = (
        NotificationFollower(SHARD, shards, told, late=late)
        if late
        else NotificationFollower(SHARD, shards, told)
    )
    await asyncio.wait_for(made.wait_positioned(), TIMEOUT_S)
    return made


@pytest.mark.parametrize("faulty_gaps", [0, 2])
async def test_a_defect_of_the_listener_is_a_gap_and_nothing_after_it_is_missed(
    faulty_gaps: int,
) -> None:
    leader, told = Leader(), Told()
    follower = await follow(leader, told)
    leader.change("/a")
    await until(lambda: told.told == ["/a"])
    told.fault, told.faulty_gaps = KeyError("a defect"), faulty_gaps
    leader.change("/b")
    leader.change("/c")
    await until(lambda: told.told == ["/a", "gap", "/c"])
    assert leader.asked == [None, 2]
    await follower.close()


async def test_a_defect_of_the_stream_is_a_gap_too() -> None:
    leader, told = Leader(), Told()
    follower = await follow(leader, told)
    leader.fault = AssertionError("a defect")
    leader.change("/a")
    await until(lambda: told.told == ["/a", "gap"])
    leader.change("/b")
    await until(lambda: told.told == ["/a", "gap", "/b"])
    await follower.close()


async def test_a_broken_connection_is_none() -> None:
    leader, told = Leader(), Told()
    follower = await follow(leader, told)
    leader.fault = CallFailed(Failure(Action.RETRY, "UNAVAILABLE", "gone"))
    leader.change("/a")
    await until(lambda: leader.asked == [None, 1])
    leader.change("/b")
    await until(lambda: told.told == ["/a", "/b"])
    await follower.close()


async def test_late_follower_begins_with_a_gap() -> None:
    leader, told = Leader(), Told()
    leader.change("/before")
    follower = await follow(leader, told, late=True)
    leader.change("/a")
    await until(lambda: told.told == ["gap", "/a"])
    await follower.close()


async def test_the_stream_of_a_replaced_leader_is_left() -> None:
    """It would tell nothing any more, and not end."""
    leader, told = Leader(), Told()
    follower = await follow(leader, told)
    follower.set_leader(leader.address)
    leader.change("/a")
    await until(lambda: told.told == ["/a"])
    assert leader.asked == [None]
    leader.address = "other:1"
    follower.set_leader(leader.address)
    await until(lambda: leader.asked == [None, 1])
    leader.change("/b")
    await until(lambda: told.told == ["/a", "/b"])
    await follower.close()
