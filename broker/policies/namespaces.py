"""Tenants and namespaces with their policies, in Pulsar's own metadata records.

The records are `/admin/policies/<tenant>` and `/admin/policies/<tenant>/<namespace>`, JSON.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar

import structlog

from broker.policies.followed_records import FollowedRecords
from broker.policies.grants import forget_topic
from broker.policies.json_numbers import is_number
from config.bounds import RECORD_CHANGE_TRIES
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import NamespaceName, TopicName
from magnetar.protocol.server_error import PeerError, ServerError
from security.access import Grants, Roles, grants_of, topic_key
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import ABSENT, MetadataStore, Record, VersionConflict

log = structlog.get_logger(__name__)

ROOT = "/admin/policies"
AUTO_SCALE_POLICY = "scalableTopicAutoScalePolicy"
"""The member of a namespace's policies for automatic splits and merges of its scalable topics."""
REPLICATION_CLUSTERS, ALLOWED_CLUSTERS = "replication_clusters", "allowed_clusters"
CLUSTER_LISTS = (REPLICATION_CLUSTERS, ALLOWED_CLUSTERS)
"""The members of a namespace's policies that are lists of clusters."""
DEFAULT_NAMESPACES = (NamespaceName("public", "default"), NamespaceName("pulsar", "system"))
JsonObject = dict[str, object]


class NamespaceNotFound(PeerError):
    """The namespace does not exist: create it over REST, or use public/default."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class TenantNotFound(PeerError):
    """The tenant does not exist: create it over REST."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class NamespaceExists(PeerError):
    """A tenant or namespace of that name exists already."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class TenantChanged(PeerError):
    """Another request changed the tenant while this one was about to."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class NamespaceChanged(PeerError):
    """Other requests changed the namespace each time that this one was about to delete it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class TooManyNamespaces(PeerError):
    """There are as many tenants, or namespaces of a tenant, as the broker's settings allow."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class NotEmpty(PeerError):
    """A tenant or namespace that is to be deleted is not empty."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True)
class Policies:
    """A namespace's policies.  None means the broker's own setting."""

    raw: Mapping[str, object] = field(default_factory=dict)
    grants: Grants = field(init=False, repr=False, compare=False)
    """Who may do what in the namespace, as read from `raw`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grants", grants_of(self.raw))

    def _section(self, name: str) -> Mapping[str, object]:
        value = self.raw.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def offload_threshold_bytes(self) -> int | None:
        """Bytes of a topic that may stay without an offloaded copy; below 0: any number."""
        value = self.raw.get("offload_threshold")
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value

    @property
    def offload_deletion_lag_ms(self) -> int | None:
        """How long a ledger is kept after it was offloaded; -1: until a request deletes it."""
        value = self.raw.get("offload_deletion_lag_ms")
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value

    @property
    def consumer_grace_s(self) -> int | None:
        """How long a lost ordered consumer of a scalable topic keeps its segments, in seconds."""
        value = self.raw.get("scalableTopicConsumerSessionGracePeriodSeconds")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return None
        return value

    @property
    def auto_topic_creation(self) -> bool | None:
        """Whether a missing topic is created on first use; False in a deleted namespace."""
        if _is_deleted(self.raw):
            return False
        value = self._section("autoTopicCreationOverride").get("allowAutoTopicCreation")
        return value if isinstance(value, bool) else None

    @property
    def default_partitions(self) -> int | None:
        """Partitions of an auto-created topic, 0 for an unpartitioned one."""
        section = self._section("autoTopicCreationOverride")
        kind, count = section.get("topicType"), section.get("defaultNumPartitions")
        if kind is None:
            return None
        wanted = kind == "partitioned" and isinstance(count, int)
        return count if wanted and isinstance(count, int) and count > 0 else 0

    @property
    def max_topics(self) -> int | None:
        """The maximum number of topics that the namespace sets; 0: no limit; None: it sets none."""
        value = self.raw.get("max_topics_per_namespace")
        return value if is_number(value, 0) else None


