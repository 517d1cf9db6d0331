"""Message ids in bodies, as Apache Pulsar's admin library sends them and as people write them.

The library sends `{ledgerId, entryId, partitionIndex, batchIndex}` and `excluded`, which Pulsar's
documentation calls `isExcluded`; Pulsar itself ignores that name.
"""

from collections.abc import Collection
from http import HTTPStatus

from broker.admin.rest import RestError, require_known
from broker.policies.json_numbers import INT32_MAX, is_number
from broker.topics.seek_target import SeekTarget
from magnetar.protocol.ids import EARLIEST, LATEST, Position, from_wire
from magnetar.protocol.names import TopicName

UINT64_MAX = 2**64 - 1
"""Ids come signed, or unsigned as in the binary protocol."""
EXCLUDED = "excluded"
PROPERTIES = "properties"
_MEMBERS = frozenset({"ledgerId", "entryId", "partitionIndex", "batchIndex"})
_OF_BATCHES = frozenset({"ackSet", "batchSize", "originalBatchSize", "outstandingAcksInSameBatch"})
"""Members that the library adds to its ids.  They do not change which message an id names."""


def target_in(body: object, topic: TopicName, *others: str) -> SeekTarget:
    """The target in a body: a message id, "earliest" or "latest".  None and {}: the newest.

    `others` are the members that the request knows besides, EXCLUDED among them.  Raises
    `RestError` for any other member, and for the id of another partition.
    """
    members = body if isinstance(body, dict) else {}
    require_known_id(members, others)
    position = _position(body)
    batch_index, excluded = members.get("batchIndex", -1), members.get(EXCLUDED, False)
    if not is_number(batch_index, -1, INT32_MAX) or not isinstance(excluded, bool):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            "In a message id batchIndex is a number, and excluded true or false.",
        )
    _require_partition(members.get("partitionIndex", -1), topic)
    return SeekTarget(position, batch_index, excluded)


def require_known_id(members: dict[str, object], others: Collection[str] = ()) -> None:
    """Raise `RestError` with status 400 for members that no message id has."""
    known = _MEMBERS.union(others)
    require_known(members, known | _OF_BATCHES, "A message id", f"send {', '.join(sorted(known))}")


def _require_partition(index: object, topic: TopicName) -> None:
    if not is_number(index, -1, INT32_MAX):
        raise RestError(HTTPStatus.BAD_REQUEST, "In a message id partitionIndex is a number.")
    if index >= 0 and topic.partition_index not in (None, index):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"The message id is of partition {index}, and not of {topic}: name that partition.",
        )


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
