"""REST against peers that send half a request, many connections, or another site's request."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp.http_exceptions import HttpProcessingError
from structlog.testing import capture_logs

from broker.admin import app as admin_app
from broker.admin.access import rules
from scripts.print_access_rules import filled
from tests.support.bounds import set_bound
from tests.support.roles import TOKENS, token_of
from tests.support.waiting import TIMEOUT_S, end, until
from tests.unit.broker.admin.conftest import Rest, asking

NAMESPACE = "/admin/v2/namespaces/public/default"
RETENTION = NAMESPACE + "/retention"
POLICY = {"retentionTimeInMinutes": 5, "retentionSizeInMB": 7}
HALF_A_HEAD = b"GET /admin/v2 HTTP/1.1\r\nHost: x\r\nX-Slow: "
LARGE_HEAD = b"GET / HTTP/1.1\r\nAuthorization: Bearer " + b"A" * 1024 * 1024 + b"\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"GET /admin/v2 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
WRONG_TOKEN = b"GET /admin/v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n"
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


@pytest.fixture
def slow_page(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Keep requests of `/metrics` in progress until it is set."""
    ready = asyncio.Event()

    async def wait(_request: object) -> bytes:
        await ready.wait()
        return b""

    monkeypatch.setattr(admin_app, "metrics_body", wait)
    return ready


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
    assert time.monotonic() - begun < 9, "less than without this bound"