class Namespaces:
    """Creates, deletes and reads tenants and namespaces, and follows their policies.

    The policies of a namespace are cached when they are first required; a watch keeps them current.
    """

    def __init__(self, metadata: MetadataStore, settings: Settings) -> None:
        self._metadata = metadata
        self._settings = settings
        self._tasks = BackgroundTasks(log)
        self._policies = FollowedRecords(
            metadata, self._tasks, "policies", lambda record: Policies(_decode(record))
        )
        self._tenants = FollowedRecords(metadata, self._tasks, "tenants", _decode)
        self._creation = asyncio.Lock()
        """Held from the count to the creation: several at once exceed no maximum."""

    async def start(self) -> None:
        """Create the default tenants and namespaces."""
        for name in DEFAULT_NAMESPACES:
            for make in (self._make_tenant(name.tenant), self._make_namespace(name, {})):
                try:
                    await make
                except NamespaceExists:
                    continue

    async def stop(self) -> None:
        """Stop following changes."""
        self._policies.clear()
        self._tenants.clear()
        await self._tasks.stop()

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with `tenant` or `tenant/namespace` of each record that changed or went.

        Records that were never required are not followed.
        """
        for records in (self._policies, self._tenants):
            records.on_change(lambda path: listener(path.removeprefix(f"{ROOT}/")))

    async def require(self, name: NamespaceName) -> Policies:
        """The policies of a namespace.  Raises `NamespaceNotFound`, `MetadataError`."""
        policies = await self._policies.require(_key(name))
        if policies is None:
            raise _no_namespace(name)
        return policies

    def known(self, name: NamespaceName) -> Policies:
        """The cached policies, without asking the store; empty ones if never required."""
        return self._policies.known(_key(name)) or Policies()

    async def tenants(self) -> list[str]:
        """Names of all tenants."""
        return await self._metadata.children(ROOT)

    async def tenant(self, tenant: str) -> JsonObject:
        """Pulsar's TenantInfo.  Raises `TenantNotFound`, `InvalidNamespaceName`."""
        return _decode(await self._tenant_record(tenant))

    async def _tenant_record(self, tenant: str) -> Record:
        # A name with a slash would be the path of a namespace's record.
        NamespaceName(tenant, "default")
        record = await self._metadata.get(f"{ROOT}/{tenant}")
        if record is None:
            raise TenantNotFound(
                f"The tenant {tenant} does not exist: PUT /admin/v2/tenants/{tenant}."
            )
        return record

    async def forget_grants(self, topic: TopicName) -> None:
        """Delete all grants on a topic, if there are any.  Raises `MetadataError`."""
        try:
            policies = await self.require(topic.namespace_name)
        except NamespaceNotFound:
            return
        if topic_key(topic) in policies.grants.of_topics:
            await self.change(topic.namespace_name, lambda record: forget_topic(record, topic))

    async def require_tenant_admins(self, tenant: str) -> Roles:
        """The roles that administer a tenant; none if there is no such tenant.

        The tenant is followed from now on.  Raises `MetadataError`.
        """
        return _admins_in(await self._tenants.require(f"{ROOT}/{tenant}") or {})

    def known_tenant_admins(self, tenant: str) -> Roles | None:
        """The same without asking the store; None if the tenant is not followed."""
        info = self._tenants.known(f"{ROOT}/{tenant}")
        return None if info is None else _admins_in(info)

    def known_grants(self, name: NamespaceName) -> Grants | None:
        """The grants of a namespace, without asking the store; None if it was never required."""
        policies = self._policies.known(_key(name))
        return None if policies is None else policies.grants

    async def create_tenant(self, tenant: str, info: JsonObject) -> None:
        """Create a tenant.  Raises `NamespaceExists`, `TooManyNamespaces`."""
        NamespaceName(tenant, "default")
        most = self._settings.max_tenants
        async with self._creation:
            if most and len(known := await self.tenants()) >= most and tenant not in known:
                raise TooManyNamespaces(
                    f"There are {len(known)} tenants, and the maximum is {most}: delete one, or "
                    "raise the setting max_tenants."
                )
            await self._make_tenant(tenant, info)

    async def update_tenant(
        self, tenant: str, info: JsonObject, require: Callable[[JsonObject], Awaitable[None]]
    ) -> None:
        """Replace a tenant's TenantInfo, once `require` allows it over the one that it replaces.

        Raises `TenantNotFound`, `TenantChanged` if somebody else changed it meanwhile, and as
        `require`.
        """
        record = await self._tenant_record(tenant)
        await require(_decode(record))
        try:
            await self._metadata.put(record.key, _encode(info), expect=record.version)
        except VersionConflict as error:
            raise TenantChanged(
                f"The tenant {tenant} was changed or deleted by another request: read it, and "
                "send the change again."
            ) from error
        self._tenants.put(record.key, info)

    async def delete_tenant(self, tenant: str) -> None:
        """Delete a tenant.

        Raises `TenantNotFound`, `NotEmpty` while it has namespaces, and `TenantChanged` if others
        change it each time.
        """
        for _ in range(RECORD_CHANGE_TRIES):
            # Before the namespaces: who creates one changes the record after that.
            record = await self._tenant_record(tenant)
            if await self._metadata.children(f"{ROOT}/{tenant}"):
                raise NotEmpty(f"The tenant {tenant} still has namespaces: delete them first.")
            try:
                await self._metadata.delete(record.key, expect=record.version)
            except VersionConflict:
                continue
            self._tenants.forget(record.key)
            return
        raise TenantChanged(f"The tenant {tenant} is being changed by others: try again.")

    async def naming_cluster(self, cluster: str) -> str | None:
        """A tenant or namespace whose record names a cluster, in words; None if there is none.

        Raises `MetadataError`.
        """
        for tenant in await self.tenants():
            record = await self._metadata.get(f"{ROOT}/{tenant}")
            if record is not None and cluster in _names(_decode(record), "allowedClusters"):
                return f"The tenant {tenant}"
            namespace = await self.namespace_naming(tenant, {cluster})
            if namespace is not None:
                return f"The namespace {namespace}"
        return None

    async def namespace_naming(self, tenant: str, clusters: Set[str]) -> NamespaceName | None:
        """A namespace of a tenant whose record names one of these clusters; None if none does.

        Raises `MetadataError`.
        """
        for record in await self._metadata.scan(*children_range(f"{ROOT}/{tenant}")):
            policies = _decode(record)
            if any(not clusters.isdisjoint(_names(policies, member)) for member in CLUSTER_LISTS):
                return NamespaceName(tenant, name_of(record.key))
        return None

    async def list(self, tenant: str) -> list[str]:
        """`tenant/namespace` of each.  Raises `TenantNotFound`."""
        await self.tenant(tenant)
        return [f"{tenant}/{name}" for name in await self._metadata.children(f"{ROOT}/{tenant}")]

    async def create(self, name: NamespaceName, policies: JsonObject | None = None) -> None:
        """Create a namespace with these policies, with one bundle; by default in this cluster.

        Raises `TenantNotFound`, `NamespaceExists`, `TooManyNamespaces`.
        """
        most = self._settings.max_namespaces_per_tenant
        async with self._creation:
            known = await self.list(name.tenant) if most else []
            if most and len(known) >= most and str(name) not in known:
                raise TooManyNamespaces(
                    f"The tenant {name.tenant} has {len(known)} namespaces, and the maximum is "
                    f"{most}: delete one, or raise the setting max_namespaces_per_tenant."
                )
            await self._make_namespace(name, policies or {})

    async def _make_namespace(self, name: NamespaceName, policies: JsonObject) -> None:
        await self.tenant(name.tenant)
        value = {
            REPLICATION_CLUSTERS: [self._settings.cluster_name],
            **policies,
            "bundles": {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1},
        }
        try:
            made = await self._metadata.put(_key(name), _encode(value), expect=ABSENT)
        except VersionConflict as error:
            raise NamespaceExists(f"The namespace {name} exists already.") from error
        try:
            await self._touch_tenant(name.tenant)
        except TenantNotFound:
            with suppress(VersionConflict):
                await self._metadata.delete(_key(name), expect=made.version)
            raise

    async def _touch_tenant(self, tenant: str) -> None:
        """Have a deletion of a tenant fail that has not seen a namespace which is there now.

        Raises `TenantNotFound` if it came first.
        """
        record = await self._tenant_record(tenant)
        try:
            await self._metadata.put(record.key, record.value, expect=record.version)
        except VersionConflict:
            # A change by somebody else does the same, and a deletion is found.
            await self._tenant_record(tenant)

    async def delete(
        self, name: NamespaceName, require_empty: Callable[[], Awaitable[None]]
    ) -> None:
        """Delete a namespace's record, once `require_empty` finds no topics.

        That raises `NotEmpty`.  The record is marked as deleted before the last call, so that no
        topics are created from then on (see `confirm_creation`); where topics are found, the mark
        is taken away again.  If the broker dies meanwhile the mark stays: repeat the deletion.
        Raises `NamespaceNotFound`, and `NamespaceChanged` if others change it each time.
        """
        # Not marked while it is in use: applications go on there.
        await require_empty()
        marked_before = _is_deleted(_decode(await self._namespace_record(name)))
        try:
            await self._delete_marked(name, require_empty)
        except (NamespaceChanged, NotEmpty):
            if not marked_before:
                with suppress(NamespaceNotFound):
                    await self.change(name, lambda record: record.pop("deleted", None))
            raise

    async def _delete_marked(
        self, name: NamespaceName, require_empty: Callable[[], Awaitable[None]]
    ) -> None:
        for _ in range(RECORD_CHANGE_TRIES):
            record = await self._namespace_record(name)
            marked = _encode(_decode(record) | {"deleted": True})
            with suppress(VersionConflict):
                stored = await self._metadata.put(record.key, marked, expect=record.version)
                await require_empty()
                await self._metadata.delete(record.key, expect=stored.version)
                self._policies.forget(record.key)
                return
        raise NamespaceChanged(f"The namespace {name} is being changed by others: try again.")

    async def _namespace_record(self, name: NamespaceName) -> Record:
        record = await self._metadata.get(_key(name))
        if record is None:
            # What is known of it may be older: a deleted namespace must not come back.
            raise _no_namespace(name)
        return record

    async def change(self, name: NamespaceName, change: Callable[[JsonObject], object]) -> Policies:
        """Apply `change` to the record, and write it if nobody else changed it meanwhile.

        `change` may be called up to RECORD_CHANGE_TRIES times, each time with a record that was
        read anew.  Raises `NamespaceNotFound`, and `VersionConflict` after the last conflict.
        """
        for tries_left in reversed(range(RECORD_CHANGE_TRIES)):
            record = await self._namespace_record(name)
            # The whole record is written: members that this broker does not know stay.
            value = _decode(record)
            change(value)
            try:
                await self._metadata.put(_key(name), _encode(value), expect=record.version)
            except VersionConflict:
                if not tries_left:
                    raise
                continue
            policies = Policies(value)
            self._policies.put(_key(name), policies)
            return policies
        raise AssertionError("unreachable: the last try returns or raises")

    async def _make_tenant(self, tenant: str, info: JsonObject | None = None) -> None:
        value = info or {"adminRoles": [], "allowedClusters": [self._settings.cluster_name]}
        try:
            await self._metadata.put(f"{ROOT}/{tenant}", _encode(value), expect=ABSENT)
        except VersionConflict as error:
            raise NamespaceExists(f"The tenant {tenant} exists already.") from error


