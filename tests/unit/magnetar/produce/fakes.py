"""Messages and segments for tests of producing."""

from typing import TYPE_CHECKING

from magnetar.layout import Layout, Segment
from magnetar.produce.outgoing import OutgoingMessage

if TYPE_CHECKING:
    from magnetar.message_id import MessageId


class Result:
    """An outcome, without a loop."""

    def __init__(self) -> None:
        self.result: MessageId | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def set_result(self, result: "MessageId", /) -> None:
        assert not self.done()
        self.result = result

    def set_exception(self, exception: BaseException, /) -> None:
        assert not self.done()
        self.error = exception


class Wait:
    """Something awaited, without a loop."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


def outgoing(
    payload: bytes = b"payload",
    *,
    key: str | None = None,
    bucket_hash: int = 0,
    sequence_id: int | None = None,
    txn: tuple[int, int] | None = None,
    deliver_at_ms: int | None = None,
) -> OutgoingMessage:
    """A message."""
    message = OutgoingMessage(
        Result(),
        payload,
        None if key is None else key.encode(),
        bucket_hash,
        sequence_id=sequence_id,
        deliver_at_ms=deliver_at_ms,
    )
    message.txn = txn
    return message


def segment(
    segment_id: int,
    start: int = 0,
    end: int = 65535,
    *,
    active: bool = True,
    parents: tuple[int, ...] = (),
    legacy: bool = False,
    splits: tuple[int, ...] = (),
) -> Segment:
    """A segment; its topic has its id at the end."""
    return Segment(
        segment_id=segment_id,
        hash_start=start,
        hash_end=end,
        active=active,
        parent_ids=parents,
        child_ids=(),
        topic=f"segment://public/default/t/{start:04x}-{end:04x}-{segment_id}",
        legacy=legacy,
        bucket_splits=splits,
    )


def layout(epoch: int, *segments: Segment) -> Layout:
    """A layout."""
    return Layout(epoch, segments)
