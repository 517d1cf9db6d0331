"""Changed files are loaded; those that cannot be used are counted and logged."""

import asyncio

import pytest
from structlog.testing import capture_logs

from magnetar.protocol.server_error import OperatorError
from security.errors import InvalidSecret
from security.reloading import Reloader
from tests.support.waiting import until


class Part:
    """A part with a file that changes when a test says so."""

    def __init__(self, name: str) -> None:
        self.part = name
        self.changed = False
        self.error: Exception | None = None
        self.loaded = 0
        self.checked = 0

    def reload(self) -> bool:
        self.checked += 1
        if self.error is not None:
            raise self.error
        changed, self.changed = self.changed, False
        self.loaded += changed
        return changed


async def test_changed_part_is_loaded_and_logged() -> None:
    reloader, part = Reloader(60), Part("tls")
    reloader.add(part)
    with capture_logs() as logged:
        await reloader.check()
        part.changed = True
        await reloader.check()
    assert part.loaded == 1
    assert logged == [{"event": "security_files_loaded", "log_level": "info", "part": "tls"}]


@pytest.mark.parametrize("error", [OperatorError("mend it"), InvalidSecret("mend it")])
async def test_failure_is_counted_and_leaves_other_parts_alone(error: Exception) -> None:
    reloader, broken, other = Reloader(60), Part("tls"), Part("tokens")
    for each in (broken, other):
        reloader.add(each)
    broken.error, other.changed = error, True
    with capture_logs() as logged:
        await reloader.check()
    assert reloader.failures == {"tls": 1, "tokens": 0}
    assert other.loaded == 1
    assert logged[0] == {
        "event": "security_files_unusable",
        "log_level": "error",
        "part": "tls",
        "error": "mend it",
    }


async def test_end_of_a_failure_is_logged_once() -> None:
    reloader, part = Reloader(60), Part("tls")
    reloader.add(part)
    with capture_logs() as logged:
        part.error = InvalidSecret("mend it")
        for _ in range(2):
            await reloader.check()
        part.error = None  # The files have their old content again.
        for _ in range(2):
            await reloader.check()
        part.error = InvalidSecret("mend it")
        await reloader.check()
        part.error, part.changed = None, True
        for _ in range(2):
            await reloader.check()
    assert [each["event"] for each in logged] == [
        *("security_files_unusable", "security_files_unusable", "security_files_usable_again"),
        *("security_files_unusable", "security_files_loaded"),
    ]


async def test_files_are_checked_at_the_interval_and_when_asked() -> None:
    reloader, part = Reloader(0.01), Part("tls")
    reloader.add(part)
    reloader.start()
    await until(lambda: part.checked >= 3)
    await reloader.stop()
    checked = part.checked
    await asyncio.sleep(0.05)
    assert part.checked == checked

    slow, part = Reloader(3600), Part("tls")
    slow.add(part)
    slow.start()
    slow.check_soon()
    await until(lambda: part.checked == 1)
    await slow.stop()


async def test_reloader_without_parts_does_nothing() -> None:
    reloader = Reloader(0.001)
    reloader.start()
    await reloader.stop()
