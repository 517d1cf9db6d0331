"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription[s]`: subscriptions of a topic.

A request on a partitioned topic is carried out on each partition: see `partition_requests`.
"""

from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.partition_requests import on_each_partition, partitions_in
from broker.admin.persistent import TOPIC, persistent_name
from broker.admin.rest import (
    RestError,
    body_of,
    conflict,
    flag,
    no_content,
    number,
    properties_in,
    refused,
)
from broker.policies.json_numbers import is_number
from broker.topics.seek_target import SeekTarget
from broker.topics.topic_requests import (
    CreateTopicSubscription,
    DeleteTopicSubscription,
    ExpireMessages,
    ExpireUpTo,
    ListTopicSubscriptions,
    SeekTopicSubscription,
    SeekTopicSubscriptionToTime,
    SkipEntries,
)
from magnetar.protocol.ids import EARLIEST, LATEST, Position, from_wire
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR

UINT64_MAX = 2**64 - 1
"""Ids come signed, or unsigned as in the binary protocol."""
MAX_BATCH_INDEX = 2**31 - 1
SUBSCRIPTION = TOPIC + "/subscription/{subscription}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.put(SUBSCRIPTION, create),
        web.delete(SUBSCRIPTION, delete),
        web.post(SUBSCRIPTION + "/skip_all", skip_all),
        web.post(SUBSCRIPTION + "/skip/{count}", skip),
        web.post(SUBSCRIPTION + "/resetcursor", reset_to_id),
        web.post(SUBSCRIPTION + "/resetcursor/{timestamp}", reset_to_time),
        web.post(SUBSCRIPTION + "/expireMessages", expire_up_to),
        web.post(SUBSCRIPTION + "/expireMessages/{seconds}", expire),
        web.post(TOPIC + "/all_subscription/expireMessages/{seconds}", expire_all),
    ]


NOT_FOUND = (ServerError.TOPIC_NOT_FOUND, ServerError.SUBSCRIPTION_NOT_FOUND)
"""Errors of partitions that do not have the subscription."""


def target_in(body: object) -> SeekTarget:
    """The target in a body: a message id, "earliest" or "latest".  None and {}: the newest."""
    position = _position(body)
    members = body if isinstance(body, dict) else {}
    batch_index, excluded = members.get("batchIndex", -1), members.get("excluded", False)
    if not is_number(batch_index, -1, MAX_BATCH_INDEX) or not isinstance(excluded, bool):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            "In a message id batchIndex is a number, and excluded true or false.",
        )
    return SeekTarget(position, batch_index, excluded)


def _position(body: object) -> Position:
    if body is None or body == "latest":
        return LATEST
    if body == "earliest":
        return EARLIEST
    members = body if isinstance(body, dict) else {"ledgerId": body}
    ledger_id, entry_id = members.get("ledgerId"), members.get("entryId")
    if ledger_id is None and entry_id is None:
        return LATEST
    if not is_number(ledger_id, most=UINT64_MAX) or not is_number(entry_id, most=UINT64_MAX):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            'A message id needs the numbers ledgerId and entryId: give them, "earliest" or '
            '"latest".',
        )
    position = Position(from_wire(ledger_id % 2**64), from_wire(entry_id % 2**64))
    return EARLIEST if position.ledger_id < 0 else position


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
    found = await on_each_partition(request, ListTopicSubscriptions, tolerated=NOT_FOUND)
    return web.json_response(sorted({name for names in found for name in names}))


async def create(request: web.Request) -> web.Response:
    """PUT, message id and properties as body: create a subscription; 409 if it exists.

    It begins at the message id, by default behind the newest message.
    """
    name = request.match_info["subscription"]
    if flag(request, "replicated"):
        raise refused("There is one cluster, so nothing is replicated: leave replicated out.")
    body = await body_of(request)
    target = target_in(body)
    properties = properties_in(body.get("properties") if isinstance(body, dict) else None)
    if not target.at_edge:
        await _require_unpartitioned(
            request, "a subscription cannot begin there on every partition"
        )

    def request_of(topic: TopicName) -> CreateTopicSubscription:
        return CreateTopicSubscription(
            topic, name, target.position, properties, target.batch_index, target.excluded
        )

    if not any(await on_each_partition(request, request_of)):
        raise conflict(f"{persistent_name(request)} has a subscription {name!r} already.")
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

    await on_each_partition(request, request_of, tolerated=NOT_FOUND)
    return no_content()


async def _require_unused(request: web.Request, partition: TopicName, name: str) -> None:
    """Raise 412 if the subscription has consumers on this partition."""
    found = (await request.app[BROKER].topics.cluster.stats(partition)).get("subscriptions")
    stats = found.get(name) if isinstance(found, dict) else None
    if stats and stats.get("consumers"):
        raise refused(
            f"Subscription {name!r} on {partition} has consumers: close them, or use force."
        )


async def skip_all(request: web.Request) -> web.Response:
    """POST: skip all messages that were published so far."""
    return await _seek(request, SeekTarget(LATEST))


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
    return await _seek(request, target_in(await body_of(request)))


async def _seek(request: web.Request, target: SeekTarget) -> web.Response:
    """Move the subscription in the path; 404 if neither the topic nor any partition has it."""
    name = request.match_info["subscription"]

    def request_of(topic: TopicName) -> SeekTopicSubscription:
        return SeekTopicSubscription(
            topic, name, target.position, target.batch_index, target.excluded
        )

    await on_each_partition(request, request_of, tolerated=NOT_FOUND)
    return no_content()


async def reset_to_time(request: web.Request) -> web.Response:
    """POST: continue at the first message published at or after the time, in ms."""
    name, since_ms = request.match_info["subscription"], number(request, "timestamp")

    def request_of(topic: TopicName) -> SeekTopicSubscriptionToTime:
        return SeekTopicSubscriptionToTime(topic, name, since_ms)

    await on_each_partition(request, request_of, tolerated=NOT_FOUND)
    return no_content()


async def expire(request: web.Request) -> web.Response:
    """POST: count messages that are older than `seconds` as acknowledged; 409 if there are none."""
    return _answer_expiry(request, await _expire(request, [request.match_info["subscription"]]))


async def expire_all(request: web.Request) -> web.Response:
    """POST: count messages that are older than `seconds` as acknowledged by all subscriptions.

    Only admins may: a role that may consume may not use every subscription.
    """
    found = await on_each_partition(request, ListTopicSubscriptions, tolerated=NOT_FOUND)
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

        expired += sum(await on_each_partition(request, request_of, tolerated=NOT_FOUND))
    return expired


async def expire_up_to(request: web.Request) -> web.Response:
    """POST, message id as body: count messages up to it as acknowledged.

    With `excluded` the message itself stays.  405 on a partitioned topic, 409 without messages.
    """
    await _require_unpartitioned(request, "messages of other partitions cannot expire up to it")
    target, name = target_in(await body_of(request)), request.match_info["subscription"]

    def request_of(topic: TopicName) -> ExpireUpTo:
        return ExpireUpTo(topic, name, target.position, target.excluded)

    return _answer_expiry(request, sum(await on_each_partition(request, request_of)))


def _answer_expiry(request: web.Request, entries: int) -> web.Response:
    if not entries:
        # As in Apache Pulsar.
        raise conflict(f"No message of {persistent_name(request)} is old enough to expire.")
    return no_content()
