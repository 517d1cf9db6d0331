"""A fresh store of every backend."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.metadata.store import MetadataStore
from tests.contract.metadata.backends import BACKENDS, Backend


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend under test."""
    found = request.param
    assert isinstance(found, Backend)
    return found


@pytest.fixture
async def store(backend: Backend, tmp_path: Path) -> AsyncIterator[MetadataStore]:
    """A store of the backend, empty, closed after the test."""
    opened = await backend.open(tmp_path)
    yield opened
    await opened.close()
