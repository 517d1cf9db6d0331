"""`.../replication` of namespaces and topics, and `.../allowedClusters` of namespaces.

A list has the names of the clusters among which topics are replicated, the local one included;
with it alone they are not.  A topic's list comes before that of its namespace.  allowedClusters are
those that the namespace's list may name; without them, those that the tenant may use.

A scalable topic has its list where its other policies are, under the path with `persistent`.
`/admin/v2/scalable/{tenant}/{namespace}/{topic}` has two more resources: `replicationKeyHash`, by
which half of a key's hash its clients choose segments, and `replication/incarnation`.
"""

from collections.abc import Iterable
from http import HTTPStatus

from aiohttp import web

from broker.admin.cluster_lists import (
    clusters_in,
    require_allowed,
    require_replicable,
    require_within,
)
from broker.admin.keys import BROKER
from broker.admin.namespaces import NAMESPACE
from broker.admin.persistent import TOPIC
from broker.admin.rest import (
    RestError,
    body_of,
    flag,
    namespace_of,
    no_content,
    refused,
    topic_of,
)
from broker.admin.scalable import TOPIC as SCALABLE_TOPIC
from broker.admin.topic_policies import TopicPolicyHandlers
from broker.app.service import Broker
from broker.policies.namespaces import ALLOWED_CLUSTERS, JsonObject
from broker.policies.policy_kinds import REPLICATION, REPLICATION_KEY_HASH
from broker.replication.namespace_comparison import (
    creation_in_force,
    creation_of_broker,
    require_alike,
)
from magnetar.protocol.names import NamespaceName, TopicName

ALLOWED, LIST, KEY_HASH = "allowedClusters", "replication", "replicationKeyHash"
_COMPARE = "compareTopicPartitions"


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    of_topic = _Handlers(LIST, REPLICATION)
    return [
        web.get(f"{NAMESPACE}/{LIST}", show),
        web.post(f"{NAMESPACE}/{LIST}", replicate),
        web.get(f"{NAMESPACE}/{ALLOWED}", show_allowed),
        web.post(f"{NAMESPACE}/{ALLOWED}", allow),
        *of_topic.routes(f"{TOPIC}/{LIST}"),
        *_KeyHashHandlers(KEY_HASH, REPLICATION_KEY_HASH).routes(f"{SCALABLE_TOPIC}/{KEY_HASH}"),
        web.post(f"{SCALABLE_TOPIC}/{LIST}/incarnation", renew_incarnation),
    ]


async def show(request: web.Request) -> web.Response:
    """GET: the clusters of a namespace."""
    broker = request.app[BROKER]
    policies = await broker.namespaces.require(namespace_of(request))
    return web.json_response(broker.policies.value_of(REPLICATION, policies))


async def replicate(request: web.Request) -> web.Response:
    """POST, names of clusters as body: replicate the topics of a namespace among them.

    412 for an empty list, peers, and a list without the local cluster; 403 for clusters that are
    unknown or not allowed to the tenant; 400 for those that the namespace does not allow.  With
    `?compareTopicPartitions=true` 409 if topics do not have the same number of partitions there, or
    would not when they are made at their first use; 503 for a cluster that does not say.
    """
    broker, namespace = request.app[BROKER], namespace_of(request)
    await broker.namespaces.require(namespace)
    names = clusters_in(await body_of(request), LIST)
    await require_replicable(broker, names, LIST, tenant=namespace.tenant)
    if flag(request, _COMPARE):
        await _require_alike(broker, namespace, names)

    def change(record: JsonObject) -> None:
        require_within(names, record.get(ALLOWED_CLUSTERS), LIST)
        record[REPLICATION.member] = names

    await broker.namespaces.change(namespace, change)
    return no_content()


async def _require_alike(broker: Broker, namespace: NamespaceName, names: Iterable[str]) -> None:
    """Raise unless the clusters that are new in the list of a namespace have the same partitions.

    Raises `ClustersDiffer`, and `RemoteRefused` for one that does not say.
    """
    policies = await broker.namespaces.require(namespace)
    before = broker.policies.value_of(REPLICATION, policies)
    new = (
        set(names) - {broker.clusters.local_name} - set(before if isinstance(before, list) else ())
    )
    if not new:
        return
    partitions = await broker.topics.partition_counts(namespace)
    creation = creation_in_force(
        policies.raw, creation_of_broker(broker.settings.model_dump(mode="json"))
    )
    for name in sorted(new):
        there = broker.replications.cluster(name)
        await require_alike(there, namespace, partitions, creation)


