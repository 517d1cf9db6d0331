"""`.../backlogQuotaMap` and `.../backlogQuota` of namespaces and topics: backlog quotas.

GET of the map answers the quotas that are set, by type; `?applied=true` those in force.  POST and
DELETE of `backlogQuota?backlogQuotaType=destination_storage|message_age` change one.
"""

from collections.abc import Mapping

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import NAMESPACE
from broker.admin.persistent import TOPIC
from broker.admin.policy_handlers import invalid_value
from broker.admin.rest import body_of, flag, namespace_of, no_content, refused, shortened
from broker.admin.topic_policies import change_policy, require_topic
from broker.policies.backlog_quotas import QuotaType, is_quota, normalized
from broker.policies.namespaces import JsonObject, Policies
from broker.policies.policy_kinds import BACKLOG_QUOTAS

MAP, ONE, TYPE = "backlogQuotaMap", "backlogQuota", "backlogQuotaType"


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    return [
        web.get(f"{NAMESPACE}/{MAP}", show_of_namespace),
        web.post(f"{NAMESPACE}/{ONE}", set_of_namespace),
        web.delete(f"{NAMESPACE}/{ONE}", remove_of_namespace),
        web.get(f"{TOPIC}/{MAP}", show_of_topic),
        web.post(f"{TOPIC}/{ONE}", set_of_topic),
        web.delete(f"{TOPIC}/{ONE}", remove_of_topic),
    ]


async def show_of_namespace(request: web.Request) -> web.Response:
    """GET: the quotas that the namespace sets."""
    broker = request.app[BROKER]
    policies = await broker.namespaces.require(namespace_of(request))
    if flag(request, "applied"):
        return web.json_response(broker.policies.value_of(BACKLOG_QUOTAS, policies))
    return web.json_response(_map(policies.raw.get(BACKLOG_QUOTAS.member)))


async def set_of_namespace(request: web.Request) -> web.Response:
    """POST: set one quota; 412 if retention is not more."""
    broker, kind, quota = request.app[BROKER], _type(request), await _quota(request)

    def change(record: JsonObject) -> None:
        record[BACKLOG_QUOTAS.member] = {**_map(record.get(BACKLOG_QUOTAS.member)), kind: quota}
        broker.policies.require_retention_above_quotas(Policies(record))

    await broker.namespaces.change(namespace_of(request), change)
    return no_content()


async def remove_of_namespace(request: web.Request) -> web.Response:
    """DELETE: remove one quota; the broker's holds again."""
    kind = _type(request)

    def change(record: JsonObject) -> None:
        record[BACKLOG_QUOTAS.member] = _without(record.get(BACKLOG_QUOTAS.member), kind)

    await request.app[BROKER].namespaces.change(namespace_of(request), change)
    return no_content()


async def show_of_topic(request: web.Request) -> web.Response:
    """GET: the quotas that the topic sets."""
    name, broker = await require_topic(request), request.app[BROKER]
    if flag(request, "applied"):
        return web.json_response(await broker.policies.value(BACKLOG_QUOTAS, name))
    policies = await broker.topic_policies.get(name)
    return web.json_response(_map(policies.of_level(is_global=flag(request, "isGlobal")).get(MAP)))


async def set_of_topic(request: web.Request) -> web.Response:
    """POST: set one quota; 412 if retention is not more."""
    name, kind, quota = await require_topic(request), _type(request), await _quota(request)
    await change_policy(
        request, name, BACKLOG_QUOTAS, MAP, lambda found: {**_map(found), kind: quota}
    )
    return no_content()


async def remove_of_topic(request: web.Request) -> web.Response:
    """DELETE: remove one quota; that of the namespace is in force again."""
    name, kind = await require_topic(request), _type(request)
    await change_policy(
        request, name, BACKLOG_QUOTAS, MAP, lambda found: _without(found, kind) or None
    )
    return no_content()


def _map(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _without(value: object, kind: str) -> dict[str, object]:
    return {name: quota for name, quota in _map(value).items() if name != kind}


def _type(request: web.Request) -> str:
    """The type in the query; that of sizes unless it is given.  Raises 412 for another one."""
    name = request.query.get(TYPE, QuotaType.SIZE.value)
    if name not in list(QuotaType):
        raise refused(f"There is no {TYPE} {shortened(name)!r}: give {' or '.join(QuotaType)}.")
    return name


async def _quota(request: web.Request) -> dict[str, object]:
    """The quota in the body.  Raises 412 if it is none."""
    value = await body_of(request)
    if not isinstance(value, dict) or not is_quota(value):
        raise invalid_value(ONE, value, BACKLOG_QUOTAS.wanted)
    return normalized(value)
