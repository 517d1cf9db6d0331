"""A world and its first process."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.broker.scalable.node import Node, World


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def node(world: World) -> AsyncIterator[Node]:
    node = await Node(world).start()
    yield node
    await node.stop()