async def test_a_connection_that_sends_nothing_is_closed_in_time(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HTTP_HEAD_S", 0.3)
    set_bound(monkeypatch, "HTTP_CHECK_S", 0.1)
    peer = await Peer.connect(rest.port)
    assert await peer.rest_of_answer() == b""


@pytest.mark.parametrize(
    "head",
    [LARGE_HEAD, b"no HTTP" * 20_000, UPGRADE + b"no HTTP" * 5_000],
    ids=["large", "none", "behind an upgrade"],
)
async def test_unreadable_heads_leave_no_memory_behind(
    rest: Rest, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the garbage collector, which hardly runs in a broker; and no secrets in the log."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            peer = await Peer.connect(rest.port, head)
            with capture_logs() as logged:
                # The answer may be lost, as the peer still sends.
                await peer.rest_of_answer()
            for line in logged:
                assert line["event"] == "http_request_malformed"
                assert (line["log_level"], line["remote"]) == ("warning", "127.0.0.1")
                assert set(line) == {"event", "log_level", "remote", "error"}
        assert not caplog.records
        kept = [each for each in gc.get_objects() if isinstance(each, HttpProcessingError)]
        assert not kept
    finally:
        gc.enable()


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


async def test_newcomers_replace_the_oldest_connection_that_waits(
    one: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HTTP_HEAD_S", 3600.0)  # so that no slow head is why one is closed
    peers = [await Peer.connect(one.port, HALF_A_HEAD) for _ in range(12)]
    await asyncio.sleep(0.1)
    assert await one.get("/admin/v2/clusters")
    reads = [asyncio.create_task(peer.rest_of_answer(TIMEOUT_S)) for peer in peers]
    await until(lambda: sum(read.done() for read in reads) >= 12 - 4)
    assert await reads[0] == b""
    await end(*reads)


async def test_a_newcomer_is_closed_while_all_connections_have_requests(
    one: Rest, slow_page: asyncio.Event
) -> None:
    peers = [await Peer.connect(one.port, METRICS) for _ in range(4)]
    await asyncio.sleep(0.1)
    late = await Peer.connect(one.port, b"GET /admin/v2/clusters HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await late.rest_of_answer() == b""
    slow_page.set()
    for peer in peers:
        assert (await peer.reader.readline()).startswith(b"HTTP/1.1 200 ")
        peer.writer.close()
    await asyncio.sleep(0.1)
    assert await one.get("/admin/v2/clusters")


async def test_half_bodies_do_not_lock_out_a_newcomer(one: Rest) -> None:
    peers = [await Peer.connect(one.port, HALF_A_BODY) for _ in range(4)]
    await asyncio.sleep(0.1)
    assert await one.get("/admin/v2/clusters")
    assert await peers[0].rest_of_answer() == b""
    for peer in peers:
        peer.writer.close()


async def test_refused_logins_do_not_lock_out_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers are held back, which keeps their requests in progress."""
    set_bound(monkeypatch, "FAILED_LOGIN_DELAY_MIN_S", 30.0)
    async with asking(tmp_path, max_http_connections=4, **TOKENS) as rest:
        peers = [await Peer.connect(rest.port, WRONG_TOKEN) for _ in range(4)]
        await asyncio.sleep(0.1)
        role = f"Authorization: Bearer {token_of('alice')}\r\n".encode()
        for header in (b"", role):
            path = b"/admin/v2" if header else b"/admin/v2/brokers/ready"
            ask = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header
            late = await Peer.connect(rest.port, ask + b"\r\n")
            assert (await late.rest_of_answer()).startswith(b"HTTP/1.1 200 ")
        assert await peers[0].rest_of_answer() == b""
        for peer in peers:
            peer.writer.close()


@pytest.mark.parametrize("role", [True, False])
async def test_a_request_of_a_role_alone_keeps_its_connection(
    tmp_path: Path, slow_page: asyncio.Event, role: bool
) -> None:
    header = f"Authorization: Bearer {token_of('alice')}\r\nHost:".encode()
    ask = METRICS.replace(b"Host:", header) if role else METRICS
    async with asking(tmp_path, max_http_connections=4, **TOKENS) as rest:
        peers = [await Peer.connect(rest.port, ask) for _ in range(4)]
        await asyncio.sleep(0.1)
        late = await Peer.connect(rest.port, WRONG_TOKEN)
        answered = (await late.reader.read(20)).startswith(b"HTTP/1.1 401 ")
        assert answered is not role
        slow_page.set()
        for peer in (late, *peers):
            peer.writer.close()


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
        ("/scalableTopicConsumerSessionGracePeriod", "-1"),
        ("/scalableTopicConsumerSessionGracePeriod", "2147483648"),
        ("/autoTopicCreation", '{"allowAutoTopicCreation": true, "topicType": "partitioned", '
         '"defaultNumPartitions": 1000000}'),
    ],
)  # fmt: skip
async def test_numbers_out_of_range_are_refused(rest: Rest, path: str, text: str) -> None:
    sent = {"Content-Type": "application/json"}
    unset = await rest.call("GET", NAMESPACE + path)
    status, answer = await rest.raw("POST", NAMESPACE + path, text, sent)
    assert status in (400, 412), answer
    assert await rest.call("GET", NAMESPACE + path) == unset


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


async def test_malformed_request_is_logged_without_its_secret(
    rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    """A token from a file with a newline at its end makes such a header."""
    head = b"GET /admin/v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer marked-secret\n\r\n\r\n"
    with capture_logs() as lines:
        peer = await Peer.connect(rest.port, head)
        assert (await peer.rest_of_answer()).startswith(b"HTTP/1.0 400 ")
    assert [line["event"] for line in lines] == ["http_request_malformed"]
    assert lines[0]["remote"] == "127.0.0.1"
    assert "marked-secret" not in str(lines) + caplog.text


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


async def test_many_connections_at_once_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HTTP_HEAD_S", 3600.0)  # so that no slow head is why one is closed
    async with asking(tmp_path, max_http_connections=4) as one, aiohttp.ClientSession() as session:
        peers = [await Peer.connect(one.port, HALF_A_HEAD) for _ in range(100)]
        async with session.get(one.base + "/admin/v2/clusters") as answer:
            assert answer.status == 200
        reads = [asyncio.create_task(peer.reader.read(1)) for peer in peers]
        await until(lambda: sum(not read.done() for read in reads) <= 4)
        await end(*reads)
        for peer in peers:
            peer.writer.close()


async def test_head_gets_no_body_which_would_begin_the_next_answer(rest: Rest) -> None:
    for path in sorted(filled(path) for method, path in rules() if method == "GET"):
        head = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        answer = await (await Peer.connect(rest.port, head)).rest_of_answer()
        assert answer.partition(b"\r\n\r\n")[2] == b"", path
