"""REST against peers that send half a request, many connections, or another site's request."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import uvloop

from broker.admin import app as admin_app
from tests.support.bounds import set_bound
from tests.unit.broker.admin.conftest import Rest, asking

NAMESPACE = "/admin/v2/namespaces/public/default"
RETENTION = NAMESPACE + "/retention"
POLICY = {"retentionTimeInMinutes": 5, "retentionSizeInMB": 7}
HALF_A_HEAD = b"GET /admin/v2 HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_A_BODY = (
    b"POST " + RETENTION.encode() + b" HTTP/1.1\r\nHost: x\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)


class Peer:
    """A socket that speaks to the REST port byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, first: bytes = b"") -> "Peer":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        return cls(reader, writer)

    async def rest_of_answer(self, timeout_s: float = 5) -> bytes:
        """Everything up to the end of the connection; a reset counts as the end."""
        async with asyncio.timeout(timeout_s):
            try:
                return await self.reader.read(-1)
            except ConnectionResetError:
                return b""
            finally:
                self.writer.close()


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Rest]:
    async with asking(tmp_path, max_http_connections=4) as rest:
        yield rest


def test_limits_hold_on_the_loop_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose transports are of no class of asyncio's."""
    set_bound(monkeypatch, "HTTP_HEAD_S", 0.3)
    set_bound(monkeypatch, "HTTP_CHECK_S", 0.1)

    async def half_a_head() -> None:
        async with asking(tmp_path) as rest:
            assert await rest.get("/admin/v2/clusters")
            peer = await Peer.connect(rest.port, HALF_A_HEAD)
            assert await peer.rest_of_answer() == b""

    uvloop.run(half_a_head())


async def test_half_a_head_is_closed_in_time(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "HTTP_HEAD_S", 0.3)
    set_bound(monkeypatch, "HTTP_CHECK_S", 0.1)
    peer = await Peer.connect(rest.port, HALF_A_HEAD)
    begun = time.monotonic()
    assert await peer.rest_of_answer() == b""
    assert time.monotonic() - begun < 3


