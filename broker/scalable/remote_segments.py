"""Segments that other brokers own: the door's other side, over their REST interface.

    /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}
        GET, GET ?load=false     what is told of it (ours); DELETE; POST /terminate
        GET  /stats              what is counted there (ours)
        PUT                      /offload (ours)
        GET                      /offload/manifest (ours)
        POST                     /offload/dropHot (ours)
        PUT, DELETE              /subscription/{name}
        POST                     /subscription/{name}/seek, /skip-all

Rules:

- Paths and methods are Pulsar's where it has them; what is ours is marked.  An error's body has the
  error's code beside its sentence, and becomes the same error here.
- Positions are EARLIEST and LATEST, as they mean the same on every broker; any other is refused.
- Calls are authoritative: whoever asks has looked up, or chosen, the owner.
- `SegmentAway` says that the broker could not be asked, or serves it no longer: ask the next owner.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar
from urllib.parse import quote

from broker.dispatch.errors import ConsumerBusy
from broker.placement import BrokerAddress, Placement
from broker.placement.peer_failed import PeerFailed
from broker.scalable.segment_view import MalformedView, Members, SegmentView, view_from_json
from broker.topic import SubscriptionNotFound, TopicNotFound
from config.bounds import SEGMENT_CALL_S
from protocol.ids import EARLIEST, LATEST, Position
from protocol.names import SegmentName
from protocol.server_error import InternalError, MagnetarError, PeerError, ServerError

SEGMENTS_PATH = "/admin/v2/segments"
FEED_PATH = "/admin/v2/segment-feed"
"""Ours: a WebSocket."""
_NAMES = {EARLIEST: "earliest", LATEST: "latest"}


class SegmentAway(PeerError):
    """The broker asked does not serve the segment now: ask its owner."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class IllegalSegmentPosition(InternalError):
    """A position that means something on its segment's owner only."""


class SegmentCallFailed(InternalError):
    """The owner of a segment could not do it."""


def path_of(segment: SegmentName) -> str:
    """Where a segment is in REST."""
    parent = segment.parent
    parts = (parent.tenant, parent.namespace, parent.local_name, segment.descriptor)
    return "/".join((SEGMENTS_PATH, *(quote(part, safe="") for part in parts)))


class RemoteSegments:
    """The brokers that can be asked."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def at(self, owner: BrokerAddress) -> "RemoteHost":
        """The segments of one of them."""
        return RemoteHost(self._placement, owner)


class RemoteHost:
    """A `SegmentHost` that asks one broker."""

    def __init__(self, placement: Placement, owner: BrokerAddress) -> None:
        self._placement = placement
        self._owner = owner

    async def view(self, segment: SegmentName) -> SegmentView:
        """See `SegmentHost`."""
        return self._view(await self._ask("GET", path_of(segment)))

    async def view_of_running(self, segment: SegmentName) -> SegmentView | None:
        """See `SegmentHost`."""
        members = await self._ask("GET", path_of(segment), {"load": "false"})
        return None if members == {} else self._view(members)

    async def create_subscription(
        self, segment: SegmentName, name: str, start: Position, properties: Mapping[str, str]
    ) -> None:
        """See `SegmentHost`."""
        await self._ask(
            "PUT", _subscription(segment, name), {"start": _name_of(start)}, dict(properties)
        )

    async def delete_subscription(self, segment: SegmentName, name: str, *, force: bool) -> None:
        """See `SegmentHost`."""
        query = {"force": "true"} if force else {}
        await self._ask("DELETE", _subscription(segment, name), query)

    async def seek(self, segment: SegmentName, name: str, position: Position) -> None:
        """See `SegmentHost`."""
        if _name_of(position) == "latest":
            await self._ask("POST", _subscription(segment, name) + "/skip-all")
        else:
            await self.seek_to_time(segment, name, 0)

    async def seek_to_time(self, segment: SegmentName, name: str, timestamp_ms: int) -> None:
        """See `SegmentHost`.  Time 0 is EARLIEST."""
        path = _subscription(segment, name) + "/seek"
        await self._ask("POST", path, {"timestamp": str(timestamp_ms)})

    async def seal(self, segment: SegmentName) -> None:
        """See `SegmentHost`."""
        await self._ask("POST", path_of(segment) + "/terminate")

    async def delete(self, segment: SegmentName) -> None:
        """See `SegmentHost`."""
        await self._ask("DELETE", path_of(segment), {"force": "true"})

    async def stats(self, segment: SegmentName) -> Members:
        """See `SegmentHost`."""
        members = await self._ask("GET", path_of(segment) + "/stats")
        if not isinstance(members, dict):
            raise self._failed(f"answered {members!r}")
        return members

    async def offload(self, segment: SegmentName, url: str | None) -> None:
        """See `SegmentHost`."""
        query = {} if url is None else {"url": url}
        await self._ask("PUT", path_of(segment) + "/offload", query)

    async def offload_manifest(self, segment: SegmentName) -> Members:
        """See `SegmentHost`."""
        members = await self._ask("GET", path_of(segment) + "/offload/manifest")
        if not isinstance(members, dict):
            raise self._failed(f"answered {members!r}")
        return members

    async def drop_hot(self, segment: SegmentName, ledger_ids: Sequence[int] | None) -> list[int]:
        """See `SegmentHost`."""
        body = None if ledger_ids is None else list(ledger_ids)
        dropped = await self._ask("POST", path_of(segment) + "/offload/dropHot", body=body)
        return [int(each) for each in dropped] if isinstance(dropped, list) else []

    async def _ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None
    ) -> object:
        query = {**(query or {}), "authoritative": "true"}
        try:
            return await self._placement.call(
                self._owner, method, path, query, body=body, timeout_s=SEGMENT_CALL_S
            )
        except PeerFailed as failure:
            raise self._error(failure) from failure

    def _error(self, failure: PeerFailed) -> MagnetarError:
        code = failure.error_code
        if code == ServerError.TOPIC_NOT_FOUND:
            return TopicNotFound(str(failure))
        if code == ServerError.SUBSCRIPTION_NOT_FOUND:
            return SubscriptionNotFound(str(failure))
        if code == ServerError.CONSUMER_BUSY:
            return ConsumerBusy(str(failure))
        if code in (None, ServerError.SERVICE_NOT_READY):
            return SegmentAway(f"{self._owner.broker_id} does not serve it: {failure}")
        return self._failed(str(failure))

    def _view(self, members: object) -> SegmentView:
        try:
            return view_from_json(members)
        except MalformedView as error:
            raise self._failed(str(error)) from error

    def _failed(self, reason: str) -> SegmentCallFailed:
        return SegmentCallFailed(f"{self._owner.broker_id} could not do it: {reason} Try again.")


def _subscription(segment: SegmentName, name: str) -> str:
    return f"{path_of(segment)}/subscription/{quote(name, safe='')}"


def _name_of(position: Position) -> str:
    name = _NAMES.get(position)
    if name is None:
        raise IllegalSegmentPosition(
            f"{position} cannot be asked of another broker: give EARLIEST or LATEST, or a time."
        )
    return name
