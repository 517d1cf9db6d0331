"""Log lines: what a traceback tells, and how many lines and bytes a peer can cause."""

import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from config.bounds import LOG_LINES_PER_S
from config.logging import configure_logging


@pytest.fixture(autouse=True)
def configuration() -> Iterator[None]:
    before, root = structlog.get_config(), logging.getLogger()
    handlers = root.handlers
    root.handlers = []
    yield
    root.handlers = handlers
    structlog.configure(**before)


def connect(password: str) -> None:
    raise RuntimeError(f"a defect, with {len(password)} characters")


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_traceback_shows_no_values_of_variables(
    capsys: pytest.CaptureFixture[str], style: str
) -> None:
    configure_logging(style=style)  # type: ignore[arg-type]
    try:
        connect("".join(["hid", "den"]))
    except RuntimeError:
        structlog.get_logger().exception("it_broke")
    told = capsys.readouterr().err
    assert "hidden" not in told
    for shown in ("it_broke", "in connect", "a defect, with 6 characters"):
        assert shown in told


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_a_flood_of_one_event_is_bounded(capsys: pytest.CaptureFixture[str], level: str) -> None:
    now = [0.0]
    configure_logging(style="json", now=lambda: now[0])
    log = structlog.get_logger()
    for number in range(2000):
        getattr(log, level)("topic_lost", topic=f"t-{number}")
    log.info("another_event")
    assert len(lines(capsys)) == LOG_LINES_PER_S + 1
    now[0] = 1.0
    getattr(log, level)("topic_lost", topic="next")
    (line,) = lines(capsys)
    assert json.loads(line)["not_logged_before"] == 2000 - LOG_LINES_PER_S


def test_lines_that_no_peer_causes_are_all_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(style="json")
    log = structlog.get_logger("a.module", every_line=True)
    for number in range(50):
        log.error("ledger_log_damaged", file=number)
    found = lines(capsys)
    assert len(found) == 50
    assert "every_line" not in found[0]


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_flood_of_tracebacks_is_bounded_in_bytes(
    capsys: pytest.CaptureFixture[str], style: str
) -> None:
    configure_logging(style=style)  # type: ignore[arg-type]
    log = structlog.get_logger()
    for _ in range(200):
        try:
            raise ValueError("x" * 100_000)
        except ValueError:
            log.exception("rest_request_failed", path="/" + "p" * 100_000)
    assert len(capsys.readouterr().err) < 2 * LOG_LINES_PER_S * 20_000


@pytest.mark.parametrize("name", ["aiohttp.server", "aiohttp.access", "asyncio"])
def test_a_flood_of_a_library_is_bounded(capsys: pytest.CaptureFixture[str], name: str) -> None:
    configure_logging(style="json")
    logger = logging.getLogger(name)
    for number in range(500):
        try:
            raise RecursionError("y" * 100_000)
        except RecursionError:
            logger.exception("Error handling request from %s", number)
    told = capsys.readouterr().err
    assert told.count("Error handling request from") <= 2 * LOG_LINES_PER_S
    assert len(told) < 2 * LOG_LINES_PER_S * 20_000


def test_a_library_says_how_many_lines_were_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    configure_logging(style="json", now=lambda: now[0])
    logger = logging.getLogger("asyncio")
    for _ in range(100):
        logger.warning("socket.accept() out of system resource")
    now[0] = 2.0
    logger.warning("again")
    assert f"not_logged_before={100 - LOG_LINES_PER_S}" in lines(capsys)[-1]


class FullDisk(io.StringIO):
    """A standard error that goes to a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_line_that_cannot_be_written_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that logs the failure of its work must go on to report it."""
    monkeypatch.setattr("sys.stderr", FullDisk())
    configure_logging(style="json")
    structlog.get_logger().error("commit_failed")
    logging.getLogger("asyncio").error("a library's line")
