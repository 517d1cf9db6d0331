"""`RemoteTopic`: the layout of a scalable topic in another cluster, as it changes."""

from broker.replication.cluster_producer import require_segments_taken, schema_version_at
from broker.replication.errors import RemoteRefused, refusal
from broker.replication.segment_plan import RemoteLayout, RemoteSegment
from config.bounds import REPLICATION_RETRY_MAX_S, REPLICATION_RETRY_MIN_S
from magnetar.context import ClientContext
from magnetar.errors import BrokerError, MagnetarError, TopicNotFound
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.pulsar_pb2 import Schema
from magnetar.wire.attachment import is_retriable
from magnetar.wire.connection import Connection


class TopicFollower:
    """Follows the layout of a remote topic.  Only `make_topic` waits.

    This class itself does nothing: a closed `RemoteTopic` has it.
    """

    async def make_topic(self) -> None:
        """Create the topic at the other cluster, or raise why it cannot be."""

    def layout_changed(self, *, anew: bool) -> None:
        """The layout is another one; `anew`: the topic was deleted and created again."""

    def refused(self, error: MagnetarError) -> None:
        """The layout is not known for this reason; it is asked for again."""

    def failed(self, error: Exception) -> None:
        """The layout is not asked for again, because of a defect: begin anew."""


class RemoteTopic(LayoutWatch):
    """Follows the layout of one topic in another cluster, and has it made there if it is missing.

    Whatever the other cluster refuses is tried again after a pause, which grows.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        cluster: str,
        follower: TopicFollower,
    ) -> None:
        super().__init__(context, topic, create_if_missing=False)
        rng = context.rng
        self._backoff = Backoff(
            REPLICATION_RETRY_MIN_S, REPLICATION_RETRY_MAX_S, lambda: rng.uniform(0.5, 1)
        )
        self.cluster = cluster
        self.name = topic
        self._follower = follower
        self._before: Layout | None = None
        self._forget = self.on_change(self._changed)

    @property
    def segments(self) -> RemoteLayout:
        """The ACTIVE segments there.  Raises `AlreadyClosed` before `layout_changed`."""
        layout = self.layout
        return RemoteLayout(
            layout.epoch,
            tuple(
                RemoteSegment(each.segment_id, each.hash_start, each.hash_end, each.bucket_splits)
                for each in layout.active
            ),
        )

    async def schema_version(self, schema: Schema) -> bytes:
        """The version of a schema there, where it is added if it is missing.

        Raises `RemoteRefused`, also while it is not attached, and errors of the connection.
        """
        connection = self.connection
        if connection is None:
            raise RemoteRefused(f"{self.describe()} is not known: wait for it.")
        return await schema_version_at(connection, self.cluster, self.name, self.describe(), schema)

    def describe(self) -> str:
        """The name used in errors."""
        return f"The layout of {self.name} in cluster {self.cluster!r}"

    async def find(self) -> Connection:
        """A connection to a broker that serves the topic."""
        try:
            return await self.context.pool.of_topic(self.name)
        except MagnetarError as error:
            raise await self._judge(error) from error

    async def attach(self, connection: Connection) -> None:
        """See `LayoutWatch`.  Raises `RemoteRefused`."""
        try:
            require_segments_taken(connection, self.cluster)
        except RemoteRefused as error:
            raise self._refused(error) from None
        try:
            await super().attach(connection)
        except MagnetarError as error:
            raise await self._judge(error) from error

    def attached(self) -> None:
        """Tell the follower the first layout."""
        if self._before is None:
            self._changed(self.layout)

    def again(self, error: MagnetarError) -> None:
        """See `Attachment`.  Nothing ends it for good."""
        super().again(error if is_retriable(error) else self._refused(error))

    def failed(self, error: MagnetarError) -> None:
        """Tell the follower: this is a defect."""
        self._follower.failed(error.__cause__ if isinstance(error.__cause__, Exception) else error)

    async def close(self) -> None:
        """See `Attachment`."""
        self._forget()
        try:
            await super().close()
        finally:
            # The follower has it, and so have the frames of the last error.
            self._follower, self.error = TopicFollower(), None

    def _changed(self, layout: Layout) -> None:
        if any(each.legacy for each in layout.active):
            ordinary = RemoteRefused(
                f"{self.name} is still an ordinary topic in cluster {self.cluster!r}: migrate it "
                "there, or delete it there."
            )
            self.again(self._refused(ordinary))
            return
        if self.connection is None and self._before is None:
            return  # `attached` tells it
        before, self._before = self._before, layout
        anew = before is not None and layout.is_anew_after(before)
        self._follower.layout_changed(anew=anew)

    async def _judge(self, error: MagnetarError) -> MagnetarError:
        """Make the topic if it is missing; returns the error that the attempt raises."""
        if isinstance(error, TopicNotFound):
            try:
                await self._follower.make_topic()
            except MagnetarError as failure:
                return self._refused(failure)
            return RemoteRefused(f"{self.name} was made in cluster {self.cluster!r}: ask again.")
        if isinstance(error, BrokerError) and is_retriable(error):
            return error
        return self._refused(error)

    def _refused(self, error: MagnetarError) -> RemoteRefused:
        # Nothing is given up, whatever fails: the record, a file or the other cluster may be
        # mended.
        refused = refusal(self.cluster, error.with_traceback(None))
        self._follower.refused(refused)
        return refused
