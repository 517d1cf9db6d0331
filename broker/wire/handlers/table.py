"""The handlers of all areas in one table, by command type."""

from collections.abc import Mapping

from broker.wire.connection import Handler
from broker.wire.handlers import (
    consume,
    lookup,
    produce,
    reads,
    scalable,
    schema,
    session,
    topics,
    transaction_groups,
    transaction_keys,
    transactions,
)

_AREAS = (
    *(session, produce, consume, lookup, schema, topics, scalable),
    *(transactions, transaction_keys, transaction_groups, reads),
)


def handler_table() -> Mapping[int, Handler]:
    """All handlers by command type.  Raises ValueError when two areas claim one command."""
    table: dict[int, Handler] = {}
    for area in _AREAS:
        twice = table.keys() & area.HANDLERS.keys()
        if twice:
            raise ValueError(f"{area.__name__} claims commands that are taken: {sorted(twice)}.")
        table.update(area.HANDLERS)
    return table
