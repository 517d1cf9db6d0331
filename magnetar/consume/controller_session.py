"""The registration of an ordered consumer with the controller of its topic.

Rules:

- Each attempt asks anew who the controller is (a layout, looked at once), and subscribes there
  under the same consumer name: the controller gives back what the consumer had.
- An assignment is complete.  They count in the order in which they arrive, whether as the answer or
  unasked; one of an older layout than the last is ignored.  A new registration begins anew with
  that, since the topic may have been made anew.
- While the session is lost the consumer keeps what it has, as the controller does for it.
- `close` says so to the controller, which then deals at once.  5.0.0-M1 does not know how to be
  told, and would end the connection: it is told nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from magnetar.bounds import LEAVE_S
from magnetar.consume.holdings import AssignedSegment
from magnetar.context import ClientContext
from magnetar.errors import BrokerError, MagnetarError, NotSupported, OperationTimedOut
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from magnetar.refusals import Refusals
from magnetar.wire.attachment import Attachment
from magnetar.wire.connection import Connection, PeerKind
from protocol import pulsar_pb2 as pb
from protocol.frames import Frame

__all__ = ["Assignment", "ControllerSession", "assignment_of", "can_be_told_to_leave"]

_M1: Final = "Pulsar Server5.0.0-M1"


@dataclass(frozen=True, slots=True)
class Assignment:
    """All segments that the consumer is to read, of a layout of that epoch."""

    layout_epoch: int
    segments: tuple[AssignedSegment, ...]


def assignment_of(told: pb.ScalableConsumerAssignment) -> Assignment:
    """The assignment that a controller told.

    Raises `NotSupported` if it shares a segment among consumers by entry buckets.
    """
    for segment in told.segments:
        if segment.bucket_ranges:
            raise NotSupported(
                f"The controller shares segment {segment.segment_topic} among several consumers, "
                "which this client cannot do; use no more consumers in the subscription than the "
                "topic has segments, or set its scalableTopicEntryBucketBudget to 1."
            )
    return Assignment(
        told.layout_epoch,
        tuple(
            AssignedSegment(
                segment.segment_id, segment.hash_start, segment.hash_end, segment.segment_topic
            )
            for segment in told.segments
        ),
    )


def can_be_told_to_leave(server_version: str) -> bool:
    """Whether a broker knows SCALABLE_TOPIC_UNSUBSCRIBE: all but 5.0.0-M1 do."""
    rest = server_version.removeprefix(_M1)
    return rest == server_version or rest[:1].isdigit()


class ControllerSession(Attachment):
    """See the module's rules."""

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        subscription: str,
        consumer_name: str,
        kind: pb.ScalableConsumerType = pb.STREAM,
        *,
        create_if_missing: bool = True,
    ) -> None:
        """Of `topic`, as the user named it.  Raises `InvalidTopicName`."""
        super().__init__(context)
        self._asked: Final = topic
        self._subscription: Final = subscription
        self._consumer_name: Final = consumer_name
        self._kind: Final = kind
        self._consumer_id: Final = context.ids.consumer_id()
        self._create_if_missing: Final = create_if_missing
        self._topic = topic
        self._first_layout: Layout | None = None
        self._epoch = -1
        self._refusals = Refusals()
        self._assigned: Callable[[Assignment], None] | None = None
        self._told: Callable[[MagnetarError], None] | None = None

    @property
    def topic(self) -> str:
        """The topic as the broker resolved its name: `topic://...`."""
        return self._topic

    @property
    def first_layout(self) -> Layout | None:
        """The layout before the first assignment."""
        return self._first_layout

    def on_assignment(self, listener: Callable[[Assignment], None]) -> None:
        """Tell this listener, the only one, of every assignment; called before `open`."""
        self._assigned = listener

    def on_failure(self, listener: Callable[[MagnetarError], None]) -> None:
        """Tell this listener, the only one, why the session has ended by itself, should it."""
        self._told = listener

    # Attachment

    def describe(self) -> str:
        """What it is."""
        return f"Consumer {self._consumer_name} of {self._subscription} on {self._asked}"

    async def find(self) -> Connection:
        """The broker that leads the topic."""
        may_create = self._create_if_missing and not self._refusals.granted_before
        watch = LayoutWatch(self.context, self._asked, create_if_missing=may_create)
        try:
            await watch.open(self.context.settings.operation_timeout_s)
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            await watch.close()
        self._topic = watch.topic
        if self._first_layout is None:
            self._first_layout = watch.layout
        pool = self.context.pool
        if watch.controller_url is None:
            return await pool.of_topic(self._topic)
        return await pool.at(watch.controller_url)

    async def attach(self, connection: Connection) -> None:
        """Register, until the controller answers."""
        timeout_s = self.context.settings.operation_timeout_s
        self._epoch = -1
        answer: asyncio.Future[None] = self.context.loop.create_future()

        def answered(outcome: pb.BaseCommand | MagnetarError) -> None:
            # Not later: an assignment that comes behind the answer counts more.
            if answer.done():
                return
            if isinstance(outcome, MagnetarError):
                answer.set_exception(outcome)
            else:
                self._take(outcome.scalable_topic_subscribe_response.assignment)
                answer.set_result(None)

        connection.attach(PeerKind.CONSUMER, self._consumer_id, self)
        request_id = connection.ask(self._subscribe(), answered)
        try:
            async with asyncio.timeout(timeout_s):
                await answer
        except TimeoutError:
            raise OperationTimedOut(
                f"The controller of {self._topic} has not answered within {timeout_s:g} s; look "
                "whether its broker is overloaded, or allow more by operation_timeout_s."
            ) from None
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            connection.forget(request_id)
        self._refusals.granted()

    async def leave(self, connection: Connection) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE, where that is known."""
        if can_be_told_to_leave(connection.server_version):
            leaving = pb.CommandScalableTopicUnsubscribe(
                request_id=0, consumer_id=self._consumer_id
            )
            await connection.request(
                pb.BaseCommand(
                    type=pb.BaseCommand.SCALABLE_TOPIC_UNSUBSCRIBE,
                    scalable_topic_unsubscribe=leaving,
                ),
                LEAVE_S,
            )

    def failed(self, error: MagnetarError) -> None:
        """The session has ended by itself."""
        if self._told is not None:
            self._told(error)

    # Handler

    def received(self, frame: Frame) -> None:
        """An assignment that nobody asked for."""
        if frame.command.type == pb.BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE:
            self._take(frame.command.scalable_topic_assignment_update.assignment)

    def _take(self, told: pb.ScalableConsumerAssignment) -> None:
        try:
            assignment = assignment_of(told)
        except NotSupported as error:
            self.again(error)
            return
        if assignment.layout_epoch < self._epoch:
            return
        self._epoch = assignment.layout_epoch
        if self._assigned is not None:
            self._assigned(assignment)

    def _subscribe(self) -> pb.BaseCommand:
        return pb.BaseCommand(
            type=pb.BaseCommand.SCALABLE_TOPIC_SUBSCRIBE,
            scalable_topic_subscribe=pb.CommandScalableTopicSubscribe(
                request_id=0,
                topic=self._topic,
                subscription=self._subscription,
                consumer_name=self._consumer_name,
                consumer_id=self._consumer_id,
                consumer_type=self._kind,
            ),
        )
