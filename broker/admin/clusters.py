"""`/admin/v2/clusters`: the one cluster this broker belongs to."""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import not_found

BASE = "/admin/v2/clusters"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(BASE, list_clusters), web.get(BASE + "/{cluster}", get_cluster)]


async def list_clusters(request: web.Request) -> web.Response:
    """GET: names."""
    return web.json_response([request.app[BROKER].settings.cluster_name])


async def get_cluster(request: web.Request) -> web.Response:
    """GET: ClusterData."""
    broker = request.app[BROKER]
    cluster = request.match_info["cluster"]
    if cluster != broker.settings.cluster_name:
        raise not_found(
            f"There is no cluster {cluster!r}: this one is {broker.settings.cluster_name!r}."
        )
    return web.json_response(
        {
            "serviceUrl": broker.placement.web_url,
            "brokerServiceUrl": broker.placement.broker_url,
        }
    )
