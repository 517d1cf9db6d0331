"""The client against a small server: TLS, tokens, moving leaders, one writer for each shard."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from config import bounds
from storage.clock import SystemClock
from storage.metadata.access import StoreAccess, UnusableAccessFile
from storage.metadata.open import open_metadata_store
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.records import PROOF
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import IndexEntry, MetadataError, PutResult, RecordTooLarge
from tests.support.bounds import set_bound
from tests.support.certificates import make_certificate
from tests.support.child_process import HOST, free_port
from tests.support.fake_oxia import FakeOxia, World
from tests.support.waiting import TIMEOUT_S, until


async def open_store(address: str, access: StoreAccess | None = None) -> OxiaMetadataStore:
    async with asyncio.timeout(TIMEOUT_S):
        return await OxiaMetadataStore.open(
            f"oxia://{address}", SystemClock(), random.Random(1), access
        )


async def test_an_url_opens_a_store(server: FakeOxia) -> None:
    store = await open_metadata_store(f"oxia://{server.address}/default", SystemClock())
    await store.put("/a", b"")
    await store.close()


async def test_one_of_several_servers_that_answers_is_enough(
    server: FakeOxia, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refuses, one takes the connection and says nothing: each is told of in the log."""
    set_bound(monkeypatch, "OXIA_ATTEMPT_TIMEOUT_S", 0.5)
    refusing = f"{HOST}:{free_port()}"
    silent = await asyncio.start_server(lambda _reader, _writer: None, HOST, 0)
    taking = f"{HOST}:{silent.sockets[0].getsockname()[1]}"
    with capture_logs() as logs:
        store = await open_store(f"{refusing},{taking},{server.address}/default")
    told = [one["server"] for one in logs if one["event"] == "oxia_server_not_reached"]
    assert told == [refusing, taking]
    await store.put("/a", b"")
    await store.close()
    silent.close()


async def test_tls_with_both_certificates_and_a_token(world: World, tmp_path: Path) -> None:
    made = make_certificate(tmp_path, HOST)
    chain, key = made.chain.read_bytes(), made.key.read_bytes()
    credentials = grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=chain, require_client_auth=True
    )
    server = FakeOxia(world, token="first")
    await server.start(credentials)
    world.lead(server.address)
    token_file = tmp_path / "token"
    token_file.write_text("first\n")
    access = StoreAccess(
        token_file, trust_certs_file=made.chain, cert_file=made.chain, key_file=made.key
    )
    store = await open_store(server.address, access)
    await store.put("/a", b"1")
    assert server.refused == 0
    assert {"WriteStream", "GetShardAssignments", "GetNotifications"} <= set(server.calls)

    server.token = "second"
    with pytest.raises(MetadataError, match="UNAUTHENTICATED"):
        await store.get("/a")
    token_file.write_text("second\n")
    record = await store.get("/a")
    assert record is not None
    assert record.value == b"1"
    await store.close()
    await server.stop()


async def test_a_server_that_is_not_trusted_is_not_used(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "OXIA_REQUEST_TIMEOUT_S", 1)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    made, other = (
        make_certificate(tmp_path / "one", HOST),
        make_certificate(tmp_path / "other", HOST),
    )
    server = FakeOxia(world)
    await server.start(
        grpc.ssl_server_credentials([(made.key.read_bytes(), made.chain.read_bytes())])
    )
    world.lead(server.address)
    with pytest.raises(MetadataError, match="TLS"):
        await open_store(server.address, StoreAccess(trust_certs_file=other.chain))
    assert server.calls == []
    await server.stop()


async def test_wrong_token_fails_the_opening(world: World, tmp_path: Path) -> None:
    server = FakeOxia(world, token="right")
    await server.start()
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(MetadataError, match="wrong token"):
        await open_store(server.address, StoreAccess(tmp_path / "token"))
    await server.stop()


@pytest.mark.parametrize("content", [None, "", "two words", "\x00"])
async def test_a_token_file_without_token(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UnusableAccessFile):
        StoreAccess(path).read_token()


def test_half_a_pair_of_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableAccessFile):
        StoreAccess(cert_file=tmp_path)
    assert StoreAccess(trust_certs_file=tmp_path).uses_tls
    assert not StoreAccess().uses_tls


async def test_other_routers_are_refused(server: FakeOxia, world: World) -> None:
    world.router = pb.UNKNOWN
    with pytest.raises(MetadataError, match="XXHASH3"):
        await open_store(server.address)


