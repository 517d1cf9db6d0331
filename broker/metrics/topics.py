"""Metrics of topics and subscriptions, of each one or summed by namespace.

There may be a hundred thousand samples, so they are collected and written in parts: between two
parts the caller may let the event loop go on.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from broker.metrics.scalable import (
    ORDERED_CONSUMERS,
    ORDERED_CONSUMERS_TEXT,
    SEGMENT_GAUGES,
    ScalableTopicValues,
)
from broker.policies.backlog_quotas import QuotaType
from broker.topics.non_persistent.stats import drop_rate
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.producer import Producer
from broker.topics.replication import OutboundStats
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.topics.topic_stats import REPLICATION_DELAY, replication_stats
from broker.topics.unloaded_backlogs import UnloadedBacklog
from config.bounds import METRICS_PART_SAMPLES
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicDomain

LEFT_OUT: Final = "magnetar_producer_names_left_out"
DROP_RATE: Final = "pulsar_subscription_msg_drop_rate"
MESSAGES_THROTTLED: Final = "pulsar_subscription_dispatch_throttled_msg_events"
BYTES_THROTTLED: Final = "pulsar_subscription_dispatch_throttled_bytes_events"
DROPPED: Final = "magnetar_publish_dropped_messages_total"
_TOPIC = ("cluster", "namespace", "topic")
_SUBSCRIPTION = (*_TOPIC, "subscription")
_ENDED = (*_SUBSCRIPTION, "status")
_QUOTAS = (*_TOPIC, "quota_type")
_REPLICATION = (*_TOPIC, "remote_cluster")
_THROTTLED = (*_SUBSCRIPTION, "reason")
QUOTA_NAMES: Final = {QuotaType.SIZE: "size", QuotaType.AGE: "time"}
"""Values of the label quota_type, as Pulsar has them."""
QUOTA_LIMIT: Final = "pulsar_storage_backlog_quota_limit"
QUOTA_LIMIT_TIME: Final = "pulsar_storage_backlog_quota_limit_time"
EVICTIONS: Final = "pulsar_storage_backlog_quota_exceeded_evictions_total"
REPLICATION: Final[Mapping[str, tuple[str, str]]] = {
    "pulsar_replication_rate_in": ("msgRateIn", "Messages a second from the other cluster"),
    "pulsar_replication_throughput_in": ("msgThroughputIn", "Bytes a second from it"),
    "pulsar_replication_rate_out": ("msgRateOut", "Messages a second to the other cluster"),
    "pulsar_replication_throughput_out": ("msgThroughputOut", "Bytes a second to it"),
    "pulsar_replication_rate_expired": (
        "msgRateExpired",
        "Entries a second that were too old to be sent",
    ),
    "pulsar_replication_backlog": ("replicationBacklog", "Entries that it does not have yet"),
    "pulsar_replication_connected_count": ("connected", "Topics whose replicator is attached"),
    "pulsar_replication_delay_in_seconds": (
        REPLICATION_DELAY,
        "How long the oldest entry sent waits for its receipt",
    ),
}
"""Metrics of topics that are replicated: the member of ReplicatorStats, and the text."""
DISCONNECTED: Final = "pulsar_replication_disconnected_count"
NOT_REPLICATED: Final = "magnetar_replication_dropped_messages_total"
LARGEST: Final = frozenset({QUOTA_LIMIT, QUOTA_LIMIT_TIME, "pulsar_replication_delay_in_seconds"})
"""Metrics of which a namespace shows the largest value of its topics."""
_NAMESPACE = 2
"""Labels that are left at the level of namespaces: cluster and namespace."""
_SUCCEED = "succeed"
"""Failures are tried again until they succeed, so that there is no other status."""


class _Family(NamedTuple):
    """One metric: its text, its labels, and whether it is a counter."""

    text: str
    labels: tuple[str, ...]
    is_counter: bool


def _families(labels: tuple[str, ...], kind: str, texts: Mapping[str, str]) -> dict[str, _Family]:
    return {name: _Family(text, labels, kind == "counter") for name, text in texts.items()}


_FAMILIES: Mapping[str, _Family] = {
    **_families(
        _TOPIC[:_NAMESPACE], "gauge", {"pulsar_topics_count": "Topics and segments loaded"}
    ),
    **_families(
        _TOPIC,
        "gauge",
        {
            "pulsar_producers_count": "Producers attached, without replicators",
            "pulsar_consumers_count": "Consumers attached",
            "pulsar_subscriptions_count": "Subscriptions",
            "pulsar_msg_backlog": "Entries not acknowledged, over all subscriptions",
            "pulsar_storage_size": "Bytes stored",
            "pulsar_storage_backlog_size": "Bytes behind the slowest subscription",
            QUOTA_LIMIT: "Limit of the backlog in bytes, where there is one",
            QUOTA_LIMIT_TIME: "Limit of the backlog's age in seconds, where there is one",
            "pulsar_storage_offloaded_size": "Bytes of ledgers that have a copy",
            "pulsar_compaction_removed_event_count": "Messages that compactions removed",
            "pulsar_compaction_succeed_count": "Compactions that succeeded",
            "pulsar_compaction_failed_count": "Compactions that failed",
            "pulsar_compaction_duration_time_in_mills": "Duration of the last compaction",
            "pulsar_txn_tb_active_total": "Transactions with writes here, not ended",
            LEFT_OUT: "Producer names whose sequence ids did not fit the last snapshot",
        },
    ),
    **_families(
        _TOPIC,
        "counter",
        {
            "pulsar_in_messages_total": "Messages published",
            "pulsar_in_bytes_total": "Bytes published",
            "pulsar_out_messages_total": "Messages delivered",
            "pulsar_out_bytes_total": "Bytes delivered",
            "magnetar_segment_read_entries_total": "Entries read in bulk, by no consumer",
            "magnetar_segment_read_bytes_total": "Bytes of entries read in bulk",
            "pulsar_publish_rate_limit_times": "Times that publishing had to wait for a rate",
            "pulsar_txn_tb_committed_total": "... committed",
            "pulsar_txn_tb_aborted_total": "... aborted",
            DROPPED: "Messages dropped, because too many of their connection were in flight",
        },
    ),
    **_families(
        _SUBSCRIPTION,
        "gauge",
        {
            "pulsar_subscription_back_log": "Entries not acknowledged",
            "pulsar_subscription_back_log_no_delayed": "... without delayed ones",
            "pulsar_subscription_delayed": "Entries delayed until their time",
            "pulsar_subscription_unacked_messages": "Delivered, not acknowledged",
            "pulsar_subscription_consumers_count": "Consumers attached",
            DROP_RATE: "Messages a second that no consumer could receive, of non-persistent topics",
        },
    ),
    **_families(
        _SUBSCRIPTION,
        "counter",
        {
            "pulsar_subscription_out_messages_total": "Messages delivered",
            "pulsar_subscription_redelivered_messages_total": "Messages redelivered",
            "pulsar_subscription_acknowledged_messages_total": "Messages acknowledged",
        },
    ),
    **_families(
        _QUOTAS, "counter", {EVICTIONS: "Times that a quota had subscriptions lose messages"}
    ),
    **_families(
        _THROTTLED,
        "counter",
        {
            MESSAGES_THROTTLED: "Times that delivery had to wait for a rate in messages",
            BYTES_THROTTLED: "Times that delivery had to wait for a rate in bytes",
        },
    ),
    **_families(
        _REPLICATION,
        "gauge",
        {
            **{name: text for name, (_, text) in REPLICATION.items()},
            DISCONNECTED: "Topics whose replicator is not attached, and segments where it stands",
        },
    ),
    **_families(
        _REPLICATION,
        "counter",
        {NOT_REPLICATED: "Messages of non-persistent topics that were not sent"},
    ),
    **_families(_TOPIC, "gauge", SEGMENT_GAUGES),
    **_families(_SUBSCRIPTION, "gauge", {ORDERED_CONSUMERS: ORDERED_CONSUMERS_TEXT}),
    **_families(
        _ENDED,
        "counter",
        {
            "pulsar_txn_tp_committed_count_total": "Transactions applied",
            "pulsar_txn_tp_aborted_count_total": "Transactions released",
        },
    ),
}


class _Labels:
    """The label values of some samples, and their text."""

    __slots__ = ("text", "values")

    def __init__(self, names: Iterable[str], values: tuple[str, ...]) -> None:
        self.values = values
        pairs = sorted(zip(names, values, strict=False))
        self.text = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _is_cut_off(topic: Topic | NonPersistentTopic, sent: OutboundStats) -> bool:
    """Whether a replicator does not send what there is.

    A segment that is not attached may wait until those that it came from are sent.
    """
    if topic.name.domain is TopicDomain.SEGMENT:
        return sent.failure is not None
    return not sent.connected


class TopicFamilies:
    """Collects the samples of topics, and writes them as Prometheus text."""

    def __init__(self, cluster: str, *, topic_level: bool) -> None:
        """With `topic_level` each topic has samples of its own, else each namespace has sums."""
        self._cluster = cluster
        self._topic_level = topic_level
        self._samples: dict[str, list[tuple[_Labels, float]]] = {name: [] for name in _FAMILIES}
        self._sums: dict[tuple[str, str, tuple[str, ...]], float] = {}
        """By metric, namespace, and the quota type or cluster of metrics that have one."""

    def collect(
        self,
        topics: Iterable[Topic],
        non_persistent: Iterable[NonPersistentTopic],
        unloaded: Mapping[str, UnloadedBacklog],
        scalable: Iterable[ScalableTopicValues] = (),
    ) -> Iterator[None]:
        """Collect all samples; yields after each part of METRICS_PART_SAMPLES.

        `unloaded` has the backlogs of topics that are not loaded, by name.
        """
        samples = chain(
            chain.from_iterable(self._samples_of(each) for each in topics),
            chain.from_iterable(self._samples_of_non_persistent(each) for each in non_persistent),
            chain.from_iterable(
                self._samples_of_unloaded(name, backlog) for name, backlog in list(unloaded.items())
            ),
            chain.from_iterable(self._samples_of_scalable(each) for each in scalable),
        )
        for count, (name, labels, value) in enumerate(samples, start=1):
            self._add(name, labels, value)
            if count % METRICS_PART_SAMPLES == 0:
                yield
        namespaces: dict[tuple[str, ...], _Labels] = {}
        for (name, namespace, last), value in self._sums.items():
            names = (*_TOPIC[:_NAMESPACE], *(_FAMILIES[name].labels[len(_TOPIC) :] if last else ()))
            key = (*names, namespace, *last)
            if key not in namespaces:
                namespaces[key] = self._labels(names, namespace, *last)
            self._samples[name].append((namespaces[key], value))

    def text(self) -> Iterator[str]:
        """The samples as Prometheus text, in parts of METRICS_PART_SAMPLES."""
        for name, samples in self._samples.items():
            family = _FAMILIES[name]
            kind = "counter" if family.is_counter else "gauge"
            yield f"# HELP {name} {family.text}\n# TYPE {name} {kind}\n"
            for first in range(0, len(samples), METRICS_PART_SAMPLES):
                yield "".join(
                    f"{name}{{{labels.text}}} {float(value)}\n"
                    for labels, value in samples[first : first + METRICS_PART_SAMPLES]
                )

    def _add(self, name: str, labels: _Labels, value: float) -> None:
        if self._topic_level and name != "pulsar_topics_count":
            self._samples[name].append((labels, value))
        else:
            keeps_last = _FAMILIES[name].labels in (_QUOTAS, _REPLICATION)
            key = (name, labels.values[1], labels.values[len(_TOPIC) :] if keeps_last else ())
            before = self._sums.get(key, 0)
            self._sums[key] = max(before, value) if name in LARGEST else before + value

    def _labels(self, names: tuple[str, ...], *values: str) -> _Labels:
        return _Labels(names, (self._cluster, *values))

    def _samples_of(self, topic: Topic) -> Iterator[tuple[str, _Labels, float]]:
        namespace, name = str(topic.name.namespace_name), str(topic.name)
        labels = self._labels(_TOPIC, namespace, name)
        # One that is deleted meanwhile counts here, as `past_out` is read now.
        subscriptions = list(topic.subscriptions.values())
        sums = _SubscriptionSums(*topic.past_out)
        for subscription in subscriptions:
            sums.add(topic, subscription)
            yield from self._samples_of_subscription(subscription, labels)
        for metric, value in _values_of_topic(topic, len(subscriptions), sums):
            yield metric, labels, value
        if topic.sequences.left_out:
            yield LEFT_OUT, labels, topic.sequences.left_out
        for quota, count in topic.backlog.evictions.items():
            if count:
                yield EVICTIONS, self._labels(_QUOTAS, namespace, name, QUOTA_NAMES[quota]), count
        yield from self._samples_of_replication(topic, labels)

    def _samples_of_replication(
        self, topic: Topic | NonPersistentTopic, of_topic: _Labels
    ) -> Iterator[tuple[str, _Labels, float]]:
        now_s = asyncio.get_running_loop().time()
        sent = topic.replication.outbound_stats(now_s)
        for cluster, stats in replication_stats(topic.producers.values(), now_s, sent).items():
            labels = self._labels(_REPLICATION, *of_topic.values[1:], cluster)
            for metric, (member, _) in REPLICATION.items():
                value = stats[member]
                assert isinstance(value, int | float), "ReplicatorStats has numbers there"
                yield metric, labels, value
            if cluster in sent:
                yield DISCONNECTED, labels, _is_cut_off(topic, sent[cluster])
                dropped = sent[cluster].dropped
                if dropped is not None:
                    yield NOT_REPLICATED, labels, dropped

    def _samples_of_subscription(
        self, subscription: Subscription, of_topic: _Labels
    ) -> Iterator[tuple[str, _Labels, float]]:
        labels = self._labels(_SUBSCRIPTION, *of_topic.values[1:], subscription.name)
        for metric, value in _values_of_subscription(subscription):
            yield metric, labels, value
        for (level, in_bytes), times in subscription.throttled.items():
            throttled = self._labels(_THROTTLED, *labels.values[1:], level.value)
            yield BYTES_THROTTLED if in_bytes else MESSAGES_THROTTLED, throttled, times
        if subscription.transactional is not None:
            core = subscription.transactional.pending.core
            if core.commits or core.aborts:
                labels = self._labels(_ENDED, *labels.values[1:], _SUCCEED)
                yield "pulsar_txn_tp_committed_count_total", labels, core.commits
                yield "pulsar_txn_tp_aborted_count_total", labels, core.aborts

    def _samples_of_non_persistent(
        self, topic: NonPersistentTopic
    ) -> Iterator[tuple[str, _Labels, float]]:
        namespace, name = str(topic.name.namespace_name), str(topic.name)
        labels = of_topic = self._labels(_TOPIC, namespace, name)
        messages_in, bytes_in, messages_out, bytes_out = topic.traffic
        yield "pulsar_topics_count", labels, 1
        yield "pulsar_producers_count", labels, _local_producers(topic.producers.values())
        yield "pulsar_consumers_count", labels, topic.consumer_count
        yield "pulsar_subscriptions_count", labels, len(topic.subscriptions)
        yield "pulsar_in_messages_total", labels, messages_in
        yield "pulsar_in_bytes_total", labels, bytes_in
        yield "pulsar_out_messages_total", labels, messages_out
        yield "pulsar_out_bytes_total", labels, bytes_out
        yield DROPPED, labels, topic.messages_dropped_total
        yield "pulsar_publish_rate_limit_times", labels, topic.publish_rates.times_limited
        now_s = asyncio.get_running_loop().time()
        for subscription in list(topic.subscriptions.values()):
            labels = self._labels(_SUBSCRIPTION, namespace, name, subscription.name)
            yield "pulsar_subscription_consumers_count", labels, len(subscription.consumers)
            yield "pulsar_subscription_out_messages_total", labels, subscription.traffic[0]
            yield DROP_RATE, labels, drop_rate(subscription, now_s)
        yield from self._samples_of_replication(topic, of_topic)

    def _samples_of_unloaded(
        self, name: str, backlog: UnloadedBacklog
    ) -> Iterator[tuple[str, _Labels, float]]:
        yield (
            "pulsar_msg_backlog",
            self._labels(_TOPIC, backlog.namespace, name),
            sum(backlog.entries.values()),
        )
        for subscription, entries in backlog.entries.items():
            labels = self._labels(_SUBSCRIPTION, backlog.namespace, name, subscription)
            yield "pulsar_subscription_back_log", labels, entries
            yield "pulsar_subscription_consumers_count", labels, 0

    def _samples_of_scalable(
        self, values: ScalableTopicValues
    ) -> Iterator[tuple[str, _Labels, float]]:
        labels = self._labels(_TOPIC, values.namespace, values.topic)
        for name, value in zip(SEGMENT_GAUGES, values.gauges, strict=True):
            yield name, labels, value
        for subscription, consumers in values.consumers.items():
            of_subscription = (values.namespace, values.topic, subscription)
            yield ORDERED_CONSUMERS, self._labels(_SUBSCRIPTION, *of_subscription), consumers


class _SubscriptionSums:
    """Sums over the subscriptions of a topic, added one by one: there may be 10,000."""

    def __init__(self, messages_out: int, bytes_out: int) -> None:
        self.messages_out = messages_out
        self.bytes_out = bytes_out
        self.backlog = 0
        self.consumers = 0
        self.slowest: Position | None = None

    def add(self, topic: Topic, subscription: Subscription) -> None:
        self.messages_out += subscription.messages_out_total
        self.bytes_out += subscription.bytes_out_total
        self.consumers += len(subscription.consumers)
        if subscription.durable:
            self.backlog += subscription.backlog
        if topic.backlog.counts(subscription):
            at = subscription.cursor.mark_delete
            self.slowest = at if self.slowest is None else min(self.slowest, at)


def _local_producers(producers: Iterable[Producer]) -> int:
    """The number of producers that are no replicators of other clusters."""
    return sum(each.source_cluster is None for each in producers)


def _values_of_topic(
    topic: Topic, subscriptions: int, sums: _SubscriptionSums
) -> Iterator[tuple[str, float]]:
    size_bytes = 0 if sums.slowest is None else topic.ledger.size_after(sums.slowest)
    yield "pulsar_topics_count", 1
    yield "pulsar_producers_count", _local_producers(topic.producers.values())
    yield "pulsar_consumers_count", sums.consumers
    yield "pulsar_subscriptions_count", subscriptions
    yield "pulsar_msg_backlog", sums.backlog
    yield "pulsar_storage_size", topic.ledger.total_size_bytes
    yield "pulsar_storage_backlog_size", size_bytes
    if topic.policies.size_quota is not None:
        yield QUOTA_LIMIT, topic.policies.size_quota.limit
    if topic.policies.age_quota is not None:
        yield QUOTA_LIMIT_TIME, topic.policies.age_quota.limit
    yield "pulsar_in_messages_total", topic.messages_in_total
    yield "pulsar_in_bytes_total", topic.bytes_in_total
    yield "pulsar_out_messages_total", sums.messages_out
    yield "pulsar_out_bytes_total", sums.bytes_out
    yield "pulsar_publish_rate_limit_times", topic.publish_rates.times_limited
    yield "magnetar_segment_read_entries_total", topic.entries_read_total
    yield "magnetar_segment_read_bytes_total", topic.bytes_read_total
    yield "pulsar_txn_tb_active_total", topic.buffer.open_count
    yield "pulsar_txn_tb_committed_total", topic.buffer.commits
    yield "pulsar_txn_tb_aborted_total", topic.buffer.aborts
    if topic.compaction.started_ms:
        yield "pulsar_compaction_removed_event_count", topic.compaction.removed_total
        yield "pulsar_compaction_succeed_count", topic.compaction.succeeded_total
        yield "pulsar_compaction_failed_count", topic.compaction.failed_total
        yield "pulsar_compaction_duration_time_in_mills", topic.compaction.duration_ms
    if copied := sum(info.size_bytes for info in topic.ledger.offload.copied()):
        yield "pulsar_storage_offloaded_size", copied


def _values_of_subscription(subscription: Subscription) -> Iterator[tuple[str, float]]:
    backlog, delayed = subscription.backlog, subscription.delayed
    yield "pulsar_subscription_back_log", backlog
    yield "pulsar_subscription_back_log_no_delayed", max(0, backlog - delayed)
    yield "pulsar_subscription_delayed", delayed
    yield "pulsar_subscription_unacked_messages", subscription.unacked
    yield "pulsar_subscription_consumers_count", len(subscription.consumers)
    yield "pulsar_subscription_out_messages_total", subscription.messages_out_total
    yield "pulsar_subscription_redelivered_messages_total", subscription.redelivered_total
    yield "pulsar_subscription_acknowledged_messages_total", subscription.acknowledged_total
