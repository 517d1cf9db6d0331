"""Tenants and namespaces with their policies, in Pulsar's own metadata records.

The records are `/admin/policies/<tenant>` and `/admin/policies/<tenant>/<namespace>`, JSON.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar

import structlog

from broker.policies.followed_records import FollowedRecords
from broker.policies.grants import forget_topic
from broker.policies.schema_compatibility import CompatibilityStrategy
from config.bounds import RECORD_CHANGE_TRIES
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import NamespaceName, TopicName
from magnetar.protocol.server_error import PeerError, ServerError
from security.access import Grants, Roles, grants_of, topic_key
from storage.metadata.store import ABSENT, MetadataStore, Record, VersionConflict

log = structlog.get_logger(__name__)

ROOT = "/admin/policies"
AUTO_SCALE_POLICY = "scalableTopicAutoScalePolicy"
"""The member of a namespace's policies for automatic splits and merges of its scalable topics."""
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
        if self.raw.get("deleted") is True:
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
    def schema_compatibility(self) -> CompatibilityStrategy:
        """The strategy by which new schemas are checked; FULL unless set, as in Pulsar."""
        name = self.raw.get("schema_compatibility_strategy")
        known = CompatibilityStrategy.__members__
        return (
            known[name] if isinstance(name, str) and name in known else CompatibilityStrategy.FULL
        )


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

    async def start(self) -> None:
        """Create the default tenants and namespaces."""
        for name in DEFAULT_NAMESPACES:
            for make in (self._make_tenant(name.tenant), self.create(name)):
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
            raise NamespaceNotFound(
                f"The namespace {name} does not exist: create it with "
                f"PUT /admin/v2/namespaces/{name}, or use public/default."
            )
        return policies

    def known(self, name: NamespaceName) -> Policies:
        """The cached policies, without asking the store; empty ones if never required."""
        return self._policies.known(_key(name)) or Policies()

    async def tenants(self) -> list[str]:
        """Names of all tenants."""
        return await self._metadata.children(ROOT)

    async def tenant(self, tenant: str) -> JsonObject:
        """Pulsar's TenantInfo.  Raises `TenantNotFound`, `InvalidNamespaceName`."""
        # A name with a slash would be the path of a namespace's record.
        NamespaceName(tenant, "default")
        record = await self._metadata.get(f"{ROOT}/{tenant}")
        if record is None:
            raise TenantNotFound(
                f"The tenant {tenant} does not exist: PUT /admin/v2/tenants/{tenant}."
            )
        return _decode(record)

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
        """Create a tenant.  Raises `NamespaceExists`."""
        NamespaceName(tenant, "default")
        await self._make_tenant(tenant, info)

    async def update_tenant(self, tenant: str, info: JsonObject) -> None:
        """Replace a tenant's TenantInfo.  Raises `TenantNotFound`."""
        await self.tenant(tenant)
        await self._metadata.put(f"{ROOT}/{tenant}", _encode(info))
        self._tenants.put(f"{ROOT}/{tenant}", info)

    async def delete_tenant(self, tenant: str) -> None:
        """Delete a tenant.  Raises `TenantNotFound`, `NotEmpty` while it has namespaces."""
        await self.tenant(tenant)
        if await self._metadata.children(f"{ROOT}/{tenant}"):
            raise NotEmpty(f"The tenant {tenant} still has namespaces: delete them first.")
        await self._metadata.delete(f"{ROOT}/{tenant}")
        self._tenants.forget(f"{ROOT}/{tenant}")

    async def list(self, tenant: str) -> list[str]:
        """`tenant/namespace` of each.  Raises `TenantNotFound`."""
        await self.tenant(tenant)
        return [f"{tenant}/{name}" for name in await self._metadata.children(f"{ROOT}/{tenant}")]

    async def create(self, name: NamespaceName, policies: JsonObject | None = None) -> None:
        """Create a namespace with these policies, in this cluster, with one bundle.

        Raises `TenantNotFound`, `NamespaceExists`.
        """
        await self.tenant(name.tenant)
        value = {
            **(policies or {}),
            "replication_clusters": [self._settings.cluster_name],
            "bundles": {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1},
        }
        try:
            await self._metadata.put(_key(name), _encode(value), expect=ABSENT)
        except VersionConflict as error:
            raise NamespaceExists(f"The namespace {name} exists already.") from error

    async def delete(self, name: NamespaceName) -> None:
        """Delete a namespace's record.  The caller has checked that it is empty.

        Raises `NamespaceNotFound`.
        """
        await self.require(name)
        await self._metadata.delete(_key(name))
        self._policies.forget(_key(name))

    async def change(self, name: NamespaceName, change: Callable[[JsonObject], object]) -> Policies:
        """Apply `change` to the record, and write it if nobody else changed it meanwhile.

        `change` may be called up to RECORD_CHANGE_TRIES times, each time with a record that was
        read anew.  Raises `NamespaceNotFound`, and `VersionConflict` after the last conflict.
        """
        for tries_left in reversed(range(RECORD_CHANGE_TRIES)):
            await self.require(name)
            record = await self._metadata.get(_key(name))
            # The whole record is written: members that this broker does not know stay.
            value = _decode(record) if record else {}
            change(value)
            try:
                await self._metadata.put(
                    _key(name), _encode(value), expect=record.version if record else ABSENT
                )
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


def _key(name: NamespaceName) -> str:
    return f"{ROOT}/{name.tenant}/{name.namespace}"


def _encode(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(record: Record) -> JsonObject:
    value = json.loads(record.value) if record.value else {}
    return value if isinstance(value, dict) else {}


def _admins_in(info: JsonObject) -> Roles:
    roles = info.get("adminRoles")
    listed = roles if isinstance(roles, list) else []
    return frozenset(role for role in listed if isinstance(role, str) and role)
