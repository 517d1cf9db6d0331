"""Apache BookKeeper's records of ledgers and bookies, and their paths.  Pure.

a ledger    "BookieMetadataFormatVersion", TAB, "3", LF, varint length, LedgerMetadataFormat
"""

import json
import re
from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError

from magnetar.protocol.ids import LONG_MAX, LedgerId
from storage.ledger.bookkeeper import ledger_metadata_pb2 as pb
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_store import BookieAddress
from storage.ledger.store import LedgerError

DEFAULT_ROOT = "/ledgers"
RACKS_PATH = "/bookies"
"""The record with the racks of bookies, which operators set; beside the root of ledgers."""
READ_ONLY = "readonly"
"""The child of `available` that is no bookie: its children are the read-only bookies."""
SHORT_ID_LIMIT = 2**31 - 1

_MAGIC = b"BookieMetadataFormatVersion\t"
_PREFIX = _MAGIC + b"3\n"
_OLD_VERSIONS = (b"1", b"2")
_LAYOUT_VERSION = "2"
_LAYOUT_MANAGER = "org.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
_ENDPOINT_ID = "bookie"
_ENDPOINT_PROTOCOL = "bookie-rpc"
_LEDGER = re.compile(r"(?:(\d{2})/(\d{4})|(\d{3})/(\d{4})/(\d{4})/(\d{4}))/L(\d{4})", re.ASCII)
_LEVEL = re.compile(r"\d{2,4}", re.ASCII)
_HOST_PORT = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):(\d{1,5})", re.ASCII)


class UnreadableRecord(LedgerError):
    """A record of BookKeeper is damaged, or of a version that this client cannot read."""


# Ledger records


def encode_metadata(metadata: LedgerMetadata) -> bytes:
    """Encode the record of a ledger, with the same bytes as BookKeeper's Java client."""
    closed = metadata.state is LedgerState.CLOSED
    message = pb.LedgerMetadataFormat(
        quorumSize=metadata.write_quorum,
        ensembleSize=metadata.ensemble_size,
        length=metadata.length if closed else 0,
        lastEntryId=metadata.last_entry_id if closed else -1,
        state=pb.LedgerMetadataFormat.State.Name(metadata.state.value),
        segment=[
            pb.LedgerMetadataFormat.Segment(
                ensembleMember=ensemble.bookies, firstEntryId=ensemble.first_entry_id
            )
            for ensemble in metadata.ensembles
        ],
        digestType=pb.LedgerMetadataFormat.DigestType.Name(metadata.digest_type.value),
        password=metadata.password,
        ackQuorumSize=metadata.ack_quorum,
        ctime=metadata.ctime_ms,
        customMetadata=[
            pb.LedgerMetadataFormat.CustomMetadata(key=key, value=value)
            for key, value in metadata.custom.items()
        ],
        cToken=metadata.creator_token,
    )
    body = message.SerializeToString() + metadata.unknown
    return _PREFIX + _varint(len(body)) + body


def decode_metadata(value: bytes, ledger_id: int) -> LedgerMetadata:
    """Decode the record of a ledger.  Raises `UnreadableRecord`."""
    # A wrong guess would lose entries, so all that is not known for certain is refused.
    message = pb.LedgerMetadataFormat()
    try:
        message.ParseFromString(_metadata_body(value))
        metadata = _from_message(message)
    except (DecodeError, ValueError) as error:
        raise UnreadableRecord(
            f"The record of ledger {ledger_id} cannot be decoded: {error}; look at it with "
            f"`bookkeeper shell ledgermetadata -ledgerid {ledger_id}`."
        ) from error
    return metadata


