"""`/admin/v2/non-persistent/{tenant}/{namespace}`: empty lists, because there are no such topics.

Tools that list the topics of a namespace send requests for both domains.
"""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import namespace_of

BASE = "/admin/v2/non-persistent/{tenant}/{namespace}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(BASE, list_none), web.get(BASE + "/partitioned", list_none)]


async def list_none(request: web.Request) -> web.Response:
    """GET: no names; 404 for a namespace that does not exist."""
    await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response([])
