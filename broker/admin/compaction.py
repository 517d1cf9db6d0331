"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/compaction`: compaction and its status.

Of a partitioned topic each partition is compacted, by its owner.
"""

from aiohttp import web

from broker.admin.partition_requests import on_each_partition
from broker.admin.persistent import TOPIC
from broker.admin.rest import conflict, no_content
from broker.topics.compaction.outcome import CompactionState
from broker.topics.topic_requests import CompactTopic, ViewCompaction

COMPACTION = TOPIC + "/compaction"
_BY_WEIGHT = (
    CompactionState.RUNNING,
    CompactionState.ERROR,
    CompactionState.NOT_RUN,
    CompactionState.SUCCESS,
)
"""The state of a partitioned topic is the first of these that a partition has."""


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.put(COMPACTION, begin), web.get(COMPACTION, status)]


async def begin(request: web.Request) -> web.Response:
    """PUT: compact the topic, or its partitions; 409 if all of them are being compacted."""
    began = await on_each_partition(request, CompactTopic)
    if not any(began):
        raise conflict("The topic is being compacted: wait until its status is not RUNNING.")
    return no_content()


async def status(request: web.Request) -> web.Response:
    """GET: LongRunningProcessStatus of the last compaction since the topic was loaded."""
    found = await on_each_partition(request, ViewCompaction)
    for state in _BY_WEIGHT:
        for each in found:
            if each.get("status") == state.value:
                return web.json_response(each)
    return web.json_response({"status": CompactionState.NOT_RUN.value, "lastError": ""})
