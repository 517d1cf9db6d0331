"""A fresh store of every backend."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from storage.metadata.store import MetadataStore
from tests.contract.metadata.backends import BACKENDS, Backend, on_part

PARAMS = [
    pytest.param(each, id=each.name, marks=[pytest.mark.cluster] if each.part else [])
    for each in BACKENDS
]


@pytest.fixture(params=PARAMS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend under test."""
    found = request.param
    assert isinstance(found, Backend)
    return found if found.part is None else on_part(found, request.getfixturevalue(found.part))


@pytest.fixture
async def store(backend: Backend, tmp_path: Path) -> AsyncIterator[MetadataStore]:
    """A store of the backend, empty, closed after the test."""
    opened = await backend.open(tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
async def clients(store: MetadataStore, backend: Backend) -> AsyncIterator[Sequence[MetadataStore]]:
    """Three clients of the same records: `store`, three times where only one may write."""
    async with AsyncExitStack() as stack:
        joined = [store]
        for _ in range(2):
            joined.append(store if backend.join is None else await backend.join(store))
            if backend.join is not None:
                stack.push_async_callback(joined[-1].close)
        yield joined
