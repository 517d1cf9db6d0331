"""`/admin/v2/namespaces`: namespaces and their policies.

Each policy is one member of the namespace's record, under Pulsar's own name.  GET of one that is
not set answers 204; DELETE restores the broker's setting.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from aiohttp import web

from broker.admin.cluster_lists import (
    clusters_in,
    require_allowed,
    require_replicable,
    require_within,
)
from broker.admin.keys import BROKER
from broker.admin.policy_handlers import PolicyHandlers, invalid_value
from broker.admin.rest import (
    RestError,
    flag,
    mapping_of,
    namespace_of,
    no_content,
    properties_in,
    refused,
    shortened,
)
from broker.app.service import Broker
from broker.policies.json_numbers import is_number
from broker.policies.namespaces import (
    ALLOWED_CLUSTERS,
    AUTO_SCALE_POLICY,
    CLUSTER_LISTS,
    REPLICATION_CLUSTERS,
    JsonObject,
    NotEmpty,
    Policies,
)
from broker.policies.policy_kinds import (
    BACKLOG_QUOTAS,
    OF_NAMESPACES,
    PERSISTENCE,
    REPLICATED_SCHEMAS,
    RETENTION,
    SCHEMA_AUTO_UPDATE,
    PolicyKind,
)
from broker.scalable.auto_scale_policy import MEMBERS, InvalidAutoScalePolicy, checked_override
from broker.scalable.records import namespace_path
from broker.topics.partitions import partitioned_level
from magnetar.protocol.names import NamespaceName, TopicDomain
from storage.managed_ledger.records import ledger_key
from storage.metadata.keys import children_range

BASE = "/admin/v2/namespaces"
NAMESPACE = BASE + "/{tenant}/{namespace}"
REPLICATOR_PARAMETER = "allowAutoUpdateSchemaWithReplicator"
"""A parameter of `isAllowAutoUpdateSchema`, for schemas that come from another cluster."""
PROPERTIES = "properties"
"""The member of a namespace's record with the properties that users set."""
TOPIC_MODES = ("PERSISTENT", "NON_PERSISTENT", "ALL")
OF_THE_BROKER = frozenset({"bundles", *CLUSTER_LISTS})
"""Members of a namespace's record that are no policies."""
UNSERVED_DEFAULTS: Mapping[str, Sequence[object]] = {
    "deleted": (False,),
    "migrated": (False,),
    "offload_threshold_in_seconds": (-1,),
    "subscription_auth_mode": ("None",),
}
"""Values that Pulsar's tools send by default for policies that are not served."""


def _is_auto_scale(value: object) -> bool:
    try:
        checked_override(value)
    except InvalidAutoScalePolicy:
        return False
    return True


def _are_properties(value: object) -> bool:
    try:
        properties_in(value)
    except RestError:
        return False
    return True


_AUTO_SCALE = PolicyKind(
    None, AUTO_SCALE_POLICY, _is_auto_scale, f"members of {', '.join(MEMBERS)}"
)
"""It has routes of its own, in `auto_scale`, as it has to fit the broker's policy."""
_PROPERTIES = PolicyKind(
    None,
    PROPERTIES,
    _are_properties,
    "an object whose values are strings",
    unset=({},),
)
"""They have routes of their own, in `namespace_properties`."""
SERVED: Mapping[str, PolicyKind] = {
    kind.member: kind
    for kind in (*OF_NAMESPACES.values(), BACKLOG_QUOTAS, _AUTO_SCALE, _PROPERTIES)
}


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    found = [
        web.get(BASE + "/{tenant}", list_namespaces),
        web.get(NAMESPACE, get),
        web.put(NAMESPACE, create),
        web.delete(NAMESPACE, delete),
        web.get(NAMESPACE + "/topics", topics),
        web.get(NAMESPACE + "/bundles", bundles),
        web.put(NAMESPACE + "/unload", unload),
    ]
    for name, kind in OF_NAMESPACES.items():
        found += _NamespacePolicyHandlers(name, kind).routes(f"{NAMESPACE}/{name}")
    return found