async def confirm_creation(
    metadata: MetadataStore, namespace: NamespaceName, undo: Callable[[], Awaitable[object]]
) -> None:
    """Undo the creation of a topic whose namespace is gone, or is being deleted.

    Call it when the record of the topic is written.  A deletion marks the record of the namespace
    before it looks for topics a last time.  So it finds each one that was written before the mark,
    and the mark is found here by those that are written after it.  If a broker dies between the
    record and this call, an empty topic may stay; it is not served unless the namespace is created
    anew.

    Raises `NamespaceNotFound`, `MetadataError`.
    """
    try:
        record = await metadata.get(_key(namespace), fresh=True)
        if record is None:
            raise _no_namespace(namespace)
        if _is_deleted(_decode(record)):
            raise NamespaceNotFound(
                f"The namespace {namespace} is being deleted, and gets no more topics. If that "
                f"does not end, repeat it: DELETE /admin/v2/namespaces/{namespace}."
            )
    except BaseException:
        await undo()
        raise


def _is_deleted(policies: Mapping[str, object]) -> bool:
    """Whether the namespace is being deleted."""
    return policies.get("deleted") is True


def _no_namespace(name: NamespaceName) -> NamespaceNotFound:
    return NamespaceNotFound(
        f"The namespace {name} does not exist: create it with "
        f"PUT /admin/v2/namespaces/{name}, or use public/default."
    )


def _key(name: NamespaceName) -> str:
    return f"{ROOT}/{name.tenant}/{name.namespace}"


def _encode(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(record: Record) -> JsonObject:
    value = json.loads(record.value) if record.value else {}
    return value if isinstance(value, dict) else {}


def _admins_in(info: JsonObject) -> Roles:
    return frozenset(role for role in _names(info, "adminRoles") if role)


def _names(value: JsonObject, member: str) -> Sequence[str]:
    names = value.get(member)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
