"""The nodes of records, indexes and sequences in ZooKeeper's tree.  Pure.

    ROOT/records/txn/id            directory of the level /txn/id/
    ROOT/records/txn/id/=(1,5)     the record /txn/id/(1,5): a line of JSON, then its value
    ROOT/indexes/NAME/b/KEY^,PATH  an index entry of the record at PATH, in one of 16 buckets
    ROOT/lives/c/HEX               there as long as one record is: its header names it
    ROOT/writers/HEX               orders the writes of one process
    ROOT/sessions/HEX              a session, with the identity of its process

A directory is empty, or holds the partition and the last number of the sequence that owns it.
"""

import json
import re
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from config import bounds
from storage.metadata.group import Sequence, Stored, record_of
from storage.metadata.keys import exact_range, level_of, name_of
from storage.metadata.store import IndexEntry, MetadataError, Record, Version
from storage.metadata.zookeeper.requests import Stat

BUCKETS = 16

# A record is a node without children, as ephemeral nodes cannot have any.  So the directory of its
# level is another node; names of directories never begin with the mark.
_RECORD_MARK = "="
_SEPARATOR = "^,"
# Characters that ZooKeeper refuses in paths are escaped as `^` and two hexadecimal digits for each
# byte of UTF-8.
_FORBIDDEN = "\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff"
_IN_PARTS = re.compile(rf"[\^{_FORBIDDEN}]")
_IN_DIRECTORIES = re.compile(rf"[\^{_FORBIDDEN}]|\A=|\A\.{{1,2}}\Z")
_IN_ENTRIES = re.compile(rf"[\^|{_FORBIDDEN}]")
_ESCAPED = re.compile(r"(?:\^[0-9A-F]{2})+")
_LIFE = re.compile("[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Node:
    """A record as it was read, or as it will be once the writes in flight have taken effect."""

    # ZooKeeper counts the versions of a node that is made again from 0.  So a write checks the life
    # and the version: it cannot hit a later record at the same path.
    stored: Stored
    life: str
    """A random name that no other record has had."""
    node_version: int
    """ZooKeeper's version of the node, which conditions of writes name."""


class Directory(NamedTuple):
    """The directory of a level, with the sequence that owns it."""

    node_version: int
    sequence: Sequence | None


class Layout:
    """The paths below a root (empty, or a path)."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.records = f"{root}/records"
        self.indexes = f"{root}/indexes"
        self.lives = f"{root}/lives"
        self.writers = f"{root}/writers"
        self.sessions = f"{root}/sessions"

    def fixed_nodes(self) -> list[str]:
        """The nodes that must exist before any other, parents first."""
        parts = self.root.split("/")
        above = ["/".join(parts[:end]) for end in range(2, len(parts) + 1)]
        own = [self.records, self.indexes, self.lives, self.writers, self.sessions]
        return [*above, *own, *(f"{self.lives}/{bucket:x}" for bucket in range(BUCKETS))]

    def directory(self, level: str) -> str:
        """The directory of a level (which ends in a slash)."""
        parts = [_IN_DIRECTORIES.sub(_escape, part) for part in level[1:-1].split("/")]
        return "/".join([self.records, *parts]) if level != "/" else self.records

    def directories(self, level: str) -> list[str]:
        """The directories from the top down to that of a level, without `records` itself."""
        parts = self.directory(level)[len(self.records) :].split("/")
        return [self.records + "/".join(parts[:end]) for end in range(2, len(parts) + 1)]

    def record(self, key: str) -> str:
        """The node of a record."""
        name = _IN_PARTS.sub(_escape, name_of(key))
        return f"{self.directory(level_of(key))}/{_RECORD_MARK}{name}"

    def life(self, life: str) -> str:
        """The node that exists as long as its record does."""
        return f"{self.lives}/{life[0]}/{life}"

    def index(self, index: str) -> str:
        """The node of an index."""
        return f"{self.indexes}/{_IN_DIRECTORIES.sub(_escape, index)}"

    def bucket(self, entry: IndexEntry) -> str:
        """The node that has all entries with this secondary key below it."""
        return f"{self.index(entry.index)}/{zlib.crc32(entry.key.encode()) % BUCKETS:x}"

    def buckets(self, index: str, lo: str, hi: str) -> list[str]:
        """The nodes that have all entries of a range below them."""
        if (lo, hi) == exact_range(lo):
            return [self.bucket(IndexEntry(index, lo))]
        return [f"{self.index(index)}/{bucket:x}" for bucket in range(BUCKETS)]

    def entry(self, entry: IndexEntry, key: str) -> str:
        """The node of an index entry."""
        name = f"{_escape_entry(entry.key)}{_SEPARATOR}{_escape_entry(key)}"
        return f"{self.bucket(entry)}/{name}"


def record_name(node: str) -> str | None:
    """The last part of the key of a child of a directory; None if it is a directory itself."""
    if not node.startswith(_RECORD_MARK):
        return None
    try:
        return unescape(node[len(_RECORD_MARK) :])
    except ValueError:  # another program's
        return None


def entry_of(node: str) -> tuple[str, str] | None:
    """Secondary key and key of a child of a bucket."""
    index_key, found, key = node.partition(_SEPARATOR)
    if not found:
        return None
    try:
        return unescape(index_key.replace("|", "/")), unescape(key.replace("|", "/"))
    except ValueError:  # another program's
        return None


def unescape(text: str) -> str:
    """The text before `_escape`.  Raises `ValueError` if no `_escape` made it."""
    return _ESCAPED.sub(_unescape, text) if "^" in text else text


def encode_record(stored: Stored, life: str, value: bytes) -> bytes:
    """The data of a record's node: a line of JSON, then the value.

    The line has the life, partition, counts, times and index entries.  A value above
    `ZOOKEEPER_DEFLATE_BYTES` is deflated if that is shorter.
    """
    header: dict[str, object] = {
        "life": life,
        "modifications": stored.modifications,
        "created": stored.created_ms,
        "modified": stored.modified_ms,
    }
    if stored.partition is not None:
        header["partition"] = stored.partition
    if stored.indexes:
        header["indexes"] = [[entry.index, entry.key] for entry in stored.indexes]
    if len(value) > bounds.ZOOKEEPER_DEFLATE_BYTES:
        deflated = zlib.compress(value, 1)
        if len(deflated) < len(value):
            header["deflated"] = True
            value = deflated
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + value


def decode_record(key: str, data: bytes, stat: Stat) -> tuple[Node, bytes]:
    """A record and its value.  Raises `MetadataError` if the data are no record."""
    head, found, value = data.partition(b"\n")
    try:
        header = json.loads(head)
        stored = Stored(
            version=Version(stat.mzxid),
            modifications=header["modifications"],
            created_ms=header["created"],
            modified_ms=header["modified"],
            partition=header.get("partition"),
            session_id=stat.owner or None,
            indexes=tuple(IndexEntry(*entry) for entry in header.get("indexes", ())),
        )
        node = Node(stored, header["life"], stat.version)
        if not (_LIFE.fullmatch(node.life) and isinstance(stored.modifications, int)):
            raise ValueError("its life is no hexadecimal number, or its count none")
        if not found:
            raise ValueError("no value follows its first line")
        return node, zlib.decompress(value) if header.get("deflated") else value
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise MetadataError(
            f"The record {key!r} in ZooKeeper cannot be read ({error}): look at its node, it was "
            "written by something else."
        ) from error


def decode(key: str, data: bytes, stat: Stat) -> Record:
    """The record as the interface shows it.  Raises `MetadataError`."""
    node, value = decode_record(key, data, stat)
    return record_of(key, node.stored, value)


def encode_sequence(sequence: Sequence) -> bytes:
    """The data of a directory that a sequence owns."""
    header = {"sequence": sequence.last, "partition": sequence.partition}
    return json.dumps(header, separators=(",", ":")).encode()


def decode_directory(path: str, data: bytes, stat: Stat) -> Directory:
    """The directory that a node's data describe.  Raises `MetadataError`."""
    if not data:
        return Directory(stat.version, None)
    try:
        header = json.loads(data)
        sequence = Sequence(str(header["partition"]), int(header["sequence"]))
    except (ValueError, KeyError, TypeError) as error:
        raise MetadataError(
            f"The node {path!r} in ZooKeeper is neither empty nor a sequence ({error}): it was "
            "written by something else, look at it."
        ) from error
    return Directory(stat.version, sequence)


def _escape_entry(text: str) -> str:
    return _IN_ENTRIES.sub(_escape, text).replace("/", "|")


def _escape(found: re.Match[str]) -> str:
    return "".join(f"^{byte:02X}" for byte in found.group().encode("utf-8", "surrogatepass"))


def _unescape(found: re.Match[str]) -> str:
    return bytes.fromhex(found.group().replace("^", "")).decode("utf-8", "surrogatepass")