async def test_a_namespace_of_plain_bytes_is_refused(server: FakeOxia, world: World) -> None:
    world.hierarchical = False
    with pytest.raises(MetadataError, match="hierarchical"):
        await open_store(server.address)


async def test_everything_follows_the_leader(server: FakeOxia, world: World) -> None:
    """Twice, so that the channel of a former leader is closed under what it carries."""
    others = [FakeOxia(world), FakeOxia(world)]
    for each in others:
        await each.start()
    store = await open_store(server.address)
    session = await store.open_session(timeout_ms=60_000, identity="one")
    for n, each in enumerate(others):
        world.lead(each.address)
        value = str(n).encode()
        await asyncio.wait_for(store.put("/a", value), TIMEOUT_S)
        record = await asyncio.wait_for(store.get("/a"), TIMEOUT_S)
        assert record is not None
        assert record.value == value
        await until(lambda each=each: "GetNotifications" in each.calls)  # type: ignore[misc]
    assert not session.lost
    await store.close()
    assert session.lost
    for each in others:
        await each.stop()


async def test_shards_come_and_go(server: FakeOxia, world: World) -> None:
    store = await open_store(server.address)
    session = await store.open_session(timeout_ms=60_000, identity="one")
    watch = store.watch_key("/a")
    world.lead(server.address, server.address)
    await until(lambda: len(store._shards.table.ids) == 2)
    assert (await asyncio.wait_for(anext(watch), TIMEOUT_S)).kind.value == "resync"
    for n in range(16):
        await store.put(f"/n/{n}", b"")
    assert {shard for shard, key in world.records if key != PROOF} == {0, 1}
    await until(lambda: world.sessions == 2)
    assert not session.lost
    world.open.clear()
    writers = store._set.writers.values()
    first: list[asyncio.Task[PutResult]] = []
    for in_flight in (1, 2):
        first += [asyncio.create_task(store.put(f"/n/{n}", b"")) for n in range(16)]
        await until(
            lambda wanted=in_flight: all(  # type: ignore[misc]
                len(writer._in_flight) == wanted for writer in writers
            )
        )
    queued = [asyncio.create_task(store.put(f"/q/{n}", b"")) for n in range(16)]
    await asyncio.sleep(0)
    world.lead(server.address)
    await until(lambda: len(store._shards.table.ids) == 1)
    world.open.set()
    await asyncio.wait_for(asyncio.gather(*queued), TIMEOUT_S)
    done = await asyncio.wait_for(asyncio.gather(*first, return_exceptions=True), TIMEOUT_S)
    assert all(isinstance(each, PutResult | MetadataError) for each in done)
    assert {f"/q/{n}" for n in range(16)} <= {key for shard, key in world.records if shard == 0}
    await store.close()
    assert session.lost


async def test_a_map_with_gaps_is_not_taken(server: FakeOxia, world: World) -> None:
    store = await open_store(server.address)
    table = store._shards.table
    asked = server.calls.count("GetShardAssignments")
    world.lead()
    await until(lambda: server.calls.count("GetShardAssignments") > asked)
    assert store._shards.table is table
    world.lead(server.address)
    await asyncio.wait_for(store.put("/a", b""), TIMEOUT_S)
    await store.close()


async def test_two_requests_are_in_flight_and_the_rest_is_the_next_one(
    server: FakeOxia, world: World
) -> None:
    store = await open_store(server.address)
    await store.put("/first", b"")
    world.open.clear()
    sent = len(world.requests)
    puts = [asyncio.create_task(store.put("/a", b""))]
    await until(lambda: len(world.requests) == sent + 1)
    puts += [asyncio.create_task(store.put(f"/b/{n}", b"")) for n in range(3)]
    await asyncio.sleep(0)
    puts += [asyncio.create_task(store.put(f"/c/{n}", b"")) for n in range(3)]
    await asyncio.sleep(0)
    world.open.set()
    await asyncio.wait_for(asyncio.gather(*puts), TIMEOUT_S)
    sizes = [len(request.puts) for request in world.requests[sent:]]
    assert sum(sizes) == 7
    assert len(sizes) <= 4
    assert all(request.HasField("shard") for request in world.requests)
    await store.close()


