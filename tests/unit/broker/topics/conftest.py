"""A client that plans and reads, for a test of topics."""

from collections.abc import Awaitable, Callable

import pytest

from tests.support.raw_client import RawClient
from tests.unit.broker.topics.reads import Reads


@pytest.fixture
async def reads(connect: Callable[[], Awaitable[RawClient]]) -> Reads:
    return Reads(await connect())
