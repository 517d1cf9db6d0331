"""Producers of batches with several keys, all of one entry bucket, or of any (PIP-486)."""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from magnetar.layout import bucket_hash_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from tests.simulation.actors import Sender, segment_topic
from tests.simulation.client import GONE, SimulatedClient, payload_for
from tests.simulation.history import Message, Txn
from tests.simulation.programs import LATER_CLIENT

MOST_OF_A_ROUND = 6


class UnstampedProducer(Sender):
    """A client of 5.0.0-M1: a batch may have all messages that go to its segment.

    It sends a round of messages at once and awaits them all.  Messages without a receipt are mostly
    sent again.
    """

    stamps = False

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._again: list[Message] = []

    def new_message(self, *, awaited: bool, txn: Txn | None = None) -> Message:
        """A message with a key that other producers use too."""
        message = super().new_message(awaited=awaited, txn=txn)
        return replace(message, key=message.key.removeprefix(f"{self.name}-"), refused=[])

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        while not self.stopping and client.alive:
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))
            await self._send_round(client)

    @property
    def pause_s(self) -> float:
        """The mean time between two rounds."""
        return self.world.plan.unstamped_pause_s

    async def _send_round(self, client: SimulatedClient) -> None:
        count = self.rng.randrange(1, MOST_OF_A_ROUND + 1)
        messages = self._again or [self.new_message(awaited=True) for _ in range(count)]
        self._again = messages if self.rng.random() < 0.8 else []
        try:
            outcomes = []
            for segment, batch in self.batches(messages):
                producer = await self.producer_on(client, segment)
                if len(batch) > 1 and not self.stamps:
                    self.world.history.unstamped.add(segment)
                outcomes.append(self.begin_send(producer, *batch))
            refusals = [await client.wait(outcome) for outcome in outcomes]
        except GONE as error:
            for message in messages:
                self.world.history.refused(message, f"{type(error).__name__} {error}")
            raise
        finally:
            self._again = [each for each in self._again if each.receipt_at is None]
        if any(refusals):
            self.producers.clear()
            raise ConnectionError(next(filter(None, refusals)))

    def batches(self, messages: Iterable[Message]) -> list[tuple[str, list[Message]]]:
        """Segments, each with the messages of one batch."""
        found: defaultdict[tuple[str, int], list[Message]] = defaultdict(list)
        for message in messages:
            layout = self.layouts[message.topic]
            layout.refresh()
            found[layout.route(message.key), self.bucket_of(message)].append(message)
        return [(segment, batch) for (segment, _), batch in found.items()]

    def bucket_of(self, message: Message) -> int:
        """The number of the entry bucket whose batches the message joins."""
        return 0

    def _content(
        self, messages: Sequence[Message]
    ) -> tuple[pb.MessageMetadata, pb.CommandSend, bytes]:
        metadata, send, payload = super()._content(messages[:1])
        if len(messages) > 1:
            metadata.num_messages_in_batch = send.num_messages = len(messages)
            payload = build_batch(
                (
                    pb.SingleMessageMetadata(partition_key=each.key, payload_size=0),
                    payload_for(each.name, self.rng.choice((0, 10, 200))),
                )
                for each in messages
            )
        return metadata, send, payload


class BucketProducer(UnstampedProducer):
    """A later client: each batch is of one entry bucket, and is stamped with its hashes."""

    client_version = LATER_CLIENT
    stamps = True

    @property
    def pause_s(self) -> float:
        return self.world.plan.pause_s

    def bucket_of(self, message: Message) -> int:
        layout = self.layouts[message.topic]
        segment = layout.route(message.key)
        for each in layout.dag.segments:
            if segment_topic(message.topic, each) == segment:
                return bisect_right(each.entry_bucket_splits, _hash_of(message))
        return 0

    def _content(
        self, messages: Sequence[Message]
    ) -> tuple[pb.MessageMetadata, pb.CommandSend, bytes]:
        metadata, send, payload = super()._content(messages)
        hashes = [_hash_of(each) for each in messages]
        metadata.entry_hash_min, metadata.entry_hash_max = min(hashes), max(hashes)
        return metadata, send, payload


def _hash_of(message: Message) -> int:
    return bucket_hash_of(message.key.encode())
