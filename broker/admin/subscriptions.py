"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription[s]`: subscriptions of a topic.

A request on a partitioned topic is carried out on each partition: see `partition_requests`.
"""

from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.message_ids import EXCLUDED, PROPERTIES, target_in
from broker.admin.partition_requests import on_each_partition, partitions_in
from broker.admin.persistent import TOPIC, existing_topic, persistent_name
from broker.admin.redirect import require_here
from broker.admin.rest import (
    NOT_FOUND_CODES,
    RestError,
    body_of,
    code_of,
    conflict,
    flag,
    no_content,
    number,
    refused,
    subscription_properties_in,
)
from broker.topics.backlog_analysis import analyze_backlog
from broker.topics.seek_target import SeekTarget
from broker.topics.topic import TopicNotFound
from broker.topics.topic_requests import (
    CreateTopicSubscription,
    DeleteTopicSubscription,
    ExpireMessages,
    ExpireUpTo,
    ListTopicSubscriptions,
    ReplaceSubscriptionProperties,
    SeekTopicSubscription,
    SeekTopicSubscriptionToTime,
    SetReplicated,
    SkipBacklog,
    SkipEntries,
    ViewReplicated,
    ViewSubscriptionProperties,
    subscription_of,
)
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError, ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR

SUBSCRIPTION = TOPIC + "/subscription/{subscription}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.put(SUBSCRIPTION, create),
        web.delete(SUBSCRIPTION, delete),
        web.get(SUBSCRIPTION + "/properties", properties),
        web.put(SUBSCRIPTION + "/properties", replace_properties),
        web.post(SUBSCRIPTION + "/analyzeBacklog", analyze),
        web.post(SUBSCRIPTION + "/skip_all", skip_all),
        web.post(SUBSCRIPTION + "/skip/{count}", skip),
        web.post(SUBSCRIPTION + "/resetcursor", reset_to_id),
        web.post(SUBSCRIPTION + "/resetcursor/{timestamp}", reset_to_time),
        web.post(SUBSCRIPTION + "/expireMessages", expire_up_to),
        web.post(SUBSCRIPTION + "/expireMessages/{seconds}", expire),
        web.get(SUBSCRIPTION + "/replicatedSubscriptionStatus", show_replicated),
        web.post(SUBSCRIPTION + "/replicatedSubscriptionStatus", set_replicated),
        web.post(TOPIC + "/all_subscription/expireMessages/{seconds}", expire_all),
    ]


async def _require_unpartitioned(request: web.Request, consequence: str) -> None:
    """Raise 405 on a partitioned topic, for requests with a message id."""
    if await partitions_in(request):
        raise RestError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"A message id is of one partition, so {consequence}: use a time, or name the "
            "partition.",
        )


async def list_subscriptions(request: web.Request) -> web.Response:
    """GET: names of subscriptions; of a partitioned topic those of any partition."""
    found = await on_each_partition(request, ListTopicSubscriptions, tolerated=NOT_FOUND_CODES)
    return web.json_response(sorted({name for names in found for name in names}))


async def create(request: web.Request) -> web.Response:
    """PUT, message id and properties as body: create a subscription.

    409 if it exists, or if there are as many as maxSubscriptionsPerTopic allows.
    It begins at the message id, by default behind the newest message.  A missing topic is created
    if topics are created automatically, else the answer is 412.
    """
    name, replicated = request.match_info["subscription"], flag(request, "replicated")
    body = await body_of(request)
    target = target_in(body, persistent_name(request), EXCLUDED, PROPERTIES)
    properties = subscription_properties_in(
        body.get(PROPERTIES) if isinstance(body, dict) else None
    )
    await _create_missing_topic(request)
    if not target.at_edge:
        await _require_unpartitioned(
            request, "a subscription cannot begin there on every partition"
        )

    def request_of(topic: TopicName) -> CreateTopicSubscription:
        return CreateTopicSubscription(
            topic,
            name,
            target.position,
            properties,
            target.batch_index,
            target.excluded,
            replicated,
        )

    try:
        created = await on_each_partition(request, request_of)
    except MagnetarError as error:
        if code_of(error) is ServerError.NOT_ALLOWED_ERROR:
            raise conflict(str(error)) from error
        raise
    if not any(created):
        raise conflict(f"{persistent_name(request)} has a subscription {name!r} already.")
    return no_content()


async def _create_missing_topic(request: web.Request) -> None:
    """Create the topic in the path as its first client would; 412 if it may not be created."""
    topics, name = request.app[BROKER].topics, persistent_name(request)
    if await partitions_in(request) or await topics.may_be_opened(name):
        return
    try:
        await topics.require_auto_creation(name)
    except TopicNotFound as error:
        raise refused(str(error)) from error
    if not await topics.partitions_of(name, create=True):
        await require_here(request, name)
        await topics.get(name, create=True)


async def show_replicated(request: web.Request) -> web.Response:
    """GET: whether the subscription is to be replicated, by the name of the topic or partition."""
    name = request.match_info["subscription"]
    found = await on_each_partition(
        request, lambda topic: ViewReplicated(topic, name), tolerated=NOT_FOUND_CODES
    )
    return web.json_response({topic: value for each in found for topic, value in each.items()})


async def set_replicated(request: web.Request) -> web.Response:
    """POST, true or false as body: whether the subscription moves in other clusters too.

    It does so where its topic is replicated to them.
    """
    name, value = request.match_info["subscription"], await body_of(request)
    if not isinstance(value, bool):
        raise refused("A subscription is replicated or not: send true or false.")
    await on_each_partition(
        request, lambda topic: SetReplicated(topic, name, value), tolerated=NOT_FOUND_CODES
    )
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a subscription; 412 while it has consumers, unless forced."""
    name, force = request.match_info["subscription"], flag(request, "force")
    if not force:
        # All partitions are checked before the first is changed, so that a refusal changes none.
        for partition in await partitions_in(request):
            await _require_unused(request, partition, name)

    def request_of(topic: TopicName) -> DeleteTopicSubscription:
        return DeleteTopicSubscription(topic, name, force)

    await on_each_partition(request, request_of, tolerated=NOT_FOUND_CODES)
    return no_content()


