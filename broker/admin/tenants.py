"""`/admin/v2/tenants`."""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import mapping_of, no_content

BASE = "/admin/v2/tenants"
TENANT = BASE + "/{tenant}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_tenants),
        web.get(TENANT, get),
        web.put(TENANT, create),
        web.post(TENANT, update),
        web.delete(TENANT, delete),
    ]


async def list_tenants(request: web.Request) -> web.Response:
    """GET: names."""
    return web.json_response(await request.app[BROKER].namespaces.tenants())


async def get(request: web.Request) -> web.Response:
    """GET: TenantInfo."""
    return web.json_response(
        await request.app[BROKER].namespaces.tenant(request.match_info["tenant"])
    )


async def create(request: web.Request) -> web.Response:
    """PUT: 409 if it exists."""
    info = await mapping_of(request)
    await request.app[BROKER].namespaces.create_tenant(request.match_info["tenant"], info)
    return no_content()


async def update(request: web.Request) -> web.Response:
    """POST: replace TenantInfo."""
    info = await mapping_of(request)
    await request.app[BROKER].namespaces.update_tenant(request.match_info["tenant"], info)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE: 409 while it has namespaces."""
    await request.app[BROKER].namespaces.delete_tenant(request.match_info["tenant"])
    return no_content()
