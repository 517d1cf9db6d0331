"""The logger by which aiohttp logs the requests that it cannot serve."""

import logging

import structlog
from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["drop_frames", "request_logger"]

_log = structlog.get_logger()


def drop_frames(error: BaseException) -> None:
    """Have the error of a request refer to no frame, as those have the bytes that were received.

    They are in a reference cycle, and would stay in memory until a garbage collection, which is
    rare.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


def request_logger() -> logging.Logger:
    """Make the logger of one server.  Of malformed requests it logs only where they are from."""
    logger = logging.Logger("aiohttp.server")
    logger.parent = logging.getLogger()
    logger.addFilter(_replace_malformed)
    return logger


def _replace_malformed(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    # `HttpConnection` does not see those behind a declined upgrade.
    drop_frames(error)
    # aiohttp's line has the part that it could not parse: a header with a token, if there is a
    # newline at the token's end.
    remote = record.args[0] if isinstance(record.args, tuple) and record.args else None
    _log.warning("http_request_malformed", remote=remote, error=type(error).__name__)
    return False
