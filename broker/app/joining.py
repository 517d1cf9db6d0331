"""A starting broker joins those that it shares its stores with."""

import random
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from broker.placement.load import Totals
from broker.placement.several import BrokerInfo, SeveralBrokers
from broker.topics.registry import TopicRegistry
from config.settings import Settings
from magnetar.protocol.names import TopicName
from storage.clock import Clock
from storage.metadata.counted_metadata import CountedMetadata


class JoiningBroker(Protocol):
    """What is needed of the broker that joins."""

    settings: Settings
    clock: Clock
    random: random.Random
    metadata: CountedMetadata
    topics: TopicRegistry
    version: str

    @property
    def port(self) -> int:
        """The port of the binary protocol."""
        ...


@dataclass(frozen=True, slots=True)
class Joined:
    """What a broker has once it has joined.  `http_socket` is bound and does not listen yet."""

    placement: SeveralBrokers
    http_socket: socket.socket


async def join(broker: JoiningBroker) -> Joined:
    """The placement of this broker, which takes nothing before it is announced.

    The REST port is taken first: it is part of the broker's id.  Raises `MetadataError`, OSError.
    """
    settings = broker.settings

    async def unload(name: TopicName, target: str) -> None:
        await broker.topics.elsewhere.unload(name, target)

    placement = SeveralBrokers(
        settings.advertised_host,
        broker.metadata,
        broker.random,
        BrokerInfo(broker.version, broker.clock.now_ms()),
        session_timeout_ms=settings.metadata_store_session_timeout_ms,
        totals=lambda: totals_of(broker),
        unload=unload,
    )
    taken = take_port(settings.bind_host, settings.http_port)
    placement.listening(port=broker.port, http_port=taken.getsockname()[1])
    try:
        await placement.start()
    except BaseException:
        taken.close()
        await placement.stop()
        raise
    return Joined(placement, taken)


def totals_of(broker: JoiningBroker) -> Totals:
    """What the broker has done so far, as far as what it did it for is still loaded."""
    topics = list(broker.topics.loaded().values())
    return Totals(
        cpu_s=time.process_time(),
        messages_in=sum(topic.messages_in_total for topic in topics),
        bytes_in=sum(topic.bytes_in_total for topic in topics),
        messages_out=sum(topic.messages_out_total for topic in topics),
        bytes_out=sum(topic.bytes_out_total for topic in topics),
        topics=len(topics),
    )


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.  Raises OSError when the port is taken."""
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError:
        taken.close()
        raise
    return taken
