"""A cluster for a test of any room."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.broker.placement.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        await made.close()
