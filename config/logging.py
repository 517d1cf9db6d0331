"""Set-up of logging: readable lines on a terminal, one JSON object a line elsewhere."""

import logging
import sys
from typing import Literal

import structlog


def configure_logging(
    level: str = "info", style: Literal["auto", "console", "json"] = "auto"
) -> None:
    """Set up structlog for the whole process.  Logs go to standard error."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        # Tracebacks without the values of variables, which may be passwords and tokens.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(sort_keys=False)
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module: only warnings and above, on one line each.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
