"""Who controls a topic: the one broker that holds its ephemeral record `.../controller`.

Rules: a claim hangs on this process's session with the store.  When that was lost (the process
stood still for too long) another one is opened, and claims are made anew as they are needed; who
does not hold the claim assigns nothing.
"""

import asyncio
import json
from typing import TYPE_CHECKING, ClassVar

import structlog

from broker.scalable.records import controller_path
from config.bounds import SESSION_TIMEOUT_MS
from protocol.names import TopicName
from protocol.server_error import PeerError, ServerError
from storage.metadata.store import ABSENT, VersionConflict

if TYPE_CHECKING:
    from broker.service import Broker
    from storage.metadata.store import Session

log = structlog.get_logger(__name__)


class NotController(PeerError):
    """Another broker assigns this topic's segments."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class Leadership:
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._held: dict[TopicName, Session] = {}
        self._session = broker.session
        self._opening = asyncio.Lock()

    async def claim(self, name: TopicName) -> None:
        """Lead the topic.  Raises `NotController`, `SessionLost`."""
        session, metadata = await self._live_session(), self._broker.metadata
        if self._held.get(name) is session:
            return
        path = controller_path(name)
        value = json.dumps(self._broker.broker_id).encode()
        try:
            await metadata.put(path, value, expect=ABSENT, session=session)
        except VersionConflict:
            found = await metadata.get(path)
            if found is not None and found.value != value:
                raise NotController(
                    f"{name} is led by {found.value.decode(errors='replace')}: look its layout "
                    "up again and ask the controller named there."
                ) from None
            # Our own, of a session that has not expired yet: it hangs on this one now.
            await metadata.put(path, value, session=session)
        self._held[name] = session

    async def stop(self) -> None:
        """Give up what is led, if that does not end with the process's own session."""
        self._held.clear()
        if self._session is not self._broker.session:
            await self._session.close()

    async def _live_session(self) -> "Session":
        async with self._opening:
            if self._session.lost:
                log.warning("session_lost", next="opening another one")
                self._session = await self._broker.metadata.open_session(
                    timeout_ms=SESSION_TIMEOUT_MS, identity=self._broker.broker_id
                )
            return self._session

    def forget(self, name: TopicName) -> None:
        """The topic is gone, and its record with it."""
        self._held.pop(name, None)