async def test_a_connection_that_sends_nothing_is_closed_in_time(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HTTP_HEAD_S", 0.3)
    set_bound(monkeypatch, "HTTP_CHECK_S", 0.1)
    peer = await Peer.connect(rest.port)
    assert await peer.rest_of_answer() == b""


async def test_half_a_body_is_refused_in_time(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "HTTP_BODY_S", 0.3)
    peer = await Peer.connect(rest.port, HALF_A_BODY)
    answer = await peer.rest_of_answer()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"send it faster" in answer


async def test_a_peer_that_does_not_read_its_answer_is_closed(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HTTP_WRITE_S", 0.3)
    set_bound(monkeypatch, "HTTP_CHECK_S", 0.1)

    async def large(_request: object) -> bytes:
        return b"x" * 50_000_000

    monkeypatch.setattr(admin_app, "metrics_body", large)
    peer = await Peer.connect(rest.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(1.5)
    peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len(await peer.rest_of_answer()) < 50_000_000


async def test_newcomers_replace_the_oldest_connection_that_waits(one: Rest) -> None:
    peers = [await Peer.connect(one.port, HALF_A_HEAD) for _ in range(12)]
    await asyncio.sleep(0.1)
    assert await one.get("/admin/v2/clusters")
    ended = await asyncio.gather(
        *(peer.rest_of_answer(1) for peer in peers), return_exceptions=True
    )
    assert len([each for each in ended if each == b""]) >= 12 - 4
    assert ended[0] == b""


async def test_a_newcomer_is_closed_while_all_connections_have_requests(one: Rest) -> None:
    peers = [await Peer.connect(one.port, HALF_A_BODY) for _ in range(4)]
    await asyncio.sleep(0.1)
    late = await Peer.connect(one.port, b"GET /admin/v2/clusters HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await late.rest_of_answer() == b""
    for peer in peers:
        peer.writer.close()
    await asyncio.sleep(0.1)
    assert await one.get("/admin/v2/clusters")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_other_sites_change_nothing(rest: Rest, headers: dict[str, str]) -> None:
    sent = {"Content-Type": "application/json", **headers}
    status, answer = await rest.raw("POST", RETENTION, json.dumps(POLICY), sent)
    assert status == 403
    assert "another site" in answer
    assert (await rest.call("GET", RETENTION))[0] == 204


@pytest.mark.parametrize("site", ["same-origin", "none"])
async def test_own_pages_and_typed_addresses_may_change(rest: Rest, site: str) -> None:
    own = {"Origin": rest.base, "Sec-Fetch-Site": site, "Content-Type": "application/json"}
    assert (await rest.raw("POST", RETENTION, json.dumps(POLICY), own))[0] == 204


async def test_other_sites_may_read(rest: Rest) -> None:
    status, _ = await rest.raw("GET", "/admin/v2/clusters", "", {"Origin": "http://x.example"})
    assert status == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_bodies_that_are_no_json_are_refused(rest: Rest, kind: str) -> None:
    status, answer = await rest.raw("POST", RETENTION, json.dumps(POLICY), {"Content-Type": kind})
    assert status == 415
    assert "Content-Type: application/json" in answer


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "application/vnd.x+json"]
)
async def test_kinds_of_json_are_taken(rest: Rest, kind: str) -> None:
    sent = {"Content-Type": kind}
    assert (await rest.raw("POST", RETENTION, json.dumps(POLICY), sent))[0] == 204


@pytest.mark.parametrize("kind", [{}, {"Content-Type": "application/octet-stream"}])
async def test_an_empty_body_needs_no_content_type(rest: Rest, kind: dict[str, str]) -> None:
    assert (await rest.raw("PUT", NAMESPACE + "/unload", "", kind))[0] == 204


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/retention", '{"retentionTimeInMinutes": 1e308, "retentionSizeInMB": 1}'),
        ("/retention", '{"retentionTimeInMinutes": 1, "retentionSizeInMB": 99999999999999}'),
        ("/retention", '{"retentionTimeInMinutes": 1.5, "retentionSizeInMB": 1}'),
        ("/offloadThreshold", "-2"),
        ("/offloadThreshold", "9223372036854775808"),
        ("/offloadDeletionLagMs", "-9"),
        ("/autoTopicCreation", '{"allowAutoTopicCreation": true, "topicType": "partitioned", '
         '"defaultNumPartitions": 1000000}'),
    ],
)  # fmt: skip
async def test_numbers_out_of_range_are_refused(rest: Rest, path: str, text: str) -> None:
    sent = {"Content-Type": "application/json"}
    status, answer = await rest.raw("POST", NAMESPACE + path, text, sent)
    assert status in (400, 412), answer
    assert (await rest.call("GET", NAMESPACE + path))[0] == 204


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e309", "1" * 5000])
async def test_numbers_that_are_none_are_refused(rest: Rest, number: str) -> None:
    sent = {"Content-Type": "application/json"}
    status, answer = await rest.raw("POST", NAMESPACE + "/offloadThreshold", number, sent)
    assert status in (400, 412), answer


async def test_times_out_of_range_are_refused(creating: Rest) -> None:
    await creating.done("PUT", "/admin/v2/persistent/public/default/t")
    base = "/admin/v2/persistent/public/default/t/subscription/s"
    await creating.done("PUT", base)
    await creating.refused(412, "POST", f"{base}/resetcursor/{10**20}")


async def test_deep_nesting_is_a_fault_of_the_sender(rest: Rest) -> None:
    sent = {"Content-Type": "application/json"}
    status, answer = await rest.raw("POST", RETENTION, "[" * 100_000, sent)
    assert (status, "not JSON" in answer) == (400, True)


@pytest.mark.parametrize("path", ["/admin/v2/", "/admin/v2/clusters/", NAMESPACE + "/"])
async def test_a_slash_at_the_end_changes_nothing(rest: Rest, path: str) -> None:
    assert await rest.get(path) == await rest.get(path.rstrip("/"))


async def test_the_index_lists_each_path_once(rest: Rest) -> None:
    index = await rest.get("/admin/v2")
    assert isinstance(index, dict)
    assert not [path for path in index if path.endswith("/")]


async def test_many_connections_at_once_are_bounded(one: Rest) -> None:
    async with aiohttp.ClientSession() as session:
        peers = [await Peer.connect(one.port, HALF_A_HEAD) for _ in range(100)]
        async with session.get(one.base + "/admin/v2/clusters") as answer:
            assert answer.status == 200
        open_now = 0
        for peer in peers:
            try:
                async with asyncio.timeout(0.02):
                    open_now += bool(await peer.reader.read(1))
            except TimeoutError:
                open_now += 1
            except ConnectionResetError:
                pass
            peer.writer.close()
        assert open_now <= 4