def _from_message(message: pb.LedgerMetadataFormat) -> LedgerMetadata:
    if not message.IsInitialized():
        raise ValueError("a field that it must have is not there, or of a newer kind")
    if not message.HasField("digestType") or not message.HasField("password"):
        raise ValueError("it has no digest type that is known here, or no password")
    closed = message.state == pb.LedgerMetadataFormat.CLOSED
    if closed and not message.HasField("lastEntryId"):
        raise ValueError("it is closed without a last entry")
    metadata = LedgerMetadata(
        ensemble_size=message.ensembleSize,
        write_quorum=message.quorumSize,
        ack_quorum=message.ackQuorumSize
        if message.HasField("ackQuorumSize")
        else message.quorumSize,
        ensembles=tuple(
            Ensemble(segment.firstEntryId, tuple(map(BookieId, segment.ensembleMember)))
            for segment in message.segment
        ),
        digest_type=DigestType(message.digestType),
        password=message.password,
        state=LedgerState(message.state),
        last_entry_id=message.lastEntryId if closed else -1,
        length=message.length if closed else 0,
        custom={item.key: item.value for item in message.customMetadata},
        ctime_ms=message.ctime if message.HasField("ctime") else None,
        creator_token=message.cToken if message.HasField("cToken") else None,
        unknown=_unknown_fields(message),
    )
    _check(metadata)
    return metadata


def _check(metadata: LedgerMetadata) -> None:
    sizes = (metadata.ack_quorum, metadata.write_quorum, metadata.ensemble_size)
    if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
        raise ValueError(f"its quorums {sizes} do not fit each other")
    firsts = [ensemble.first_entry_id for ensemble in metadata.ensembles]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(f"its ensembles begin at {firsts}, which leaves entries without bookies")
    if any(len(each.bookies) != metadata.ensemble_size for each in metadata.ensembles):
        raise ValueError("an ensemble has another number of bookies than the record says")
    if metadata.last_entry_id < -1 or metadata.length < 0:
        raise ValueError("its last entry or its length is below anything possible")


def _unknown_fields(message: pb.LedgerMetadataFormat) -> bytes:
    """The bytes of the fields that are not known here; empties `message`."""
    for known in message.DESCRIPTOR.fields:
        message.ClearField(known.name)
    return message.SerializePartialToString()


def _metadata_body(value: bytes) -> bytes:
    if not value.startswith(_PREFIX):
        version, found, _ = value.removeprefix(_MAGIC).partition(b"\n")
        if found and value.startswith(_MAGIC) and version in _OLD_VERSIONS:
            raise ValueError(
                f"it is of format {version.decode()}, which BookKeeper before 4.9 wrote and only "
                "format 3 is read here, so copy that ledger with the client that wrote it"
            )
        raise ValueError(f"it begins with {value[:32]!r}, not as a ledger record of format 3 does")
    size, start = _read_varint(value, len(_PREFIX))
    if len(value) - start < size:
        raise ValueError(f"it ends after {len(value) - start} of {size} bytes")
    return value[start : start + size]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(value: bytes, start: int) -> tuple[int, int]:
    """A varint of at most 32 bits at `start`, and the offset after it."""
    number = 0
    for place, byte in enumerate(value[start : start + 5]):
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, start + place + 1
    raise ValueError("its size is missing")


# Bookies


def decode_bookie(bookie: BookieId, value: bytes) -> BookieAddress | None:
    """The address of a registered bookie: from its record, else from its id.

    None if neither has one.
    """
    info = pb.BookieServiceInfoFormat()
    try:
        info.ParseFromString(value)
    except DecodeError:
        return parse_address(bookie)
    for endpoint in info.endpoints:
        if endpoint.id == _ENDPOINT_ID and endpoint.protocol == _ENDPOINT_PROTOCOL:
            address = _address(endpoint.host, endpoint.port)
            if address is not None:
                return address
    return parse_address(bookie)


def parse_address(bookie: BookieId) -> BookieAddress | None:
    """The address in an id of the form `host:port` (or `[address]:port`), None if it has none."""
    match = _HOST_PORT.fullmatch(bookie)
    return None if match is None else _address(match[1] or match[2], int(match[3]))


def _address(host: str, port: int) -> BookieAddress | None:
    return BookieAddress(host, port) if host and 0 < port < 2**16 else None


