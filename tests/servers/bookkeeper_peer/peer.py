"""The Java client of BookKeeper in a process of its own, driven from tests.

Rules: `javac` compiles it once into `build/parts`, and again only when a source or the jars
changed; calls of one handle are to be awaited one after the other, others may overlap; every call
has a limit; what BookKeeper refuses raises `PeerError` with BookKeeper's code.  A ledger whose
writer is not closed stays open when its client is.
"""

import asyncio
import itertools
import shutil
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.servers.java_parts import BUILD, POM, PULSAR_DRIVERS, java_command, resolve_jars
from tests.support.json_line_process import Facts, JsonLineProcess
from tests.support.tools import built_once, digest_of, run_build

HERE: Final = Path(__file__).resolve().parent
CLASSES: Final = BUILD / "bookkeeper-peer"
HEAP_MB: Final = 128
CALL_TIMEOUT_S: Final = 90
PATIENCE: Final = {"addEntryTimeoutSec": 30, "readEntryTimeoutSec": 30}
"""As Pulsar has it, not five seconds: on a machine that has much else to do late is no failure."""
LEDGER_FENCED: Final = -101
UNAUTHORIZED: Final = -102
DIGEST_MATCH: Final = -5
BOOKIE_HANDLE_NOT_AVAILABLE: Final = -8
NO_SUCH_LEDGER_METADATA: Final = -25
"""Codes of `BKException`: what tests ask for by name."""


class PeerError(Exception):
    """BookKeeper's client refused or failed; `facts` is what it had told before."""

    def __init__(self, code: int, sentence: str, facts: Facts) -> None:
        super().__init__(f"{sentence} (code {code})")
        self.code = code
        self.facts = facts


@dataclass(frozen=True)
class PeerEntry:
    """An entry as it was read; `length` is that of the ledger up to and with it."""

    entry_id: int
    length: int
    data: bytes


@dataclass(frozen=True)
class PeerMetadata:
    """Metadata of a ledger as Java understands it; `ensembles` is by first entry."""

    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    state: str
    last_entry_id: int
    length: int
    digest_type: str
    password: bytes
    ensembles: Mapping[int, Sequence[str]]
    custom_metadata: Mapping[str, bytes]


def build_peer() -> Path:
    """The directory of classes, which is filled if need be."""
    lib = resolve_jars()
    sources = sorted((HERE / "src").rglob("*.java"))

    def build() -> None:
        shutil.rmtree(CLASSES, ignore_errors=True)
        options = ["-proc:none", "-Werror", "-Xlint:all,-serial,-processing,-classfile"]
        target = ["--release", "17", "-cp", f"{lib}/*", "-d", str(CLASSES)]
        run_build("the BookKeeper peer", ["javac", *options, *target, *map(str, sources)])

    built_once(BUILD / "bookkeeper-peer.sha256", digest_of([*sources, POM], POM.parent), build)
    return CLASSES


