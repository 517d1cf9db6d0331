"""The election of the broker that balances load.

The leader holds Pulsar's ephemeral record `/loadbalance/leader`, JSON.
"""

import asyncio
import json

import structlog

from broker.placement.placement import BrokerAddress
from config.bounds import PLACEMENT_RETRY_MAX_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.election import Election, KnownLeaders
from storage.metadata.store import Event, MetadataStore, Record, Session
from storage.metadata.watch_follower import WatchFollower

log = structlog.get_logger(__name__)

LEADER = "/loadbalance/leader"


class BalanceElection:
    """This broker's part in the election of the leader that balances load.

    Every broker stands when it has a session, and again whenever the record goes.  Two brokers that
    both think they lead move some topics twice, and do no other harm.
    """

    def __init__(self, metadata: MetadataStore, me: BrokerAddress) -> None:
        self._metadata = metadata
        self._me = me
        self._session: Session | None = None
        self._election = Election(metadata, _encode(me), self._may_replace)
        self._leaders = KnownLeaders[str, BrokerAddress](me)
        self._following = WatchFollower(lambda: metadata.watch_key(LEADER), self._read, self._take)
        self._tasks = BackgroundTasks(log)

    @property
    def known(self) -> BrokerAddress | None:
        """The leader, as far as it is known here; None while there is none."""
        return self._leaders.leaders.get(LEADER)

    @property
    def is_me(self) -> bool:
        """Whether this broker leads, and its session lives."""
        session = self._session
        return session is not None and not session.lost and self.known == self._me

    def start(self) -> None:
        """Follow the record, and stand whenever there is no leader."""
        self._tasks.keep("leader", self._following.run)

    async def stop(self) -> None:
        """Stand no more.  A record of this broker goes with its session."""
        await self._tasks.stop()
        self._following.close()

    def session_lost(self) -> None:
        """Take in that the session was lost, and the lead with it."""
        self._session = None
        self._leaders.lose([LEADER], all_of_them=False)

    def stand(self, session: Session) -> None:
        """Lead under this session if nobody does; retry while the store fails."""
        self._session = session
        self._tasks.see_through("leadership", self._stand_until_answered)

    async def _read(self) -> None:
        await self._apply(await self._metadata.get(LEADER))

    async def _take(self, event: Event) -> None:
        await self._apply(event.record)

    async def _apply(self, record: Record | None) -> None:
        leader = None if record is None else _decode(record)
        self._leaders.note_leader(LEADER, leader)
        # A record with this broker's id may be an earlier process's, which is taken over.
        if leader is None or leader.broker_id == self._me.broker_id:
            await self._stand_until_answered()

    async def _stand_until_answered(self) -> None:
        while (session := self._session) is not None and not session.lost:
            try:
                await self._stand(session)
            except MagnetarError as error:
                log.warning("leader_not_elected", error=str(error))
                await asyncio.sleep(PLACEMENT_RETRY_MAX_S)
            else:
                return

    async def _stand(self, session: Session) -> None:
        since = self._leaders.events()
        outcome = await self._election.stand_if_vacant(LEADER, session)
        if outcome.found is not None:
            self._leaders.learn({LEADER: _decode(outcome.found)}, since)
        elif outcome.won and session is self._session:
            self._leaders.learn({LEADER: self._me}, since)
            log.info("broker_leads")

    def _may_replace(self, record: Record) -> bool:
        # An unreadable record names no leader: it is replaced.
        leader = _decode(record)
        return leader is None or (leader.broker_id == self._me.broker_id and not self.is_me)


def _encode(address: BrokerAddress) -> bytes:
    value = {
        "serviceUrl": address.web_url_for(tls=False),
        "brokerId": address.broker_id,
        "pulsarServiceUrl": address.url or None,
        "pulsarServiceUrlTls": address.url_tls,
        "serviceUrlTls": address.web_url_tls,
    }
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(record: Record) -> BrokerAddress | None:
    """The leader in a record; None if the record is unreadable, which is logged."""
    try:
        value = json.loads(record.value)
        tls, web_tls = value.get("pulsarServiceUrlTls"), value.get("serviceUrlTls")
        web_url = str(value["serviceUrl"])
        return BrokerAddress(
            str(value.get("pulsarServiceUrl") or ""),
            tls if isinstance(tls, str) else None,
            # Without a plain port it is the address with TLS.
            web_url if web_url != web_tls else "",
            str(value["brokerId"]),
            web_tls if isinstance(web_tls, str) else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.error("leader_record_unreadable", error=repr(error))
        return None
