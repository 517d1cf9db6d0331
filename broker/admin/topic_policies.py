"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/<policy>`: the policies of topics.

The policies are those of `policy_kinds.OF_TOPICS`.  GET answers the value that the topic sets, 204
if it sets none; with `?applied=true` the value in force.  `?isGlobal=true` means the value for all
clusters; a local value comes before it.  A partitioned topic has one set of policies for all of its
partitions, a scalable topic of that name one for all of its segments.  Any broker serves these
requests.
"""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import invalid_value
from broker.admin.persistent import TOPIC, persistent_name
from broker.admin.rest import body_of, flag, no_content, not_found, number_in, refused
from broker.policies.policy_kinds import OF_TOPICS, PolicyKind
from magnetar.protocol.names import TopicName


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    found = []
    for name, kind in OF_TOPICS.items():
        path, handlers = f"{TOPIC}/{name}", _Handlers(name, kind)
        found += [
            web.get(path, handlers.get),
            web.post(path, handlers.set),
            web.put(path, handlers.set),
            web.delete(path, handlers.remove),
        ]
    return found


async def _require_topic(request: web.Request) -> TopicName:
    """The topic in the path.  Raises 404 if there is none, 412 for a partition."""
    name, topics = persistent_name(request), request.app[BROKER].topics
    if name.partition_index is not None and await topics.partitioned.count(name.partitioned):
        raise refused(f"{name} has the policies of {name.partitioned}: use that name.")
    # A topic keeps its policies when it is migrated: they are named as before.
    if not (await topics.exists(name) or await topics.has_scalable_twin(name)):
        raise not_found(f"There is no topic {name}: create it with PUT, or publish to it.")
    return name


class _Handlers:
    """GET, POST (or PUT) and DELETE of one policy."""

    def __init__(self, name: str, kind: PolicyKind) -> None:
        self._name = name
        self._kind = kind

    async def get(self, request: web.Request) -> web.Response:
        """GET: the value; 204 when it is not set."""
        name, broker = await _require_topic(request), request.app[BROKER]
        if flag(request, "applied"):
            value = await broker.policies.value(self._kind, name)
        else:
            policies = await broker.topic_policies.get(name)
            level = policies.global_ if flag(request, "isGlobal") else policies.local
            value = level.get(self._name)
        return no_content() if value is None else web.json_response(value)

    async def set(self, request: web.Request) -> web.Response:
        """POST or PUT: set the policy to the body, or to the query parameter of its name."""
        name = await _require_topic(request)
        if not self._kind.of_segments and await request.app[BROKER].topics.has_scalable_twin(name):
            raise refused(
                f"{name} is a scalable topic now, and {self._name} holds for none of these: "
                "leave it out."
            )
        value = await self._value(request)
        if not self._kind.valid(value):
            raise invalid_value(self._name, value, self._kind.wanted)
        await self._change(request, name, value)
        return no_content()

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE: remove the policy; that of the namespace is in force again."""
        await self._change(request, await _require_topic(request), None)
        return no_content()

    async def _value(self, request: web.Request) -> object:
        text = request.query.get(self._name)
        if self._kind.is_query and text is not None:
            return number_in(text, self._name)
        return await body_of(request)

    async def _change(self, request: web.Request, name: TopicName, value: object) -> None:
        await request.app[BROKER].topic_policies.change(
            name, self._name, value, is_global=flag(request, "isGlobal")
        )