async def _require_unused(request: web.Request, partition: TopicName, name: str) -> None:
    """Raise 412 if the subscription has consumers on this partition."""
    found = (await request.app[BROKER].topics.cluster.stats(partition)).get("subscriptions")
    stats = found.get(name) if isinstance(found, dict) else None
    if stats and stats.get("consumers"):
        raise refused(
            f"Subscription {name!r} on {partition} has consumers: close them, or use force."
        )


async def properties(request: web.Request) -> web.Response:
    """GET: the properties of a subscription; of a partitioned topic those of all partitions."""
    name = request.match_info["subscription"]

    def request_of(topic: TopicName) -> ViewSubscriptionProperties:
        return ViewSubscriptionProperties(topic, name)

    found = await on_each_partition(request, request_of, tolerated=NOT_FOUND_CODES)
    return web.json_response({key: text for one in found for key, text in one.items()})


async def replace_properties(request: web.Request) -> web.Response:
    """PUT, `{"key": "value"}` as body: the properties of a subscription, in place of the others."""
    name = request.match_info["subscription"]
    body = await body_of(request)
    if body is None:
        raise RestError(
            HTTPStatus.BAD_REQUEST, "The body must have the properties: send {} to remove them all."
        )
    given = subscription_properties_in(body)

    def request_of(topic: TopicName) -> ReplaceSubscriptionProperties:
        return ReplaceSubscriptionProperties(topic, name, given)

    await on_each_partition(request, request_of, tolerated=NOT_FOUND_CODES)
    return no_content()


async def analyze(request: web.Request) -> web.Response:
    """POST, message id or nothing as body: count the backlog of a subscription from there on.

    `aborted`: it has more entries, behind `lastMessageId`.  405 on a partitioned topic.
    """
    await _require_unpartitioned(request, "backlogs of all partitions are not counted from it on")
    body = await body_of(request)
    target = target_in(body or "earliest", persistent_name(request), EXCLUDED)
    topic = await existing_topic(request)
    found = await analyze_backlog(
        subscription_of(topic, request.match_info["subscription"]), target.first_entry
    )
    return web.json_response(found.as_members())


