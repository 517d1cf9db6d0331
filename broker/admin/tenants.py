"""`/admin/v2/tenants`: tenants.

Roles in `adminRoles` administer the tenant where authorization is on.
"""

from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import delete_namespace
from broker.admin.rest import RestError, flag, mapping_of, no_content, refused
from magnetar.protocol.names import parse_namespace_name

BASE = "/admin/v2/tenants"
TENANT = BASE + "/{tenant}"
MEMBERS = frozenset({"adminRoles", "allowedClusters"})


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
    """GET: the names of all tenants."""
    return web.json_response(await request.app[BROKER].namespaces.tenants())


async def get(request: web.Request) -> web.Response:
    """GET: TenantInfo of a tenant."""
    return web.json_response(
        await request.app[BROKER].namespaces.tenant(request.match_info["tenant"])
    )


async def create(request: web.Request) -> web.Response:
    """PUT, TenantInfo as body: create a tenant; 409 if it exists."""
    info = await _info(request)
    await request.app[BROKER].namespaces.create_tenant(request.match_info["tenant"], info)
    return no_content()


async def update(request: web.Request) -> web.Response:
    """POST, TenantInfo as body: replace that of a tenant."""
    info = await _info(request)
    await request.app[BROKER].namespaces.update_tenant(request.match_info["tenant"], info)
    return no_content()


async def _info(request: web.Request) -> dict[str, object]:
    """TenantInfo from the body; without clusters the tenant is allowed in this one."""
    body = await mapping_of(request)
    unknown = sorted(body.keys() - MEMBERS)
    if unknown:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"A tenant has no {', '.join(unknown)}: send adminRoles and allowedClusters.",
        )
    cluster = request.app[BROKER].settings.cluster_name
    clusters = _names_in(body, "allowedClusters") or [cluster]
    if set(clusters) != {cluster}:
        raise refused(f"allowedClusters cannot be {clusters!r}: there is one cluster, {cluster!r}.")
    return {"adminRoles": _names_in(body, "adminRoles"), "allowedClusters": [cluster]}


def _names_in(body: dict[str, object], member: str) -> list[str]:
    names = body.get(member)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RestError(HTTPStatus.BAD_REQUEST, f"{member} must be a list of names.")
    return names


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a tenant; 409 while it has namespaces, unless forced."""
    broker, tenant = request.app[BROKER], request.match_info["tenant"]
    if flag(request, "force"):
        for name in await broker.namespaces.list(tenant):
            await delete_namespace(broker, parse_namespace_name(name), force=True)
    await broker.namespaces.delete_tenant(tenant)
    return no_content()