def decode_racks(value: bytes) -> Mapping[BookieId, str]:
    """Decode the record at `RACKS_PATH`: JSON {group: {bookie: {"rack": ...}}}.

    Raises `UnreadableRecord` for any other form.
    """
    if not value.strip():
        return {}
    try:
        return {
            BookieId(bookie): str(facts["rack"])
            for bookies in json.loads(value).values()
            for bookie, facts in bookies.items()
            if facts.get("rack")
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise UnreadableRecord(
            f"The racks in {RACKS_PATH} cannot be decoded ({error}): set them again with "
            "`pulsar-admin bookies set-bookie-rack`."
        ) from error


# Paths


class LedgerPaths:
    """The paths of BookKeeper's records below `root`.

    In the path of a ledger an id below 2^31 - 1 has 10 digits (`AA/BBBB/LCCCC`), a larger one 19
    (`AAA/BBBB/CCCC/DDDD/LEEEE`).
    """

    def __init__(self, root: str = DEFAULT_ROOT) -> None:
        self.root = root.rstrip("/")
        self.available = f"{self.root}/available"
        """The node whose children are the registered bookies, and `READ_ONLY`."""
        self.read_only = f"{self.available}/{READ_ONLY}"
        self.id_generator = f"{self.root}/idgen"
        self.long_id_generator = f"{self.root}/idgen-long"
        """It exists once ids of 31 bits have run out."""
        self.layout = f"{self.root}/LAYOUT"

    def ledger(self, ledger_id: int) -> str:
        """The path of the record of a ledger."""
        if ledger_id < SHORT_ID_LIMIT:
            digits = f"{ledger_id:010d}"
            return f"{self.root}/{digits[:2]}/{digits[2:6]}/L{digits[6:]}"
        digits = f"{ledger_id:019d}"
        levels = f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}"
        return f"{self.root}/{levels}/L{digits[15:]}"

    def ledger_id(self, path: str) -> LedgerId | None:
        """The ledger whose record is at `path`, None for other paths."""
        if not path.startswith(f"{self.root}/"):
            return None
        match = _LEDGER.fullmatch(path, len(self.root) + 1)
        if match is None:
            return None
        ledger_id = int("".join(filter(None, match.groups())))
        return LedgerId(ledger_id) if self.ledger(ledger_id) == path else None

    def parents(self, path: str) -> Sequence[str]:
        """The paths above `path`, from its direct parent up to and with the root."""
        found = []
        parent = path
        while parent != self.root:
            parent = parent.rpartition("/")[0]
            if len(parent) < len(self.root):
                raise ValueError(f"{path} is not below {self.root}")
            found.append(parent)
        return found


def is_level(name: str) -> bool:
    """Whether a child found below the root, or below a level, may have ledgers below it."""
    return _LEVEL.fullmatch(name) is not None


def number_of(name: str) -> int | None:
    """The ten digits that end the name of a sequential record (`ID-...`, `HOB-...`).

    None if it does not end so, as when the counter that gave it ran over.
    """
    prefix, found, digits = name.rpartition("-")
    if not found or prefix.endswith("-") or len(digits) != 10:
        return None
    return int(digits) if digits.isascii() and digits.isdigit() else None


def long_ledger_id(high: int, low: int) -> LedgerId:
    """An id of 63 bits from the number of an `HOB-` record and that of an `ID-` record below it."""
    ledger_id = high << 32 | low
    if not SHORT_ID_LIMIT <= ledger_id <= LONG_MAX:
        raise LedgerError(
            f"Ledger ids have run out at {high} and {low}: look at the children of idgen-long."
        )
    return LedgerId(ledger_id)


def check_layout(value: bytes | None) -> None:
    """Check that the layout of the ledgers is the one known here, or not written.

    Raises `UnreadableRecord` for another layout.
    """
    text = (value or b"").decode("utf-8", "replace").strip()
    if text and text.splitlines() != [_LAYOUT_VERSION, _LAYOUT_MANAGER]:
        raise UnreadableRecord(
            f"The ledgers of this cluster have the layout {text!r}, and only {_LAYOUT_MANAGER} of "
            f"version {_LAYOUT_VERSION} is supported: use a cluster with BookKeeper's default one."
        )
