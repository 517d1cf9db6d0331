"""An ordered consumer that does what it is told, as the official client does."""

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient, RawConsumer, Session

SUBSCRIPTION = "s"


def ids(assignment: pb.ScalableConsumerAssignment) -> set[int]:
    """The segments of an assignment."""
    return {segment.segment_id for segment in assignment.segments}


class OrderedConsumer:
    """Subscribes to what it is given and closes what is taken away, each time it is looked at."""

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.name = name
        self.consumers: dict[int, RawConsumer] = {}
        self.buckets: dict[int, list[tuple[int, int]]] = {}
        """The entry buckets of each segment; none if it is not shared."""

    @classmethod
    async def open(
        cls, client: RawClient, topic: str, name: str, *, consumer_id: int | None = None
    ) -> "OrderedConsumer":
        """Register, and follow the first assignment."""
        session, assignment = await client.subscribe_scalable(
            topic, SUBSCRIPTION, name, consumer_id=consumer_id
        )
        consumer = cls(session, name)
        await consumer._follow(assignment)
        return consumer

    async def until(self, wanted: set[int]) -> None:
        """Follow assignments until it is this one."""
        while set(self.consumers) != wanted:
            await self._follow(await self._next())

    async def until_shared(self, *segments: int) -> None:
        """Follow assignments until it shares these segments, and no other."""
        while {each for each, ranges in self.buckets.items() if ranges} != set(segments):
            await self._follow(await self._next())

    async def told(self, wanted: set[int]) -> None:
        """Wait for this assignment without following it."""
        while ids(await self._next()) != wanted:
            pass

    async def leave(self) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE, then close."""
        await self.session.client.unsubscribe_scalable(self.session)
        await self.close_all()

    async def close_all(self) -> None:
        """Close the consumers of all segments."""
        for segment_id in list(self.consumers):
            await self.consumers.pop(segment_id).close()

    async def _next(self) -> pb.ScalableConsumerAssignment:
        update = await self.session.next()
        return update.scalable_topic_assignment_update.assignment

    async def _follow(self, assignment: pb.ScalableConsumerAssignment) -> None:
        buckets = {
            segment.segment_id: [(each.start, each.end) for each in segment.bucket_ranges]
            for segment in assignment.segments
        }
        for segment_id in list(self.consumers):
            if buckets.get(segment_id) != self.buckets[segment_id]:
                await self.consumers.pop(segment_id).close()
        self.buckets = buckets
        for segment in assignment.segments:
            if segment.segment_id not in self.consumers:
                options = pb.CommandSubscribe(
                    consumer_name=f"{self.name}-seg-{segment.segment_id}",
                    initial_position=pb.CommandSubscribe.Earliest,
                )
                for start, end in buckets[segment.segment_id]:
                    options.sub_type = pb.CommandSubscribe.Key_Shared
                    options.key_shared_meta.key_shared_mode = pb.STICKY
                    options.key_shared_meta.entryBucketDispatch = True
                    options.key_shared_meta.hash_ranges.add(start=start, end=end)
                self.consumers[segment.segment_id] = await self.session.client.subscribe(
                    segment.segment_topic, SUBSCRIPTION, options, permits=100
                )
