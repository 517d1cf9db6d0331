"""The records of ledgers in the metadata store: keys, values, states.

Keys are those of BookKeeper: `/ledgers/AA/BBBB/LCCCC` from the ten digits of an id, the longer form
above 2^31 - 2, every parent a record of its own, and `/ledgers/idgen`.  The value is JSON: it names
no bookies, so BookKeeper's own format would be mostly empty, and any tool can read this one.
"""

import base64
import binascii
import enum
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from magnetar.protocol.ids import LedgerId
from magnetar.protocol.state_table import StateTable
from storage.ledger.store import LedgerAssertion, LedgerError, record_text
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import ABSENT, MetadataStore, Version, VersionConflict

ROOT = "/ledgers"
ID_GENERATOR = f"{ROOT}/idgen"
SHORT_ID_LIMIT = 2**31 - 1
SHORT_DIGITS = 10
_PATH = re.compile(
    rf"{ROOT}/(?:[0-9]{{2}}|[0-9]{{3}}/[0-9]{{4}}/[0-9]{{4}})/[0-9]{{4}}/L[0-9]{{4}}"
)
"""The keys of records: ten digits, or nineteen."""

COMPONENT = "component"
STREAM = "pulsar/managed-ledger"
HEALTH_CHECK = b"health"
"""Custom metadata: the component that made the ledger, and the ledger path of its topic.  Nobody
reads the ledgers of the component HEALTH_CHECK."""

_KNOWN = frozenset({"state", "lastEntryId", "length", "ctime", "customMetadata"})


class LedgerState(enum.Enum):
    """State of a ledger.  Deletion removes the record in any state."""

    OPEN = "OPEN"
    IN_RECOVERY = "IN_RECOVERY"
    CLOSED = "CLOSED"


ALLOWED: StateTable[LedgerState] = StateTable(
    {
        LedgerState.OPEN: frozenset({LedgerState.IN_RECOVERY, LedgerState.CLOSED}),
        LedgerState.IN_RECOVERY: frozenset({LedgerState.IN_RECOVERY, LedgerState.CLOSED}),
        LedgerState.CLOSED: frozenset(),
    },
    defect=LedgerAssertion,
)


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One ledger.  `last_entry_id` and `length` (bytes) count once the state is CLOSED.

    `unknown` has fields of newer versions, which stay when the record is rewritten.
    """

    state: LedgerState
    created_ms: int
    last_entry_id: int = -1
    length: int = 0
    custom: Mapping[str, bytes] = field(default_factory=dict)
    unknown: Mapping[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The record in the form of BookKeeper's tools.  There is one copy, on this disk."""
        ended: Mapping[str, object] = {}
        if self.state is LedgerState.CLOSED:
            ended = {"length": self.length, "lastEntryId": self.last_entry_id}
        return record_text({"ensembleSize": 1, "state": self.state.name, **ended}, self.custom)

    def moved(self, state: LedgerState, last_entry_id: int = -1, length: int = 0) -> "LedgerRecord":
        """The record in another state.  Raises `LedgerAssertion` if that is not allowed."""
        state = ALLOWED.move(self.state, state, "A ledger")
        return replace(self, state=state, last_entry_id=last_entry_id, length=length)


_STATES = {state.value: state for state in LedgerState}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, binascii.Error)
_parse = json.JSONDecoder().raw_decode


class StoredRecord(NamedTuple):
    """A record and the version under which it was read or written."""

    record: LedgerRecord
    version: Version


def ledger_path(ledger_id: int) -> str:
    """The key of a ledger's record."""
    if ledger_id < SHORT_ID_LIMIT:
        digits = f"{ledger_id:010d}"
        return f"{ROOT}/{digits[:2]}/{digits[2:6]}/L{digits[6:]}"
    digits = f"{ledger_id:019d}"
    return f"{ROOT}/{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"


def ledger_id_of(path: str) -> int | None:
    """The id in a record's key, None for other keys."""
    if _PATH.fullmatch(path) is None:
        return None
    digits = path[len(ROOT) :].replace("/", "").replace("L", "")
    ledger_id = int(digits)
    return ledger_id if (ledger_id < SHORT_ID_LIMIT) == (len(digits) == SHORT_DIGITS) else None


