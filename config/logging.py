"""Set-up of logging: readable lines on a terminal, one JSON object a line elsewhere.

Every line from `info` on is bounded, as peers cause most of them: LOG_LINES_PER_S lines a second of
each event, and of each library's logger; values and tracebacks in a length of their own.  The next
line of an event has the number of those left out, `not_logged_before`.  A logger that was made with
`every_line=True` has no bound in number: for lines that no peer can cause, and an operator must see
all of, such as damage that is found at the start.

A line that cannot be written is lost, and nothing else happens: the disk of the log may be full.
"""

import io
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from config.bounds import LOG_TRACEBACK_CHARACTERS, LOG_VALUE_CHARACTERS
from config.log_limit import LogLimits

_EVERY_LINE = "every_line"
_LEFT_OUT = "not_logged_before"


def configure_logging(
    level: str = "info",
    style: Literal["auto", "console", "json"] = "auto",
    *,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Set up structlog for the whole process.  Logs go to standard error.

    `now` is the monotonic clock, in seconds, of the bounds.
    """
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        # Tracebacks without the values of variables, which may be passwords and tokens.
        structlog.dev.ConsoleRenderer(exception_formatter=_short_traceback)
        if console
        else structlog.processors.JSONRenderer(sort_keys=False)
    )
    limits = LogLimits(now)
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _LineBound(limits),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, _shorten_values, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _LossyOutput(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    _configure_libraries(limits)


def _configure_libraries(limits: LogLimits) -> None:
    """Write what libraries log through the standard module: only warnings and above."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _LibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(_LibraryHandler(limits))
    root.setLevel(logging.WARNING)


class _LossyOutput(io.TextIOBase):
    """Writes to a stream, and leaves out what that does not take."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a line, or lose it."""
        # Lines are logged between the steps of a failure, on threads too: an error would break off
        # the handling of that failure, and leave those waiting that wait for its end.
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or lose it."""
        with suppress(OSError):
            self._stream.flush()


class _LineBound:
    """A processor that drops the lines of an event above its bound."""

    def __init__(self, limits: LogLimits) -> None:
        self._limits = limits

    def __call__(self, _logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        if line.pop(_EVERY_LINE, False) or method == "debug":
            return line
        left_out = self._limits.take(str(line.get("event")))
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            line[_LEFT_OUT] = left_out
        return line


def _shorten_values(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    for name, value in line.items():
        if name == "exception":
            line[name] = _without_middle(str(value))
        elif isinstance(value, str) and len(value) > LOG_VALUE_CHARACTERS:
            line[name] = value[:LOG_VALUE_CHARACTERS] + "..."
    return line


def _without_middle(text: str) -> str:
    half = LOG_TRACEBACK_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"


def _short_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    whole = io.StringIO()
    structlog.dev.plain_traceback(whole, exc_info)
    out.write(_without_middle(whole.getvalue()))


class _LibraryHandler(logging.StreamHandler[io.TextIOBase]):
    """Writes the records of libraries to standard error, bounded as other lines are."""

    def __init__(self, limits: LogLimits) -> None:
        super().__init__(sys.stderr)  # type: ignore[arg-type]
        self._limits = limits

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless its logger is above its bound."""
        # Not by the message: asyncio puts addresses and names into it.
        left_out = self._limits.take(f"library {record.name}")
        if left_out is not None:
            record.not_logged_before = left_out
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback if there is one."""
        left_out = getattr(record, _LEFT_OUT, 0)
        counted = f" {_LEFT_OUT}={left_out}" if left_out else ""
        message = record.getMessage()[:LOG_TRACEBACK_CHARACTERS]
        text = f"{record.levelname} {record.name} {message}{counted}"
        if record.exc_info:
            traceback = logging.Formatter().formatException(record.exc_info)
            text += "\n" + _without_middle(traceback)
        return text
