"""`/admin/v2/namespaces/{tenant}/{namespace}/properties`: texts that users keep with a namespace.

They are the member `properties` of the namespace's record, as in Pulsar, and mean nothing to the
broker.  One property is shown as plain text.
"""

from collections.abc import Mapping

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import NAMESPACE, PROPERTIES
from broker.admin.rest import body_of, namespace_of, no_content, properties_in
from broker.policies.namespaces import JsonObject

PROPERTY = NAMESPACE + "/property/{key}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(NAMESPACE + "/properties", get_all),
        web.put(NAMESPACE + "/properties", update),
        web.delete(NAMESPACE + "/properties", clear),
        web.get(PROPERTY, get),
        web.put(PROPERTY + "/{value}", set_one),
        web.delete(PROPERTY, remove),
    ]


def _properties_of(record: Mapping[str, object]) -> dict[str, str]:
    found = record.get(PROPERTIES)
    return {str(key): str(text) for key, text in found.items()} if isinstance(found, dict) else {}


async def _stored(request: web.Request) -> dict[str, str]:
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return _properties_of(policies.raw)


async def _change(request: web.Request, changes: dict[str, str | None]) -> None:
    def changed(record: JsonObject) -> None:
        merged = {**_properties_of(record), **changes}
        kept = {key: text for key, text in merged.items() if text is not None}
        # The whole may not grow beyond the bound either.
        record[PROPERTIES] = dict(properties_in(kept))

    await request.app[BROKER].namespaces.change(namespace_of(request), changed)


async def get_all(request: web.Request) -> web.Response:
    """GET: all properties."""
    return web.json_response(await _stored(request))


async def update(request: web.Request) -> web.Response:
    """PUT, properties as body: set these; others stay."""
    await _change(request, dict(properties_in(await body_of(request))))
    return no_content()


async def clear(request: web.Request) -> web.Response:
    """DELETE: remove all properties."""
    await request.app[BROKER].namespaces.change(
        namespace_of(request), lambda record: record.pop(PROPERTIES, None)
    )
    return no_content()


async def get(request: web.Request) -> web.Response:
    """GET: the text of one property; 204 if it is not set."""
    return _text((await _stored(request)).get(request.match_info["key"]))


async def set_one(request: web.Request) -> web.Response:
    """PUT: set one property to the text in the path."""
    await _change(request, {request.match_info["key"]: request.match_info["value"]})
    return no_content()


async def remove(request: web.Request) -> web.Response:
    """DELETE: remove one property, and show the text that it had; 204 if it was not set."""
    key = request.match_info["key"]
    before = (await _stored(request)).get(key)
    await _change(request, {key: None})
    return _text(before)


def _text(text: str | None) -> web.Response:
    return no_content() if text is None else web.Response(text=text)
