"""A replicator of another cluster over the bare protocol, as Apache Pulsar's sends."""

import asyncio
from typing import Final

from broker.topics.source_positions import SOURCE_POSITION
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position, to_wire
from tests.support.raw_client import BrokerError, RawClient, RawProducer, Receipt

BY_POSITION: Final = pb.CommandConnect(
    feature_flags=pb.FeatureFlags(supports_repl_dedup_by_lid_and_eid=True)
)
"""The CONNECT of a replicator that wants receipts with source positions (V2)."""
NO_ID: Final = to_wire(-1)


class RawReplicator:
    """The producer of a replicator, on a connection that it shares with nobody's receipts."""

    def __init__(self, producer: RawProducer, cluster: str, *, by_position: bool) -> None:
        self.producer = producer
        self.cluster = cluster
        self.by_position = by_position

    @classmethod
    async def open(
        cls, client: RawClient, topic: str, cluster: str = "east", *, epoch: int = 0
    ) -> "RawReplicator":
        """Open the producer of a cluster's replicator; V2 if the broker announces that.

        The client is to be one that was opened with BY_POSITION then.
        """
        options = pb.CommandProducer(
            producer_name=f"pulsar.repl.{cluster}-->here",
            user_provided_producer_name=True,
            epoch=epoch,
        )
        producer = await client.create_producer(topic, options)
        flag = client.connected.feature_flags.supports_repl_dedup_by_lid_and_eid
        return cls(producer, cluster, by_position=flag)

    def metadata(
        self, source: str | None, origin: str = "origin", sequence_id: int = 0
    ) -> pb.MessageMetadata:
        """The metadata of a message at a source position."""
        metadata = pb.MessageMetadata(
            producer_name=origin, sequence_id=sequence_id, replicated_from=self.cluster
        )
        if source is not None:
            metadata.properties.add(key=SOURCE_POSITION, value=source)
        return metadata

    async def send(
        self,
        metadata: pb.MessageMetadata,
        expected: Position | int | None = None,
        *,
        send: pb.CommandSend | None = None,
        payload: bytes = b"x",
    ) -> bool:
        """Send, and wait for the receipt of these ids; returns whether it was stored now.

        `expected` is the source position, the highest sequence id, or None for the receipt of any
        producer.  Raises `BrokerError`.
        """
        number, frame = self.producer.frame(payload, metadata=metadata, send=send)
        due = expected[0] if isinstance(expected, Position) else number
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self.producer.send_frame(due, frame, future.set_result)
        receipt = await self.producer.client.wait(future)
        if isinstance(receipt, BrokerError):
            raise receipt
        highest = expected[1] if isinstance(expected, Position) else expected or 0
        assert receipt.highest_sequence_id == highest
        ids = receipt.message_id.ledger_id, receipt.message_id.entry_id
        assert ids == (NO_ID, NO_ID) or NO_ID not in ids
        return NO_ID not in ids

    async def send_at(self, source: Position, *, payload: bytes = b"x") -> bool:
        """Send the message at a source position, by position; see `send`."""
        text = f"{source.ledger_id}:{source.entry_id}"
        return await self.send(self.metadata(text), source, payload=payload)
