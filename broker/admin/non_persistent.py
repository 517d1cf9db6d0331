"""`/admin/v2/non-persistent/{tenant}/{namespace}`: there are no such topics, so lists are empty.

Tools that list the topics of a namespace ask for those of both domains.
"""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import namespace_of

BASE = "/admin/v2/non-persistent/{tenant}/{namespace}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(BASE, list_none), web.get(BASE + "/partitioned", list_none)]


async def list_none(request: web.Request) -> web.Response:
    """GET: no names; 404 for a namespace that is not there."""
    await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response([])
