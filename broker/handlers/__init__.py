"""Command handlers, one module for each area of the protocol.

Each module exports `HANDLERS: Mapping[int, Handler]`, from command type to function.  A handler
gets the connection, the command and the entry (SEND only).  One that returns an awaitable runs as
a task of the connection, counted against MAX_PENDING_REQUESTS and cancelled when it closes; a
plain function has done its work when it returns.  What a handler raises is answered for it: a
`MagnetarError` with ERROR and its code, `ProtocolViolation` by closing the connection, anything
else as UnknownError, logged with its traceback.

`handler_table()` merges the modules; two that claim one command are a programming error.
"""

from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.connection import Connection
    from protocol.pulsar_pb2 import BaseCommand

Handler = Callable[["Connection", "BaseCommand", bytes | None], Awaitable[None] | None]

HANDLER_MODULES = ("session", "produce", "consume", "lookup", "schema", "topics", "scalable")


def handler_table() -> Mapping[int, Handler]:
    """All handlers by command type.  Raises ValueError when two modules claim one command."""
    table: dict[int, Handler] = {}
    for name in HANDLER_MODULES:
        handlers: Mapping[int, Handler] = import_module(f"broker.handlers.{name}").HANDLERS
        twice = table.keys() & handlers.keys()
        if twice:
            raise ValueError(f"broker.handlers.{name} claims commands again: {sorted(twice)}.")
        table.update(handlers)
    return table
