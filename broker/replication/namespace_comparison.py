"""Compares the topics of two clusters, before one is added to the list of a namespace.

As Apache Pulsar's `compareTopicPartitions` (PIP-433): topics of one name have the same number
of partitions, and topics that are made at their first use will have.
"""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import ClassVar, NamedTuple, Protocol

from config.bounds import PARTITIONS_AT_ONCE
from magnetar.protocol.names import NamespaceName, TopicName
from magnetar.protocol.server_error import PeerError, ServerError

Json = Mapping[str, object]


class ClustersDiffer(PeerError):
    """Topics of a namespace do not, or would not, have the same partitions in two clusters."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class TopicCreation(NamedTuple):
    """The kind of the topics that are made at their first use."""

    kind: str
    """`partitioned`, or `non-partitioned`."""
    partitions: int


class ComparedCluster(Protocol):
    """Another cluster."""

    name: str

    async def partitions(self, topic: TopicName, /) -> int | None:
        """The number of partitions of a topic there, 0 for one without; None if it is missing."""
        ...

    async def namespace_policies(self, namespace: NamespaceName, /) -> Json | None:
        """The policies of a namespace there; None if it is missing."""
        ...

    async def settings(self) -> Json:
        """The settings of a broker there."""
        ...


def creation_in_force(policies: Json, of_broker: TopicCreation) -> TopicCreation:
    """The creation of topics as the policies of a namespace say, else as its brokers do."""
    section = policies.get("autoTopicCreationOverride")
    if not isinstance(section, Mapping):
        return of_broker
    kind, count = section.get("topicType"), section.get("defaultNumPartitions")
    return TopicCreation(
        kind if isinstance(kind, str) else of_broker.kind,
        count if isinstance(count, int) else of_broker.partitions,
    )


def creation_of_broker(settings: Json) -> TopicCreation:
    """The creation of topics as the settings say, by Apache Pulsar's names or Magnetar's."""
    kind = settings.get("allowAutoTopicCreationType", settings.get("auto_topic_creation_type"))
    count = settings.get("defaultNumPartitions", settings.get("default_num_partitions"))
    return TopicCreation(
        str(kind or "non-partitioned").lower().replace("_", "-"),
        int(count) if isinstance(count, int | str) and str(count).isdigit() else 1,
    )


async def require_alike(
    there: ComparedCluster,
    namespace: NamespaceName,
    partitions: Mapping[TopicName, int],
    creation: TopicCreation,
) -> None:
    """Compare the topics of a namespace here, by their numbers of partitions, with those there.

    `creation` is the one in force here.  Raises `ClustersDiffer`, `RemoteRefused`, and errors of
    the connection.
    """
    policies = await there.namespace_policies(namespace)
    if policies is None:
        raise ClustersDiffer(
            f"Cluster {there.name!r} has no namespace {namespace}: create it there first."
        )
    topics = list(partitions.items())
    for start in range(0, len(topics), PARTITIONS_AT_ONCE):
        await _compare(there, topics[start : start + PARTITIONS_AT_ONCE])
    there_made = creation_in_force(policies, creation_of_broker(await there.settings()))
    if there_made != creation:
        raise ClustersDiffer(
            f"Topics of {namespace} that are made at their first use are {creation.kind} here, "
            f"with a default of {creation.partitions}, and {there_made.kind} in cluster "
            f"{there.name!r}, with a default of {there_made.partitions}: give both the same "
            "autoTopicCreation."
        )


async def _compare(there: ComparedCluster, some: Sequence[tuple[TopicName, int]]) -> None:
    found = await asyncio.gather(*(there.partitions(topic) for topic, _ in some))
    for (topic, here), count in zip(some, found, strict=True):
        if count is not None and count != here:
            raise ClustersDiffer(
                f"{topic} has {here} partitions here and {count} in cluster {there.name!r}: give "
                "both the same number."
            )