def _asks_for_nothing(value: object) -> bool:
    """Whether a value is None, "", 0 or empty; false is none of these: it sets some policies."""
    if isinstance(value, dict):
        return all(each in (None, {}, []) for each in value.values())
    return value is None or value in ("", []) or (is_number(value) and value == 0)


def _is_one_of(value: object, known: Sequence[object]) -> bool:
    """Whether a value is among others; of JSON's 1, 1.0 and true none is another one."""
    return any(type(value) is type(each) and value == each for each in known)


def _policies_of_new(body: Mapping[str, object], cluster: str) -> dict[str, object]:
    """The policies of a request that a new namespace's record gets.

    Raises `RestError` for values that are not served.
    """
    # Tools send every policy that they know, most of them with a value that asks for nothing.
    kept: dict[str, object] = {}
    for member, value in body.items():
        if member in OF_THE_BROKER:
            continue
        if member == REPLICATED_SCHEMAS and isinstance(value, bool):
            kept.update({} if value else {member: False})
            continue
        policy = SERVED.get(member)
        if policy is None:
            if not _asks_for_nothing(value) and not _is_one_of(
                value, UNSERVED_DEFAULTS.get(member, ())
            ):
                raise refused(
                    f"{member} = {shortened(repr(value))} is not served yet: leave it out. See "
                    "'Not served yet' in docs/differences.md."
                )
        elif value is not None and not _is_one_of(value, policy.unset):
            if policy.by_cluster:
                _require_own_cluster(member, value, cluster)
            if not policy.valid(policy.of_namespace({member: value})):
                raise invalid_value(member, value, policy.wanted)
            kept[member] = value
    return kept


def _require_own_cluster(member: str, value: object, cluster: str) -> None:
    names = list(value) if isinstance(value, dict) else value
    if names != [cluster]:
        raise RestError(
            HTTPStatus.FORBIDDEN,
            f"{member} cannot be of {shortened(repr(names))}: it is of this cluster alone, "
            f"{cluster!r}.",
        )


class _NamespacePolicyHandlers(PolicyHandlers[NamespaceName]):
    """GET, POST, PUT and DELETE of one policy of namespaces.

    GET with `?applied=true` shows the broker's value where the namespace has none.
    """

    async def _holder(self, request: web.Request) -> NamespaceName:
        return namespace_of(request)

    async def _read(self, request: web.Request, holder: NamespaceName) -> object:
        broker = request.app[BROKER]
        value = self._kind.of_namespace((await broker.namespaces.require(holder)).raw)
        if value is None and (flag(request, "applied") or self._kind.shows_broker):
            value = broker.policies.of_broker(self._kind)
        return value

    async def _write(self, request: web.Request, holder: NamespaceName, value: object) -> None:
        broker, kind = request.app[BROKER], self._kind

        def change(record: JsonObject) -> None:
            if value is None:
                record.pop(kind.member, None)
                return
            by_cluster = {broker.settings.cluster_name: value}
            record[kind.member] = by_cluster if kind.by_cluster else value
            if kind is SCHEMA_AUTO_UPDATE and REPLICATOR_PARAMETER in request.query:
                record[REPLICATED_SCHEMAS] = flag(request, REPLICATOR_PARAMETER)
            if kind is RETENTION:
                broker.policies.require_retention_above_quotas(Policies(record))

        await broker.namespaces.change(holder, change)


async def list_namespaces(request: web.Request) -> web.Response:
    """GET `/{tenant}`: the namespaces of a tenant, as `tenant/namespace`."""
    return web.json_response(
        await request.app[BROKER].namespaces.list(request.match_info["tenant"])
    )


