"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/internal-info`: the stored records of a topic.

The members are those of Pulsar's ManagedLedgerInfo.  Any broker reads them, and no topic is loaded:
what its owner has not stored yet is not there.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.partition_requests import partitions_in
from broker.admin.persistent import TOPIC, persistent_name
from broker.admin.rest import no_topic
from broker.app.service import Broker
from broker.topics.local_topics import properties_of_users
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicName
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.records import cursor_name, decode_cursor, decode_stream, ledger_key
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import Record


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(TOPIC + "/internal-info", stored_ledgers)]


async def stored_ledgers(request: web.Request) -> web.Response:
    """GET: the records of a topic and of its subscriptions, or those of each partition."""
    broker, name = request.app[BROKER], persistent_name(request)
    partitions = await partitions_in(request)
    if partitions:

        async def of_partition(partition: TopicName) -> Mapping[str, object] | None:
            return await _info_of(broker, partition)

        each = await broker.topics.partition_work.run(partitions, of_partition)
        found = {str(one): info for one, info in zip(partitions, each, strict=True) if info}
        return web.json_response({"partitions": found})
    info = await _info_of(broker, name)
    if info is None:
        raise no_topic(name)
    return web.json_response(info)


async def _info_of(broker: Broker, name: TopicName) -> dict[str, object] | None:
    """ManagedLedgerInfo; None without a record.  Raises `MetadataError`, `CorruptRecord`."""
    key = ledger_key(name.ledger_path)
    record = await broker.metadata.get(key)
    if record is None:
        return None
    stream = decode_stream(key, record.value)
    cursors = await broker.metadata.scan(*children_range(key))
    return {
        **_history(record),
        "ledgers": [_ledger(info) for info in stream.ledgers],
        "terminatedPosition": None if stream.terminated is None else _place(stream.terminated),
        "cursors": {cursor_name(name_of(each.key)): _cursor(each) for each in cursors},
        "properties": properties_of_users(stream.properties),
    }


def _history(record: Record) -> dict[str, object]:
    return {
        "version": record.modifications,
        "creationDate": _time(record.created_ms),
        "modificationDate": _time(record.modified_ms),
    }


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _place(position: Position) -> dict[str, int]:
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id}


def _ledger(info: LedgerInfo) -> dict[str, object]:
    """LedgerInfo; of the ledger that is written to only the id is stored."""
    offload = info.offload
    return {
        "ledgerId": info.ledger_id,
        "entries": info.entries if info.closed_ms else None,
        "size": info.size_bytes if info.closed_ms else None,
        "timestamp": info.closed_ms or None,
        "isOffloaded": offload is not None and offload.complete,
        "offloadedContextUuid": None if offload is None else str(offload.uid),
    }


def _cursor(record: Record) -> dict[str, object]:
    """CursorInfo.  A cursor with a ledger of its own has its newest position there."""
    found = decode_cursor(record.key, record.value)
    return {
        **_history(record),
        "cursorsLedgerId": found.ledger_id,
        "markDelete": _place(found.state.mark_delete),
        "individualDeletedMessages": [
            {"from": _place(after), "to": _place(last)} for after, last in found.state.spans
        ],
        "properties": dict(found.state.numbers),
    }
