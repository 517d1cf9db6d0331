"""Who controls a topic, as Pulsar's tools see it: its ephemeral record `.../controller`.

Rules:

- A claim hangs on a session with the store.  When that was lost (the process stood still for too
  long) another one is opened, and claims are made anew as they are needed; who does not hold the
  claim assigns nothing.
- With several brokers who leads is decided before (see `leads`): the record tells of it, and one
  that an earlier leader left is overwritten.
"""

import asyncio
import json
from typing import TYPE_CHECKING

import structlog

from broker.placement import PlacementNotReady
from broker.scalable.leads import NotController
from broker.scalable.records import controller_path
from protocol.names import TopicName
from storage.metadata.store import ABSENT, SessionLost, VersionConflict

if TYPE_CHECKING:
    from broker.service import Broker
    from storage.metadata.store import Session

log = structlog.get_logger(__name__)


class Leadership:
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._held: dict[TopicName, Session] = {}
        self._session = broker.session
        self._opening = asyncio.Lock()

    async def claim(self, name: TopicName) -> None:
        """Show that this broker leads the topic.

        Raises `NotController`; `PlacementNotReady` among several brokers, if their session is lost
        meanwhile or for good, and `SessionLost` on one broker.
        """
        session, metadata = await self._live_session(), self._broker.metadata
        if self._held.get(name) is session:
            return
        path = controller_path(name)
        value = json.dumps(self._broker.broker_id).encode()
        try:
            if self._broker.placement.shared:
                await self._show(path, value, session)
            else:
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

    async def _show(self, path: str, value: bytes, session: "Session") -> None:
        try:
            await self._broker.metadata.put(path, value, session=session)
        except SessionLost as error:
            raise PlacementNotReady(
                "This broker has just lost its session with the metadata store, and what it led: "
                "look the topic's layout up again."
            ) from error

    async def stop(self) -> None:
        """Give up what is led, if that does not end with the process's own session."""
        self._held.clear()
        if not self._broker.placement.shared and self._session is not self._broker.session:
            await self._session.close()

    async def _live_session(self) -> "Session":
        if self._broker.placement.shared:
            return await self._broker.placement.live_session()
        async with self._opening:
            if self._session.lost:
                log.warning("session_lost", next="opening another one")
                self._session = await self._broker.metadata.open_session(
                    timeout_ms=self._broker.settings.metadata_store_session_timeout_ms,
                    identity=self._broker.broker_id,
                )
            return self._session

    def forget(self, name: TopicName) -> None:
        """The topic is gone, and its record with it."""
        self._held.pop(name, None)
