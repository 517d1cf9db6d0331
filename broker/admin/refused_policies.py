"""Policies of Apache Pulsar that have no meaning here, under topics and namespaces.

GET and DELETE answer 204, as none is ever set; POST answers 501 with the reason.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import NAMESPACE
from broker.admin.not_served import REASONS
from broker.admin.persistent import TOPIC, persistent_name
from broker.admin.rest import Handler, RestError, namespace_of, no_content, no_topic

POLICIES: Final[Mapping[str, str]] = {
    "deduplicationSnapshotInterval": "sequence-ids",
}
"""Each policy, and the word in `REASONS` for why it is refused."""


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    found = []
    for base in (NAMESPACE, TOPIC):
        for name, reason in POLICIES.items():
            path, refuse = f"{base}/{name}", _refusing(name, reason)
            found += [web.get(path, show), web.post(path, refuse), web.delete(path, show)]
    return found


async def show(request: web.Request) -> web.Response:
    """GET, DELETE: there is none."""
    await _require_holder(request)
    return no_content()


def _refusing(name: str, reason: str) -> Handler:
    async def refuse(request: web.Request) -> web.StreamResponse:
        """POST: 501."""
        await _require_holder(request)
        raise RestError(
            HTTPStatus.NOT_IMPLEMENTED, f"{name} is not served: leave it out. {REASONS[reason]}"
        )

    return refuse


async def _require_holder(request: web.Request) -> None:
    """Raise 404 unless the topic or namespace in the path exists."""
    broker = request.app[BROKER]
    if "topic" not in request.match_info:
        await broker.namespaces.require(namespace_of(request))
        return
    name = persistent_name(request)
    if not (await broker.topics.exists(name) or await broker.topics.has_scalable_twin(name)):
        raise no_topic(name)
