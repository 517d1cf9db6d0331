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
    me = broker.placement.me
    urls = {
        "serviceUrl": me.web_url,
        "serviceUrlTls": me.web_url_tls,
        "brokerServiceUrl": me.url,
        "brokerServiceUrlTls": me.url_tls,
    }
    return web.json_response({name: url for name, url in urls.items() if url})
