"""Bytes of the requests that the library lacks, and what answers mean."""

import struct

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, ConnectionClosedError, ConnectionLoss, NoAuthError
from kazoo.protocol.states import ZnodeStat

from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.requests import Failure, MultiResult, Stat

STAT_BYTES = struct.pack("!qqqqiiiqiiq", 1, 2, 0, 0, 3, 0, 0, 9, 0, 0, 0)
STAT = Stat(1, 2, 3, 9)
END = struct.pack("!iBi", -1, True, -1)


def part(kind: int, body: bytes = b"", error: int = 0) -> bytes:
    return struct.pack("!iBi", kind, False, error) + body


def failed(code: int) -> bytes:
    return part(-1, struct.pack("!i", code), code)


def text(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value


def answer(request: requests.Request, body: bytes) -> requests.Value:
    found = request.deserialize(b"\xff" * 3 + body, 3)  # type: ignore[attr-defined]
    return requests.value_of(found)


def test_reads_of_many_nodes() -> None:
    request = requests.read_many([requests.get_data("/a"), requests.get_children("/b")])
    body = part(4, text(b"/a") + b"\0", -1) + part(8, text(b"/b") + b"\0", -1) + END
    assert request.serialize() == body
    reply = (
        part(4, text(b"value") + STAT_BYTES)
        + part(4, struct.pack("!i", -1) + STAT_BYTES)
        + part(8, struct.pack("!i", 2) + text(b"x") + text("ü".encode()))
        + failed(-101)
        + failed(-4711)
        + END
    )
    found = [(b"value", STAT), (b"", STAT), ["x", "ü"], Failure.NO_NODE, Failure.OTHER]
    assert answer(request, reply) == found
    assert answer(request, END) == []


def test_a_multi_says_what_failed() -> None:
    request = requests.multi([requests.check("/a", 1), requests.delete("/b", 2)])
    body = part(13, text(b"/a") + struct.pack("!i", 1), -1)
    assert request.serialize() == body + part(2, text(b"/b") + struct.pack("!i", 2), -1) + END
    assert answer(request, part(13) + part(2) + END) == MultiResult()
    assert answer(request, failed(-101) + failed(-2) + END) == MultiResult(0, Failure.NO_NODE)
    reply = failed(0) + failed(0) + failed(-103) + failed(-2) + END
    assert answer(request, reply) == MultiResult(2, Failure.BAD_VERSION)


def test_watches() -> None:
    added = requests.add_watch("/a", recursive=True)
    assert added.serialize() == text(b"/a") + struct.pack("!i", 1)
    assert requests.add_watch("/a", recursive=False).serialize()[-1] == 0
    assert requests.remove_watch("/a").serialize() == text(b"/a") + struct.pack("!i", 3)


def test_answers_of_the_library() -> None:
    stat = ZnodeStat(1, 2, 0, 0, 3, 0, 0, 9, 0, 0, 0)
    assert requests.value_of(stat) == STAT
    assert requests.value_of((b"v", stat)) == (b"v", STAT)
    assert requests.value_of((None, stat)) == (b"", STAT)
    assert requests.value_of(["a"]) == ["a"]
    assert requests.value_of("/a") == "/a"
    assert requests.value_of(None) is None


@pytest.mark.parametrize(
    ("error", "failure", "uncertain"),
    [
        (BadVersionError(), Failure.BAD_VERSION, False),
        (NoAuthError(), Failure.NO_AUTH, False),
        (ConnectionLoss(), Failure.CONNECTION_LOSS, True),
        (ConnectionClosedError(), Failure.SESSION_EXPIRED, True),
        (RuntimeError(), Failure.OTHER, True),
    ],
)
def test_failures(error: Exception, failure: Failure, uncertain: bool) -> None:
    assert requests.failure_of(error) is failure
    assert failure.uncertain is uncertain


def test_the_library_has_the_insides_that_are_used() -> None:
    """Each of them is private: a release that moves one must be noticed here."""
    client = KazooClient()
    assert callable(client._call)
    assert client._session_id is None
    assert client.last_zxid == 0
    assert callable(client._connection._invoke)
    assert callable(client._connection._read_watch_event)
