"""One Oxia server in this process."""

from collections.abc import AsyncIterator

import pytest

from tests.support.fake_oxia import FakeOxia, World


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def server(world: World) -> AsyncIterator[FakeOxia]:
    """It leads the only shard until a test says otherwise."""
    made = FakeOxia(world)
    await made.start()
    world.lead(made.address)
    yield made
    world.open.set()
    await made.stop()
