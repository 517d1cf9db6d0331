"""The node that orders the batches of one process and counts those that took effect."""

import asyncio
from random import Random
from typing import Final, cast

from config import bounds
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import RequestFailed, ZooKeeperClient
from storage.metadata.zookeeper.layout import Layout
from storage.metadata.zookeeper.plan import LAST_NODE_VERSION
from storage.metadata.zookeeper.requests import Failure, Request, Stat

NAME_BITS: Final = 96


class Guard:
    """The node that every batch of this process sets first, so that they keep their order.

    A batch sets it at the version that the batch before leaves.  The node is ephemeral: it goes
    with the session of the process, and then `open` makes another one.
    """

    def __init__(self, client: ZooKeeperClient, layout: Layout, rng: Random, identity: str) -> None:
        self._client = client
        self._layout = layout
        self._rng = rng
        self._identity = identity.encode()
        self._path = ""
        self.count = 0
        """Number of batches that have taken effect since it was made."""

    async def open(self) -> None:
        """Make a new node.

        Raises `MetadataError`, after `ZOOKEEPER_REQUEST_S` at the latest.
        """
        try:
            async with asyncio.timeout(bounds.ZOOKEEPER_REQUEST_S):
                while True:
                    if await self._make():
                        return
                    await asyncio.sleep(bounds.ZOOKEEPER_RECONNECT_MIN_S)
        except TimeoutError:
            raise MetadataError(
                f"ZooKeeper did not make a node below {self._layout.writers} within "
                f"{bounds.ZOOKEEPER_REQUEST_S} s: look at its servers."
            ) from None

    async def _make(self) -> bool:
        """Make the node; False if no answer confirms it."""
        path = f"{self._layout.writers}/{self._rng.getrandbits(NAME_BITS):x}"
        try:
            await self._client.call(requests.create(path, self._identity, ephemeral=True))
        except RequestFailed as error:
            if error.failure.uncertain:
                return False
            raise MetadataError(
                f"ZooKeeper refused to make {path} ({error.failure.name}): look at the access "
                "rights below the chroot."
            ) from error
        self._path, self.count = path, 0
        return True

    async def read(self) -> int | None:
        """Number of batches that took effect; None if the node is gone.

        Raises `MetadataError`, `RequestFailed`.
        """
        try:
            await self._client.call_again(requests.sync(self._layout.writers))
            found, _ = await self._client.call_again(requests.get_data(self._path))
        except RequestFailed as error:
            if error.failure is Failure.NO_NODE:
                return None
            raise
        return cast(tuple[bytes, Stat], found)[1].version

    def step(self, in_flight: int) -> Request:
        """The first operation of a batch that is sent behind `in_flight` others."""
        return requests.set_data(self._path, self._identity, self.count + in_flight)

    @property
    def is_used_up(self) -> bool:
        """Whether ZooKeeper's count of its versions is near its end."""
        return self.count >= LAST_NODE_VERSION
