"""Command handlers, one module for each area of the protocol.

Each module exports `HANDLERS: Mapping[int, Handler]`, from command type to function.  A handler
gets the connection, the command and the entry (SEND only).  One that returns an awaitable runs as
a task of the connection, counted against MAX_PENDING_REQUESTS and cancelled when it closes; a
plain function has done its work when it returns.  What a handler raises is answered for it: a
`MagnetarError` with ERROR and its code, `ProtocolViolation` by closing the connection, anything
else as UnknownError, logged with its traceback.
"""
