"""The state of a topic's or segment's offloading, as REST shows it."""

from broker.scalable.segment_view import Members
from broker.topics.offloading import OffloadState, Outcome
from broker.topics.topic import Topic
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.offload.cold_ledgers import Manifest


def offload_status(topic: Topic, outcome: Outcome) -> Members:
    """The state of the last offload, as Pulsar's OffloadProcessStatus."""
    first = topic.ledger.offload.first_hot()
    partition = topic.name.partition_index
    done = outcome.state is OffloadState.SUCCESS
    return {
        "status": outcome.state.value,
        "lastError": outcome.error,
        "firstUnoffloadedMessage": {
            "ledgerId": first.ledger_id,
            "entryId": first.entry_id,
            "partitionIndex": -1 if partition is None else partition,
        }
        if done
        else None,
    }


async def offload_manifest(topic: Topic, outcome: Outcome) -> Members:
    """The status, and all ledgers with their copies; it reads the index of each copy.

    The members besides those of `offload_status` are not Pulsar's.
    """
    manifests = {info.ledger_id: one for info, one in await topic.ledger.offload.manifests()}
    ledgers = [
        _ledger(info) | _copy(manifests.get(info.ledger_id)) for info in topic.ledger.ledgers
    ]
    return {
        "topic": str(topic.name),
        "sealed": topic.sealed,
        **offload_status(topic, outcome),
        "ledgers": ledgers,
    }


def _ledger(info: LedgerInfo) -> Members:
    offload = info.offload
    return {
        "ledgerId": info.ledger_id,
        "entries": info.entries,
        "size": info.size_bytes,
        "closedTimestamp": info.closed_ms,
        "requested": offload is not None,
        "offloaded": offload is not None and offload.complete,
        "offloadedTimestamp": 0 if offload is None else offload.offloaded_ms,
        "bookkeeperDeleted": not info.hot,
    }


def _copy(manifest: Manifest | None) -> Members:
    if manifest is None:
        return {}
    return {
        "url": manifest.url,
        "objects": list(manifest.objects),
        "dataBytes": manifest.data_bytes,
        "dataSha256": None if manifest.data_sha256 is None else manifest.data_sha256.hex(),
        "entriesSha256": None if manifest.entries_sha256 is None else manifest.entries_sha256.hex(),
        "firstPublishTime": manifest.first_published_ms,
        "lastPublishTime": manifest.last_published_ms,
    }