def encode_record(record: LedgerRecord) -> bytes:
    """The value of a record."""
    custom = {key: base64.b64encode(value).decode() for key, value in record.custom.items()}
    fields: dict[str, object] = {
        **record.unknown,
        "state": record.state.value,
        "lastEntryId": record.last_entry_id,
        "length": record.length,
        "ctime": record.created_ms,
        "customMetadata": custom,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(value: bytes, ledger_id: int) -> LedgerRecord:
    """Decode the value of a record.  Raises `LedgerError` if it is malformed."""
    try:
        fields = json.loads(value)
        custom = {
            key: base64.b64decode(text, validate=True)
            for key, text in fields.get("customMetadata", {}).items()
        }
        return LedgerRecord(
            state=LedgerState(fields["state"]),
            created_ms=int(fields["ctime"]),
            last_entry_id=int(fields["lastEntryId"]),
            length=int(fields["length"]),
            custom=custom,
            unknown={key: value for key, value in fields.items() if key not in _KNOWN},
        )
    except _MALFORMED as error:
        raise _malformed(ledger_id, error) from error


def _left_out_in(value: bytes) -> int:
    """The number of ids that were left out.  Raises `LedgerError` if it is malformed."""
    if value and not value.isdigit():
        raise LedgerError(
            f"The record {ID_GENERATOR} of the metadata store has {value[:40]!r}, which is no "
            "number of ids: restore it."
        )
    return int(value or b"0")


def stream_of(custom: Mapping[str, bytes]) -> str | None:
    """The ledger path of the topic that made a ledger; None of a health check's, which none reads.

    `custom` is the custom metadata of the ledger.
    """
    if custom.get(COMPONENT) == HEALTH_CHECK:
        return None
    return sys.intern(custom.get(STREAM, b"").decode(errors="replace"))


class LedgerSummary(NamedTuple):
    """The parts of a record that a start compares with the log; `stream` as `stream_of` has it.

    `last_entry_id` counts if the ledger `is_closed`.
    """

    is_closed: bool
    last_entry_id: int
    stream: str | None


def summarize_record(value: bytes, ledger_id: int) -> LedgerSummary:
    """Decode the parts of a record that a start needs.  Raises `LedgerError` if it is malformed."""
    # A start does this for all ledgers.  It takes a third of the time of `decode_record`: most of
    # that is spent around the parser, in `json.loads`, and for fields that are not needed here.
    try:
        text = value.decode().strip()
        fields, end = _parse(text)
        if end != len(text):
            raise ValueError("more follows")
        encoded = fields.get("customMetadata", {})
        custom = {
            key: binascii.a2b_base64(encoded[key], strict_mode=True)
            for key in (COMPONENT, STREAM)
            if key in encoded
        }
        is_closed = _STATES[fields["state"]] is LedgerState.CLOSED
        return LedgerSummary(is_closed, int(fields["lastEntryId"]), stream_of(custom))
    except _MALFORMED as error:
        raise _malformed(ledger_id, error) from error


def _malformed(ledger_id: int, error: Exception) -> LedgerError:
    return LedgerError(
        f"The record of ledger {ledger_id} cannot be decoded ({error!r}): restore "
        f"{ledger_path(ledger_id)} in the metadata store."
    )


class LedgerRecords:
    """Reads and writes of ledger records."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._left_out: int | None = None
        """Ids that were left out; None until it is read."""
        self._last_parent = ""

    async def take_id(self, *, above: int) -> LedgerId:
        """An id that was never given, and is higher than `above`."""
        # `idgen` is never deleted.  The last id given is its number of modifications and its value,
        # the number of ids that were left out.  A restored backup may be older than its log:
        # `above` leaves out the ids that the log has.
        while True:
            left_out = await self._read_left_out()
            taken = await self._metadata.put(ID_GENERATOR, b"%d" % left_out if left_out else b"")
            ledger_id = taken.modifications + left_out
            if ledger_id > above:
                return LedgerId(ledger_id)
            self._left_out = left_out + above - ledger_id

    async def leave_out(self, count: int) -> None:
        """Give out no id of the next `count`."""
        last = await self.last_id() or 0
        await self.take_id(above=last + count)

    async def _read_left_out(self) -> int:
        if self._left_out is None:
            await self._put_absent(ROOT)
            await self._put_absent(ID_GENERATOR)
            found = await self._metadata.get(ID_GENERATOR)
            self._left_out = 0 if found is None else _left_out_in(found.value)
        return self._left_out

    async def last_id(self) -> int | None:
        """The last id given, None if this metadata store never gave one."""
        found = await self._metadata.get(ID_GENERATOR)
        return None if found is None else found.modifications + _left_out_in(found.value)

    async def create(self, ledger_id: int, record: LedgerRecord) -> StoredRecord:
        """A new record.  Raises `VersionConflict` if there is one."""
        path = ledger_path(ledger_id)
        parent = path.rpartition("/")[0]
        if parent != self._last_parent:
            parts = parent.split("/")
            for depth in range(2, len(parts) + 1):
                await self._put_absent("/".join(parts[:depth]))
            self._last_parent = parent
        made = await self._metadata.put(path, encode_record(record), expect=ABSENT)
        return StoredRecord(record, made.version)

    async def _put_absent(self, key: str) -> None:
        try:
            await self._metadata.put(key, b"", expect=ABSENT)
        except VersionConflict:
            pass

    async def get(self, ledger_id: int) -> StoredRecord | None:
        """The record, None if there is none."""
        found = await self._metadata.get(ledger_path(ledger_id))
        if found is None:
            return None
        return StoredRecord(decode_record(found.value, ledger_id), found.version)

    async def update(self, ledger_id: int, record: LedgerRecord, expect: Version) -> StoredRecord:
        """Replace the record that was read as `expect`.  Raises `VersionConflict`."""
        value = encode_record(record)
        made = await self._metadata.put(ledger_path(ledger_id), value, expect=expect)
        return StoredRecord(record, made.version)

    async def delete(self, ledger_id: int) -> None:
        """Remove the record, whatever its state; fine if there is none."""
        await self._metadata.delete(ledger_path(ledger_id))

    async def summaries(self) -> dict[int, LedgerSummary]:
        """All records, by ledger id.  Raises `MetadataError`, `LedgerError`."""
        found: dict[int, LedgerSummary] = {}
        levels = [ROOT]
        while levels:
            for record in await self._metadata.scan(*children_range(levels.pop())):
                ledger_id = ledger_id_of(record.key)
                if ledger_id is not None:
                    found[ledger_id] = summarize_record(record.value, ledger_id)
                elif name_of(record.key).isdigit():
                    levels.append(record.key)
        return found

    async def list_ids(self) -> list[LedgerId]:
        """The ids of all ledgers, ascending."""
        found: list[LedgerId] = []
        levels = [ROOT]
        while levels:
            level = levels.pop()
            for name in await self._metadata.children(level):
                path = f"{level}/{name}"
                ledger_id = ledger_id_of(path)
                if ledger_id is not None:
                    found.append(LedgerId(ledger_id))
                elif name.isascii() and name.isdigit():
                    levels.append(path)
        return sorted(found)