class BookKeeperPeer:
    """The running process; it serves when the constructor returns."""

    def __init__(self, directory: Path) -> None:
        command = java_command(
            "magnetar.parts.BookKeeperPeer",
            heap_mb=HEAP_MB,
            direct_mb=HEAP_MB,
            options=PULSAR_DRIVERS,
            classes=build_peer(),
        )
        self._ids = itertools.count(1)
        self._calls: dict[int, Future[Facts]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._process = JsonLineProcess(
            "bookkeeper-peer",
            command,
            directory / "bookkeeper-peer.log",
            on_line=self._take,
            on_end=self._ended,
        )

    async def connect(
        self, uri: str, *, v2: bool = True, settings: Mapping[str, object] | None = None
    ) -> "PeerClient":
        """A client of the cluster at `uri`; `settings` are lines of the client's configuration."""
        given = {name: str(value) for name, value in {**PATIENCE, **(settings or {})}.items()}
        facts = await self.call("connect", uri=uri, v2=v2, settings=given)
        return PeerClient(self, facts["client"])

    async def call(self, operation: str, **arguments: object) -> Facts:
        """One request and its answer."""
        number = next(self._ids)
        future: Future[Facts] = Future()
        self._calls[number] = future
        self._process.write({"id": number, "op": operation, **arguments})
        async with asyncio.timeout(CALL_TIMEOUT_S):
            answer = await asyncio.wrap_future(future)
        if not answer["ok"]:
            raise PeerError(answer["code"], f"{operation}: {answer['error']}", answer["facts"])
        facts: Facts = answer["facts"]
        return facts

    def close(self) -> None:
        """End the process.  Open ledgers stay open."""
        self._process.close()

    def kill(self) -> None:
        """SIGKILL: as a writer that crashes."""
        self._process.kill()

    def _take(self, line: Facts) -> None:
        future = self._calls.pop(line["id"])
        if future.set_running_or_notify_cancel():
            future.set_result(line)

    def _ended(self) -> None:
        for number in list(self._calls):
            self._take(
                {"id": number, "ok": False, "code": 0, "error": "the peer has ended", "facts": {}}
            )


class PeerClient:
    """One `BookKeeper` client of the peer."""

    def __init__(self, peer: BookKeeperPeer, number: int) -> None:
        self._peer = peer
        self._number = number

    async def create_ledger(
        self,
        *,
        ensemble_size: int = 3,
        write_quorum_size: int = 2,
        ack_quorum_size: int = 2,
        digest_type: str = "CRC32C",
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] | None = None,
    ) -> "PeerWriter":
        """A new ledger; `digest_type` is one of CRC32, MAC, CRC32C, DUMMY."""
        facts = await self._call(
            "create",
            ensembleSize=ensemble_size,
            writeQuorumSize=write_quorum_size,
            ackQuorumSize=ack_quorum_size,
            digestType=digest_type,
            password=_text(password),
            customMetadata={k: _text(v) for k, v in (custom_metadata or {}).items()},
        )
        return PeerWriter(self._peer, facts)

    async def open_ledger(
        self,
        ledger_id: int,
        *,
        recover: bool,
        digest_type: str = "CRC32C",
        password: bytes = b"",
    ) -> "PeerReader":
        """The ledger; with `recover`, fenced and closed before."""
        facts = await self._call(
            "open",
            ledger=ledger_id,
            recover=recover,
            digestType=digest_type,
            password=_text(password),
        )
        return PeerReader(self._peer, facts)

    async def delete_ledger(self, ledger_id: int) -> None:
        """Remove its metadata; bookies collect the entries."""
        await self._call("delete", ledger=ledger_id)

    async def list_ledgers(self) -> list[int]:
        """Ids of all ledgers."""
        return list((await self._call("list"))["ledgers"])

    async def ledger_metadata(self, ledger_id: int) -> PeerMetadata:
        """What is stored about the ledger."""
        facts = await self._call("metadata", ledger=ledger_id)
        return PeerMetadata(
            ensemble_size=facts["ensembleSize"],
            write_quorum_size=facts["writeQuorumSize"],
            ack_quorum_size=facts["ackQuorumSize"],
            state=facts["state"],
            last_entry_id=facts["lastEntryId"],
            length=facts["length"],
            digest_type=facts["digestType"],
            password=b64decode(facts["password"]),
            ensembles={int(first): ids for first, ids in facts["ensembles"].items()},
            custom_metadata={k: b64decode(v) for k, v in facts["customMetadata"].items()},
        )

    async def close(self) -> None:
        """Close the client, not its ledgers."""
        await self._peer.call("disconnect", client=self._number)

    async def _call(self, operation: str, **arguments: object) -> Facts:
        return await self._peer.call(operation, client=self._number, **arguments)


class PeerReader:
    """A ledger opened for reading; the three facts are those at the time of opening."""

    def __init__(self, peer: BookKeeperPeer, facts: Facts) -> None:
        self._peer = peer
        self._number = facts["handle"]
        self.ledger_id: int = facts["ledger"]
        self.last_add_confirmed: int = facts["lastAddConfirmed"]
        self.length: int = facts["length"]
        self.closed: bool = facts["closed"]

    async def read(self, first: int, last: int, *, unconfirmed: bool = False) -> list[PeerEntry]:
        """Entries from `first` to `last`, both included."""
        facts = await self._call("read", first=first, last=last, unconfirmed=unconfirmed)
        return _entries(facts)

    async def batch_read(self, first: int, max_count: int, max_bytes: int) -> list[PeerEntry]:
        """Entries from `first`, as many as fit, at least one."""
        facts = await self._call("batch_read", first=first, maxCount=max_count, maxBytes=max_bytes)
        return _entries(facts)

    async def read_last_add_confirmed(self) -> int:
        """The last confirmed entry, asked from the bookies."""
        lac: int = (await self._call("last_add_confirmed"))["lastAddConfirmed"]
        return lac

    async def close(self) -> None:
        """Close the handle; a writer's ledger is closed with it."""
        await self._call("close")

    async def _call(self, operation: str, **arguments: object) -> Facts:
        return await self._peer.call(operation, handle=self._number, **arguments)


class PeerWriter(PeerReader):
    """A ledger that this client writes."""

    async def add(self, *entries: bytes) -> list[int]:
        """Send all at once; returns their ids.

        If one fails, `facts["acknowledged"]` of the error has the ids before it.
        """
        facts = await self._call("add", entries=[_text(entry) for entry in entries])
        return list(facts["acknowledged"])


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _entries(facts: Facts) -> list[PeerEntry]:
    return [
        PeerEntry(each["entry"], each["length"], b64decode(each["data"]))
        for each in facts["entries"]
    ]