async def get(request: web.Request) -> web.Response:
    """GET: the policies of a namespace that are set."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(dict(policies.raw))


async def create(request: web.Request) -> web.Response:
    """PUT, policies or nothing as body: create a namespace.

    409 if it exists, 404 if its tenant does not.
    """
    broker, name = request.app[BROKER], namespace_of(request)
    body = await mapping_of(request)
    policies = _policies_of_new(body, broker.settings.cluster_name)
    policies |= await _cluster_lists_of_new(broker, name, body)
    auto_scale = policies.get(AUTO_SCALE_POLICY)
    if isinstance(auto_scale, dict):
        broker.scalable.require_fitting_policy(auto_scale)
    if RETENTION.member in policies or BACKLOG_QUOTAS.member in policies:
        broker.policies.require_retention_above_quotas(Policies(policies))
    if PERSISTENCE.member in policies:
        broker.policies.require_copies(policies[PERSISTENCE.member])
    await broker.namespaces.create(name, policies)
    return no_content()


async def _cluster_lists_of_new(
    broker: Broker, name: NamespaceName, body: Mapping[str, object]
) -> Mapping[str, object]:
    """The lists of clusters that a new namespace's record gets; none is given for an empty one.

    Raises as `replication.replicate` and `replication.allow`.
    """
    lists = {
        member: clusters_in(body[member], member)
        for member in CLUSTER_LISTS
        if body.get(member) not in (None, [])
    }
    replicated, allowed = lists.get(REPLICATION_CLUSTERS), lists.get(ALLOWED_CLUSTERS)
    if replicated:
        await require_replicable(broker, replicated, REPLICATION_CLUSTERS, tenant=name.tenant)
    if allowed:
        await require_allowed(broker, allowed, ALLOWED_CLUSTERS, tenant=name.tenant)
        own = [broker.clusters.local_name]
        require_within(replicated or own, allowed, REPLICATION_CLUSTERS)
    return lists


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a namespace; 409 while it has topics, unless forced."""
    await delete_namespace(request.app[BROKER], namespace_of(request), force=flag(request, "force"))
    return no_content()


async def delete_namespace(broker: Broker, name: NamespaceName, *, force: bool) -> None:
    """Delete a namespace; with `force` its topics first, used or not.

    With `force` no topics are created in it from then on, even if this fails half way: a repeated
    call finishes it.
    """
    await broker.namespaces.require(name)
    if force:
        await broker.namespaces.change(name, lambda record: record.update(deleted=True))
        await broker.topics.cluster.delete_namespace(name)

    async def require_empty() -> None:
        for level in _topic_levels(name):
            # The records only where there seem to be none: that read is behind no creation.
            if await broker.metadata.children(level) or await broker.metadata.scan(
                *children_range(level), fresh=True
            ):
                raise NotEmpty(f"The namespace {name} still has topics: delete them, or use force.")

    await broker.namespaces.delete(name, require_empty)


def _topic_levels(name: NamespaceName) -> Sequence[str]:
    """The parent keys of the records of a namespace's topics."""
    return (
        ledger_key(f"{name}/{TopicDomain.PERSISTENT.value}"),
        partitioned_level(name),
        partitioned_level(name, TopicDomain.NON_PERSISTENT),
        namespace_path(name),
    )


async def topics(request: web.Request) -> web.Response:
    """GET `?mode=`: ordinary topics; scalable ones are listed by /admin/v2/scalable."""
    broker = request.app[BROKER]
    await broker.namespaces.require(namespace_of(request))
    mode = request.query.get("mode", "PERSISTENT")
    if mode not in TOPIC_MODES:
        raise refused(f"There is no mode {mode!r}: give one of {', '.join(TOPIC_MODES)}.")
    namespace, names = namespace_of(request), list[str]()
    if mode != "NON_PERSISTENT":
        names += await broker.topics.list_names(namespace)
    if mode != "PERSISTENT":
        names += await broker.topics.non_persistent.list_names(namespace)
    return web.json_response(names)


async def unload(request: web.Request) -> web.Response:
    """PUT: close every topic and segment, at any broker; clients reconnect by themselves."""
    broker = request.app[BROKER]
    name = namespace_of(request)
    await broker.namespaces.require(name)
    await broker.topics.cluster.unload_namespace(name)
    return no_content()


async def bundles(request: web.Request) -> web.Response:
    """GET: one bundle, because topics are owned one by one."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(policies.raw.get("bundles"))
