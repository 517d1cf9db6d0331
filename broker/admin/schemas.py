"""`/admin/v2/schemas/{tenant}/{namespace}/{topic}`: schema histories, also of scalable topics."""

from contextlib import suppress
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError, flag, mapping_of, require_known, topic_of
from broker.policies.schema_compatibility import (
    IncompatibleSchema,
    SchemaDefinition,
    SchemaType,
    data_of_pair,
    text_of_pair,
)
from broker.topics.schemas import SchemaVersion
from magnetar.protocol.names import TopicName

TOPIC = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"
MEMBERS = frozenset({"type", "schema", "data", "properties"})


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(TOPIC + "/schema", get),
        web.get(TOPIC + "/schema/{version:[0-9]{1,18}}", get),
        web.get(TOPIC + "/schemas", get_all),
        web.post(TOPIC + "/schema", add),
        web.delete(TOPIC + "/schema", delete),
        web.post(TOPIC + "/compatibility", compatibility),
        web.post(TOPIC + "/version", version_of),
    ]


def _topic(request: web.Request) -> TopicName:
    return topic_of(request, "persistent")


def _to_json(entry: SchemaVersion) -> dict[str, object]:
    definition = entry.definition
    return {
        "version": entry.version,
        "type": definition.kind.name,
        "timestamp": entry.timestamp_ms,
        "data": _text(definition),
        "properties": definition.properties,
    }


def _text(definition: SchemaDefinition) -> str:
    if definition.kind is SchemaType.KEY_VALUE:
        # Those of ALWAYS_COMPATIBLE topics need not be readable.
        with suppress(IncompatibleSchema):
            return text_of_pair(definition)
    return definition.data.decode("utf-8", "replace")


async def _definition(request: web.Request) -> SchemaDefinition:
    """The body: `{"type", "schema" or "data", "properties"}`, as Pulsar's tools send it."""
    body = await mapping_of(request)
    require_known(body, MEMBERS, "A schema", "send type, schema and properties")
    if "schema" in body and "data" in body:
        raise RestError(
            HTTPStatus.BAD_REQUEST, "schema and data are two names of the same text: send one."
        )
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in SchemaType.__members__:
        raise RestError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"type = {kind!r} is unknown: give one of {', '.join(SchemaType.__members__)}.",
        )
    text = body.get("schema", body.get("data", ""))
    properties = body.get("properties") or {}
    if not isinstance(text, str) or not isinstance(properties, dict):
        raise RestError(
            HTTPStatus.UNPROCESSABLE_ENTITY, "schema must be text and properties an object."
        )
    named = {str(key): str(value) for key, value in properties.items()}
    pair = SchemaType[kind] is SchemaType.KEY_VALUE
    data = data_of_pair(text, named) if pair else text.encode()
    return SchemaDefinition(SchemaType[kind], data, "", named)


async def get(request: web.Request) -> web.Response:
    """GET: the newest version, or the one in the path."""
    version = request.match_info.get("version")
    entry = await request.app[BROKER].schemas.get(
        _topic(request).schema_id, None if version is None else int(version)
    )
    return web.json_response(_to_json(entry))


async def get_all(request: web.Request) -> web.Response:
    """GET: all versions."""
    history = await request.app[BROKER].schemas.history(_topic(request).schema_id)
    return web.json_response({"getSchemaResponses": [_to_json(entry) for entry in history]})


async def add(request: web.Request) -> web.Response:
    """POST: add a version; 409 if it is not compatible with the history."""
    broker = request.app[BROKER]
    topic = _topic(request)
    policies = await broker.policies.require_of(topic)
    version = await broker.schemas.add(
        topic.schema_id, await _definition(request), policies.schema_compatibility
    )
    # As Pulsar's PostSchemaResponse, which has a SchemaVersion; other answers have the number.
    return web.json_response({"version": {"version": version}})


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: end the history; with force delete all records of it (version -1)."""
    schemas, schema_id = request.app[BROKER].schemas, _topic(request).schema_id
    if flag(request, "force"):
        await schemas.forget(schema_id)
        return web.json_response({"version": -1})
    return web.json_response({"version": await schemas.delete(schema_id)})


async def compatibility(request: web.Request) -> web.Response:
    """POST: whether a schema is compatible with the history."""
    broker = request.app[BROKER]
    topic = _topic(request)
    strategy = (await broker.policies.require_of(topic)).schema_compatibility
    definition = await _definition(request)
    try:
        await broker.schemas.check_successor(topic.schema_id, definition, strategy)
    except IncompatibleSchema:
        compatible = False
    else:
        compatible = True
    # Pulsar's library reads the first under this name, although its field has another one.
    return web.json_response(
        {"compatibility": compatible, "schemaCompatibilityStrategy": strategy.name}
    )


async def version_of(request: web.Request) -> web.Response:
    """POST: the version of a schema; 404 if it has none."""
    wanted = await _definition(request)
    history = await request.app[BROKER].schemas.history(_topic(request).schema_id)
    for entry in history:
        if entry.definition.same_as(wanted):
            return web.json_response({"version": entry.version})
    raise RestError(HTTPStatus.NOT_FOUND, "The topic has no such schema: POST it to /schema.")
