"""URLs of metadata stores."""

from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.open import UnknownMetadataUrl, open_metadata_store
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import MetadataError


async def test_urls(tmp_path: Path) -> None:
    memory = await open_metadata_store("memory:", SystemClock())
    assert isinstance(memory, MemoryMetadataStore)
    await memory.close()
    sqlite = await open_metadata_store(f"sqlite:{tmp_path / 'm.db'}", SystemClock())
    assert isinstance(sqlite, SqliteMetadataStore)
    await sqlite.close()
    assert (tmp_path / "m.db").exists()


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "sqlite:", "sqlite", "redis://x", "/p"])
async def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UnknownMetadataUrl):
        await open_metadata_store(url, SystemClock())


async def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match="cannot be opened"):
        await open_metadata_store(f"sqlite:{tmp_path / 'no' / 'm.db'}", SystemClock())
