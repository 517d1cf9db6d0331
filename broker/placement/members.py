"""The live brokers: an ephemeral record for each, with its addresses and its load.

Rules:

- Records are Pulsar's, `/loadbalance/brokers/<broker id>`, JSON; what only we need is under
  `properties`, as Pulsar leaves room for there.
- Each start of a broker is another *incarnation*.  A record of this id by an earlier one is taken
  over; one by a later one means that this process is superseded: it owns nothing any more.
- The watch is taken before the records are read; a resync, and a watch that broke, read them again
  and compare.
- A record that cannot be read is logged, and its broker is not there for us.
"""

import asyncio
import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from broker.placement.placement import BrokerAddress
from config.bounds import RECORD_CHANGE_TRIES
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import (
    ABSENT,
    Event,
    MetadataError,
    MetadataStore,
    Record,
    Session,
    VersionConflict,
)
from storage.metadata.watch_follower import WatchFollower
from storage.supervised import Supervised

log = structlog.get_logger(__name__)

BROKERS = "/loadbalance/brokers"
_STATE = "magnetar.state"
_INCARNATION = "magnetar.incarnation"
_LOAD_MANAGER = "magnetar.placement"


class MemberState(enum.Enum):
    """What a broker does with topics that nobody owns."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a broker is.  Rates are of one second; `cpu` is the share of one core."""

    cpu: float = 0.0
    messages_in: float = 0.0
    bytes_in: float = 0.0
    messages_out: float = 0.0
    bytes_out: float = 0.0
    topics: int = 0

    def differs(self, other: "Load", share: float) -> bool:
        """Whether any number moved by more than this share of the larger one, and noticeably."""
        pairs = (
            (self.cpu, other.cpu, 0.05),
            (self.messages_in, other.messages_in, 10.0),
            (self.bytes_in, other.bytes_in, 10_000.0),
            (self.messages_out, other.messages_out, 10.0),
            (self.bytes_out, other.bytes_out, 10_000.0),
            (self.topics, other.topics, 0.0),
        )
        return any(abs(a - b) > max(least, share * max(a, b)) for a, b, least in pairs)


@dataclass(frozen=True, slots=True)
class Member:
    """One broker as its record tells."""

    address: BrokerAddress
    incarnation: str
    state: MemberState = MemberState.STARTING
    load: Load = field(default_factory=Load)
    version: str = ""
    started_ms: int = 0


class Superseded(MetadataError):
    """A later process has this broker's id."""


