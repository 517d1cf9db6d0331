"""`/admin/v2/namespaces`: namespaces and their policies.

Each policy is one member of the namespace's record, under Pulsar's own name.  GET of one that is
not set answers 204; DELETE restores the broker's setting.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import (
    RestError,
    body_of,
    conflict,
    flag,
    mapping_of,
    namespace_of,
    no_content,
    refused,
    shortened,
)
from broker.app.service import Broker
from broker.policies.json_numbers import is_number
from broker.policies.namespaces import AUTO_SCALE_POLICY
from broker.policies.policy_kinds import OF_NAMESPACES, UNDEFINED, PolicyKind
from broker.scalable.auto_scale_policy import MEMBERS, InvalidAutoScalePolicy, checked_override
from magnetar.protocol.names import NamespaceName

BASE = "/admin/v2/namespaces"
NAMESPACE = BASE + "/{tenant}/{namespace}"
TOPIC_MODES = ("PERSISTENT", "NON_PERSISTENT", "ALL")
CLUSTERS = ("replication_clusters", "allowed_clusters")
OF_THE_BROKER = frozenset({"bundles", *CLUSTERS})
"""Members of a namespace's record that are no policies."""
DEFAULTS: Mapping[str, Sequence[object]] = {
    "deleted": (False,),
    "encryption_required": (False,),
    "is_allow_auto_update_schema": (True,),
    "is_allow_auto_update_schema_with_replicator": (True, False),
    "migrated": (False,),
    "offload_threshold_in_seconds": (-1,),
    "schema_auto_update_compatibility_strategy": ("Full",),
    "schema_validation_enforced": (False,),
    "subscription_auth_mode": ("None",),
}
"""Values that Pulsar's tools send by default for policies that are not served."""


def _is_auto_scale(value: object) -> bool:
    try:
        checked_override(value)
    except InvalidAutoScalePolicy:
        return False
    return True


_AUTO_SCALE = PolicyKind(
    None, AUTO_SCALE_POLICY, _is_auto_scale, f"members of {', '.join(MEMBERS)}"
)
"""It has routes of its own, in `auto_scale`, as it has to fit the broker's policy."""
SERVED: Mapping[str, PolicyKind] = {
    kind.member: kind for kind in (*OF_NAMESPACES.values(), _AUTO_SCALE)
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
    for name, policy in OF_NAMESPACES.items():
        path = f"{NAMESPACE}/{name}"
        handlers = _PolicyHandlers(name, policy)
        found += [
            web.get(path, handlers.get),
            web.post(path, handlers.set),
            web.put(path, handlers.set),
            web.delete(path, handlers.remove),
        ]
    return found


def invalid_value(name: str, value: object, wanted: str) -> RestError:
    """The error for a value that a policy cannot have."""
    return refused(f"{name} cannot be {shortened(repr(value))}: give {wanted}.")


def _asks_for_nothing(value: object) -> bool:
    """Whether a value is None, "", 0 or empty; false is none of these: it sets some policies."""
    if isinstance(value, dict):
        return all(each in (None, {}, []) for each in value.values())
    return value is None or value in ("", []) or (is_number(value) and value == 0)


def _policies_of_new(body: Mapping[str, object], cluster: str) -> dict[str, object]:
    """The policies of a request that a new namespace's record gets.

    Raises `RestError` for values that are not served.
    """
    # Tools send every policy that they know, most of them with a value that asks for nothing.
    kept: dict[str, object] = {}
    for member in CLUSTERS:
        _require_own_cluster(member, body.get(member), cluster)
    for member, value in body.items():
        if member in OF_THE_BROKER:
            continue
        policy = SERVED.get(member)
        if policy is None:
            if not _asks_for_nothing(value) and value not in DEFAULTS.get(member, ()):
                raise refused(
                    f"{member} = {shortened(repr(value))} is not served yet: leave it out. See "
                    "'Not served yet' in docs/differences.md."
                )
        elif value is not None and value not in policy.unset:
            if not policy.valid(value):
                raise invalid_value(member, value, policy.wanted)
            kept[member] = value
    return kept


def _require_own_cluster(member: str, clusters: object, cluster: str) -> None:
    names = clusters or []
    if not isinstance(names, list) or set(names) - {cluster}:
        raise RestError(
            HTTPStatus.FORBIDDEN,
            f"{member} cannot be {names!r}: there is one cluster, {cluster!r}.",
        )


class _PolicyHandlers:
    """GET, POST (or PUT) and DELETE of one policy."""

    def __init__(self, name: str, policy: PolicyKind) -> None:
        self._name = name
        self._policy = policy

    async def get(self, request: web.Request) -> web.Response:
        """GET: the value; 204 when it is not set, or what the policy shows then.

        With `?applied=true` it is the broker's value then, for policies that have a setting.
        """
        broker = request.app[BROKER]
        policies = await broker.namespaces.require(namespace_of(request))
        value = policies.raw.get(self._policy.member)
        if value is None and flag(request, "applied"):
            value = broker.policies.of_broker(self._policy)
        if value is None:
            value = self._policy.shown_unset
        return no_content() if value is None else web.json_response(value)

    async def set(self, request: web.Request) -> web.Response:
        """POST or PUT, the value as body: set the policy."""
        value = await body_of(request)
        if value == UNDEFINED and UNDEFINED in self._policy.unset:
            return await self.remove(request)
        if not self._policy.valid(value):
            raise invalid_value(self._name, value, self._policy.wanted)
        await request.app[BROKER].namespaces.change(
            namespace_of(request), lambda record: record.update({self._policy.member: value})
        )
        return no_content()

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE: remove the policy; the broker's setting holds again."""
        await request.app[BROKER].namespaces.change(
            namespace_of(request), lambda record: record.pop(self._policy.member, None)
        )
        return no_content()


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
    broker = request.app[BROKER]
    policies = _policies_of_new(await mapping_of(request), broker.settings.cluster_name)
    auto_scale = policies.get(AUTO_SCALE_POLICY)
    if isinstance(auto_scale, dict):
        broker.scalable.require_fitting_policy(auto_scale)
    await broker.namespaces.create(namespace_of(request), policies)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a namespace; 409 while it has topics, unless forced."""
    await delete_namespace(request.app[BROKER], namespace_of(request), force=flag(request, "force"))
    return no_content()


async def delete_namespace(broker: Broker, name: NamespaceName, *, force: bool) -> None:
    """Delete a namespace; with `force` its topics first, used or not.

    From then on no topics are created in it automatically, even if this fails half way: a repeated
    call finishes it.
    """
    await broker.namespaces.require(name)
    if force:
        await broker.namespaces.change(name, lambda record: record.update(deleted=True))
        await broker.topics.cluster.delete_namespace(name)
    if await broker.topics.list_names(name) or await broker.scalable.list(name, {}):
        raise conflict(f"The namespace {name} still has topics: delete them, or use force.")
    await broker.namespaces.delete(name)


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
