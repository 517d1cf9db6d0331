"""Groups of one transaction key of an anonymous owner, as tests of coordinators use them."""

from collections.abc import Sequence

from magnetar.protocol.txn_id import TxnId
from tests.unit.txn.coordinator_world import World
from tests.unit.txn.keyed import KEY, NAME
from txn import key_records
from txn.collector import Collector
from txn.coordinators import Coordinators
from txn.group import Batch, bounded_commit
from txn.key_store import TransactionKeyStore
from txn.parts import TransactionParts
from txn.transaction_groups import BegunAttempt, CommittedGroup, TransactionGroups
from txn.transaction_key import KeyRecord
from txn.transaction_keys import TransactionKeys

BATCH = Batch("q", 0)
HEADERS, KEY_PATH = "/txn/id/", key_records.key_path(NAME)


def groups_of(led: Coordinators) -> TransactionGroups:
    groups, _ = led.groups_of(led.coordinator_of(KEY), None, KEY)
    return groups


def keys_of(led: Coordinators) -> TransactionKeys:
    return groups_of(led)._keys


async def attempt(
    led: Coordinators,
    epoch: int = 0,
    nonce: str = "n",
    timeout_ms: int = 60_000,
    batch: Batch | None = None,
) -> BegunAttempt | None:
    return await groups_of(led).begin_attempt(NAME, epoch, nonce, timeout_ms, batch)


async def begin_attempt(led: Coordinators, epoch: int = 0, nonce: str = "n") -> TxnId:
    begun = await attempt(led, epoch, nonce)
    assert begun is not None
    return begun.attempt


async def commit(
    led: Coordinators,
    winners: Sequence[TxnId] = (),
    batch: Batch = BATCH,
    *,
    epoch: int = 0,
    nonce: str = "n",
    group: TxnId | None = None,
    positions: str | None = None,
) -> CommittedGroup:
    """`group`: that of the first winner, if there is one."""
    named = winners[0].group if winners and group is None else group
    whole = bounded_commit(batch, positions, [(each, {}) for each in winners])
    return await groups_of(led).commit(NAME, epoch, nonce, named, whole, winners)


def writes(world: World) -> list[tuple[str, str]]:
    """What was put or deleted of headers and keys since the last time this was asked."""
    calls, world.metadata.calls = world.metadata.calls, []
    return [call for call in calls if call[0] in ("put", "delete") and "tc-seq" not in call[1]]


async def key_record(parts: TransactionParts, led: Coordinators) -> KeyRecord:
    store = TransactionKeyStore(parts.store.metadata, led.coordinator_of(KEY))
    stored = await store.read(NAME)
    assert stored is not None
    return stored.record


def a_round(parts: TransactionParts) -> Collector:
    async def nobody(segment: str, found: Sequence[object]) -> bool:
        return True

    return Collector(parts, lambda _: True, nobody, interval_s=1000, retention_s=0)
