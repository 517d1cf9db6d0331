"""The ephemeral record `.../controller` that shows Pulsar's tools the leader of a topic."""

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
    """Keeps the controller records of the topics that this broker leads.

    A record belongs to a session with the store, and goes with it.  After a lost session it is put
    again when it is next claimed.

    Several brokers decide by placement who leads (see `topic_leadership`): the record only shows
    it, and one of an earlier leader is overwritten.  On a single broker the record itself decides.
    """

    def __init__(self, broker: ScalableHost) -> None:
        self._broker = broker
        self._held: dict[TopicName, Session] = {}
        self._session = broker.session
        self._opening = asyncio.Lock()
        self._value = json.dumps(broker.broker_id).encode()
        self._election = Election(broker.metadata, self._value, self._is_ours)

    async def claim(self, name: TopicName) -> None:
        """Put the record of a topic, unless it is there under the live session.

        Raises `NotController` if another broker leads; among several brokers `PlacementNotReady`,
        when the session is lost meanwhile or for good; on a single broker `SessionLost`.
        """
        session = await self._live_session()
        if self._held.get(name) is session:
            return
        if self._broker.placement.shared:
            await self._overwrite(name, session)
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
            # The record was deleted or put again, by this broker, as there is no other one.
            await self._election.overwrite(key, session)

    def _is_ours(self, record: Record) -> bool:
        return record.value == self._value

    async def _overwrite(self, name: TopicName, session: Session) -> None:
        try:
            await self._election.overwrite(controller_path(name), session)
        except SessionLost as error:
            raise PlacementNotReady(
                "This broker has just lost its session with the metadata store, and what it led: "
                "look the topic's layout up again."
            ) from error

    async def stop(self) -> None:
        """Give up all records; those under the process's own session go with that."""
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
        """Forget the record of a topic that is gone or is not led any more."""
        self._held.pop(name, None)
