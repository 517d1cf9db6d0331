"""The broker: makes its parts, connects them, starts and stops them."""

import asyncio
import importlib
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

import structlog

from broker.app.clock_check import ClockCheck
from broker.app.descriptors import descriptor_limit, share_descriptors
from broker.app.health import HealthCheck
from broker.app.stores import Stores, limits_of, open_stores
from broker.placement import OneBroker, Placement
from broker.policies.clusters import Clusters
from broker.policies.namespaces import Namespaces
from broker.policies.policies_in_force import PoliciesInForce
from broker.policies.policy_kinds import REPLICATION
from broker.policies.topic_policies import TopicPolicies
from broker.replication.service import Replications
from broker.scalable.records import namespace_path
from broker.scalable.service import ScalableTopics
from broker.topics.backlog_quotas import BacklogQuotas
from broker.topics.compactor import Compactions
from broker.topics.idle_topics import IdleTopics
from broker.topics.inactive_topics import InactiveTopics
from broker.topics.message_expiry import MessageExpiry
from broker.topics.offloading import Offloads
from broker.topics.producer_names import ProducerNames
from broker.topics.publish_limits import PublishLimits, largest_message
from broker.topics.rate_timer import RateTimer
from broker.topics.registry import TopicRegistry
from broker.topics.schemas import SchemaRegistry
from broker.topics.segment_reads import SegmentReads
from broker.topics.stored_backlogs import StoredBacklogs
from broker.topics.subscription_expiry import SubscriptionExpiry
from broker.topics.topic_counts import TopicCounts
from broker.transactions.service import Transactions
from broker.wire.client_addresses import ClientAddresses
from broker.wire.connection import Connection
from broker.wire.gone_peers import GonePeers
from broker.wire.handlers.produce import send
from broker.wire.handlers.table import handler_table
from broker.wire.listening import PortSetting
from broker.wire.peer_memory import PeerMemory
from broker.wire.request_share import CostlyRequests
from broker.wire.server import BinaryServer
from broker.wire.tls_handshakes import Handshakes
from config.bounds import (
    BROKER_INFLIGHT_BYTES,
    CONNECTION_INFLIGHT_BYTES,
    COSTLY_REQUESTS_AT_ONCE,
    DRAIN_REQUESTS_S,
    PEER_MEMORY_BYTES,
)
from config.settings import Settings
from magnetar.protocol.names import NamespaceName
from magnetar.protocol.server_error import MagnetarError
from security.audit import AuditLog
from security.reloading import Reloader
from storage.clock import Clock
from storage.damage import DamageReport
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.records import ledger_key
from storage.metadata.counted_metadata import CountedMetadata
from storage.metadata.store import MetadataError, Session
from storage.offload.cold_ledgers import ColdLedgers

if TYPE_CHECKING:
    # A single broker starts without the parts of a cluster.
    from broker.app.cluster_membership import ClusterMembership
    from broker.placement.several import SeveralBrokers
    from broker.policies.authorizer import Authorizer
    from broker.wire.handlers.guard import AccessGuard
    from broker.wire.tls_server import TlsBinaryServer
    from security.authenticator import Authenticator
    from security.own_credentials import OwnCredentials
    from security.tls import PeerTls, ServerTls
    from storage.ledger.bookkeeper.store import BookKeeperLedgerStore

log = structlog.get_logger(__name__)

DRAINING = "draining"


