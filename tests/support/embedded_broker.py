"""A whole broker in this process, on a free port and a temporary data directory."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.app.service import Broker
from broker.app.stores import Stores
from config.settings import Settings
from storage.clock import Clock, SystemClock


@asynccontextmanager
async def running(directory: Path, **settings: object) -> AsyncIterator[Broker]:
    async with running_on(None, directory, **settings) as broker:
        yield broker


@asynccontextmanager
async def running_on(
    stores: Stores | None, directory: Path, **settings: object
) -> AsyncIterator[Broker]:
    """On these stores, where there are some.  Topics are not scaled by themselves."""
    async with running_at(SystemClock(), stores, directory, **settings) as broker:
        yield broker


@asynccontextmanager
async def running_at(
    clock: Clock, stores: Stores | None, directory: Path, **settings: object
) -> AsyncIterator[Broker]:
    """The same with a clock of the test's own."""
    given = {
        "data_dir": directory,
        "port": 0,
        "http_port": 0,
        "bind_host": "127.0.0.1",
        "scalable_topic_auto_scale_enabled": False,
    } | settings
    broker = Broker(
        Settings(**given),  # type: ignore[arg-type]
        clock=clock,
        rng=random.Random(1),
        stores=stores,
    )
    try:
        await broker.start()
        yield broker
    finally:
        await broker.stop()
