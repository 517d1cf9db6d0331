"""Membership of a starting broker in the cluster with which it shares its stores."""

import random
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from broker.placement.load import Totals
from broker.placement.several import BrokerInfo, SeveralBrokers
from broker.topics.registry import TopicRegistry
from broker.wire.listening import PortSetting, bind_port
from config.settings import Settings
from magnetar.protocol.names import TopicName
from storage.clock import Clock
from storage.metadata.counted_metadata import CountedMetadata


class MemberHost(Protocol):
    """The parts of a broker that membership uses."""

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
class ClusterMembership:
    """The placement of a member.  `http_socket` is bound and does not listen yet."""

    placement: SeveralBrokers
    http_socket: socket.socket


async def join(broker: MemberHost) -> ClusterMembership:
    """Start the placement of this broker, which takes no topics before it is announced.

    Raises `MetadataError`, `CannotListen`.
    """
    settings = broker.settings

    async def unload(name: TopicName, target: str) -> None:
        await broker.topics.cluster.unload(name, target)

    placement = SeveralBrokers(
        settings.advertised_host,
        broker.metadata,
        broker.random,
        BrokerInfo(broker.version, broker.clock.now_ms()),
        session_timeout_ms=settings.metadata_store_session_timeout_ms,
        totals=lambda: totals_of(broker),
        unload=unload,
    )
    # The REST port is bound first, because it is part of the broker's id.
    http_socket = bind_port(settings.bind_host, settings.http_port, PortSetting.HTTP_PORT)
    placement.listening(port=broker.port, http_port=http_socket.getsockname()[1])
    try:
        await placement.start()
    except BaseException:
        http_socket.close()
        await placement.stop()
        raise
    return ClusterMembership(placement, http_socket)


def totals_of(broker: MemberHost) -> Totals:
    """Counters of the broker, over the topics that are loaded now."""
    topics = list(broker.topics.loaded().values())
    return Totals(
        cpu_s=time.process_time(),
        messages_in=sum(topic.messages_in_total for topic in topics),
        bytes_in=sum(topic.bytes_in_total for topic in topics),
        messages_out=sum(topic.messages_out_total for topic in topics),
        bytes_out=sum(topic.bytes_out_total for topic in topics),
        topics=len(topics),
    )
