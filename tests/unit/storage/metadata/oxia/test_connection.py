"""Whose fault a failed call is."""

import asyncio
from collections.abc import Iterator
from typing import cast

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from storage.metadata.access import StoreAccess
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import CallFailed, Peer, Token, call_failures


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a"),
        KeyError("a"),
        AssertionError("a"),
        ValueError("a"),
        grpc.aio.UsageError("the two styles of a call are mixed"),
    ],
)
def test_mistakes_of_ours_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)), call_failures():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        grpc.aio.UsageError("Channel is closed."),
        grpc.aio.InternalError("core"),
        asyncio.InvalidStateError("RPC already finished."),
        TimeoutError(),
    ],
)
def test_error_of_a_lost_connection_is_a_failed_call(error: Exception) -> None:
    with pytest.raises(CallFailed), call_failures():
        raise error


async def test_a_channel_that_was_closed_fails_the_call() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    await channel.close()
    peer = Peer("127.0.0.1:1", channel, "default", Token(StoreAccess()))
    with pytest.raises(CallFailed, match="closed"):
        await peer.keep_alive(0, 0, 1.0)
    with pytest.raises(CallFailed, match="closed"):
        await peer.read(0, ["/a"], 1.0)


class Garbled:
    """A channel whose answers are no messages: gRPC gives None for them."""

    def unary_unary(self, *_: object) -> "Garbled":
        return self

    unary_stream = unary_unary

    def __call__(self, _request: Message, **_: object) -> "Garbled":
        return self

    def __await__(self) -> Iterator[None]:
        yield from ()

    def __aiter__(self) -> "Garbled":
        return self

    async def __anext__(self) -> pb.ReadResponse | None:
        return None

    def cancel(self) -> bool:
        return True


async def test_an_answer_that_cannot_be_read_is_the_servers() -> None:
    channel = cast("grpc.aio.Channel", Garbled())
    peer = Peer("127.0.0.1:1", channel, "default", Token(StoreAccess()))
    with pytest.raises(CallFailed, match="no message"):
        await peer.create_session(0, 1000, "me", 1.0)
    with pytest.raises(CallFailed, match="no message"):
        await peer.read(0, ["/a"], 1.0)
