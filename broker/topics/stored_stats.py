"""Statistics of a topic that no broker has loaded, from what is stored of it."""

import asyncio
from collections.abc import Mapping

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.dispatch.entry_facts import publish_time_ms
from broker.topics.replication import is_replicator_cursor
from broker.topics.source_positions import REPLICATOR_PREFIX
from broker.topics.topic_stats import (
    ACKED_RUNS,
    CREATION,
    EARLIEST_OF_TOPIC,
    LAST_PUBLISH,
    NO_REPLICATION,
    backlog_limits,
    oldest_members,
)
from broker.topics.traffic import SubscriptionTraffic, Traffic
from config.bounds import PLAN_BACKLOG_WAIT_S
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.stored_stream import StoredCursor, StoredStream

COUNTERS = ("msgInCounter", "bytesInCounter", "msgOutCounter", "bytesOutCounter")


async def stored_topic_stats(
    stream: StoredStream, policies: AppliedPolicies, now_ms: int
) -> dict[str, object]:
    """TopicStats of a topic that is not loaded; `now_ms` is the wall-clock time.

    Counters and rates are 0, as after a load.  Backlogs are in entries, and in bytes as
    `StoredCursor` has them.  An entry is read for the age of each backlog, and for the time of the
    newest message; a marker or an aborted message counts as one there.  What cannot be read within
    PLAN_BACKLOG_WAIT_S is left out.  So are the messages of a backlog (`messagesInBacklog`), for
    which indexes of all its entries are needed, and the number of transactions, which is known to
    the owner of a loaded topic.
    """
    cursors, ages = stream.cursors.values(), await _publish_times(stream)
    shown = {
        name: _subscription(cursor, ages.get(name))
        for name, cursor in stream.cursors.items()
        if not is_replicator_cursor(name)
    }
    replication = {
        name.removeprefix(REPLICATOR_PREFIX): {
            **NO_REPLICATION,
            "replicationBacklog": cursor.backlog,
        }
        for name, cursor in stream.cursors.items()
        if is_replicator_cursor(name)
    }
    oldest = min(
        ((ms, name) for name, ms in ages.items() if name != COMPACTION_CURSOR), default=None
    )
    return {
        **Traffic(0, 0, 0, 0).as_members(),
        **dict.fromkeys(COUNTERS, 0),
        "storageSize": stream.size_bytes,
        "offloadedStorageSize": stream.offloaded_size_bytes,
        "backlogSize": max((each.backlog_size_bytes for each in cursors), default=0),
        ACKED_RUNS: sum(each.acked_run_count for each in cursors),
        **({EARLIEST_OF_TOPIC: min(ages.values())} if ages else {}),
        **backlog_limits(policies),
        **oldest_members(oldest, now_ms),
        **await _last_publish(stream),
        CREATION: stream.created_ms,
        "publishers": [],
        "replication": replication,
        "waitingPublishers": 0,
        "deduplicationStatus": "Enabled" if policies.deduplicates else "Disabled",
        "subscriptions": shown,
    }


async def _publish_times(stream: StoredStream) -> dict[str, int]:
    """When the oldest message of each backlog was published, by subscription."""
    known: dict[Position, int] = {}
    found: dict[str, int] = {}
    try:
        async with asyncio.timeout(PLAN_BACKLOG_WAIT_S):
            for name, cursor in stream.cursors.items():
                if not cursor.backlog:
                    continue
                if cursor.oldest not in known:
                    entry = await stream.entry(cursor.oldest)
                    known[cursor.oldest] = 0 if entry is None else publish_time_ms(entry.data)
                if known[cursor.oldest]:
                    found[name] = known[cursor.oldest]
    except (TimeoutError, MagnetarError):
        # Statistics are shown without what cannot be read now.
        return found
    return found


async def _last_publish(stream: StoredStream) -> dict[str, object]:
    try:
        async with asyncio.timeout(PLAN_BACKLOG_WAIT_S):
            newest = await stream.newest()
    except (TimeoutError, MagnetarError):
        return {}
    return {LAST_PUBLISH: 0 if newest is None else publish_time_ms(newest.data)}


def _subscription(cursor: StoredCursor, earliest_ms: int | None) -> Mapping[str, object]:
    """SubscriptionStats."""
    return {
        **SubscriptionTraffic(0, 0, 0, 0, 0).as_members(),
        **dict.fromkeys(("msgOutCounter", "bytesOutCounter"), 0),
        "type": "None",
        "msgBacklog": cursor.backlog,
        "msgBacklogNoDelayed": cursor.backlog,
        "backlogSize": cursor.backlog_size_bytes,
        **({} if earliest_ms is None else {"earliestMsgPublishTimeInBacklog": earliest_ms}),
        ACKED_RUNS: cursor.acked_run_count,
        "unackedMessages": 0,
        "isDurable": True,
        "isReplicated": cursor.replicated,
        "subscriptionProperties": dict(cursor.properties),
        "consumers": [],
    }
