"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/properties`: properties that users set.

The properties of a partitioned topic are in its record, those of any other topic in its ledger's
record, both as in Pulsar.
"""

from collections.abc import Mapping

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.not_served import require_no_shadow
from broker.admin.persistent import TOPIC, existing_topic, persistent_name
from broker.admin.rest import body_of, no_content, properties_in, refused
from broker.topics.local_topics import is_own_property, properties_of_users


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(TOPIC + "/properties", get),
        web.put(TOPIC + "/properties", update),
        web.delete(TOPIC + "/properties", remove),
    ]


async def get(request: web.Request) -> web.Response:
    """GET: all properties that users set."""
    partitioned = await request.app[BROKER].topics.partitioned.find(persistent_name(request))
    if partitioned is not None:
        return web.json_response(dict(partitioned.properties))
    stored = (await existing_topic(request)).ledger.properties
    return web.json_response(properties_of_users(stored))


async def update(request: web.Request) -> web.Response:
    """PUT, properties as body: set these; others stay."""
    properties = properties_in(await body_of(request))
    require_no_shadow(properties)
    await _change(request, properties)
    return no_content()


async def remove(request: web.Request) -> web.Response:
    """DELETE `?key=`: remove one property."""
    key = request.query.get("key")
    if not key or is_own_property(key):
        raise refused("The request names no property of a user: give its name as ?key=.")
    await _change(request, {key: None})
    return no_content()


async def _change(request: web.Request, changes: Mapping[str, str | None]) -> None:
    name = persistent_name(request)
    partitioned = request.app[BROKER].topics.partitioned
    if await partitioned.find(name) is not None:
        await partitioned.set_properties(name, changes)
    else:
        await (await existing_topic(request)).ledger.set_properties(changes)
