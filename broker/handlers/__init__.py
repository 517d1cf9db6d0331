"""Command handlers, one module for each area of the protocol.

Each module exports `HANDLERS: Mapping[int, Handler]`, from command type to function.  A handler
gets the connection, the command and the entry (SEND only).  One that returns an awaitable runs as
a task of the connection, counted against MAX_PENDING_REQUESTS and cancelled when it closes; a
plain function has done its work when it returns.  What a handler raises is answered for it: a
`MagnetarError` with ERROR and its code, `ProtocolViolation` by closing the connection, anything
else as UnknownError, logged with its traceback.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.connection import Connection
    from protocol.pulsar_pb2 import BaseCommand

Handler = Callable[["Connection", "BaseCommand", bytes | None], Awaitable[None] | None]