async def test_a_shard_has_one_writer_at_a_time(server: FakeOxia, world: World) -> None:
    """Streams, and calls that begin or end sessions."""
    store = await open_store(server.address)
    await store.put("/first", b"")
    writes = [asyncio.create_task(store.put(f"/w/{n}", b"")) for n in range(100)]
    sessions = [
        asyncio.create_task(store.open_session(timeout_ms=60_000, identity=f"s{n}"))
        for n in range(5)
    ]
    writes += [asyncio.create_task(store.put(f"/x/{n}", b"")) for n in range(100)]
    opened = await asyncio.wait_for(asyncio.gather(*sessions), TIMEOUT_S)
    closing = [asyncio.create_task(session.close()) for session in opened]
    writes += [asyncio.create_task(store.put(f"/y/{n}", b"")) for n in range(100)]
    await asyncio.wait_for(asyncio.gather(*writes, *closing), TIMEOUT_S)
    assert world.most_writing == 1
    await store.close()


async def test_a_queue_that_is_full_refuses(
    server: FakeOxia, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "METADATA_QUEUE_OPERATIONS", 10)
    store = await open_store(server.address)
    puts = [store.put(f"/a/{n}", b"") for n in range(11)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(each, MetadataError) for each in results] == [*[False] * 10, True]
    await store.put("/a", b"")
    await store.close()


async def test_bytes_of_the_queue_are_bounded(
    server: FakeOxia, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "METADATA_QUEUE_BYTES", 2000)
    store = await open_store(server.address)
    puts = [store.put(f"/a/{n}", b"x" * 1000) for n in range(3)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(each, MetadataError) for each in results] == [False, False, True]
    await store.put("/a", b"")
    await store.close()


async def test_a_request_has_four_mebibytes_at_most(server: FakeOxia, world: World) -> None:
    """Index entries are sent twice; much more would fill a segment of the shard's log."""
    store = await open_store(server.address)
    entries = [IndexEntry("i", f"{n:03}" + "k" * 3000) for n in range(900)]
    with pytest.raises(RecordTooLarge):
        await store.put("/a", b"", indexes=entries)
    await store.put("/a", b"", indexes=entries[:600])
    values = [store.put(f"/v/{n}", b"v" * bounds.METADATA_VALUE_BYTES) for n in range(6)]
    await asyncio.wait_for(asyncio.gather(*values), TIMEOUT_S)
    sizes = [request.ByteSize() for request in world.requests]
    assert bounds.METADATA_VALUE_BYTES < max(sizes) <= bounds.METADATA_REQUEST_BYTES
    await store.close()


async def test_a_put_that_is_sent_again_does_not_overwrite_a_later_one(
    server: FakeOxia, world: World
) -> None:
    """Both are lost; somebody else writes before they are sent again, so the first one fails."""
    store = await open_store(server.address)
    await store.put("/a", b"0")
    world.open.clear()
    sent = len(world.requests)
    first = asyncio.create_task(store.put("/a", b"1"))
    await until(lambda: len(world.requests) == sent + 1)
    second = asyncio.create_task(store.put("/a", b"2"))
    await until(lambda: len(store._set.writers[0]._in_flight) == 2)
    world.after_read = lambda: world.put(0, "/a", b"of another")
    world.losing = True
    world.open.set()
    outcomes = asyncio.gather(first, second, return_exceptions=True)
    unknown, done = await asyncio.wait_for(outcomes, TIMEOUT_S)
    assert isinstance(done, PutResult)
    assert isinstance(unknown, MetadataError)
    record = await store.get("/a")
    assert record is not None
    assert record.value == b"2"
    await store.close()


@pytest.mark.parametrize(("limit", "max_bytes"), [(10, None), (10, 1000), (None, 100)])
@pytest.mark.parametrize("going", [5, 20, 35])
async def test_w10_limited_scan_is_not_taken_for_the_end_while_records_are_deleted(
    server: FakeOxia, world: World, limit: int | None, max_bytes: int | None, going: int
) -> None:
    """The first ones go when the server has found their keys: it sends them as missing."""
    store = await open_store(server.address)
    keys = [f"/n/{n:02}" for n in range(60)]
    puts = [store.put(key, b"v" * 10, indexes=[IndexEntry("i", key[3:])]) for key in keys]
    await asyncio.gather(*puts)
    deletes = [pb.DeleteRequest(key=key) for key in keys[:going]]
    world.after_listed = lambda: world.apply(0, pb.WriteRequest(deletes=deletes))
    hits = await store.scan_index("i", "0", "9", limit=limit, max_bytes=max_bytes)
    assert world.after_listed is None
    assert [hit.record.key for hit in hits] == keys[going : going + 10]
    await store.close()
