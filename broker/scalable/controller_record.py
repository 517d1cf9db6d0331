"""Who controls a topic, as Pulsar's tools see it: its ephemeral record `.../controller`.

Rules:

- A claim hangs on a session with the store.  When that was lost (the process stood still for too
  long) another one is opened, and claims are made anew as they are needed; who does not hold the
  claim assigns nothing.
- With several brokers who leads is decided before (see `topic_leadership`): the record tells of
  it, and one that an earlier leader left is overwritten.
"""

import asyncio
import json

import structlog

from broker.placement import PlacementNotReady
from broker.scalable.host import ScalableHost
from broker.scalable.records import controller_path
from broker.scalable.topic_leadership import NotController
from magnetar.protocol.names import TopicName
from storage.metadata.election import Election
from storage.metadata.store import Record, Session, SessionLost

log = structlog.get_logger(__name__)


class ControllerRecord:
    """The claims of this broker, each the record of one topic; see the module's rules."""

    def __init__(self, broker: ScalableHost) -> None:
        self._broker = broker
        self._held: dict[TopicName, Session] = {}
        self._session = broker.session
        self._opening = asyncio.Lock()
        self._value = json.dumps(broker.broker_id).encode()
        self._election = Election(broker.metadata, self._value, self._is_ours)

    async def claim(self, name: TopicName) -> None:
        """Show that this broker leads the topic.

        Raises `NotController`; `PlacementNotReady` among several brokers, if their session is lost
        meanwhile or for good, and `SessionLost` on one broker.
        """
        session = await self._live_session()
        if self._held.get(name) is session:
            return
        if self._broker.placement.shared:
            await self._show(name, session)
        else:
            await self._stand(name, session)
        self._held[name] = session

    async def _stand(self, name: TopicName, session: Session) -> None:
        key = controller_path(name)
        outcome = await self._election.stand(key, session)
        if outcome.found is not None:
            raise NotController(
                f"{name} is led by {outcome.found.value.decode(errors='replace')}: look its layout "
                "up again and ask the controller named there."
            )
        if not outcome.won:
            # The record went, or was put again: by a session of ours, as no other broker is there.
            await self._election.overwrite(key, session)

    def _is_ours(self, record: Record) -> bool:
        return record.value == self._value

    async def _show(self, name: TopicName, session: Session) -> None:
        try:
            await self._election.overwrite(controller_path(name), session)
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

    async def _live_session(self) -> Session:
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
