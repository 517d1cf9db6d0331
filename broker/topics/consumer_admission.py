"""Rules by which a subscription of any topic admits a consumer."""

from collections.abc import Sequence
from typing import Protocol

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.client_connection import ClientConnection
from broker.topics.consumer import Consumer, KeySharedPolicy, SubscribeRequest, SubscriptionType
from broker.topics.dispatch.errors import ConsumerBusy
from magnetar.protocol.names import TopicName


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
    subscription: AdmittingSubscription,
    topic: TopicName,
    policies: AppliedPolicies,
    consumers_of_topic: int,
) -> None:
    """Raise `ConsumerBusy` if there are as many consumers as the policies allow."""
    for most, count, where, policy in (
        (policies.max_consumers, consumers_of_topic, str(topic), "maxConsumersPerTopic"),
        (
            policies.max_consumers_per_subscription,
            len(subscription.consumers),
            f"Subscription {subscription.name!r} on {topic}",
            "maxConsumersPerSubscription",
        ),
    ):
        if most and count >= most:
            raise ConsumerBusy(
                f"{where} has {count} consumers, and the maximum is {most}: close one, or "
                f"raise {policy}."
            )


async def remove_if_silent(
    subscription: AdmittingSubscription, consumer: Consumer, asking: ClientConnection
) -> None:
    """Remove a consumer whose connection, another one than `asking`, does not answer."""
    connection = consumer.connection
    if connection is not asking and not await connection.is_alive():
        connection.abort("another consumer asked for its place and it is silent")
        subscription.remove_consumer(consumer, by_command=False)
