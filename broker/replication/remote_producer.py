"""`RemoteProducer`: the producer of a replicator at another cluster."""

from asyncio import TimerHandle
from typing import Final

from broker.replication.cluster_producer import ClusterProducer, schema_version_at
from broker.replication.entries import Route
from broker.replication.errors import RemoteRefused, at_cluster
from broker.replication.send_window import SendWindow
from config.bounds import REFUSAL_DRAIN_S
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, error_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.wire.connection import Connection, PeerKind

_FINAL: Final = frozenset({pb.NotAllowedError, pb.MetadataError})
"""Errors with which Apache Pulsar refuses an entry that it has certainly not stored."""
_NO_LEDGER: Final = 2**64 - 1
"""The ledger id in the receipt of what was stored before."""


class ProducerOwner:
    """Sends by a remote producer, and is told what comes of it.

    Only `require_topic` waits.  This class itself does nothing: a closed producer has it.
    """

    async def require_topic(self) -> None:
        """Have the topic at the other cluster, or raise why it cannot be used."""

    def attached(self) -> None:
        """Send from the first entry that is not acknowledged."""

    def detached(self, error: MagnetarError) -> None:
        """Send nothing for now: what is in flight will not be answered."""

    def refused(self, error: MagnetarError) -> None:
        """Attaching failed; it is tried again."""

    def stored(self, position: Position, *, before: bool) -> None:
        """The other cluster has the entry of this position, durably.

        `before`: it says that it had it when it came, and has not stored it again.
        """

    def not_stored(self, position: Position, error: RemoteRefused) -> None:
        """The other cluster has refused the entry of this position."""


class RemoteProducer(ClusterProducer):
    """A producer of one topic at another cluster; see `ClusterProducer`."""

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        route: Route,
        owner: ProducerOwner,
        *,
        resends: bool,
        stores: bool = True,
    ) -> None:
        """`resends`: another one of this name may have sent some of the messages.

        `stores`: the topic is persistent.
        """
        super().__init__(context, topic, route.remote, route.producer)
        self.window = SendWindow()
        """The entries that were sent and are not answered."""
        self._drain_reason: RemoteRefused | None = None
        """Why it attaches again when all is answered that is in flight."""
        self._drain_timer: TimerHandle | None = None
        self._stores = stores
        self._owner = owner
        if resends:
            # The other cluster compares what comes first after epoch 0 with what it has.
            self._epoch = 0

    def send(
        self, position: Position, entry: bytes, messages: int, *, marker: bool = False
    ) -> None:
        """Send the entry of this position, with so many messages.  Call while it is attached."""
        sequence_id = self.window.add(position, self.context.loop.time(), marker=marker)
        self.write_send(sequence_id, entry, messages, marker=marker)

    @property
    def is_draining(self) -> bool:
        """Whether it waits for answers alone, to attach again then."""
        return self._drain_reason is not None

    def drain(self, reason: RemoteRefused) -> None:
        """Send no more, and attach again once all that is in flight is answered.

        It waits for REFUSAL_DRAIN_S at most.  The answers are worth it: what has none is sent
        again, and a cluster that does not deduplicate stores it twice.
        """
        if self.connection is None or self.is_draining:
            return
        self._drain_reason = reason
        self._drain_timer = self.context.loop.call_later(REFUSAL_DRAIN_S, self._attach_again)
        self._attach_again_if_drained()

    async def schema_version(self, schema: pb.Schema) -> bytes:
        """The version of a schema at the other cluster, where it is added if it is missing.

        Raises `RemoteRefused`, also while the producer is not attached, and errors of the
        connection.
        """
        connection = self.connection
        if connection is None:
            raise RemoteRefused(f"{self.describe()} is not attached: wait for it.")
        return await schema_version_at(connection, self.cluster, self.topic, self.name, schema)

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"The replicator of {self.topic} to cluster {self.cluster!r}"

    def note_refused(self, error: RemoteRefused) -> None:
        """See `ClusterProducer`."""
        self._owner.refused(error)

    async def require_topic(self) -> None:
        """See `ClusterProducer`."""
        await self._owner.require_topic()

    async def open_there(self, connection: Connection) -> None:
        """Send PRODUCER."""
        connection.attach(PeerKind.PRODUCER, self.producer_id, self)
        command = pb.BaseCommand(type=pb.BaseCommand.PRODUCER, producer=self.next_command())
        await self.answer_of(connection.request(command))

    def begin(self, connection: Connection) -> None:
        """See `ClusterProducer`."""
        by_position = connection.features.supports_repl_dedup_by_lid_and_eid
        self.window.begin(by_position=by_position and self._stores)
        self._owner.attached()

    def detached(self, error: MagnetarError) -> None:
        """Tell the owner."""
        self._end_draining()
        self.window.clear()
        self._owner.detached(error)

    async def close(self) -> None:
        """See `Attachment`."""
        self._end_draining()
        await super().close()

    def leave_owner(self) -> None:
        """See `ClusterProducer`."""
        self._owner = ProducerOwner()

    def take_receipt(self, receipt: pb.CommandSendReceipt) -> None:
        """See `ClusterProducer`."""
        position = self.window.answered(receipt.sequence_id, receipt.highest_sequence_id)
        if position is None:
            self.again(self.unexpected_receipt())
            return
        self.pauses.entry_stored()
        self._owner.stored(position, before=receipt.message_id.ledger_id == _NO_LEDGER)
        self._attach_again_if_drained()

    def take_refusal(self, refused: pb.CommandSendError) -> None:
        """See `ClusterProducer`."""
        reason = at_cluster(self.cluster, error_of(refused.error, refused.message))
        error = RemoteRefused(reason, final=refused.error in _FINAL)
        position = self.window.refused(refused.sequence_id)
        if position is None:
            self.again(error)
            return
        self._owner.not_stored(position, error)
        self._attach_again_if_drained()

    # Refusals

    def _attach_again_if_drained(self) -> None:
        if not self.window:
            self._attach_again()

    def _attach_again(self) -> None:
        if self._drain_reason is not None:
            self.again(self._drain_reason)

    def _end_draining(self) -> None:
        self._drain_reason = None
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
