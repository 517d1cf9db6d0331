"""`/admin/v2/clusters`: the local cluster, as its settings describe it, and those registered.

`authenticationParameters` of a cluster may be a secret: only superusers may ask for it.
"""

from dataclasses import replace
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError, body_of, mapping_of, no_content, refused
from broker.policies.cluster_data import ClusterData, cluster_data_in, peer_names_in

BASE = "/admin/v2/clusters"
CLUSTER = BASE + "/{cluster}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_clusters),
        web.get(CLUSTER, get_cluster),
        web.put(CLUSTER, create),
        web.post(CLUSTER, update),
        web.delete(CLUSTER, delete),
        web.get(CLUSTER + "/peers", peers),
        web.post(CLUSTER + "/peers", set_peers),
    ]


async def list_clusters(request: web.Request) -> web.Response:
    """GET: names."""
    return web.json_response(request.app[BROKER].clusters.names())


async def get_cluster(request: web.Request) -> web.Response:
    """GET: ClusterData."""
    broker, cluster = request.app[BROKER], request.match_info["cluster"]
    if cluster != broker.clusters.local_name:
        return web.json_response((await broker.clusters.require(cluster)).json())
    me = broker.placement.me
    urls = {
        "serviceUrl": me.web_url,
        "serviceUrlTls": me.web_url_tls,
        "brokerServiceUrl": me.url,
        "brokerServiceUrlTls": me.url_tls,
    }
    return web.json_response({name: url for name, url in urls.items() if url})


async def create(request: web.Request) -> web.Response:
    """PUT, ClusterData as body: register a cluster; 409 if it exists."""
    data = await _data_of(request)
    await request.app[BROKER].clusters.create(request.match_info["cluster"], data)
    return no_content()


async def update(request: web.Request) -> web.Response:
    """POST, ClusterData as body: replace that of a cluster."""
    data = await _data_of(request)
    await request.app[BROKER].clusters.change(request.match_info["cluster"], lambda _: data)
    return no_content()


async def _data_of(request: web.Request) -> ClusterData:
    body = await mapping_of(request)
    if not body:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            "The body must describe the cluster: send brokerServiceUrl and serviceUrl.",
        )
    return cluster_data_in(body)


async def delete(request: web.Request) -> web.Response:
    """DELETE: forget a cluster; 412 while a tenant or namespace names it."""
    broker, cluster = request.app[BROKER], request.match_info["cluster"]
    if cluster != broker.clusters.local_name:
        await broker.clusters.require(cluster)
        user = await broker.namespaces.naming_cluster(cluster)
        if user is not None:
            raise refused(f"{user} names the cluster {cluster}: take it out there first.")
    await broker.clusters.delete(cluster)
    return no_content()


async def peers(request: web.Request) -> web.Response:
    """GET: the names of a cluster's peers."""
    broker, cluster = request.app[BROKER], request.match_info["cluster"]
    if cluster == broker.clusters.local_name:
        return web.json_response([])
    data = await broker.clusters.require(cluster)
    return web.json_response(list(data.peer_cluster_names))


async def set_peers(request: web.Request) -> web.Response:
    """POST, names as body: clusters that are never in one list with this one."""
    names = peer_names_in(await body_of(request))
    await request.app[BROKER].clusters.change(
        request.match_info["cluster"], lambda data: replace(data, peer_cluster_names=names)
    )
    return no_content()
