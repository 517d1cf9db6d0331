"""A copy of a data directory gives no ids of ledgers that another broker has given."""

import random
from pathlib import Path
from shutil import copytree

import pytest

from broker.app.stores import open_stores
from config.bounds import LEDGER_IDS_LEFT_OUT, LEDGER_IDS_LEFT_OUT_PER_S
from config.settings import Settings
from storage.backup import backup
from storage.clock import SystemClock
from storage.data_directory import COPIED_FILE, DataDirectoryError

HOUR_MS = 3600 * 1000


class LaterClock:
    """The machine's clock, put forward."""

    def __init__(self, by_ms: int) -> None:
        self._by_ms = by_ms

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return SystemClock().now_ms() + self._by_ms


async def next_id(directory: Path, later_ms: int = 0) -> int:
    """The id of the first ledger that a broker makes which starts on a directory now, or later."""
    settings = Settings(data_dir=directory)
    stores = await open_stores(settings, LaterClock(later_ms), random.Random(1))
    try:
        return (await stores.ledgers.create(custom={})).ledger_id
    finally:
        await stores.ledgers.close()
        await stores.metadata.close()
        stores.release()


async def test_a_broker_on_a_backup_gives_ids_that_no_other_one_has_given(tmp_path: Path) -> None:
    data, copy, again = (tmp_path / name for name in ("data", "copy", "again"))
    last = await next_id(data)
    backup(data, copy)
    copytree(copy, again)
    first = await next_id(copy)
    assert first > last + LEDGER_IDS_LEFT_OUT
    # From then on it is a data directory as any other.
    assert not (copy / COPIED_FILE).exists()
    assert await next_id(copy, HOUR_MS) == first + 1
    # Another broker on the same backup, after the first one has made ledgers for an hour.
    assert await next_id(again, HOUR_MS) >= first + LEDGER_IDS_LEFT_OUT_PER_S * 3600


async def test_a_backup_of_a_backup_is_as_old_as_the_first_one(tmp_path: Path) -> None:
    data, copy, second = (tmp_path / name for name in ("data", "copy", "second"))
    last = await next_id(data)
    backup(data, copy)
    (copy / COPIED_FILE).write_text(f"{SystemClock().now_ms() // 1000 - 24 * 3600}\n")
    backup(copy, second)
    assert await next_id(second) > last + 24 * 3600 * LEDGER_IDS_LEFT_OUT_PER_S


async def test_a_copy_by_other_tools_says_when_it_was_made(tmp_path: Path) -> None:
    last = await next_id(tmp_path)
    (tmp_path / COPIED_FILE).write_text("yesterday\n")
    with pytest.raises(DataDirectoryError, match="seconds since 1970"):
        await next_id(tmp_path)
    day_ago_s = SystemClock().now_ms() // 1000 - 24 * 3600
    (tmp_path / COPIED_FILE).write_text(f"{day_ago_s}\n")
    assert await next_id(tmp_path) > last + 24 * 3600 * LEDGER_IDS_LEFT_OUT_PER_S
