"""`/admin/v2/brokers`: which brokers there are, and whether this one is well."""

from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError

BASE = "/admin/v2/brokers"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_brokers),
        web.get(BASE + "/health", health),
        web.get(BASE + "/ready", health),
        web.get(BASE + "/version", version),
        web.get(BASE + "/leaderBroker", leader),
        web.get(BASE + "/configuration/runtime", runtime_configuration),
        web.get(BASE + "/{cluster}", list_brokers),
    ]


async def list_brokers(request: web.Request) -> web.Response:
    """GET: `["host:port"]` of the REST addresses."""
    return web.json_response([request.app[BROKER].placement.broker_id])


async def health(request: web.Request) -> web.Response:
    """GET: `ok` when both stores answer; 503 otherwise."""
    broker = request.app[BROKER]
    if not broker.serving:
        raise RestError(
            HTTPStatus.SERVICE_UNAVAILABLE, "The broker is starting or draining: try again later."
        )
    await broker.check_health()
    return web.Response(text="ok")


async def version(request: web.Request) -> web.Response:
    """GET: the version, as text."""
    return web.Response(text=request.app[BROKER].version)


async def leader(request: web.Request) -> web.Response:
    """GET: on one broker, this one."""
    placement = request.app[BROKER].placement
    return web.json_response({"serviceUrl": placement.web_url, "brokerId": placement.broker_id})


async def runtime_configuration(request: web.Request) -> web.Response:
    """GET: every setting as text."""
    settings = request.app[BROKER].settings
    return web.json_response(
        {name: str(getattr(settings, name)) for name in type(settings).model_fields}
    )
