"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/<policy>`: the policies of topics.

The policies are those of `policy_kinds.OF_TOPICS`.  GET answers the value that the topic sets, 204
if it sets none; with `?applied=true` the value in force.  `?isGlobal=true` means the value for all
clusters; a local value comes before it.  A partitioned topic has one set of policies for all of its
partitions, a scalable topic of that name one for all of its segments.  Any broker serves these
requests.  DELETE of `policies` removes all that a topic sets.
`/{topic}/{subscription}/dispatchRate` is that of a single subscription, which comes before the
subscriptionDispatchRate of the topic; the subscription need not exist.
"""

from collections.abc import Callable

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.persistent import TOPIC, persistent_name
from broker.admin.policy_handlers import PolicyHandlers
from broker.admin.rest import flag, no_content, no_topic, number_in, refused
from broker.policies.policy_kinds import (
    BACKLOG_QUOTAS,
    OF_TOPICS,
    RETENTION,
    SUBSCRIPTION_DISPATCH_RATE,
    SUBSCRIPTION_RATE_SUFFIX,
    PolicyKind,
)
from broker.policies.topic_policies import PoliciesOfTopic
from magnetar.protocol.names import TopicName


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    found = [web.delete(f"{TOPIC}/policies", remove_all)]
    for name, kind in OF_TOPICS.items():
        found += TopicPolicyHandlers(name, kind).routes(f"{TOPIC}/{name}")
    path, rate = f"{TOPIC}/{{subscription}}{SUBSCRIPTION_RATE_SUFFIX}", _SubscriptionRateHandlers()
    found += [web.get(path, rate.get), web.post(path, rate.set), web.delete(path, rate.remove)]
    return found


async def remove_all(request: web.Request) -> web.Response:
    """DELETE: remove all local and global policies; those of the namespace are in force again."""
    await request.app[BROKER].topic_policies.forget(await require_topic(request))
    return no_content()


async def require_topic(request: web.Request) -> TopicName:
    """The topic in the path.  Raises 404 if there is none, 412 for a partition."""
    name, topics = persistent_name(request), request.app[BROKER].topics
    if name.partition_index is not None and await topics.partitioned.count(name.partitioned):
        raise refused(f"{name} has the policies of {name.partitioned}: use that name.")
    # A topic keeps its policies when it is migrated: they are named as before.
    if not (await topics.exists(name) or await topics.has_scalable_twin(name)):
        raise no_topic(name)
    return name


async def change_policy(
    request: web.Request,
    name: TopicName,
    kind: PolicyKind,
    member: str,
    change: Callable[[object], object],
) -> None:
    """Set a policy of a topic, at the request's level, to what `change` makes of its value there.

    `member` is the policy's name in the topic's record.  `change` may be called again; None removes
    the policy.  Raises `RetentionTooSmall`.
    """
    broker, is_global = request.app[BROKER], flag(request, "isGlobal")
    namespace = await broker.namespaces.require(name.namespace_name)

    def changed(found: PoliciesOfTopic) -> PoliciesOfTopic:
        value = change(found.of_level(is_global=is_global).get(member))
        new = found.changed(member, value, is_global=is_global)
        if kind in (RETENTION, BACKLOG_QUOTAS) and value is not None:
            broker.policies.require_retention_above_quotas(namespace, new)
        return new

    await broker.topic_policies.update(name, changed)


class TopicPolicyHandlers(PolicyHandlers[TopicName]):
    """GET, POST, PUT and DELETE of one policy of topics."""

    async def _holder(self, request: web.Request) -> TopicName:
        return await require_topic(request)

    async def _read(self, request: web.Request, holder: TopicName) -> object:
        if flag(request, "applied"):
            return await self._applied(request, holder)
        policies = await request.app[BROKER].topic_policies.get(holder)
        return policies.of_level(is_global=flag(request, "isGlobal")).get(self._member(request))

    async def _write(self, request: web.Request, holder: TopicName, value: object) -> None:
        await change_policy(request, holder, self._kind, self._member(request), lambda _: value)

    async def _require_settable(self, request: web.Request, holder: TopicName) -> None:
        topics = request.app[BROKER].topics
        if not self._kind.of_segments and await topics.has_scalable_twin(holder):
            raise refused(
                f"{holder} is a scalable topic now, and {self._name} holds for none of these: "
                "leave it out."
            )

    async def _value_in(self, request: web.Request) -> object:
        text = request.query.get(self._name)
        if self._kind.is_query and text is not None:
            return number_in(text, self._name)
        return await super()._value_in(request)

    def _member(self, request: web.Request) -> str:
        """The name of the policy in the topic's record."""
        return self._name

    async def _applied(self, request: web.Request, name: TopicName) -> object:
        """The value in force."""
        return await request.app[BROKER].policies.value(self._kind, name)


class _SubscriptionRateHandlers(TopicPolicyHandlers):
    """GET, POST and DELETE of the dispatch rate of a single subscription."""

    def __init__(self) -> None:
        super().__init__("dispatchRate", SUBSCRIPTION_DISPATCH_RATE)

    def _member(self, request: web.Request) -> str:
        return request.match_info["subscription"] + SUBSCRIPTION_RATE_SUFFIX

    async def _applied(self, request: web.Request, name: TopicName) -> object:
        own = (await request.app[BROKER].topic_policies.get(name)).get(self._member(request))
        return await super()._applied(request, name) if own is None else own
