"""`/admin/v2/brokers`: the live brokers, their topics, and the health and work of this one."""

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from itertools import groupby

from aiohttp import hdrs, web

from broker.admin.keys import BROKER
from broker.admin.rest import BUNDLE, RestError, no_content, not_found
from broker.app.service import Broker
from broker.topics.non_persistent.stats import non_persistent_topic_stats
from broker.topics.topic_stats import topic_stats_in_memory
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name

BASE = "/admin/v2/brokers"
LOAD_REPORT = "/admin/v2/broker-stats/load-report"
STATS_OF_TOPICS = "/admin/v2/broker-stats/topics"

_ORDINARY = (TopicDomain.PERSISTENT, TopicDomain.NON_PERSISTENT)


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_brokers),
        web.get(BASE + "/health", health),
        web.get(BASE + "/ready", health),
        web.get(BASE + "/version", version),
        web.get(BASE + "/leaderBroker", leader),
        web.get(BASE + "/backlog-quota-check", check_backlog_quotas),
        web.get(BASE + "/configuration/runtime", runtime_configuration),
        web.get(BASE + "/internal-configuration", internal_configuration),
        web.get(BASE + "/{cluster}", list_brokers),
        web.get(BASE + "/{cluster}/{broker}/ownedNamespaces", owned_namespaces),
        web.get(LOAD_REPORT, load_report),
        web.get(STATS_OF_TOPICS, stats_of_topics),
    ]


async def list_brokers(request: web.Request) -> web.Response:
    """GET: `["host:port"]` of the REST addresses; 404 for those of another cluster."""
    broker = request.app[BROKER]
    cluster = request.match_info.get("cluster", broker.settings.cluster_name)
    if cluster != broker.settings.cluster_name:
        raise not_found(
            f"There is no cluster {cluster!r}: this one is {broker.settings.cluster_name!r}."
        )
    return web.json_response(sorted(broker.placement.brokers))


async def health(request: web.Request) -> web.Response:
    """GET: `ok` when both stores answer; 503 otherwise.

    `/health` adds a line for each thing that is damaged in the data directory; `/ready` does not.
    """
    broker = request.app[BROKER]
    if not broker.serving or broker.placement.draining:
        raise RestError(
            HTTPStatus.SERVICE_UNAVAILABLE, "The broker is starting or draining: try again later."
        )
    await broker.check_health()
    lines = ["ok"]
    if request.path.endswith("/health"):
        lines += broker.damage.sentences()
    return web.Response(text="\n".join(lines))


async def version(request: web.Request) -> web.Response:
    """GET: the version, as text."""
    return web.Response(text=request.app[BROKER].version)


async def leader(request: web.Request) -> web.Response:
    """GET: the broker that balances load; 404 while there is none."""
    found = request.app[BROKER].placement.leader
    if found is None:
        raise not_found("There is no leader just now: try again in a moment.")
    return web.json_response(
        {"serviceUrl": found.web_url_for(request.secure), "brokerId": found.broker_id}
    )


async def check_backlog_quotas(request: web.Request) -> web.Response:
    """GET: check the backlog quotas of this broker's topics now; it answers when that is done."""
    await request.app[BROKER].backlog_quotas.check()
    return no_content()


async def owned_namespaces(request: web.Request) -> web.Response:
    """GET: the namespaces of a broker's topics, each with the number of these."""
    placement = request.app[BROKER].placement
    asked = request.match_info["broker"]
    if asked not in placement.brokers:
        raise not_found(f"There is no broker {asked!r}: see {BASE} for the live ones.")
    counts: dict[str, int] = {}
    for name, owner in placement.owners().items():
        if owner == asked:
            namespace = str(parse_topic_name(name).namespace_name)
            counts[namespace] = counts.get(namespace, 0) + 1
    return web.json_response(
        {
            f"{namespace}/{BUNDLE}": {
                "broker_assignment": "shared",
                "is_controlled": True,
                "is_active": True,
                "topics": count,
            }
            for namespace, count in sorted(counts.items())
        }
    )


async def load_report(request: web.Request) -> web.Response:
    """GET: this broker's record, with its load as it was last reported to the others."""
    return web.json_response(request.app[BROKER].placement.load_report())


async def stats_of_topics(request: web.Request) -> web.StreamResponse:
    """GET: TopicStats of the topics that this broker has loaded, by namespace, bundle and domain.

    Sizes and ages of backlogs are left out: entries may have to be read for them.
    """
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/json"})
    await response.prepare(request)
    if request.method != hdrs.METH_HEAD:
        # In parts, so that neither the loop nor the memory is taken by all topics at once.
        async for part in _stats_of_topics(request.app[BROKER]):
            await response.write(part.encode())
    await response.write_eof()
    return response


async def _stats_of_topics(broker: Broker) -> AsyncIterator[str]:
    """The text of the answer, a part for each topic."""
    named = (*broker.topics.loaded(), *broker.topics.non_persistent.loaded())
    names = [name for name in map(parse_topic_name, named) if name.domain in _ORDINARY]
    opening = "{"
    names.sort(key=lambda name: (str(name.namespace_name), name.domain.value, str(name)))
    for namespace, of_namespace in groupby(names, lambda name: str(name.namespace_name)):
        yield f"{opening}{json.dumps(namespace)}:{{{json.dumps(BUNDLE)}:"
        opening = "{"
        for domain, of_domain in groupby(of_namespace, lambda name: name.domain.value):
            yield f"{opening}{json.dumps(domain)}:"
            opening = "{"
            for name in of_domain:
                stats = await _stats_in_memory(broker, name)
                if stats is not None:
                    yield f"{opening}{json.dumps(str(name))}:{json.dumps(stats)}"
                    opening = ","
                await asyncio.sleep(0)
            yield "{}" if opening == "{" else "}"
            opening = ","
        yield "}}"
    yield "{}" if opening == "{" else "}"


async def _stats_in_memory(broker: Broker, name: TopicName) -> dict[str, object] | None:
    """TopicStats; None for a topic that is not loaded any more."""
    topic = broker.topics.loaded().get(str(name))
    if topic is not None:
        return await topic_stats_in_memory(topic, broker.broker_id, {})
    non_persistent = broker.topics.non_persistent.loaded().get(str(name))
    if non_persistent is not None:
        return non_persistent_topic_stats(non_persistent, broker.broker_id)
    return None


async def internal_configuration(request: web.Request) -> web.Response:
    """GET: InternalConfigurationData: addresses of the stores; empty for a data directory."""
    settings = request.app[BROKER].settings
    return web.json_response(
        {
            "metadataStoreUrl": settings.metadata_store_url,
            "configurationMetadataStoreUrl": settings.metadata_store_url,
            "ledgersRootPath": "",
            "bookkeeperMetadataServiceUri": settings.bookkeeper_metadata_service_uri,
            "stateStorageServiceUrl": "",
        }
    )


async def runtime_configuration(request: web.Request) -> web.Response:
    """GET: every setting as text."""
    settings = request.app[BROKER].settings
    return web.json_response(
        {name: str(getattr(settings, name)) for name in type(settings).model_fields}
    )
