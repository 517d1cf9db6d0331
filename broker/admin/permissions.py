"""Grants of namespaces, subscriptions and topics, as Apache Pulsar's admin tools send them.

All of a namespace's grants are in its policies record, under Pulsar's own names: see
`security.access.grants_of`.  A POST replaces the actions of one role.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from broker.admin.access import require_access
from broker.admin.keys import BROKER
from broker.admin.rest import (
    RestError,
    body_of,
    namespace_of,
    no_content,
    ordinary_topic_of,
    require_known,
    shortened,
    topic_of,
)
from broker.policies.grants import grant, revoke
from config.bounds import GRANTS_OF_REQUEST
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, parse_topic_name
from security.access import Action, Need, on_namespace, topic_key
from security.identity import InvalidRole, role_of

NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
PERSISTENT = "/admin/v2/persistent/{tenant}/{namespace}/{topic}/permissions"
NON_PERSISTENT = "/admin/v2/non-persistent/{tenant}/{namespace}/{topic}/permissions"
SCALABLE = "/admin/v2/scalable/{tenant}/{namespace}/{topic}/permissions"
MODES = ("None", "Prefix")
Json = dict[str, object]


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    found = [
        web.get(NAMESPACE + "/permissions/subscription", of_subscriptions),
        web.post(NAMESPACE + "/permissions/subscription/{subscription}", grant_subscription),
        web.get(NAMESPACE + "/permissions", of_namespace),
        web.post(NAMESPACE + "/permissions/{role}", grant_on_namespace),
        web.delete(NAMESPACE + "/permissions/{role}", revoke_on_namespace),
        web.delete(NAMESPACE + "/permissions/{subscription}/{role}", revoke_subscription),
        web.get(NAMESPACE + "/subscriptionAuthMode", subscription_mode),
        web.post(NAMESPACE + "/subscriptionAuthMode", set_subscription_mode),
        web.post("/admin/v2/namespaces/grantPermissionsOnTopics", grant_on_topics),
        web.post("/admin/v2/namespaces/revokePermissionsOnTopics", revoke_on_topics),
    ]
    for path in (PERSISTENT, NON_PERSISTENT, SCALABLE):
        found.append(web.get(path, of_topic))
        found.append(web.post(path + "/{role}", grant_on_topic))
        found.append(web.delete(path + "/{role}", revoke_on_topic))
    return found


# Namespaces


async def of_namespace(request: web.Request) -> web.Response:
    """GET: `{role: [action]}` of the namespace."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(_section(policies.raw, "namespace_auth"))


async def grant_on_namespace(request: web.Request) -> web.Response:
    """POST `["produce", ...]`: the actions of a role; 204."""
    role, actions = _role(request), await _actions(request)
    await _change(request, "namespace_auth", lambda granted: granted.update({role: actions}))
    return no_content()


async def revoke_on_namespace(request: web.Request) -> web.Response:
    """DELETE: all actions of a role; 204 also if it has none."""
    role = request.match_info["role"]
    await _change(request, "namespace_auth", lambda granted: granted.pop(role, None))
    return no_content()


async def of_subscriptions(request: web.Request) -> web.Response:
    """GET: `{subscription: [role]}` of the namespace."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(_section(policies.raw, "subscription_auth_roles"))


async def grant_subscription(request: web.Request) -> web.Response:
    """POST `["role", ...]`: the roles that alone may use a subscription; 204."""
    roles = [_checked(name) for name in await _names(request)]
    name = request.match_info["subscription"]
    await _change(request, "subscription_auth_roles", lambda known: known.update({name: roles}))
    return no_content()


async def revoke_subscription(request: web.Request) -> web.Response:
    """DELETE: one role of a subscription.  Without roles every consumer may use it."""
    name, role = request.match_info["subscription"], request.match_info["role"]

    def remove(known: Json) -> None:
        roles = known.get(name)
        if isinstance(roles, list):
            known[name] = [each for each in roles if each != role]

    await _change(request, "subscription_auth_roles", remove)
    return no_content()


async def subscription_mode(request: web.Request) -> web.Response:
    """GET: `"None"`, or `"Prefix"`: a subscription bears the name of the role that uses it."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    mode = policies.raw.get("subscription_auth_mode")
    return web.json_response(mode if mode in MODES else MODES[0])


async def set_subscription_mode(request: web.Request) -> web.Response:
    """POST `"None"` or `"Prefix"`; 204."""
    mode = await body_of(request)
    if mode not in MODES:
        raise RestError(HTTPStatus.BAD_REQUEST, 'The mode is "None" or "Prefix": send one of them.')
    await request.app[BROKER].namespaces.change(
        namespace_of(request), lambda record: record.update(subscription_auth_mode=mode)
    )
    return no_content()


# Topics