async def show_allowed(request: web.Request) -> web.Response:
    """GET: the clusters that a namespace's list may name; [] for all those of the tenant."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(policies.raw.get(ALLOWED_CLUSTERS, []))


async def allow(request: web.Request) -> web.Response:
    """POST, names of clusters as body: those that a namespace's list may name.

    403 for clusters that are unknown or not allowed to the tenant, 412 for peers, 400 if one of
    the namespace's list is missing.
    """
    broker, namespace = request.app[BROKER], namespace_of(request)
    await broker.namespaces.require(namespace)
    names = clusters_in(await body_of(request), ALLOWED)
    await require_allowed(broker, names, ALLOWED, tenant=namespace.tenant)

    def change(record: JsonObject) -> None:
        require_allows(names, record.get(REPLICATION.member))
        record[ALLOWED_CLUSTERS] = names

    await broker.namespaces.change(namespace, change)
    return no_content()


async def renew_incarnation(request: web.Request) -> web.Response:
    """POST: have all other clusters take a scalable topic for a new one.

    What its cursors for them have not passed is sent again, also what is stored there already.
    """
    await _renew_incarnation(request.app[BROKER], topic_of(request, "topic"))
    return no_content()


async def _renew_incarnation(broker: Broker, name: TopicName) -> None:
    """Draw another incarnation for a topic that has one: without, no other cluster knows it."""
    known = (await broker.scalable.get(name)).incarnation
    if known is not None:
        await broker.scalable.renew_incarnation(name, known)


def require_allows(allowed: list[str], replicated: object) -> None:
    """Raise 400 if a cluster among which a namespace is replicated would not be allowed."""
    missing = sorted(set(replicated if isinstance(replicated, list) else ()) - set(allowed))
    if missing:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"{ALLOWED} lacks {', '.join(missing)}, which is in the list of clusters of the "
            "namespace: add it, or change that list first.",
        )


class _Handlers(TopicPolicyHandlers):
    """GET, POST, PUT and DELETE of a topic's list."""

    async def _write(self, request: web.Request, holder: TopicName, value: object) -> None:
        names = None if value is None else await _list_of_topic(request, holder, value)
        await super()._write(request, holder, names)


async def _list_of_topic(request: web.Request, name: TopicName, value: object) -> list[str]:
    """The list in a request, in order.

    Raises as `replicate`, and 412 for a global list that goes beyond that of the namespace.
    """
    broker = request.app[BROKER]
    names = clusters_in(value, LIST)
    await require_replicable(broker, names, LIST, tenant=name.tenant)
    if flag(request, "isGlobal"):
        policies = await broker.namespaces.require(name.namespace_name)
        of_namespace = broker.policies.value_of(REPLICATION, policies)
        known = of_namespace if isinstance(of_namespace, list) else []
        if len(known) < 2 or not set(names) <= set(known):
            raise refused(
                f"A global list of a topic has clusters of its namespace's list alone, which has "
                f"at least two: it is {known!r}. Change that first."
            )
    return names


class _KeyHashHandlers(TopicPolicyHandlers):
    """GET, POST, PUT and DELETE of the half of the hash by which segments are chosen."""

    async def _holder(self, request: web.Request) -> TopicName:
        name = topic_of(request, "topic")
        await request.app[BROKER].scalable.get(name)
        return name

    async def _write(self, request: web.Request, holder: TopicName, value: object) -> None:
        broker = request.app[BROKER]
        if (await broker.policies.read(holder)).replication_clusters:
            # What is stored there of an entry is known by the hashes of its messages.
            raise refused(
                f"{holder} is replicated to other clusters: set its list of clusters to the local "
                "one alone, then this, and then the list again."
            )
        await _renew_incarnation(broker, holder)
        await super()._write(request, holder, value)
