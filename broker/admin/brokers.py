"""`/admin/v2/brokers`: the live brokers, their topics, and the health of this one."""

from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError, not_found
from magnetar.protocol.names import parse_topic_name

BASE = "/admin/v2/brokers"
LOAD_REPORT = "/admin/v2/broker-stats/load-report"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_brokers),
        web.get(BASE + "/health", health),
        web.get(BASE + "/ready", health),
        web.get(BASE + "/version", version),
        web.get(BASE + "/leaderBroker", leader),
        web.get(BASE + "/configuration/runtime", runtime_configuration),
        web.get(BASE + "/internal-configuration", internal_configuration),
        web.get(BASE + "/{cluster}", list_brokers),
        web.get(BASE + "/{cluster}/{broker}/ownedNamespaces", owned_namespaces),
        web.get(LOAD_REPORT, load_report),
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
            f"{namespace}/0x00000000_0xffffffff": {
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
