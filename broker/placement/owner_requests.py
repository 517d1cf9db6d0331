"""Typed requests to the owners of names: sent to the owner, this broker or another, and served."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import structlog

from broker.placement.peer_failed import PeerFailed
from broker.placement.placement import BrokerAddress, OwnedElsewhere, Placement
from broker.placement.typed_request import MalformedRequest, Request
from config.bounds import (
    ADMIN_SESSION_WAIT_S,
    OWNER_HOPS,
    OWNER_REQUEST_S,
    OWNER_RETRY_PAUSE_S,
    OWNER_TRIES,
)
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import InternalError, MagnetarError, PeerError, ServerError

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
H = TypeVar("H")
H_contra = TypeVar("H_contra", contravariant=True)
log = structlog.get_logger(__name__)


class OwnerUnavailable(PeerError):
    """The broker that was asked does not serve the name now, or does not answer."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class OwnerFailed(InternalError):
    """The owner of a name failed on a request.  `owner_code` is the code of its error, if known."""

    def __init__(self, message: str, owner_code: ServerError | None = None) -> None:
        super().__init__(message)
        self.owner_code = owner_code


@dataclass(frozen=True, slots=True)
class OwnedRequest(Request[H_contra, A_co]):
    """A request to the owner of a name.

    Every request may be sent twice: its answer may be lost with a connection.
    """

    @property
    @abstractmethod
    def owned(self) -> TopicName:
        """The request goes to the owner of this name."""


class OwnerRequests(Generic[H]):
    """Has the owner of a name, this broker or another, carry out requests.

    A single broker carries every request out itself.  Among several the owner does, or the broker
    that would be chosen to own the name now.
    """

    def __init__(
        self,
        placement: Placement,
        host: H,
        errors: Mapping[ServerError, type[MagnetarError]],
        *,
        retry_pause_s: float = OWNER_RETRY_PAUSE_S,
    ) -> None:
        """`host` carries requests out here.  `errors` are by code the same at both brokers."""
        self._placement = placement
        self._host = host
        self._errors = errors
        self._retry_pause_s = retry_pause_s

    async def ask(self, request: OwnedRequest[H, A]) -> A:
        """Have the owner carry a request out.

        The owner is looked up again after an error with SERVICE_NOT_READY, which is raised after
        OWNER_TRIES.  Raises what the request raises, and `OwnerFailed`.
        """
        if not self._placement.shared:
            return await request.run(self._host)
        for tried in range(1, OWNER_TRIES):
            try:
                return await self._ask_owner(request)
            except MagnetarError as error:
                if error.code is not ServerError.SERVICE_NOT_READY:
                    raise
                log.debug(
                    "owner_asked_again",
                    name=str(request.owned),
                    request=request.KIND,
                    error=str(error),
                )
            await asyncio.sleep(self._retry_pause_s * tried)
        return await self._ask_owner(request)

    async def serve(self, request: OwnedRequest[H, A]) -> A:
        """Carry out a request of another broker, which has looked up or chosen this one.

        Raises `OwnedElsewhere`, `PlacementNotReady`, and what the request raises.
        """
        placement = self._placement
        if placement.shared:
            # Without a session this broker can take nothing: wait for the next one.
            with suppress(TimeoutError):
                async with asyncio.timeout(ADMIN_SESSION_WAIT_S):
                    await placement.live_session()
        placed = placement.place(request.owned, authoritative=True)
        if not placed.here:
            owner_id = placed.address.broker_id
            raise OwnedElsewhere(
                f"{request.owned} is not served by {placement.broker_id}: ask {owner_id}.",
                owner_id,
            )
        return await request.run(self._host)

    async def _ask_owner(self, request: OwnedRequest[H, A]) -> A:
        placement = self._placement
        owner = placement.owner_of(request.owned)
        for _ in range(OWNER_HOPS):
            if owner.broker_id == placement.broker_id:
                return await request.run(self._host)
            try:
                return await placement.ask(owner, request, timeout_s=OWNER_REQUEST_S)
            except PeerFailed as failure:
                # It may know the owner before this broker does.
                named = placement.brokers.get(failure.owner_id)
                if named is None:
                    raise self._error(owner, failure) from failure
                owner = named
            except MalformedRequest as error:
                raise _failed(owner, str(error)) from error
        raise OwnerUnavailable(
            f"Brokers take each other for the owner of {request.owned}: try again."
        )

    def _error(self, owner: BrokerAddress, failure: PeerFailed) -> MagnetarError:
        """Return the error that a failure of the owner is at this broker."""
        code = failure.error_code
        if code in (None, ServerError.SERVICE_NOT_READY):
            return OwnerUnavailable(f"{owner.broker_id} does not serve it: {failure}")
        try:
            known = ServerError(code) if isinstance(code, int) else None
        except ValueError:  # of a later version
            known = None
        same = None if known is None else self._errors.get(known)
        return _failed(owner, str(failure), known) if same is None else same(str(failure))


def _failed(
    owner: BrokerAddress, reason: str, owner_code: ServerError | None = None
) -> OwnerFailed:
    return OwnerFailed(f"{owner.broker_id} could not do it: {reason} Try again.", owner_code)
