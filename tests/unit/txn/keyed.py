"""One transaction key of an anonymous owner, as tests of coordinators use it."""

from collections.abc import Callable

from magnetar.protocol.txn_id import TxnId
from txn.coordinators import Coordinators
from txn.parts import TransactionParts
from txn.records import KeyEpoch, TxnState
from txn.transaction_key import NO_EPOCH, KeyName, OpenedKey

KEY = "k"
NAME = KeyName("", KEY)
COMMIT, ABORT = TxnState.COMMITTED, TxnState.ABORTED


class Holder:
    """A connection."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.callbacks: list[Callable[[], None]] = []

    def close(self, why: str) -> None:
        self.closed.append(why)
        self.end()

    def end(self) -> None:
        for callback in list(self.callbacks):
            callback()

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)


async def open_key(
    led: Coordinators, presented: int = NO_EPOCH, opener: str = "", holder: Holder | None = None
) -> OpenedKey:
    keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
    return await keys.open(name, presented, opener, holder)


async def begin(led: Coordinators, epoch: int, beginner: str = "") -> TxnId:
    key = KeyEpoch(KEY, epoch)
    return await led.begin(led.coordinator_of(KEY), 60_000, None, key, beginner)


async def state_of(parts: TransactionParts, txn: TxnId) -> TxnState | None:
    stored = await parts.store.read_header(txn)
    return None if stored is None else stored.header.state