class Members:
    """The live brokers, followed by a watch, and this broker's own ephemeral record among them.

    `me` changes by `update`.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        me: Member,
        changed: Callable[[], None],
        superseded: Callable[[], None],
    ) -> None:
        """`changed`: brokers came, went, or changed; `superseded`: this one was."""
        self.me = me
        self._metadata = metadata
        self._changed = changed
        self._superseded = superseded
        self._others: dict[str, Member] = {}
        self._session: Session | None = None
        self._version = ABSENT
        self._entered = False
        self._writing = asyncio.Lock()
        self._following = WatchFollower(
            lambda: metadata.watch_children(BROKERS), self._list, self._take
        )
        self._tasks = Supervised()

    @property
    def live(self) -> Mapping[str, Member]:
        """By broker id, with this one while its session lives."""
        if self._session is None or self._session.lost:
            return self._others
        return {**self._others, self.me.address.broker_id: self.me}

    def address_of(self, broker_id: str) -> BrokerAddress | None:
        """Where a live broker is reached."""
        if broker_id == self.me.address.broker_id:
            return self.me.address
        found = self._others.get(broker_id)
        return None if found is None else found.address

    def state_of(self, broker_id: str) -> MemberState | None:
        """What a broker does, None when it is not there."""
        found = self.live.get(broker_id)
        return None if found is None else found.state

    async def start(self) -> None:
        """Read who is there and follow it.  Raises `MetadataError`."""
        await self._following.begin()
        self._tasks.keep("brokers", self._following.run)

    async def stop(self) -> None:
        """Follow nothing more.  The record goes with its session."""
        await self._tasks.stop()
        self._following.close()

    # This one

    async def enter(self, session: Session) -> None:
        """Put this broker's record under a session.  Raises `Superseded`, `MetadataError`."""
        async with self._writing:
            self._version = ABSENT
            await self._put(session)
            self._session = session
        self._changed()

    def left(self) -> None:
        """The session was lost, and the record with it."""
        self._session = None
        self._changed()

    async def update(self, *, state: MemberState | None = None, load: Load | None = None) -> None:
        """Tell the others.  Raises `Superseded`, `MetadataError`."""
        self.me = replace(self.me, state=state or self.me.state, load=load or self.me.load)
        if self._session is not None:
            async with self._writing:
                if self._session is not None:
                    await self._put(self._session)
        self._changed()

    async def _put(self, session: Session) -> None:
        key = member_key(self.me.address.broker_id)
        for _ in range(RECORD_CHANGE_TRIES):
            value = encode_member(self.me)
            try:
                put = await self._metadata.put(key, value, expect=self._version, session=session)
            except VersionConflict:
                await self._settle_conflict(key)
                continue
            self._version, self._entered = put.version, True
            return
        raise MetadataError(f"The record {key} changes all the time: look who else writes it.")

    async def _settle_conflict(self, key: str) -> None:
        """Whose record it is: an earlier process's, ours by an unknown outcome, a later one's."""
        record = await self._metadata.get(key)
        found = None if record is None else decode_member(record)
        if record is None:
            self._version = ABSENT
        elif found is None or found.incarnation == self.me.incarnation or not self._entered:
            self._version = record.version
        else:
            raise Superseded(
                f"Another process has the id {self.me.address.broker_id} now: give each broker "
                "its own advertised_host and http_port, and stop this one."
            )

    # The others

    async def _list(self) -> None:
        records = await self._metadata.scan(*children_range(BROKERS))
        mine, others = self.me.address.broker_id, dict[str, Member]()
        for record in records:
            if name_of(record.key) == mine:
                await self._look_at_own(record)
            elif (member := decode_member(record)) is not None:
                others[member.address.broker_id] = member
        if others != self._others:
            self._others = others
            self._changed()

    async def _take(self, event: Event) -> None:
        broker_id = name_of(event.key)
        if broker_id == self.me.address.broker_id:
            await self._look_at_own(event.record)
            return
        member = None if event.record is None else decode_member(event.record)
        if member == self._others.get(broker_id):
            return
        if member is None:
            del self._others[broker_id]
            log.info("broker_gone", broker=broker_id)
        else:
            if broker_id not in self._others:
                log.info("broker_joined", broker=broker_id)
            self._others[broker_id] = member
        self._changed()

    async def _look_at_own(self, record: Record | None) -> None:
        """A later process with this id puts its record over ours; an event of old may say less."""
        member = None if record is None else decode_member(record)
        if not self._entered or member is None or member.incarnation == self.me.incarnation:
            return
        newest = await self._metadata.get(member_key(self.me.address.broker_id))
        member = None if newest is None else decode_member(newest)
        if member is not None and member.incarnation != self.me.incarnation:
            self._superseded()


def member_key(broker_id: str) -> str:
    """Where a broker's record is."""
    return f"{BROKERS}/{broker_id}"


def report_of(member: Member) -> dict[str, object]:
    """Pulsar's BrokerLookupData, with the load that its LocalBrokerData has."""
    address, load = member.address, member.load
    return {
        "webServiceUrl": address.web_url,
        "webServiceUrlTls": None,
        "pulsarServiceUrl": address.url,
        "pulsarServiceUrlTls": address.url_tls,
        "advertisedListeners": {},
        "protocols": {},
        "persistentTopicsEnabled": True,
        "nonPersistentTopicsEnabled": False,
        "loadManagerClassName": _LOAD_MANAGER,
        "startTimestamp": member.started_ms,
        "brokerVersion": member.version,
        "cpu": {"usage": round(load.cpu * 100, 1), "limit": 100.0},
        "msgRateIn": round(load.messages_in, 1),
        "msgRateOut": round(load.messages_out, 1),
        "msgThroughputIn": round(load.bytes_in, 1),
        "msgThroughputOut": round(load.bytes_out, 1),
        "numTopics": load.topics,
        "properties": {_STATE: member.state.value, _INCARNATION: member.incarnation},
    }


def encode_member(member: Member) -> bytes:
    """A broker's record."""
    return json.dumps(report_of(member), separators=(",", ":")).encode()


def decode_member(record: Record) -> Member | None:
    """None if it cannot be read, which is logged."""
    try:
        value = json.loads(record.value)
        properties = value["properties"]
        url_tls = value.get("pulsarServiceUrlTls")
        return Member(
            BrokerAddress(
                str(value["pulsarServiceUrl"]),
                url_tls if isinstance(url_tls, str) else None,
                str(value["webServiceUrl"]),
                name_of(record.key),
            ),
            str(properties[_INCARNATION]),
            MemberState(properties[_STATE]),
            Load(
                float(value["cpu"]["usage"]) / 100,
                float(value["msgRateIn"]),
                float(value["msgThroughputIn"]),
                float(value["msgRateOut"]),
                float(value["msgThroughputOut"]),
                int(value["numTopics"]),
            ),
            str(value.get("brokerVersion", "")),
            int(value.get("startTimestamp", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.error("broker_record_unreadable", key=record.key, error=repr(error))
        return None
