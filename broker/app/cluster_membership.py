"""Membership of a starting broker in the cluster with which it shares its stores."""

import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from broker.placement.dialing import Dialer
from broker.placement.load import Totals
from broker.placement.several import BrokerInfo, SeveralBrokers
from broker.topics.registry import TopicRegistry
from broker.wire.listening import PortSetting, bind_port, http_ports
from config.settings import Settings
from magnetar.protocol.names import TopicName
from security.own_credentials import OwnCredentials
from security.tls import PeerTls
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
    peer_tls: PeerTls | None
    own_credentials: OwnCredentials | None

    @property
    def port(self) -> int:
        """The port of the binary protocol."""
        ...

    @property
    def port_tls(self) -> int | None:
        """The port of the binary protocol over TLS; None without."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterMembership:
    """The placement of a member.  The sockets of its REST ports are bound and do not listen yet."""

    placement: SeveralBrokers
    http_sockets: Mapping[PortSetting, socket.socket]


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
        dialer=Dialer(broker.peer_tls, broker.own_credentials),
    )
    # The REST ports are bound first, because one is part of the broker's id.
    sockets = _bind_http(settings)
    ports = {setting: each.getsockname()[1] for setting, each in sockets.items()}
    placement.listening(port=broker.port, http_port=ports.get(PortSetting.HTTP_PORT))
    placement.listening_tls(
        port=broker.port_tls,
        http_port=ports.get(PortSetting.HTTP_PORT_TLS),
        only=not settings.plaintext_ports,
    )
    try:
        await placement.start()
    except BaseException:
        _close(sockets)
        await placement.stop()
        raise
    return ClusterMembership(placement, sockets)


def _bind_http(settings: Settings) -> dict[PortSetting, socket.socket]:
    """Bind the REST ports that the settings ask for.  Raises `CannotListen`."""
    sockets: dict[PortSetting, socket.socket] = {}
    try:
        for setting, port in http_ports(settings).items():
            sockets[setting] = bind_port(settings.bind_host, port, setting)
    except BaseException:
        _close(sockets)
        raise
    return sockets


def _close(sockets: Mapping[PortSetting, socket.socket]) -> None:
    for each in sockets.values():
        each.close()


def totals_of(broker: MemberHost) -> Totals:
    """Counters of the broker, over the topics that are loaded now."""
    counts = [topic.traffic for topic in broker.topics.sampled()]
    return Totals(
        cpu_s=time.process_time(),
        messages_in=sum(each[0] for each in counts),
        bytes_in=sum(each[1] for each in counts),
        messages_out=sum(each[2] for each in counts),
        bytes_out=sum(each[3] for each in counts),
        topics=len(counts),
    )
