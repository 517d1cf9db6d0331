"""Policies of Apache Pulsar that have no meaning here, under topics and namespaces.

GET and DELETE answer 204, as none is ever set; POST answers 501 with the reason.
"""

from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import NAMESPACE
from broker.admin.persistent import TOPIC, persistent_name
from broker.admin.rest import RestError, namespace_of, no_content, not_found

SNAPSHOT_INTERVAL = "deduplicationSnapshotInterval"


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    found = []
    for base in (NAMESPACE, TOPIC):
        path = f"{base}/{SNAPSHOT_INTERVAL}"
        found += [web.get(path, show), web.post(path, refuse), web.delete(path, show)]
    return found


async def show(request: web.Request) -> web.Response:
    """GET, DELETE: there is none."""
    await _require(request)
    return no_content()


async def refuse(request: web.Request) -> web.Response:
    """POST: 501."""
    await _require(request)
    raise RestError(
        HTTPStatus.NOT_IMPLEMENTED,
        f"{SNAPSHOT_INTERVAL} is not served: leave it out. The broker saves sequence ids by the "
        "number and the size of messages since the last time, and each minute at the latest.",
    )


async def _require(request: web.Request) -> None:
    """Raise 404 unless the topic or namespace in the path exists."""
    broker = request.app[BROKER]
    if "topic" not in request.match_info:
        await broker.namespaces.require(namespace_of(request))
        return
    name = persistent_name(request)
    if not (await broker.topics.exists(name) or await broker.topics.has_scalable_twin(name)):
        raise not_found(f"There is no topic {name}: create it with PUT, or publish to it.")
