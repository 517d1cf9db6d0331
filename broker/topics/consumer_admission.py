"""Rules by which a subscription of any topic admits a consumer."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.client_connection import ClientConnection, address_of
from broker.topics.consumer import Consumer, KeySharedPolicy, SubscribeRequest, SubscriptionType
from broker.topics.context import TopicContext
from broker.topics.dispatch.errors import ConsumerBusy, SubscriptionRefused
from broker.topics.subscribe_limit import SubscribeLimit
from magnetar.protocol.names import TopicName


class AdmittingTopic(Protocol):
    """The topic of a subscription."""

    @property
    def name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def context(self) -> TopicContext:
        """Services that all topics use."""
        ...

    @property
    def policies(self) -> AppliedPolicies:
        """The policies in force."""
        ...

    @property
    def consumer_count(self) -> int:
        """The number of attached consumers, those of readers included."""
        ...

    @property
    def subscriptions(self) -> Mapping[str, "AdmittingSubscription"]:
        """Subscriptions by name."""
        ...


class AdmittingSubscription(Protocol):
    """A subscription that admits consumers."""

    @property
    def name(self) -> str:
        """Name of the subscription."""
        ...

    @property
    def type(self) -> SubscriptionType | None:
        """The type of the connected consumers; None if it never had any."""
        ...

    @property
    def key_shared(self) -> KeySharedPolicy:
        """The Key_Shared options of the connected consumers."""
        ...

    @property
    def consumers(self) -> Sequence[Consumer]:
        """The connected consumers."""
        ...

    def remove_consumer(self, consumer: Consumer, *, by_command: bool) -> None:
        """Remove a consumer."""
        ...


def require_agreement(subscription: AdmittingSubscription, request: SubscribeRequest) -> None:
    """Raise `ConsumerBusy` if the connected consumers have another type or Key_Shared policy."""
    if request.type is not subscription.type:
        has = "" if subscription.type is None else subscription.type.label
        raise ConsumerBusy(
            f"Subscription {subscription.name!r} has {has} consumers: subscribe with that type, or "
            "close them first."
        )
    if request.type is SubscriptionType.KEY_SHARED and not request.key_shared.agrees_with(
        subscription.key_shared
    ):
        raise ConsumerBusy(
            f"Subscription {subscription.name!r} has consumers with another Key_Shared policy: "
            "subscribe with theirs, or close them first."
        )


def require_below_maximums(
    subscription: AdmittingSubscription, topic: AdmittingTopic, request: SubscribeRequest
) -> None:
    """Raise `ConsumerBusy` if there are as many consumers as policies and settings allow."""
    policies, settings = topic.policies, topic.context.settings
    for most, count, where, policy in (
        (policies.max_consumers, topic.consumer_count, str(topic.name), "maxConsumersPerTopic"),
        (
            policies.max_consumers_per_subscription,
            len(subscription.consumers),
            f"Subscription {subscription.name!r} on {topic.name}",
            "maxConsumersPerSubscription",
        ),
    ):
        if most and count >= most:
            raise ConsumerBusy(
                f"{where} has {count} consumers, and the maximum is {most}: close one, or "
                f"raise {policy}."
            )
    most = settings.max_same_address_consumers_per_topic
    address = address_of(request.connection.remote)
    if most and (count := _consumers_from(topic, address)) >= most:
        raise ConsumerBusy(
            f"{topic.name} has {count} consumers from {address}, and the maximum is {most}: close "
            "one, or raise max_same_address_consumers_per_topic."
        )


def _consumers_from(topic: AdmittingTopic, address: str) -> int:
    return sum(
        address_of(consumer.connection.remote) == address
        for each in topic.subscriptions.values()
        for consumer in each.consumers
    )


def require_rate(limit: SubscribeLimit, topic: TopicName, request: SubscribeRequest) -> None:
    """Raise `SubscriptionRefused` if this consumer subscribes too often."""
    address = address_of(request.connection.remote)
    consumer = (address, request.consumer_name, request.consumer_id)
    if not limit.admits(consumer, asyncio.get_running_loop().time()):
        raise SubscriptionRefused(
            f"Consumer {request.consumer_name!r} subscribes to {topic} more often than the policy "
            "subscribeRate allows: subscribe again later, or raise the policy."
        )


async def remove_if_silent(
    subscription: AdmittingSubscription, consumer: Consumer, asking: ClientConnection
) -> None:
    """Remove a consumer whose connection, another one than `asking`, does not answer."""
    connection = consumer.connection
    if connection is not asking and not await connection.is_alive():
        connection.abort("another consumer asked for its place and it is silent")
        subscription.remove_consumer(consumer, by_command=False)
