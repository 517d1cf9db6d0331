"""The consumers of chunked messages, where a subscription has several consumers.  Pure."""

from typing import Generic, TypeVar

from broker.topics.deduplication import Chunk
from config.bounds import CHUNKED_MESSAGES_BEGUN

C = TypeVar("C")


class ChunkOwners(Generic[C]):
    """Who got the first chunks of the messages whose last one was not sent yet.

    Only a consumer that gets all chunks of a message can put it together.  Of messages whose
    producers ended in the middle CHUNKED_MESSAGES_BEGUN are remembered, the newest.
    """

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        self._owners: dict[int, C] = {}
        """By the hashes of their ids, which clients may make as long as they like."""

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, chunk: Chunk) -> C | None:
        """The consumer that has earlier chunks of the message, if there is one."""
        return self._owners.get(hash(chunk.uuid))

    def sent(self, chunk: Chunk, consumer: C) -> None:
        """Note who got a chunk."""
        if chunk.last:
            self._owners.pop(hash(chunk.uuid), None)
        else:
            self._owners[hash(chunk.uuid)] = consumer
        if len(self._owners) > CHUNKED_MESSAGES_BEGUN:
            del self._owners[next(iter(self._owners))]

    def left(self, consumer: C) -> None:
        """Note that a consumer left: its chunks come again, from the first one on."""
        self._owners = {uuid: each for uuid, each in self._owners.items() if each is not consumer}
