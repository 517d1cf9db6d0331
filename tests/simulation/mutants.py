"""Brokers that break one rule each: what the simulation is worth is that it finds every one.

Each mutant overrides the one method that keeps its rule.  A story ends otherwise with it, which
shows what the rule is for; and runs by luck find it, which shows that they would find what nobody
thought of.  `docs/testing.md` has them all in a table, and why luck finds some of them never.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from broker.scalable import assignment, group, group_controller
from broker.scalable.auto_scaler import AutoScaler
from broker.scalable.key_sample import KeySample
from broker.scalable.migration import Migrator
from broker.scalable.reshape import Reshaper
from broker.scalable.scale_decision import _Rules
from broker.scalable.segments import Segments
from broker.topics import publishing
from broker.topics.carried_ids import CarriedId
from broker.topics.deduplication import Deduplication, ProducerSequence
from broker.topics.dispatch.earlier_messages import EarlierMessages
from broker.topics.dispatch.entry_bucket_dispatcher import EntryBucketDispatcher
from broker.topics.dispatch.entry_buckets import EntryBuckets
from broker.topics.dispatch.holds import Holds
from broker.topics.dispatch.key_order import KeyOrder
from broker.topics.dispatch.outdated_messages import OutdatedMessages
from broker.topics.dispatch.redelivery import ReplayQueue
from broker.topics.dispatch.single_active import SingleActiveDispatcher
from broker.topics.sequence_store import SequenceStore
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.topics.transactional_acks import TransactionalAcks
from broker.transactions.service import Transactions
from config.bounds import TXN_ID_BLOCK
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger import cursors
from storage.metadata.store import Version
from tests.simulation import ack_mutants as acks
from tests.simulation import bucket_mutants as buckets
from tests.simulation import scaling_mutants as scaling
from tests.simulation import sequence_mutants as ids
from tests.simulation import v4_mutants as v4
from tests.simulation import write_mutants as writes
from tests.simulation.ack_mutants import with_acks
from tests.simulation.injection import Parts
from tests.simulation.write_mutants import with_buffer, with_core
from tests.unit.txn import group_mutants, key_mutants
from txn import coordinator, decisions, records, store
from txn.coordinator import Coordinator
from txn.coordinators import Coordinators
from txn.errors import TransactionNotFound
from txn.header import end_header
from txn.held_messages import HeldMessages
from txn.numbers import NumberBlocks
from txn.records import Header, KeyEpoch, TxnState, decode_sequence, sequence_key
from txn.store import TransactionStore
from txn.transaction_keys import TransactionKeys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    """The rule that it breaks; where there are two ways to break it, also which."""
    parts: Parts
    story: str
    """That ends otherwise with it."""
    profile: str = ""
    """The kind of trouble in which it shows; empty: luck does not find it, `docs/testing.md` says
    why."""
    seed: int = 1
    """Of a run that finds it."""

    @property
    def rule(self) -> str:
        return self.name.partition("-")[0]


class _ReusedNumbers(NumberBlocks):
    async def reserve(self) -> range:
        """T1 broken: the counter is read, and not moved before its numbers are used."""
        record = await self._store.metadata.get(sequence_key(self._coordinator))
        first = 0 if record is None else decode_sequence(record.key, record.value)
        later = self._store.reserve_numbers(self._coordinator, TXN_ID_BLOCK)
        self._later = asyncio.get_running_loop().create_task(_after(3600.0, later))
        return range(first, first + TXN_ID_BLOCK)


async def _after(seconds: float, work: Awaitable[T]) -> T:
    await asyncio.sleep(seconds)
    return await work


async def _ends_blindly(
    self: TransactionStore, txn: TxnId, header: Header, expect: Version
) -> Version:
    """T2 broken: an end is written over whatever stands there."""
    result = await self.metadata.put(
        records.header_key(txn),
        records.encode_header(header),
        partition=records.partition_of(txn),
        indexes=records.header_indexes(header),
    )
    return result.version


class _RevivesMissing(Coordinator):
    """T3 broken: an END makes the header that is not there."""

    async def _end_on_stored_version(
        self,
        txn: TxnId,
        action: TxnState,
        owner: str | None,
        key: KeyEpoch | None = None,
        *,
        if_due: bool = False,
    ) -> bool:
        try:
            return await super()._end_on_stored_version(txn, action, owner, key, if_due=if_due)
        except TransactionNotFound:
            now_ms = self._parts.clock.now_ms()
            missing = Header(TxnState.OPEN, 1, now_ms, None, owner)
            await self._store.create_header(txn, end_header(missing, action, now_ms))
            return True


def _with_keys(keys: type[TransactionKeys]) -> Parts:
    return {(Coordinator, "keys_class"): keys}


ZOMBIE = "zombie_with_a_key"
AT_ONCE = "a_key_is_opened_at_once_and_begun_under_late"
DELAYED_EVENTS = "delayed_end_events"
GROUP = "a_group_and_what_comes_late"
PROGRAMS = "programs_over_layout_changes"
MOVES = "a_bucket_moves_to_another_consumer"
SEVERAL = "a_batch_of_several_buckets"
FIRST = "partitions_are_read_first"
V4 = "a_v4_client_keeps_a_topic_ordinary"
EVERYBODY = "everybody_has_a_bucket"
_EVERYBODY_WINS: Parts = {
    (part, "header_of"): group_mutants.everybody_wins for part in (store, decisions)
}

MUTANTS = (
    Mutant("W1", with_core(writes.AppendBesideClaim), "crash_between_claim_and_append", "joins"),
    Mutant("W2", with_core(writes.NoHeaderRead), "write_after_collection", "joins", 22),
    Mutant("W3", with_core(writes.JoinsByLoadedClaim), "stale_owner_refuses_a_join"),
    Mutant("W4", with_core(writes.AbortsAtOnce), "abort_with_appends_in_flight", "aborts", 3),
    Mutant(
        "W5-order", with_core(writes.ClaimsFirst), "crash_while_cleaning_an_abort", "cleaning", 5
    ),
    Mutant(
        "W5-lowers",
        {(TransactionStore, "record_aborted"): writes.lowers_aborted},
        "stale_owner_records_an_abort_late",
    ),
    Mutant("W6-all", with_buffer(writes.DeletesAllClaims), "stale_owner_hears_of_an_abort"),
    Mutant("W6-newer", with_buffer(writes.LoadsAllClaims), "replaced_while_it_loads"),
    Mutant("W7-follow", with_buffer(writes.FollowsLate), "end_during_a_load"),
    Mutant(
        "W7-W8",
        with_buffer(writes.AbortedSetFirst),
        "stale_owner_cleans_up",
        "aborts-handed-over",
        26,
    ),
    Mutant("W9-missing", with_core(writes.HidesWithoutHeader), "claim_after_collection"),
    Mutant("W9-unknown", with_core(writes.HidesUnread), "stale_owner_finds_no_header"),
    Mutant(
        "W10",
        {(Transactions, "collector_class"): writes.CollectsUnlisted},
        "abort_is_not_recorded_for_long",
        "aborts-handed-over",
        21,
    ),
    Mutant("W11", with_buffer(writes.LooksOnce), "stale_owner_claims_late", "left-behind", 13),
    Mutant("W12", with_core(writes.LeavesRefused), "write_after_collection"),
    Mutant("W13", with_core(writes.OneFloor), "two_owners_claim", "resumed", 4),
    Mutant(
        "W14",
        {(Subscription, "at_end"): writes.DRAINED_AT_MAX_READ_POSITION},
        "children_wait_for_their_parent",
        "general",
        4,
    ),
    Mutant(
        "A1-proof",
        with_acks(acks.AnswersUnproven),
        "stale_owner_takes_an_ack",
        "acks-handed-over",
        24,
    ),
    Mutant("A1-record", with_acks(acks.AnswersEarly), "crash_before_the_ack_record", "cleaning", 4),
    Mutant(
        "A2",
        with_acks(acks.DeletesBeforeDurable),
        "crash_while_a_commit_is_applied",
        "cleaning",
        52,
    ),
    Mutant(
        "A3",
        {(cursors, "CursorStore"): acks.Unfenced},
        "stale_owner_applies_a_commit",
        "commits-handed-over",
        12,
    ),
    Mutant("A4", with_acks(acks.LoadsNothing), "pending_acks_after_reload", "restarts", 5),
    Mutant("A5", with_acks(acks.AppliesVoid), "stale_owner_puts_a_void_ack"),
    Mutant("A6", with_acks(acks.LooksOnce), "stale_owner_puts_an_ack_late", "left-behind", 35),
    Mutant("A7", with_acks(acks.SeeksAtOnce), "crash_after_a_seek"),
    Mutant(
        "A8-pass", {(Holds, "may_pass"): acks.passes_unread}, DELAYED_EVENTS, "delayed-end-events"
    ),
    Mutant("A8-refuse", with_acks(acks.RefusesUnread), DELAYED_EVENTS, "delayed-end-events"),
    Mutant("A8-seek", with_acks(acks.SeeksUnread), "seek_after_an_unseen_commit"),
    Mutant(
        "A9",
        {(TransactionalAcks, "must_wait_for"): acks.keeps_nothing},
        "hold_of_another_consumer",
    ),
    Mutant(
        "T1",
        {(Coordinator, "numbers_class"): _ReusedNumbers},
        "numbers_are_never_used_again",
        "restarts",
    ),
    Mutant(
        "T2", {(TransactionStore, "end_header"): _ends_blindly}, "both_ends_at_once", "restarts", 2
    ),
    Mutant(
        "T3", {(Coordinators, "coordinator_class"): _RevivesMissing}, "end_twice", "restarts", 7
    ),
    Mutant("K1-version", _with_keys(key_mutants.Overwrites), AT_ONCE, "keys", 4),
    Mutant("K2-abort", _with_keys(key_mutants.LeavesOpen), ZOMBIE, "keys", 3),
    Mutant("K3-name", _with_keys(key_mutants.NamesNothing), ZOMBIE, "keys"),
    Mutant("K3-version", _with_keys(key_mutants.NamesBlindly), AT_ONCE, "keys", 19),
    Mutant("G1", _EVERYBODY_WINS, GROUP, "groups", 6),
    Mutant("G3", _with_keys(group_mutants.BeginsAgain), GROUP, "groups", 15),
    Mutant("G4", _with_keys(group_mutants.AsksNoEpoch), GROUP, "groups", 36),
    Mutant("G6", _with_keys(group_mutants.KnowsNoBatch), GROUP, "groups", 2),
    Mutant(
        "C1", {(SequenceStore, "wait_inherited"): ids.waits_for_nothing}, PROGRAMS, "sequences", 5
    ),
    Mutant("C2", {(SequenceStore, "inherit"): ids.inherits_in_memory}, PROGRAMS),
    Mutant("C4-ends", {(Deduplication, "final"): ids.passes_nothing_on}, PROGRAMS, "sequences"),
    Mutant("C4-keys", {(CarriedId, "may_cover"): ids.covers_every_key}, PROGRAMS),
    Mutant(
        "C5",
        {(ProducerSequence, "end_repeated"): ids.compares_with_its_own},
        PROGRAMS,
        "sequences",
        3,
    ),
    Mutant("B1", {(KeyOrder, "sent"): buckets.holds_nothing}, MOVES, "buckets", 11),
    Mutant("B2", {(ReplayQueue, "first"): buckets.newest_first}, MOVES, "buckets", 6),
    Mutant("B3-grant", {(group, "rebalance"): buckets.grants_at_once}, MOVES),
    Mutant("B3-attach", {(Subscription, "_changes_sharing"): buckets.refuses_the_other_use}, MOVES),
    Mutant("B4", {(EntryBucketDispatcher, "_must_wait"): buckets.sends_among_others}, SEVERAL),
    Mutant(
        "B5",
        {(group_controller, "can_share_segments"): buckets.takes_all_for_sharers},
        "a_client_that_cannot_share",
        "buckets",
    ),
    Mutant("B6", {(Topic, "note_unstamped_batch"): buckets.marks_nothing}, SEVERAL),
    Mutant(
        "B7",
        {(EntryBucketDispatcher, "_update_block"): buckets.blocks_nothing},
        "a_transaction_holds_a_bucket",
        "buckets",
        62,
    ),
    Mutant(
        "B8-spread",
        {(EntryBuckets, "_spread"): buckets.gives_all_to_one},
        EVERYBODY,
        "buckets",
        8,
    ),
    Mutant("B8-deal", {(assignment, "_counts"): buckets.deals_one_each}, EVERYBODY, "buckets", 8),
    Mutant(
        "B8-policy", {(_Rules, "by_buckets"): buckets.lacks_no_buckets}, "consumers_lack_buckets"
    ),
    Mutant("L1", {(Transactions, "_require_participant"): v4.takes_every_topic}, "v4_participants"),
    Mutant(
        "L2",
        {(publishing, "_naming_transaction"): v4.names_nothing},
        "v4_message_names_no_transaction",
        "v4",
        4,
    ),
    Mutant(
        "L3",
        {(Transactions, "carry_out_end"): v4.waits_for_nobody},
        "v4_end_is_carried_out",
        "v4",
        2,
    ),
    Mutant("L4", {(coordinator, "decide_end"): v4.ends_once}, "v4_end_is_carried_out", "v4", 2),
    Mutant(
        "L5", {(HeldMessages, "require_individual"): v4.sees_no_conflict}, "v4_conflict", "v4", 22
    ),
    Mutant("L6", with_core(writes.NoHeaderRead), "v4_late_requests", "v4", 4),
    Mutant(
        "L7",
        {(Transactions, "require_served_to_v4"): v4.serves_every_coordinator},
        "v4_coordinator_has_no_leader",
    ),
    Mutant(
        "L8",
        {(OutdatedMessages, "require_unused"): v4.refuses_nothing_outdated},
        "v4_another_consumer_was_active",
    ),
    Mutant(
        "L8-now",
        {(SingleActiveDispatcher, "_require_not_passed_on"): v4.takes_what_another_has},
        "v4_another_consumer_was_active",
    ),
    Mutant(
        "L9",
        {(EarlierMessages, "require_unused"): v4.refuses_nobody_that_comes_back},
        "v4_a_consumer_comes_back",
    ),
    Mutant(
        "S1",
        {(_Rules, "_may_come_from_a_split"): scaling.takes_none_for_young},
        "a_young_split_stays",
    ),
    Mutant(
        "S2-split",
        {(_Rules, "_cooling_down"): scaling.splits_at_once},
        "splits_are_a_cooldown_apart",
    ),
    Mutant(
        "S2-merge",
        {(_Rules, "_cooling_down"): scaling.merges_at_once},
        "merges_are_a_cooldown_apart",
    ),
    Mutant(
        "S2-rebucket",
        {(_Rules, "_cooling_down"): scaling.rebuckets_at_once},
        "rebuckets_are_a_cooldown_apart",
    ),
    Mutant(
        "S3", {(KeySample, "helpful_parts"): scaling.takes_any_split_for_helpful}, "one_hot_key"
    ),
    Mutant(
        "S4",
        {(AutoScaler, "_sample"): scaling.takes_all_for_loaded},
        "a_load_of_a_broker_that_died",
    ),
    Mutant(
        "M1",
        {(assignment, "_readable_in_order"): scaling.reads_partitions_beside},
        FIRST,
        "migrations",
    ),
    Mutant("M2-first", {(Migrator, "_require_managed"): scaling.asks_for_no_clients}, V4),
    Mutant("M2-again", {(Migrator, "_require_managed"): scaling.asks_for_clients_once}, V4),
    Mutant("M3", {(Reshaper, "_undo"): scaling.undoes_nothing}, "a_migration_that_dies_half_done"),
    Mutant(
        "M4",
        {(Migrator, "finish_late"): scaling.finishes_nothing_late},
        "a_migration_that_is_published_late",
    ),
    Mutant("M5", {(Segments, "refuse_producers"): scaling.refuses_no_producers}, FIRST),
)