async def skip_all(request: web.Request) -> web.Response:
    """POST: skip all messages that were published so far.

    Messages from the first one of an open transaction on stay, as they are not published yet.
    """
    name = request.match_info["subscription"]
    await on_each_partition(
        request, lambda topic: SkipBacklog(topic, name), tolerated=NOT_FOUND_CODES
    )
    return no_content()


async def skip(request: web.Request) -> web.Response:
    """POST: count the oldest `count` entries of the backlog as acknowledged.

    A batch is one entry, as in Apache Pulsar.  405 on a partitioned topic.
    """
    name, count = request.match_info["subscription"], number(request, "count")
    if count < 0:
        raise refused(f"{count} messages cannot be skipped: give 0 or more.")
    if await partitions_in(request):
        raise RestError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "Messages have an order within one partition alone: name the partition, or use "
            "skip_all.",
        )
    await on_each_partition(request, lambda topic: SkipEntries(topic, name, count))
    return no_content()


async def reset_to_id(request: web.Request) -> web.Response:
    """POST, message id as body: continue at that message, or with `excluded` behind it.

    405 on a partitioned topic.
    """
    await _require_unpartitioned(request, "the cursors of all cannot be set to it")
    target = target_in(await body_of(request), persistent_name(request), EXCLUDED)
    return await _seek(request, target)


async def _seek(request: web.Request, target: SeekTarget) -> web.Response:
    """Move the subscription in the path; 404 if neither the topic nor any partition has it."""
    name = request.match_info["subscription"]

    def request_of(topic: TopicName) -> SeekTopicSubscription:
        return SeekTopicSubscription(
            topic, name, target.position, target.batch_index, target.excluded
        )

    await on_each_partition(request, request_of, tolerated=NOT_FOUND_CODES)
    return no_content()


async def reset_to_time(request: web.Request) -> web.Response:
    """POST: continue at the first message published at or after the time, in ms."""
    name, since_ms = request.match_info["subscription"], number(request, "timestamp")

    def request_of(topic: TopicName) -> SeekTopicSubscriptionToTime:
        return SeekTopicSubscriptionToTime(topic, name, since_ms)

    await on_each_partition(request, request_of, tolerated=NOT_FOUND_CODES)
    return no_content()


async def expire(request: web.Request) -> web.Response:
    """POST: count messages that are older than `seconds` as acknowledged; 409 if there are none."""
    return _answer_expiry(request, await _expire(request, [request.match_info["subscription"]]))


async def expire_all(request: web.Request) -> web.Response:
    """POST: count messages that are older than `seconds` as acknowledged by all subscriptions.

    Only admins may: a role that may consume may not use every subscription.
    """
    found = await on_each_partition(request, ListTopicSubscriptions, tolerated=NOT_FOUND_CODES)
    names = {name for names in found for name in names} - {COMPACTION_CURSOR}
    await _expire(request, sorted(names))
    return no_content()


async def _expire(request: web.Request, names: Sequence[str]) -> int:
    seconds = number(request, "seconds")
    if seconds < 0:
        raise refused(f"An age cannot be {seconds} seconds: give 0 or more.")
    before_ms = request.app[BROKER].clock.now_ms() - seconds * 1000
    expired = 0
    for name in names:

        def request_of(topic: TopicName, name: str = name) -> ExpireMessages:
            return ExpireMessages(topic, name, before_ms)

        expired += sum(await on_each_partition(request, request_of, tolerated=NOT_FOUND_CODES))
    return expired


async def expire_up_to(request: web.Request) -> web.Response:
    """POST, message id as body: count messages up to it as acknowledged.

    With `excluded` the message itself stays.  405 on a partitioned topic, 409 without messages.
    """
    await _require_unpartitioned(request, "messages of other partitions cannot expire up to it")
    name = request.match_info["subscription"]
    target = target_in(await body_of(request), persistent_name(request), EXCLUDED)

    def request_of(topic: TopicName) -> ExpireUpTo:
        return ExpireUpTo(topic, name, target.position, target.excluded)

    return _answer_expiry(request, sum(await on_each_partition(request, request_of)))


def _answer_expiry(request: web.Request, entries: int) -> web.Response:
    if not entries:
        # As in Apache Pulsar.
        raise conflict(f"No message of {persistent_name(request)} is old enough to expire.")
    return no_content()
