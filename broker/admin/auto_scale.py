"""Policies of automatic splits and merges, and their decisions.

`/admin/v2/scalable/{tenant}/{namespace}/{topic}/autoScalePolicy` and `.../scaling`, and
`/admin/v2/namespaces/{tenant}/{namespace}/scalableTopicAutoScalePolicy`.  GET answers what is set
at that level, 204 without: `scaling` shows the policy that is in force.
"""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import body_of, namespace_of, no_content
from broker.admin.scalable import TOPIC, topic_at_leader
from broker.policies.namespaces import AUTO_SCALE_POLICY
from broker.scalable.auto_scale_policy import checked_override

_OF_TOPIC = f"{TOPIC}/autoScalePolicy"
_OF_NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}/scalableTopicAutoScalePolicy"


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    return [
        web.get(_OF_TOPIC, topic_policy),
        web.post(_OF_TOPIC, set_topic_policy),
        web.delete(_OF_TOPIC, remove_topic_policy),
        web.get(f"{TOPIC}/scaling", scaling),
        web.get(_OF_NAMESPACE, namespace_policy),
        web.post(_OF_NAMESPACE, set_namespace_policy),
        web.delete(_OF_NAMESPACE, remove_namespace_policy),
    ]


def _answer(policy: object) -> web.Response:
    return no_content() if policy is None else web.json_response(policy)


async def topic_policy(request: web.Request) -> web.Response:
    """GET: the members that the topic overrides; 204 without."""
    # At the leader: another broker may not have seen yet what was just set.
    record = await request.app[BROKER].scalable.get(await topic_at_leader(request))
    policy = record.auto_scale_policy
    return _answer(None if policy is None else dict(policy))


async def set_topic_policy(request: web.Request) -> web.Response:
    """POST: replace what the topic overrides; null, or no member, inherits."""
    override = checked_override(await body_of(request))
    await request.app[BROKER].scalable.set_auto_scale_policy(
        await topic_at_leader(request), override
    )
    return no_content()


async def remove_topic_policy(request: web.Request) -> web.Response:
    """DELETE: the topic inherits everything from its namespace."""
    await request.app[BROKER].scalable.set_auto_scale_policy(await topic_at_leader(request), None)
    return no_content()


async def scaling(request: web.Request) -> web.Response:
    """GET: the decision of now with its reasons and input, and the last decision."""
    name = await topic_at_leader(request)
    return web.json_response(await request.app[BROKER].scalable.explain_scaling(name))


async def namespace_policy(request: web.Request) -> web.Response:
    """GET: the members that the namespace overrides; 204 without."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return _answer(policies.raw.get(AUTO_SCALE_POLICY))


async def set_namespace_policy(request: web.Request) -> web.Response:
    """POST: replace what the namespace overrides; null, or no member, inherits."""
    override = checked_override(await body_of(request))
    broker = request.app[BROKER]
    broker.scalable.require_fitting_policy(override)
    await broker.namespaces.change(
        namespace_of(request), lambda record: record.update({AUTO_SCALE_POLICY: override})
    )
    return no_content()


async def remove_namespace_policy(request: web.Request) -> web.Response:
    """DELETE: the namespace inherits everything from the broker."""
    await request.app[BROKER].namespaces.change(
        namespace_of(request), lambda record: record.pop(AUTO_SCALE_POLICY, None)
    )
    return no_content()
