"""Command handlers, one module for each area of the protocol.

Each module exports `HANDLERS: Mapping[int, Handler]`, from command type to function.  A handler
gets the connection, the command and the entry (SEND only).  An awaitable that it returns runs as a
task of the connection, counted against MAX_PENDING_REQUESTS and cancelled when it closes; a plain
function has done its work when it returns.  The connection answers what a handler raises: a
`MagnetarError` with ERROR and its code, `ProtocolViolation` by closing, anything else as
UnknownError, logged with its traceback.
"""
