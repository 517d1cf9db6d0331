"""A bookie of the protocol alone, on a port of its own."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.storage.ledger.bookkeeper.fake_bookie import FakeBookie


@pytest.fixture
async def bookie() -> AsyncIterator[FakeBookie]:
    fake = FakeBookie()
    await fake.start()
    yield fake
    await fake.stop()
