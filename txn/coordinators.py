"""The transaction coordinators of the cluster, and those that this process leads."""

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import ClassVar

import structlog

from config.bounds import (
    TXN_CONCURRENT_ENDS,
    TXN_SWEEP_S,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.server_error import MagnetarError, OperatorError, ServerError
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import ABSENT, MetadataStore, VersionConflict
from txn import records
from txn.coordinator import Coordinator
from txn.coordinator_elections import CoordinatorBrokers, CoordinatorElections, Leader
from txn.deadlines import Deadlines
from txn.errors import CoordinatorNotFound, InvalidTransactionKey
from txn.parts import TransactionParts
from txn.records import Header, KeyEpoch, TxnState
from txn.store import StoredHeader
from txn.transaction_groups import TransactionGroups
from txn.transaction_key import KeyName, key_name
from txn.transaction_keys import TransactionKeys

log = structlog.get_logger(__name__)

_ABORT_RETRY_MS = 1000


class CoordinatorCountDiffers(OperatorError):
    """The setting and the metadata store have different numbers of coordinators."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class Coordinators:
    """The cluster's transaction coordinators, and those of them that this process leads.

    Their number is fixed when the metadata store is first used, as ids of transactions name them.

    A coordinator is served as soon as this process leads it.  Its stored open transactions are
    loaded after that, so that they are aborted at their deadlines.
    """

    coordinator_class: ClassVar[type[Coordinator]] = Coordinator

    def __init__(
        self,
        parts: TransactionParts,
        me: Leader,
        *,
        parallelism: int,
        max_open: int,
        session_timeout_ms: int,
        electorate: CoordinatorBrokers | None = None,
    ) -> None:
        """`session_timeout_ms` and `electorate` as for `CoordinatorElections`."""
        self.parallelism = parallelism
        self._parts = parts
        self._max_open = max_open
        self._elections = CoordinatorElections(
            parts.store.metadata,
            me,
            parallelism,
            self._leaders_changed,
            session_timeout_ms=session_timeout_ms,
            electorate=electorate,
        )
        self._led: dict[CoordinatorId, Coordinator] = {}
        self._deadlines = Deadlines(parts.clock, self._due)
        self._aborts = asyncio.Semaphore(TXN_CONCURRENT_ENDS)
        self._listeners: dict[object, Callable[[], None]] = {}
        self._tasks = BackgroundTasks(log, failure_event="transaction_work_failed")
        self._kept = BackgroundTasks(log)
        self._won = asyncio.Event()
        self._stopping = False

    async def start(self) -> None:
        """Stand in the elections, and load the open transactions of coordinators that are won.

        Raises `CoordinatorCountDiffers`, `MetadataError`.
        """
        await require_parallelism(self._parts.store.metadata, self.parallelism)
        await self._elections.start()
        self._won.clear()
        await self._load_open()
        self._kept.keep("open_transactions", self._load_when_won)
        self._kept.keep("transaction_sweep", self._sweep)

    async def stop(self) -> None:
        """Give up all coordinators.  May be called again."""
        self._stopping = True
        self._deadlines.close()
        await self._kept.stop()
        await self._tasks.end()
        led, self._led = self._led, {}
        for coordinator in led.values():
            await coordinator.close()
        await self._elections.stop()

    # Leaders

    def leads(self, coordinator: CoordinatorId) -> bool:
        """Whether this process leads a coordinator."""
        return coordinator in self._led

    def assignments(self) -> Mapping[CoordinatorId, Leader]:
        """The leader of each coordinator; one without a leader is left out."""
        return self._elections.leaders

    def balance(self) -> None:
        """Share the coordinators anew, as brokers came or went."""
        self._elections.balance()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when assignments change; returns its removal."""
        token = object()
        self._listeners[token] = listener
        return lambda: (self._listeners.pop(token, None), None)[1]

    def _leaders_changed(self) -> None:
        if self._stopping:
            return
        led = set(self._elections.led_here)
        for number in self._led.keys() - led:
            log.info("transaction_coordinator_lost", coordinator=number)
            self._parts.counters.coordinators_lost += 1
            self._tasks.start(self._led.pop(number).close())
        won = led - self._led.keys()
        for number in won:
            self._led[number] = self.coordinator_class(
                number, self._parts, self._deadlines, max_open=self._max_open
            )
        if won:
            self._won.set()
        for listener in list(self._listeners.values()):
            try:
                listener()
            except Exception:
                log.exception("transaction_listener_failed")

    # Requests of clients

    async def begin(
        self,
        coordinator: CoordinatorId,
        timeout_ms: int,
        owner: str | None,
        key: KeyEpoch | None = None,
        beginner: str = "",
    ) -> TxnId:
        """Begin a transaction; `beginner` identifies a request under a key that is repeated (K3).

        Raises `TooManyTransactions`, `CoordinatorNotFound`; with a key as `TransactionKeys.begin`.
        """
        if key is None:
            return await self._served(coordinator).begin(timeout_ms, owner)
        keys, name = self.keys_of(coordinator, owner, key.key)
        return await keys.begin(name, key.epoch, beginner, timeout_ms)

    async def require_open(
        self, txn: TxnId, owner: str | None, key: KeyEpoch | None = None
    ) -> Header:
        """The header of an open transaction of an owner, under its key, if any (K4).

        Raises `TransactionNotFound`, `InvalidTxnStatus`, `CoordinatorNotFound`,
        `InvalidTransactionKey`, `TransactionKeyFenced`.
        """
        coordinator = self._served(txn.coordinator)
        if key is None:
            return await coordinator.require_open(txn, owner)
        keys, name = self.keys_of(txn.coordinator, owner, key.key)
        return await keys.under(name, key.epoch, lambda: coordinator.require_open(txn, owner, key))

    async def end_transaction(
        self, txn: TxnId, action: TxnState, owner: str | None, key: KeyEpoch | None = None
    ) -> None:
        """End a transaction as COMMITTED or ABORTED.  The same end again is no error.

        Raises `TransactionNotFound`, `InvalidTxnStatus`, `CoordinatorNotFound`,
        `InvalidTransactionKey`, `TransactionKeyFenced`.
        """
        coordinator = self._served(txn.coordinator)
        if key is None:
            await coordinator.end_transaction(txn, action, owner)
            return
        keys, name = self.keys_of(txn.coordinator, owner, key.key)
        await keys.under(
            name, key.epoch, lambda: coordinator.end_transaction(txn, action, owner, key)
        )

    def keys_of(
        self, coordinator: CoordinatorId, owner: str | None, key: str
    ) -> tuple[TransactionKeys, KeyName]:
        """The keys of a coordinator that is led here, and the name of a key that hashes to it.

        Raises `CoordinatorNotFound`, `InvalidTransactionKey`.
        """
        name = key_name(owner, key)
        keys = self._served(coordinator).keys
        if self.coordinator_of(key) != coordinator:
            raise InvalidTransactionKey(
                f"Transaction key {key!r} is served by coordinator {self.coordinator_of(key)}, "
                f"not by {coordinator}: ask that one, and begin its transactions there."
            )
        return keys, name

    def groups_of(
        self, coordinator: CoordinatorId, owner: str | None, key: str
    ) -> tuple[TransactionGroups, KeyName]:
        """The groups of a coordinator that is led here, and the name of a key that hashes to it.

        Raises `CoordinatorNotFound`, `InvalidTransactionKey`.
        """
        _, name = self.keys_of(coordinator, owner, key)
        return self._served(coordinator).groups, name

    def coordinator_of(self, key: str) -> CoordinatorId:
        """The coordinator that serves a key."""
        return CoordinatorId(coordinator_of_key(key, self.parallelism))

    def require_served(self, coordinator: CoordinatorId) -> None:
        """Raise `CoordinatorNotFound` unless this process leads the coordinator."""
        self._served(coordinator)

    def open_transactions(self, coordinator: CoordinatorId | None = None) -> Sequence[StoredHeader]:
        """The open transactions of one coordinator, or of all that are led here; in no order."""
        led = self._led
        numbers = led.keys() if coordinator is None else led.keys() & {coordinator}
        return [stored for number in numbers for stored in led[number].open_transactions()]

    def oldest_open(
        self,
        coordinator: CoordinatorId | None,
        begun_by_ms: int,
        limit: int,
        *,
        owner: str | None = None,
    ) -> tuple[int, Sequence[StoredHeader]]:
        """The number of open transactions begun by a time, and the `limit` oldest of them.

        With an `owner`: of those that it began.
        """
        old = [
            stored
            for stored in self.open_transactions(coordinator)
            if stored.header.created_ms <= begun_by_ms and owner in (None, stored.header.owner)
        ]
        return len(old), heapq.nsmallest(limit, old, key=_age)

    def find_open(self, txn: TxnId) -> StoredHeader | None:
        """An open transaction, or attempt of an open group, of a coordinator that is led here."""
        coordinator = self._led.get(txn.coordinator)
        return None if coordinator is None else coordinator.find(txn)

    def led(self) -> Sequence[Coordinator]:
        """The coordinators that this process leads, in order of number."""
        return [self._led[number] for number in sorted(self._led)]

    def _served(self, coordinator: CoordinatorId) -> Coordinator:
        found = self._led.get(coordinator)
        if found is not None:
            return found
        if coordinator >= self.parallelism:
            raise CoordinatorNotFound(
                f"There is no transaction coordinator {coordinator}: there are "
                f"{self.parallelism}, numbered from 0; take one from the assignments."
            )
        raise CoordinatorNotFound(
            f"Transaction coordinator {coordinator} is not served here: ask the broker that the "
            "assignments name."
        )

    # Deadlines

    def _due(self, txns: Sequence[TxnId]) -> None:
        for txn in txns:
            self._tasks.start(self._abort(txn))

    async def _abort(self, txn: TxnId) -> None:
        async with self._aborts:
            coordinator = self._led.get(txn.coordinator)
            if coordinator is None:
                return
            try:
                await coordinator.time_out(txn)
            except MagnetarError as error:
                # Tried again after a second.
                log.warning("transaction_timeout_failed", txn=str(txn), error=str(error))
                self._deadlines.add(txn, self._parts.clock.now_ms() + _ABORT_RETRY_MS)

    async def _sweep(self) -> None:
        # A transaction may have been begun by a leader that did not know yet that it was replaced,
        # or by a request that was interrupted.
        while True:
            await asyncio.sleep(TXN_SWEEP_S)
            try:
                await self._load_open(self._parts.clock.now_ms())
            except MagnetarError as error:
                log.warning("transaction_sweep_failed", error=str(error))

    async def _load_when_won(self) -> None:
        # One scan loads the transactions of all coordinators that were won meanwhile.
        while True:
            await self._won.wait()
            self._won.clear()
            try:
                await self._load_open()
            except BaseException:
                self._won.set()
                raise

    async def _load_open(self, up_to_ms: int | None = None) -> None:
        """Load the open transactions of coordinators led here; with a time, those due by then."""
        async for page in self._parts.store.open_headers(up_to_ms):
            for stored in page:
                coordinator = self._led.get(stored.txn.coordinator)
                if coordinator is not None:
                    coordinator.adopt((stored,))


def _age(stored: StoredHeader) -> tuple[int, TxnId]:
    return stored.header.created_ms, stored.txn


async def require_parallelism(metadata: MetadataStore, parallelism: int) -> None:
    """Store the number of coordinators, or check the one that is stored.

    Raises `CoordinatorCountDiffers`, `MetadataError`.
    """
    record = await metadata.get(records.PARALLELISM)
    if record is None:
        try:
            await metadata.put(records.PARALLELISM, str(parallelism).encode(), expect=ABSENT)
        except VersionConflict:
            record = await metadata.get(records.PARALLELISM)
    if record is None:
        return
    stored = record.value.decode(errors="replace").strip()
    if stored != str(parallelism):
        raise CoordinatorCountDiffers(
            f"The metadata store was set up with {stored} transaction coordinators, and "
            f"transaction_coordinators is {parallelism}: set it to {stored}, as ids of "
            "transactions name their coordinator."
        )
