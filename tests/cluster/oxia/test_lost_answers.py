"""Writes that took effect while their answer got lost: settled by reading, none done twice."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from storage.metadata.keys import sequence_key
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import (
    ABSENT,
    EventKind,
    IndexEntry,
    MetadataError,
    PutResult,
    VersionConflict,
)
from tests.cluster.oxia.half_proxy import HalfProxy
from tests.cluster.oxia.stores import PATIENCE_S, is_there, look
from tests.servers.oxia_part import OxiaServer
from tests.support.child_process import once_it_is

pytestmark = pytest.mark.cluster


async def unheard(
    proxy: HalfProxy,
    write: Awaitable[object],
    took_effect: Callable[[], Awaitable[bool]],
) -> object:
    """Issue a write whose answer does not arrive, and break the connection once it is done."""
    proxy.mute()
    writing = asyncio.ensure_future(write)
    await once_it_is(took_effect, "a write that took effect", PATIENCE_S)
    assert not writing.done()
    proxy.cut()
    return await asyncio.wait_for(writing, PATIENCE_S)


@pytest.mark.parametrize("expect", [None, ABSENT])
async def test_a_put_that_creates(
    far_store: OxiaMetadataStore, proxy: HalfProxy, fresh_oxia: OxiaServer, expect: None
) -> None:
    watch = far_store.watch_key("/a")
    made = await unheard(
        proxy,
        far_store.put("/a", b"1", expect=expect, indexes=[IndexEntry("i", "k")]),
        lambda: is_there(fresh_oxia.address, "/a"),
    )
    assert isinstance(made, PutResult)
    assert made.modifications == 0
    record = await far_store.get("/a")
    assert record is not None
    assert (record.value, record.version) == (b"1", made.version)
    event = await asyncio.wait_for(anext(watch), PATIENCE_S)
    assert (event.kind, event.record) == (EventKind.UPSERT, record)


async def test_a_conditional_put(
    far_store: OxiaMetadataStore, proxy: HalfProxy, fresh_oxia: OxiaServer
) -> None:
    first = await far_store.put("/a", b"1")

    async def is_second() -> bool:
        answers = await look(fresh_oxia.address, "/a")
        return any(answer.version.modifications_count == 1 for answer in answers)

    made = await unheard(proxy, far_store.put("/a", b"2", expect=first.version), is_second)
    assert isinstance(made, PutResult)
    assert made.modifications == 1
    with pytest.raises(VersionConflict):
        await far_store.put("/a", b"3", expect=first.version)
    await far_store.put("/a", b"3", expect=made.version)


async def test_a_delete(
    far_store: OxiaMetadataStore, proxy: HalfProxy, fresh_oxia: OxiaServer
) -> None:
    made = await far_store.put("/a", b"1")

    async def is_gone() -> bool:
        return not await is_there(fresh_oxia.address, "/a")

    assert await unheard(proxy, far_store.delete("/a", expect=made.version), is_gone) is True
    assert await far_store.get("/a") is None


async def test_a_sequence_put_is_not_repeated(
    far_store: OxiaMetadataStore, proxy: HalfProxy, fresh_oxia: OxiaServer
) -> None:
    await far_store.put("/s/", b"1", partition="p", sequence=True)
    made = await unheard(
        proxy,
        far_store.put("/s/", b"2", partition="p", sequence=True),
        lambda: is_there(fresh_oxia.address, sequence_key("/s/", 2)),
    )
    assert isinstance(made, PutResult)
    assert made.key == sequence_key("/s/", 2)
    assert [each.value for each in await far_store.scan("/s/", "/s//")] == [b"1", b"2"]


async def test_an_ephemeral(
    far_store: OxiaMetadataStore, proxy: HalfProxy, fresh_oxia: OxiaServer
) -> None:
    session = await far_store.open_session(timeout_ms=30_000, identity="one")
    await unheard(
        proxy,
        far_store.put("/e", b"", session=session),
        lambda: is_there(fresh_oxia.address, "/e"),
    )
    assert not session.lost
    record = await far_store.get("/e")
    assert record is not None
    assert record.ephemeral
    await session.close()
    assert await far_store.get("/e") is None


async def test_many_writes_at_once(
    far_store: OxiaMetadataStore, proxy: HalfProxy, fresh_oxia: OxiaServer
) -> None:
    """Done by two requests of each shard, and queued: each takes effect once, in order."""
    proxy.mute()
    puts: list[asyncio.Future[PutResult]] = []
    counts: list[asyncio.Future[PutResult]] = []
    for part in range(3):
        for n in range(part * 40, part * 40 + 40):
            puts.append(asyncio.ensure_future(far_store.put(f"/many/{n}", b"")))
            counts.append(asyncio.ensure_future(far_store.put("/counter", str(n).encode())))
        if part < 2:
            last = f"/many/{part * 40 + 39}"
            await once_it_is(partial(is_there, fresh_oxia.address, last), last, PATIENCE_S)
    assert not any(each.done() for each in puts + counts)
    proxy.cut()
    results = await asyncio.wait_for(asyncio.gather(*puts), PATIENCE_S)
    assert [each.modifications for each in results] == [0] * 120
    assert len(await far_store.children("/many")) == 120
    counted = await asyncio.gather(*counts, return_exceptions=True)
    known = [each.modifications for each in counted if isinstance(each, PutResult)]
    assert known[-41:] == list(range(79, 120))
    assert all(isinstance(each, PutResult | MetadataError) for each in counted)
    record = await far_store.get("/counter")
    assert record is not None
    assert (record.value, record.modifications) == (b"119", 119)
