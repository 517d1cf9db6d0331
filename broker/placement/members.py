"""The live brokers: an ephemeral record for each, with its addresses and its load.

Records are Pulsar's, `/loadbalance/brokers/<broker id>`, JSON.
"""

import asyncio
import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from broker.placement.placement import BrokerAddress
from config.bounds import RECORD_CHANGE_TRIES
from magnetar.background_tasks import BackgroundTasks
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

log = structlog.get_logger(__name__)

BROKERS = "/loadbalance/brokers"
_STATE = "magnetar.state"
_INCARNATION = "magnetar.incarnation"
_LOAD_MANAGER = "magnetar.placement"


class MemberState(enum.Enum):
    """The state of a broker; only a SERVING one acquires topics without an owner."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a broker.  Rates are per second; `cpu` is in cores, 1.0 for one in full use."""

    cpu: float = 0.0
    messages_in: float = 0.0
    bytes_in: float = 0.0
    messages_out: float = 0.0
    bytes_out: float = 0.0
    topics: int = 0

    def differs(self, other: "Load", share: float) -> bool:
        """Whether any number differs by more than this share of the larger one.

        Each number also has to differ by a least amount, so that small loads make no noise.
        """
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
    """A live broker, as its record describes it.

    Each start of a broker has another `incarnation`.
    """

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

    `me` changes by `update`.  A record with this broker's id by an earlier incarnation is taken
    over; one by a later incarnation supersedes this process.  A broker with an unreadable record,
    which is logged, counts as gone.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        me: Member,
        changed: Callable[[], None],
        superseded: Callable[[], None],
    ) -> None:
        """Call `changed` when brokers come, go or change, `superseded` when this one is."""
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
        self._tasks = BackgroundTasks(log)

    @property
    def live(self) -> Mapping[str, Member]:
        """The live brokers by id; this one is among them while its session is alive."""
        if self._session is None or self._session.lost:
            return self._others
        return {**self._others, self.me.address.broker_id: self.me}

    def address_of(self, broker_id: str) -> BrokerAddress | None:
        """The address of a live broker; None if it is not alive."""
        if broker_id == self.me.address.broker_id:
            return self.me.address
        found = self._others.get(broker_id)
        return None if found is None else found.address

    def state_of(self, broker_id: str) -> MemberState | None:
        """The state of a broker; None if it is not alive."""
        found = self.live.get(broker_id)
        return None if found is None else found.state

    async def start(self) -> None:
        """Read the records of all brokers and follow them.  Raises `MetadataError`."""
        await self._following.begin()
        self._tasks.keep("brokers", self._following.run)

    async def stop(self) -> None:
        """Stop following.  This broker's record goes with its session."""
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

    def session_lost(self) -> None:
        """Take in that the session was lost, and this broker's record with it."""
        self._session = None
        self._changed()

    async def update(self, *, state: MemberState | None = None, load: Load | None = None) -> None:
        """Change this broker's record.  Raises `Superseded`, `MetadataError`."""
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
        raise MetadataError(
            f"The record {key} was changed by other writers {RECORD_CHANGE_TRIES} times in a row: "
            "give each broker its own advertised_host and http_port."
        )

    async def _settle_conflict(self, key: str) -> None:
        """Choose the version to overwrite.  Raises `Superseded`."""
        record = await self._metadata.get(key)
        found = None if record is None else decode_member(record)
        if record is None:
            self._version = ABSENT
        # The record is unreadable; or ours, by a write without a known outcome; or, as long as we
        # have written none, an earlier incarnation's.  Afterwards another one is a later one's.
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
                await self._check_own(record)
            elif (member := decode_member(record)) is not None:
                others[member.address.broker_id] = member
        if others != self._others:
            self._others = others
            self._changed()

    async def _take(self, event: Event) -> None:
        broker_id = name_of(event.key)
        if broker_id == self.me.address.broker_id:
            await self._check_own(event.record)
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

    async def _check_own(self, record: Record | None) -> None:
        """Notice that a later process with this id has put its record over ours."""
        member = None if record is None else decode_member(record)
        if not self._entered or member is None or member.incarnation == self.me.incarnation:
            return
        # The event may be older than our own record, so the newest one decides.
        newest = await self._metadata.get(member_key(self.me.address.broker_id))
        member = None if newest is None else decode_member(newest)
        if member is not None and member.incarnation != self.me.incarnation:
            self._superseded()


def member_key(broker_id: str) -> str:
    """The key of a broker's record."""
    return f"{BROKERS}/{broker_id}"


def report_of(member: Member) -> dict[str, object]:
    """Pulsar's BrokerLookupData as JSON, with the load that its LocalBrokerData has.

    Pulsar has `properties` for members that are not its own: state and incarnation are there.
    """
    address, load = member.address, member.load
    return {
        "webServiceUrl": address.web_url or None,
        "webServiceUrlTls": address.web_url_tls,
        "pulsarServiceUrl": address.url or None,
        "pulsarServiceUrlTls": address.url_tls,
        "advertisedListeners": {},
        "protocols": {},
        "persistentTopicsEnabled": True,
        "nonPersistentTopicsEnabled": True,
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
    """Encode the record of a broker."""
    return json.dumps(report_of(member), separators=(",", ":")).encode()


def decode_member(record: Record) -> Member | None:
    """Decode the record of a broker; None if it is unreadable, which is logged."""
    try:
        value = json.loads(record.value)
        properties = value["properties"]
        return Member(
            BrokerAddress(
                str(value["pulsarServiceUrl"] or ""),
                _text_of(value.get("pulsarServiceUrlTls")),
                str(value["webServiceUrl"] or ""),
                name_of(record.key),
                _text_of(value.get("webServiceUrlTls")),
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


def _text_of(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