class Broker:
    """One broker process.  Its parts exist from `start` on."""

    joins_others: ClassVar[bool] = True
    """Whether brokers on the same shared stores form a cluster."""

    metadata: CountedMetadata
    clock_check: ClockCheck
    bookkeeper: "BookKeeperLedgerStore | None"
    managed_ledgers: ManagedLedgerFactory
    session: Session
    clusters: Clusters
    namespaces: Namespaces
    topic_policies: TopicPolicies
    policies: PoliciesInForce
    schemas: SchemaRegistry
    transactions: Transactions
    topic_counts: TopicCounts
    topics: TopicRegistry
    replications: Replications
    scalable: ScalableTopics
    producer_names: ProducerNames
    idle_topics: IdleTopics
    message_expiry: MessageExpiry
    backlog_quotas: BacklogQuotas
    subscription_expiry: SubscriptionExpiry
    inactive_topics: InactiveTopics
    stored_backlogs: StoredBacklogs
    offloads: Offloads
    compactions: Compactions
    damage: DamageReport
    _health: HealthCheck
    _rate_timer: RateTimer

    def __init__(
        self, settings: Settings, *, clock: Clock, rng: random.Random, stores: Stores | None = None
    ) -> None:
        """Use `stores` if given, else those that the settings name."""
        self.settings = settings
        self.clock = clock
        self.random = rng
        self.version = version("magnetar")
        self.placement: Placement = OneBroker(settings.advertised_host)
        self.connections: set[Connection] = set()
        self.descriptors = share_descriptors(descriptor_limit(), settings)
        self.publish_limits = PublishLimits(
            connection_bytes=CONNECTION_INFLIGHT_BYTES, total_bytes=BROKER_INFLIGHT_BYTES
        )
        self.segment_reads = SegmentReads()
        self.peer_memory = PeerMemory(
            PEER_MEMORY_BYTES, settings.max_connections, asyncio.get_running_loop().time
        )
        self.client_addresses = ClientAddresses(
            settings.max_connections_per_address, self.descriptors.binary
        )
        self.gone_peers = GonePeers(self.connections)
        self.costly_requests = CostlyRequests(COSTLY_REQUESTS_AT_ONCE)
        self.own_credentials: OwnCredentials | None = None
        """How this broker shows itself to others; None if there are none."""
        self.authenticator: Authenticator | None = None
        """Finds out who a peer is; None: authentication is off."""
        self.authorizer: Authorizer | None = None
        """Decides what roles may do; None: everything."""
        self.access_guard: AccessGuard | None = None
        self.audit = AuditLog(time.monotonic)
        self.handshakes: dict[PortSetting, Handshakes] = {
            PortSetting.PORT_TLS: self.client_addresses.handshakes
        }
        """The TLS handshakes of each port; that of the REST port is added by its server."""
        self.server_tls: ServerTls | None = None
        """The TLS of the ports; None if none has TLS."""
        self.peer_tls: PeerTls | None = None
        """The TLS towards other brokers; None if there are none."""
        self.reloader = Reloader(settings.security_reload_interval_s)
        self.serving = False
        self._http_sockets: dict[PortSetting, socket.socket] = {}
        self._checks: asyncio.Future[None] | None = None
        self._several: SeveralBrokers | None = None
        self._stores = stores
        self._server = BinaryServer(self, handler_table(), send)
        self._tls_server: TlsBinaryServer | None = None
        self._exit = AsyncExitStack()

    @property
    def port(self) -> int:
        """The port of the binary protocol, once started; 0 if it has TLS only."""
        return self._server.port

    @property
    def port_tls(self) -> int | None:
        """The port of the binary protocol over TLS, once started; None without."""
        return None if self._tls_server is None else self._tls_server.port

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address: Pulsar's broker id."""
        return self.placement.broker_id

    @property
    def max_message_size(self) -> int:
        """The largest payload that producers may send, once started."""
        return largest_message(self.managed_ledgers.max_entry_bytes)

    async def start(self) -> None:
        """Open the stores, recover from a crash, then accept clients.

        After a failure `stop` releases what was opened.
        """
        settings, at_stop = self.settings, self._release_at_stop
        stores = self._stores or await open_stores(settings, self.clock, self.random)
        self._stores = stores
        self._exit.callback(stores.release)
        self.damage = stores.damage
        at_stop("metadata", stores.metadata.close)
        at_stop("ledgers", stores.ledgers.close)
        self.metadata = CountedMetadata(stores.metadata, asyncio.get_running_loop().time)
        self.clock_check = ClockCheck(self.metadata, self.clock)
        at_stop("clock_check", self.clock_check.stop)
        await self.clock_check.start()
        self.bookkeeper = stores.bookkeeper
        self._health = HealthCheck(self.metadata, stores.ledgers, self.clock)
        at_stop("health", self._health.close)
        await self._load_security()
        at_stop("server", self._stop_listening)
        self._bind()
        self.offloads = Offloads(self, asyncio.get_running_loop().time)
        self.managed_ledgers = ManagedLedgerFactory(
            self.metadata,
            stores.ledgers,
            self.clock,
            limits_of(settings, shared=stores.shared),
            ColdLedgers(self.random, {"magnetar/cluster": settings.cluster_name.encode()}),
            self.offloads.lag_ms,
            # The policies are opened after the stores.
            lambda path: self.policies.persistence(path),  # noqa: PLW0108
        )
        at_stop("managed_ledgers", self.managed_ledgers.close)
        await self._sweep_orphans()
        await self._join_others()
        await self._open_policies()
        self._authorize()
        self.schemas = SchemaRegistry(self.metadata, self.clock)
        self.producer_names = await ProducerNames.open(self.metadata, settings.cluster_name)
        self.transactions = Transactions(self)
        at_stop("transactions", self.transactions.stop)
        await self.transactions.start()
        self.compactions = Compactions(self)
        self._make_topics()
        self.scalable = ScalableTopics(self)
        self.replications.use_source_topics(
            self.scalable.replicated, self.scalable.subscription_exchange.ask_soon
        )
        at_stop("scalable", self.scalable.close)
        await self.scalable.start()
        at_stop("coordinators", self.transactions.stop_serving)
        await self.transactions.serve()
        self._start_periodic_work()
        await self._listen()
        self.serving = True
        if stores.check_later is not None:
            self._checks = asyncio.ensure_future(stores.check_later())
        if self._several is not None:
            await self._several.announce()

    def _make_topics(self) -> None:
        self.topics = TopicRegistry(self)
        self.damage.on_loss(self.topics.entries_lost)
        self.replications = Replications(
            self.settings,
            self.clusters,
            self.schemas,
            self.topics.partitioned,
            self.random,
            self.topics.is_migrated,
            self._replication_list,
        )
        self._release_at_stop("replications", self.replications.close)
        self.topics.replicate = self.replications.of
        self.topics.non_persistent.replicate = self.replications.of_non_persistent
        self._release_at_stop("topics", self.topics.close)

    def _replication_list(self, namespace: NamespaceName) -> frozenset[str]:
        """The clusters of a namespace's list, from the cached policies."""
        found = self.policies.value_of(REPLICATION, self.namespaces.known(namespace))
        return frozenset(found if isinstance(found, list) else ())

    async def _load_security(self) -> None:
        """Load certificates, and what the providers of authentication need.

        Raises `UnusableCertificate`, `ConfigurationError`.
        """
        await self._load_authentication()
        await self._load_tls()
        if self._joins_others:
            await self._load_own_credentials()
        self._release_at_stop("security_reload", self.reloader.stop)
        self.reloader.start()

    async def _load_authentication(self) -> None:
        if not self.settings.names_authentication:
            return
        # Not imported at the top: a broker without it starts sooner.
        from broker.app.security import make_authenticator  # noqa: PLC0415

        authenticator = make_authenticator(self.settings, audit=self.audit)
        if not authenticator.enabled:
            return
        self.authenticator = authenticator
        self._release_at_stop("authentication", authenticator.close)
        for files in authenticator.files:
            self.reloader.add(files)

    async def _load_own_credentials(self) -> None:
        from broker.app.security import OwnCredentials, check_own_credentials  # noqa: PLC0415

        settings = self.settings
        own = self.own_credentials = OwnCredentials(
            settings.broker_client_token_file,
            has_certificate=settings.broker_client_certificate_file is not None,
        )
        if self.authenticator is not None:
            await check_own_credentials(self.authenticator, own, settings)

    def _authorize(self) -> None:
        """Have every command checked against its access rule, if authorization is on."""
        settings = self.settings
        if settings.authorization == "off":
            return
        from broker.app.security import make_guard  # noqa: PLC0415

        guard = make_guard(self.namespaces, settings, self.audit)
        self.access_guard, self.authorizer = guard, guard.authorizer
        self._release_at_stop("access", guard.stop)
        handlers = guard.guarded(handler_table())
        for server in (self._server, self._tls_server):
            if server is not None:
                server.handlers = handlers

    async def _load_tls(self) -> None:
        settings, joins = self.settings, self._joins_others
        if not settings.uses_tls and not joins:
            return
        # Not imported at the top: a single broker without TLS starts sooner.
        tls = await asyncio.to_thread(importlib.import_module, "security.tls")
        if settings.uses_tls:
            ports: ServerTls = await asyncio.to_thread(tls.ServerTls, settings)
            self.server_tls = ports
            self.reloader.add(ports)
        if joins:
            peers: PeerTls = await asyncio.to_thread(tls.PeerTls, settings)
            self.peer_tls = peers
            self.reloader.add(peers)

    def _bind(self) -> None:
        """Bind the sockets of the binary protocol.  Raises `CannotListen`."""
        settings, tls = self.settings, self.server_tls
        if settings.plaintext_ports:
            self._server.bind(settings.bind_host, settings.port)
        self.placement.listening(port=self._server.port, http_port=settings.http_port)
        if tls is not None and settings.port_tls is not None:
            module = importlib.import_module("broker.wire.tls_server")
            self._tls_server = module.TlsBinaryServer(
                self,
                handler_table(),
                send,
                context=lambda: tls.current,
            )
            self._tls_server.bind(settings.bind_host, settings.port_tls)
        self.placement.listening_tls(
            port=self.port_tls,
            http_port=settings.http_port_tls,
            only=not settings.plaintext_ports,
        )

    async def _open_policies(self) -> None:
        self.clusters = Clusters(self.metadata, self.settings.cluster_name)
        self._release_at_stop("clusters", self.clusters.stop)
        await self.clusters.start()
        self.namespaces = Namespaces(self.metadata, self.settings)
        self._release_at_stop("namespaces", self.namespaces.stop)
        await self.namespaces.start()
        self.topic_policies = TopicPolicies(self.metadata)
        self._release_at_stop("topic_policies", self.topic_policies.stop)
        self.policies = PoliciesInForce(self.namespaces, self.topic_policies, self.settings)
        self.topic_counts = TopicCounts(
            self.metadata,
            self.namespaces,
            self.settings,
            ledgers_of=ledger_key,
            scalable_of=namespace_path,
        )
        self._release_at_stop("topic_counts", self.topic_counts.stop)

    async def _listen(self) -> None:
        if self.settings.plaintext_ports:
            await self._server.start()
        if self._tls_server is not None:
            await self._tls_server.start()

    async def _stop_listening(self) -> None:
        await self._server.stop()
        if self._tls_server is not None:
            await self._tls_server.stop()

    def _start_periodic_work(self) -> None:
        self.idle_topics = IdleTopics(self, asyncio.get_running_loop().time)
        self._release_at_stop("idle_topics", self.idle_topics.stop)
        self.idle_topics.start()
        self.message_expiry = MessageExpiry(
            self.topics.loaded, self.clock, self.settings.message_expiry_check_interval_s
        )
        self._release_at_stop("message_expiry", self.message_expiry.stop)
        self.message_expiry.start()
        self.backlog_quotas = BacklogQuotas(
            self.topics.loaded, self.clock, self.settings.backlog_quota_check_interval_s
        )
        self._release_at_stop("backlog_quotas", self.backlog_quotas.stop)
        self.backlog_quotas.start()
        self.subscription_expiry = SubscriptionExpiry(
            self.topics, self.clock, self.settings.subscription_expiry_check_interval_s
        )
        self._release_at_stop("subscription_expiry", self.subscription_expiry.stop)
        self.subscription_expiry.start()
        self.inactive_topics = InactiveTopics(self, asyncio.get_running_loop().time)
        self._release_at_stop("inactive_topics", self.inactive_topics.stop)
        self.inactive_topics.start()
        self._rate_timer = RateTimer(self.topics.sampled, asyncio.get_running_loop().time)
        self.topics.non_persistent.start()
        self._release_at_stop("topic_rates", self._rate_timer.stop)
        self._rate_timer.start()
        self.stored_backlogs = StoredBacklogs(self)
        self._release_at_stop("stored_backlogs", self.stored_backlogs.stop)
        self.stored_backlogs.start()
        self._release_at_stop("offloads", self.offloads.stop)
        self.offloads.start()
        self._release_at_stop("compactions", self.compactions.stop)
        self.compactions.start()
        self._release_at_stop("gone_peers", self.gone_peers.stop)
        self.gone_peers.start()

    async def _sweep_orphans(self) -> None:
        """Delete ledgers that no record names, if all records can be read."""
        try:
            await self.managed_ledgers.sweep_orphans()
        except MetadataError as error:
            # A damaged page keeps nobody from topics whose records are in others.
            log.error("orphaned_ledgers_not_swept", error=str(error), action="at the next start")

    @property
    def _joins_others(self) -> bool:
        return self.joins_others and self._stores is not None and self._stores.shared

    async def _join_others(self) -> None:
        """Open the session of this process, and join the brokers that share its stores."""
        timeout_ms = self.settings.metadata_store_session_timeout_ms
        if not self._joins_others:
            self.session = await self.metadata.open_session(
                timeout_ms=timeout_ms, identity=self.broker_id
            )
            self._release_at_stop("session", self.session.close)
            return
        # Not imported at the top: a single broker does without, and starts sooner.
        module = await asyncio.to_thread(importlib.import_module, "broker.app.cluster_membership")
        joined: ClusterMembership = await module.join(self)
        several = self.placement = self._several = joined.placement
        self._http_sockets.update(joined.http_sockets)
        self._exit.callback(self._close_http_sockets)
        self._release_at_stop("placement", several.stop)
        self.session = several.session

    def take_http_socket(self, setting: PortSetting) -> socket.socket | None:
        """Pass the bound socket of a REST port to the caller; None if it was not bound early."""
        return self._http_sockets.pop(setting, None)

    def _close_http_sockets(self) -> None:
        while self._http_sockets:
            self._http_sockets.popitem()[1].close()

    async def drain(self) -> None:
        """Accept no new work, make everything acknowledged durable, and disconnect clients.

        In a cluster topics move to other brokers first, while clients can still look them up here.
        """
        self.serving = False
        if self._several is not None:
            await self._several.begin_drain()
            await self.idle_topics.stop()
            await self.inactive_topics.stop()
            await self.subscription_expiry.stop()
            await self.scalable.stop()
            await self.topics.hand_over()
        await self._stop_listening()
        connections = list(self.connections)
        for connection in connections:
            connection.pause_reading(DRAINING)
        await self.idle_topics.stop()
        await self.inactive_topics.stop()
        await self.subscription_expiry.stop()
        await self.stored_backlogs.stop()
        await self.offloads.stop()
        await self.compactions.stop()
        await self.scalable.stop()
        await self.transactions.stop_serving()
        await self.topics.close()
        if connections:
            await asyncio.wait(
                [asyncio.ensure_future(each.requests_done()) for each in connections],
                timeout=DRAIN_REQUESTS_S,
            )
        for connection in connections:
            connection.close("the broker stops")
        for connection in connections:
            await connection.closed()

    async def stop(self) -> None:
        """Release everything, drained or not.  Failures are logged."""
        self.serving = False
        self._abort_connections()
        await self._exit.aclose()
        # Clients may have come back before the ports were closed.
        self._abort_connections()
        if self._checks is not None:
            # Ended by the close of the store that is checked.
            await asyncio.wait({self._checks})
        self._stores = None

    def _abort_connections(self) -> None:
        for connection in list(self.connections):
            connection.abort("the broker stops")

    def _release_at_stop(self, part: str, release: Callable[[], Awaitable[object]]) -> None:
        async def quietly() -> None:
            try:
                await release()
            except MagnetarError as error:
                log.error("stop_failed", part=part, error=str(error))

        self._exit.push_async_callback(quietly)

    async def check_health(self) -> None:
        """Write to both stores.  Raises `MetadataError` or `LedgerError`."""
        await self._health.run()