async def of_topic(request: web.Request) -> web.Response:
    """GET: `{role: [action]}` of the topic and its namespace together."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    granted = {role: set(actions) for role, actions in policies.grants.of_namespace.items()}
    for role, actions in policies.grants.of_topics.get(topic_key(_topic(request)), {}).items():
        granted.setdefault(role, set()).update(actions)
    return web.json_response({role: _values(actions) for role, actions in granted.items()})


async def grant_on_topic(request: web.Request) -> web.Response:
    """POST `["produce", ...]`: the actions of a role on a topic; 204, also before it exists."""
    topic, role, actions = _topic(request), _role(request), await _actions(request)
    await _change(request, "destination_auth", lambda granted: grant(granted, topic, role, actions))
    return no_content()


async def revoke_on_topic(request: web.Request) -> web.Response:
    """DELETE: all actions of a role on a topic, in every domain; 412 if it has none."""
    topic, role = _topic(request), request.match_info["role"]
    policies = await request.app[BROKER].namespaces.require(topic.namespace_name)
    if role not in policies.grants.of_topics.get(topic_key(topic), {}):
        raise RestError(
            HTTPStatus.PRECONDITION_FAILED,
            f"The role {shortened(role)} has no grant on {topic}: nothing was revoked.",
        )
    await _change(request, "destination_auth", lambda granted: revoke(granted, topic, role))
    return no_content()


async def grant_on_topics(request: web.Request) -> web.Response:
    """POST `[{topic, role, actions}]`, all of one namespace; 204."""
    wanted = [
        (*_topic_and_role(each, "actions"), _known_actions(each.get("actions")))
        for each in await _objects(request)
    ]

    def grant_all(granted: Json) -> None:
        for topic, role, actions in wanted:
            grant(granted, topic, role, actions)

    await _change_topics(request, [topic for topic, _, _ in wanted], grant_all)
    return no_content()


async def revoke_on_topics(request: web.Request) -> web.Response:
    """POST `[{topic, role}]`, all of one namespace; 204."""
    wanted = [_topic_and_role(each) for each in await _objects(request)]

    def revoke_all(granted: Json) -> None:
        for topic, role in wanted:
            revoke(granted, topic, role)

    await _change_topics(request, [topic for topic, _ in wanted], revoke_all)
    return no_content()


# The record and the request


async def _change(request: web.Request, member: str, change: Callable[[Json], object]) -> None:
    await _change_section(request, namespace_of(request), member, change)


async def _change_topics(
    request: web.Request, topics: list[TopicName], change: Callable[[Json], object]
) -> None:
    namespaces = {topic.namespace_name for topic in topics}
    if len(namespaces) != 1:
        raise RestError(
            HTTPStatus.BAD_REQUEST, "The topics are of several namespaces: send one at a time."
        )
    namespace = namespaces.pop()
    # The path does not name the tenant, so the access table cannot ask this.
    await require_access(request, (on_namespace(Need.TENANT_ADMIN, namespace),))
    await _change_section(request, namespace, "destination_auth", change)


async def _change_section(
    request: web.Request,
    namespace: NamespaceName,
    member: str,
    change: Callable[[Json], object],
) -> None:
    def change_record(record: Json) -> None:
        section = record.get("auth_policies")
        if not isinstance(section, dict):
            section = record["auth_policies"] = {}
        granted = section.get(member)
        if not isinstance(granted, dict):
            granted = section[member] = {}
        change(granted)

    await request.app[BROKER].namespaces.change(namespace, change_record)


def _section(record: Mapping[str, object], member: str) -> object:
    section = record.get("auth_policies")
    granted = section.get(member) if isinstance(section, dict) else None
    return granted if isinstance(granted, dict) else {}


def _topic(request: web.Request) -> TopicName:
    if request.path.startswith("/admin/v2/scalable/"):
        return topic_of(request, TopicDomain.TOPIC).partitioned
    return ordinary_topic_of(request).partitioned


def _role(request: web.Request) -> str:
    return _checked(request.match_info["role"])


def _checked(name: str) -> str:
    """A role, or a pattern with a `*` at one end, that may be granted something."""
    plain = name[:-1] if name.endswith("*") else name[1:] if name.startswith("*") else name
    try:
        role_of(plain)
    except InvalidRole as error:
        raise RestError(HTTPStatus.BAD_REQUEST, f"That is no role: {error}") from error
    return name


async def _names(request: web.Request) -> list[str]:
    names = await body_of(request)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RestError(HTTPStatus.BAD_REQUEST, 'The body must be a list of names: send ["a"].')
    return names


async def _actions(request: web.Request) -> list[str]:
    return _known_actions(await body_of(request))


def _known_actions(names: object) -> list[str]:
    known = [each.value for each in Action]
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise RestError(
            HTTPStatus.BAD_REQUEST, f"Actions must be a list of any of {', '.join(known)}."
        )
    return sorted(set(names), key=known.index)


async def _objects(request: web.Request) -> list[Json]:
    body = await body_of(request)
    if not isinstance(body, list) or not body or not all(isinstance(each, dict) for each in body):
        raise RestError(HTTPStatus.BAD_REQUEST, "The body must be a list of objects.")
    if len(body) > GRANTS_OF_REQUEST:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"One request may have {GRANTS_OF_REQUEST} grants: split it into several.",
        )
    return body


def _topic_and_role(each: Json, *others: str) -> tuple[TopicName, str]:
    """The topic and the role of an object, which may have the members `others` besides."""
    known = ("topic", "role", *others)
    require_known(each, known, "An object of this list", f"send {', '.join(known)}")
    topic, role = each.get("topic"), each.get("role")
    if not isinstance(topic, str) or not isinstance(role, str):
        raise RestError(HTTPStatus.BAD_REQUEST, "Each object must have a topic and a role.")
    return parse_topic_name(topic).partitioned, _checked(role)


def _values(actions: set[Action]) -> list[str]:
    return [each.value for each in Action if each in actions]
