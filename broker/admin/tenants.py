"""`/admin/v2/tenants`: tenants.

Roles in `adminRoles` administer the tenant where authorization is on.
"""

from collections.abc import Mapping, Set
from http import HTTPStatus

from aiohttp import web

from broker.admin.cluster_lists import require_clusters, require_own
from broker.admin.keys import BROKER
from broker.admin.namespaces import delete_namespace
from broker.admin.rest import RestError, conflict, flag, mapping_of, no_content, require_known
from broker.app.service import Broker
from broker.policies.namespaces import JsonObject
from broker.policies.topic_policies import PoliciesOfTopic
from magnetar.protocol.names import parse_namespace_name

BASE = "/admin/v2/tenants"
TENANT = BASE + "/{tenant}"
ALLOWED = "allowedClusters"
MEMBERS = frozenset({"adminRoles", ALLOWED})


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
    """POST, TenantInfo as body: replace that of a tenant.

    409 if a namespace or topic of the tenant names a cluster that it takes out, or if another
    request changes the tenant meanwhile.
    """
    broker, tenant = request.app[BROKER], request.match_info["tenant"]
    info = await _info(request)

    async def require_unused_clusters(before: JsonObject) -> None:
        taken_out = set(_names_in(before, ALLOWED)) - set(_names_in(info, ALLOWED))
        known = {name for name in taken_out if broker.clusters.get(name)}
        await _require_unused(broker, tenant, known)

    await broker.namespaces.update_tenant(tenant, info, require_unused_clusters)
    return no_content()


async def _require_unused(broker: Broker, tenant: str, clusters: Set[str]) -> None:
    """Raise 409 if a namespace or topic of a tenant names one of these clusters."""
    if not clusters:
        return
    names = ", ".join(sorted(clusters))
    namespace = await broker.namespaces.namespace_naming(tenant, clusters)
    if namespace is not None:
        raise conflict(f"The namespace {namespace} names {names}: take it out there first.")

    def has_list(policies: PoliciesOfTopic) -> bool:
        lists = (level.get("replication") for level in (policies.local, policies.global_))
        return any(isinstance(each, list) and not clusters.isdisjoint(each) for each in lists)

    for text in await broker.namespaces.list(tenant):
        topic = await broker.topic_policies.find(parse_namespace_name(text), has_list)
        if topic is not None:
            raise conflict(f"The topic {topic} of {text} names {names}: take it out there first.")


async def _info(request: web.Request) -> dict[str, object]:
    """TenantInfo from the body; without clusters the tenant is allowed in this one."""
    broker, body = request.app[BROKER], await mapping_of(request)
    require_known(body, MEMBERS, "A tenant", f"send adminRoles and {ALLOWED}")
    own = broker.clusters.local_name
    clusters = sorted(set(_names_in(body, ALLOWED))) or [own]
    await require_clusters(broker, clusters, ALLOWED, unknown=HTTPStatus.PRECONDITION_FAILED)
    require_own(clusters, own, ALLOWED)
    return {"adminRoles": _names_in(body, "adminRoles"), ALLOWED: clusters}


def _names_in(body: Mapping[str, object], member: str) -> list[str]:
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
