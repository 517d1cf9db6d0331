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
from broker.topics.non_persistent.stats import drop_rate
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.topics.unloaded_backlogs import UnloadedBacklog
from config.bounds import METRICS_PART_SAMPLES

LEFT_OUT: Final = "magnetar_producer_names_left_out"
DROP_RATE: Final = "pulsar_subscription_msg_drop_rate"
DROPPED: Final = "magnetar_publish_dropped_messages_total"
_TOPIC = ("cluster", "namespace", "topic")
_SUBSCRIPTION = (*_TOPIC, "subscription")
_ENDED = (*_SUBSCRIPTION, "status")
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
            "pulsar_producers_count": "Producers attached",
            "pulsar_consumers_count": "Consumers attached",
            "pulsar_subscriptions_count": "Subscriptions",
            "pulsar_msg_backlog": "Entries not acknowledged, over all subscriptions",
            "pulsar_storage_size": "Bytes stored",
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


class TopicFamilies:
    """Collects the samples of topics, and writes them as Prometheus text."""

    def __init__(self, cluster: str, *, topic_level: bool) -> None:
        """With `topic_level` each topic has samples of its own, else each namespace has sums."""
        self._cluster = cluster
        self._topic_level = topic_level
        self._samples: dict[str, list[tuple[_Labels, float]]] = {name: [] for name in _FAMILIES}
        self._sums: dict[tuple[str, str], float] = {}

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
        namespaces: dict[str, _Labels] = {}
        for (name, namespace), value in self._sums.items():
            if namespace not in namespaces:
                namespaces[namespace] = self._labels(_TOPIC[:_NAMESPACE], namespace)
            self._samples[name].append((namespaces[namespace], value))

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
            key = (name, labels.values[1])
            self._sums[key] = self._sums.get(key, 0) + value

    def _labels(self, names: tuple[str, ...], *values: str) -> _Labels:
        return _Labels(names, (self._cluster, *values))

    def _samples_of(self, topic: Topic) -> Iterator[tuple[str, _Labels, float]]:
        namespace, name = str(topic.name.namespace_name), str(topic.name)
        labels = self._labels(_TOPIC, namespace, name)
        subscriptions = list(topic.subscriptions.values())
        for metric, value in _values_of_topic(topic, subscriptions):
            yield metric, labels, value
        if topic.sequences.left_out:
            yield LEFT_OUT, labels, topic.sequences.left_out
        for subscription in subscriptions:
            labels = self._labels(_SUBSCRIPTION, namespace, name, subscription.name)
            for metric, value in _values_of_subscription(subscription):
                yield metric, labels, value
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
        labels = self._labels(_TOPIC, namespace, name)
        messages_in, bytes_in, messages_out, bytes_out = topic.traffic
        yield "pulsar_topics_count", labels, 1
        yield "pulsar_producers_count", labels, len(topic.producers)
        yield "pulsar_consumers_count", labels, topic.consumer_count
        yield "pulsar_subscriptions_count", labels, len(topic.subscriptions)
        yield "pulsar_in_messages_total", labels, messages_in
        yield "pulsar_in_bytes_total", labels, bytes_in
        yield "pulsar_out_messages_total", labels, messages_out
        yield "pulsar_out_bytes_total", labels, bytes_out
        yield DROPPED, labels, topic.messages_dropped_total
        now_s = asyncio.get_running_loop().time()
        for subscription in list(topic.subscriptions.values()):
            labels = self._labels(_SUBSCRIPTION, namespace, name, subscription.name)
            yield "pulsar_subscription_consumers_count", labels, len(subscription.consumers)
            yield "pulsar_subscription_out_messages_total", labels, subscription.traffic[0]
            yield DROP_RATE, labels, drop_rate(subscription, now_s)

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


def _values_of_topic(
    topic: Topic, subscriptions: list[Subscription]
) -> Iterator[tuple[str, float]]:
    yield "pulsar_topics_count", 1
    yield "pulsar_producers_count", len(topic.producers)
    yield "pulsar_consumers_count", sum(len(each.consumers) for each in subscriptions)
    yield "pulsar_subscriptions_count", len(subscriptions)
    yield "pulsar_msg_backlog", sum(each.backlog for each in subscriptions if each.durable)
    yield "pulsar_storage_size", topic.ledger.total_size_bytes
    yield "pulsar_in_messages_total", topic.messages_in_total
    yield "pulsar_in_bytes_total", topic.bytes_in_total
    yield "pulsar_out_messages_total", topic.messages_out_total
    yield "pulsar_out_bytes_total", topic.bytes_out_total
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
