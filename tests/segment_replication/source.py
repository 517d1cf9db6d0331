"""The cluster that sends: its layout, logs, cursors, and the owners of its segments."""

import copy
import random
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from broker.replication.chunk_groups import ChunkGroups
from broker.replication.segment_plan import (
    MessageHashes,
    RemoteLayout,
    SourceEntry,
    Unattached,
    Unplanned,
    hash_without_key,
)
from broker.replication.segment_sender import Planned, SegmentSender
from broker.scalable import layout as layouts
from broker.scalable.layout import IllegalReshape, Layout
from broker.scalable.replicated_segments import is_needed, sending
from broker.topics.replicated_ranges import (
    EVERYTHING,
    LAST_HASH,
    PartRecord,
    ReplicatedRanges,
    SourceSegment,
)
from broker.topics.segment_sources import SourceState
from magnetar.protocol.ids import EARLIEST, Position
from tests.segment_replication.rules import Rules

KEYS = tuple(MessageHashes(4096 + 8192 * n, (4096 + 24576 * n) & 0xFFFF) for n in range(8))
"""The hashes of each key."""
NO_KEY = len(KEYS)
"""Stands for the key of a message without one."""
WINDOW = 4
"""Entries that a sender has in flight."""
REMOTE = "R"
SEGMENTS_MAX = 6
TRANSACTIONS_MAX = 2
"""Open ones."""


class Message(NamedTuple):
    """A message: the life of the topic, its key, and its number among those of that key.

    A topic that is created anew, or gets a new incarnation, begins another life.
    """

    life: int
    key: int
    number: int


class Chunk(NamedTuple):
    """A chunk of a message."""

    uuid: str
    number: int
    total: int
    key: int

    @property
    def last(self) -> bool:
        """Whether the message is whole with it."""
        return self.number == self.total - 1


class Entry(NamedTuple):
    """A stored entry: messages, or a chunk, of which the last one has the message."""

    position: Position
    messages: tuple[Message, ...]
    chunk: Chunk | None = None
    transaction: int | None = None


class Attach(NamedTuple):
    """The first frame of a link."""

    state: SourceState


class PartFrame(NamedTuple):
    """A part on its way."""

    sequence: int
    source: SourceSegment
    record: PartRecord | None
    messages: tuple[Message, ...]
    chunk: Chunk | None


class Link:
    """One connection of a sender to a segment of the other cluster; each end may be cut."""

    def __init__(self, sender: "Sender", segment_id: int) -> None:
        self.sender = sender
        self.segment_id = segment_id
        self.to_remote: deque[Attach | PartFrame] = deque()
        self.to_sender: deque[ReplicatedRanges | None] = deque()
        """What is stored, and after that a None for each receipt."""
        self.cut = False
        """The remote end is gone: the sender hears of it after what is on its way."""
        self.left = False
        """The sender's end is gone; what it sent may still arrive."""
        self.refused = False
        """The sender is refused for an older layout, or an older owner."""
        self.layout_epoch = sender.layout.epoch


class Log:
    """A segment's log, and its cursor for the other cluster."""

    def __init__(self, ledger: int, *, cursor: bool) -> None:
        self.entries: list[Entry] = []
        self.terminated = False
        self.ledger = ledger
        self.next_entry = 0
        self.owner_epoch = 1
        self.has_cursor = cursor
        self.acked: set[Position] = set()
        """By the owner, in memory."""
        self.durable: set[Position] = set()
        self.open: set[int] = set()
        """Transactions that have entries here, and whose end has not come here yet."""
        self.aborted: set[int] = set()
        self.known = EARLIEST
        """The owner found the log up to here, or has sent or passed over what is beyond that."""
        self.found_terminated = False
        """Whether the owner found the log terminated."""
        self.restored = False
        """Whether it is from a backup, and the topic has no new incarnation since."""

    def append(
        self,
        messages: tuple[Message, ...],
        chunk: Chunk | None = None,
        transaction: int | None = None,
    ) -> None:
        """Store an entry."""
        position = Position(self.ledger, self.next_entry)
        self.entries.append(Entry(position, messages, chunk, transaction))
        self.next_entry += 1
        if transaction is not None:
            self.open.add(transaction)

    def load(self) -> None:
        """Take the log over, with the cursor that is durable."""
        self.acked = set(self.durable)
        self.known = self.entries[-1].position if self.entries else EARLIEST
        self.found_terminated = self.terminated

    def readable(self) -> list[Entry]:
        """The entries up to the max read position: before those of open transactions."""
        return list(takewhile(lambda each: each.transaction not in self.open, self.entries))

    @property
    def read(self) -> bool:
        """Whether the cursor has passed all entries."""
        return self.has_cursor and len(self.acked) == len(self.entries)


class Sender:
    """An owner of a segment that sends it.  It may be stale, and not know that."""

    def __init__(self, cluster: "SourceCluster", segment_id: int, layout: RemoteLayout) -> None:
        self.log = cluster.logs[segment_id]
        self.segment_id = segment_id
        self.epoch = self.log.owner_epoch
        self.rules = cluster.rules
        self.incarnation = cluster.incarnation
        self.layout = cluster.layout
        """The layout of its own topic, as it knows it."""
        self.acked = set(self.log.acked)
        self.known, self.ledger = self.log.known, self.log.ledger
        segment = cluster.layout.segments[segment_id]
        self.range = (segment.hash_start, segment.hash_end)
        own_range = self.range if cluster.same_hash else None
        self.core: SegmentSender = self.rules.sender(own_range, layout)
        self.links: dict[int, Link] = {}
        self.opened: set[Position] = set()
        self.chunks = ChunkGroups()
        self.attempts = 0
        self.went_back = False
        """Positions of its log went back, as after its cluster was restored from a backup."""
        self.cluster = cluster

    @property
    def stale(self) -> bool:
        """Whether the segment has another owner by now."""
        return self.epoch != self.log.owner_epoch

    def source(self) -> SourceSegment:
        """What its messages are from."""
        incarnation = 0 if self.rules.breaks("R5-incarnation") else self.incarnation
        return SourceSegment("S", incarnation, self.segment_id)

    def next_entry(self) -> Entry | None:
        """The entry that is to be sent next."""
        every = self.rules.breaks("R11-open")
        for entry in self.log.entries if every else self.log.readable():
            if entry.position.ledger_id > self.ledger:
                return None  # another owner's
            if entry.position >= self.core.read_from and entry.position not in self.acked:
                return entry
        return None

    def step(self) -> Link | None:
        """Send the next entry, or open a link that it needs."""
        if self.core.in_flight >= WINDOW:
            return None
        entry = self.next_entry()
        if entry is None:
            if self.log.terminated and self._is_read():
                self.chunks.give_up()
                self._drop()
            return None
        if entry.transaction in self.log.aborted and not self.rules.breaks("R11-aborted"):
            self.pass_over(entry)
            return None
        facts = self._facts(entry)
        if facts is None:
            self.core.skip(entry.position)
            self._drop()
            return None
        planned = self.core.take(facts)
        if isinstance(planned, Unplanned):
            self.opened.add(entry.position)
        elif isinstance(planned, Unattached):
            for segment_id in sorted(planned.segment_ids - self.links.keys()):
                return self.open(segment_id)
        else:
            self._send(entry, planned)
        return None

    def _is_read(self) -> bool:
        """Whether nothing comes behind what it has read."""
        return not self.log.open or self.rules.breaks("R3-chunks-open")

    def pass_over(self, entry: Entry) -> None:
        """Send nothing of an entry, ever."""
        self.core.skip(entry.position)
        self.acknowledge(entry.position)

    def _hashes(self, key: int, together: str) -> MessageHashes:
        """The hashes by which the target's clients choose the place of a message."""
        if key != NO_KEY:
            return KEYS[key]
        if self.rules.breaks("R3-keyless"):
            self.attempts += 1
            together += f" {self.attempts}"
        hashes = (0, LAST_HASH) if self.rules.breaks("R3-keyless-range") else self.range
        return MessageHashes(hash_without_key(together.encode(), *hashes), 0)

    def _facts(self, entry: Entry) -> SourceEntry | None:
        """What the core has to know of an entry; None for one that waits for its last chunk."""
        if entry.chunk is not None:
            chunk = entry.chunk
            earlier = self.chunks.add(entry.position, chunk.uuid, chunk.number, chunk.total, 0)
            if self.rules.breaks("R3-chunks"):
                earlier = ()
            return (
                None
                if earlier is None
                else SourceEntry(
                    entry.position, [self._hashes(chunk.key, chunk.uuid)], earlier=earlier
                )
            )
        together = entry.position.text
        hashes = [self._hashes(message.key, together) for message in entry.messages]
        buckets = [each.bucket for each in hashes]
        opened = len(hashes) == 1 or entry.position in self.opened
        return SourceEntry(entry.position, hashes if opened else None, (min(buckets), max(buckets)))

    def _drop(self) -> None:
        for position in self.chunks.dropped():
            self.acknowledge(position)

    def _send(self, entry: Entry, planned: Planned) -> None:
        by_position = {each.position: each for each in self.log.entries}
        for sequence, segment_id, position, part in planned.sends:
            sent = by_position[position]
            every = sent.messages
            chosen = (
                every
                if part is None or part.indexes is None
                else [every[each] for each in part.indexes]
            )
            record = None if part is None else part.record
            frame = PartFrame(sequence, self.source(), record, tuple(chosen), sent.chunk)
            self.links[segment_id].to_remote.append(frame)
        self._know(entry.position)
        if planned.done or self.rules.breaks("R9-sent"):
            self.acknowledge(entry.position)

    def open(self, segment_id: int) -> Link:
        """Open a link and ask what is stored."""
        link = self.links[segment_id] = Link(self, segment_id)
        drained = self.layout.ancestors(self.segment_id)
        if self.rules.breaks("R8-drained"):
            drained = frozenset()
        state = SourceState(
            self.source(),
            self.epoch,
            self.layout.epoch,
            frozenset(self.layout.segments),
            drained,
            self.mark_delete(),
        )
        link.to_remote.append(Attach(state))
        return link

    def mark_delete(self) -> Position:
        """Everything up to here is acknowledged."""
        passed = EARLIEST
        for entry in self.log.entries:
            if entry.position not in self.acked:
                break
            passed = entry.position
        return passed

    def _know(self, position: Position) -> None:
        self.known = max(self.known, position)
        if not self.stale:
            self.log.known = max(self.log.known, position)

    def acknowledge(self, position: Position) -> None:
        """Move the cursor over an entry, and the chunks before it."""
        done = self.chunks.done(position)
        self._know(position)
        self.acked.update(done)
        if not self.stale:
            self.log.acked.update(done)

    def hear(self, link: Link) -> None:
        """Take the next answer of a link, or hear that it is gone."""
        if link.to_sender:
            answer = link.to_sender.popleft()
            if answer is not None:
                self.went_back |= self._is_past(answer)
                self.core.attached(link.segment_id, self.rules.told(answer))
                return
            done = self.core.answered(link.segment_id)
            if done is not None:
                self.acknowledge(done)
        elif link.cut:
            self.went_back |= link.refused and self._is_newest(link)
            self.leave(link)

    def _is_past(self, stored: ReplicatedRanges) -> bool:
        """Whether this owner cannot have sent what is stored, nor found it in the log."""
        if self.stale or self.rules.breaks("R12"):
            return False
        known = max(self.known, self.mark_delete())
        if self.rules.breaks("R12-end"):
            known = self.log.entries[-1].position if self.log.entries else EARLIEST
        if stored.is_past(known):
            return True
        drained = any(run.mark == EVERYTHING for run in stored.runs)
        return (
            drained
            and not self.log.found_terminated
            and not self.log.read
            and not self.rules.breaks("R12-drained")
        )

    def _is_newest(self, link: Link) -> bool:
        """Whether it was refused as an older one, and is of the newest layout and owner."""
        newest = link.layout_epoch == self.cluster.layout.epoch and not self.stale
        return newest and not self.rules.breaks("R12-epochs")

    def leave(self, link: Link) -> None:
        """End a link."""
        link.left = True
        if self.links.get(link.segment_id) is link:
            del self.links[link.segment_id]
        self.core.detached(link.segment_id)

    def learn(self, layout: RemoteLayout) -> None:
        """Hear of the other cluster's layout."""
        for segment_id in self.core.learn(layout):
            self.leave(self.links[segment_id])


class Backup(NamedTuple):
    """What a backup of the source has."""

    layout: Layout
    logs: dict[int, Log]
    moved: dict[int, set[int]]
    transactions: dict[int, bool]
    ended: dict[int, bool]
    ledgers: int
    written: tuple[int, ...]


class SourceCluster:
    """The cluster whose topic is replicated."""

    def __init__(self, rng: random.Random, rules: Rules, batches: Sequence[int]) -> None:
        """`batches` are how many messages an entry may have at most beside its first."""
        self.rng = rng
        self.rules = rules
        self.batches = batches
        self.life = self.uuids = self.began = 0
        self.chunked = rng.choice((0, 0, 0.3))
        self.keyless = rng.choice((0, 0, 0.3))
        self.transactional = rng.choice((0, 0, 0.3))
        self.same_hash = rng.random() < 0.8
        """Whether clients here choose segments by the hash by which those of the target do."""
        self.keys = rng.sample(range(len(KEYS)), rng.choice((2, 4, 8)))
        self.begin()

    def begin(self) -> None:
        """Create the topic; positions begin anew."""
        self.incarnation = self.rng.getrandbits(64)
        self.ledgers = 1
        self.layout: Layout = layouts.initial(self.rng.choice((1, 1, 2, 3)), now_ms=0)
        self.logs = {segment_id: self._log() for segment_id in self.layout.segments}
        self.written = [0] * (len(KEYS) + 1)
        self.chunking: tuple[int, Chunk, int | None] | None = None
        """The segment, the next chunk and the transaction of a message that is being written."""
        self.transactions: dict[int, bool] = {}
        """By open transaction: whether it will commit."""
        self.ended: dict[int, bool] = {}
        """By ended transaction: whether it committed."""
        self.saved: Backup | None = None
        self.moved: dict[int, set[int]] = {}
        """By sealed segment that still takes messages: the keys that its children get."""

    def recreate(self) -> None:
        """Delete the topic, and create it anew under the same name."""
        for log in self.logs.values():
            log.owner_epoch += 1
        self.life += 1
        self.begin()

    def _log(self, *, cursor: bool = True) -> Log:
        self.ledgers += 1
        return Log(self.ledgers - 1, cursor=cursor)

    def produce(self) -> None:
        """Store one entry: messages of keys of one segment, or a chunk."""
        if self.rng.random() < self.chunked:
            self.produce_chunk()
            return
        key = self._key()
        segment_id = self._segment_of(key)
        log = self.logs[segment_id]
        keys = [key] + [
            each
            for each in (self._key() for _ in range(self.rng.choice(self.batches)))
            if self._could_write(each, segment_id)
        ]
        self.rng.shuffle(keys)
        messages = []
        for each in keys:
            messages.append(Message(self.life, each, self.written[each]))
            self.written[each] += 1
        log.append(tuple(messages), transaction=self._transaction())

    def _key(self) -> int:
        if self.keyless and self.rng.random() < self.keyless:
            return NO_KEY
        return self.rng.choice(self.keys)

    def _transaction(self) -> int | None:
        """The transaction of an entry: an open one, a new one, or none."""
        if not self.transactional or self.rng.random() >= self.transactional:
            return None
        if len(self.transactions) < TRANSACTIONS_MAX and self.rng.random() < 0.3:
            self.began += 1
            self.transactions[self.began] = self.rng.random() < 0.6
        return self.rng.choice(list(self.transactions)) if self.transactions else None

    def end_transaction(self) -> set[Message]:
        """Commit or abort a transaction; the messages that are nowhere to arrive."""
        if not self.transactions:
            return set()
        transaction = self.rng.choice(list(self.transactions))
        commits = self.ended[transaction] = self.transactions.pop(transaction)
        return set() if commits else self._messages_of(transaction)

    def _messages_of(self, transaction: int) -> set[Message]:
        return {
            message
            for log in self.logs.values()
            for entry in log.entries
            if entry.transaction == transaction
            for message in entry.messages
        }

    def settle(self) -> None:
        """Let a segment hear how a transaction ended."""
        for log in self.logs.values():
            for transaction in log.open & self.ended.keys():
                log.open.remove(transaction)
                if not self.ended[transaction]:
                    log.aborted.add(transaction)
                return

    def produce_chunk(self) -> None:
        """Store a chunk; a producer whose segment was terminated begins anew at a child."""
        if self.chunking is None:
            key, count = self._key(), self.rng.choice((2, 3))
            self.uuids += 1
            segment_id, chunk = self._segment_of(key), Chunk(str(self.uuids), 0, count, key)
            transaction = self._transaction()
        else:
            segment_id, chunk, transaction = self.chunking
        log = self.logs.get(segment_id)
        if (
            log is None
            or log.terminated
            or not self._could_write(chunk.key, segment_id)
            or transaction in self.ended
        ):
            self.chunking = None
            return
        messages: tuple[Message, ...] = ()
        if chunk.last:
            messages = (Message(self.life, chunk.key, self.written[chunk.key]),)
            self.written[chunk.key] += 1
        log.append(messages, chunk, transaction)
        following = segment_id, chunk._replace(number=chunk.number + 1), transaction
        self.chunking = None if chunk.last else following

    def _sealed_with(self, key: int) -> int | None:
        """The sealed segment of a key that still takes messages; there is one at most."""
        covering = (each for each in self.moved if self._covers(each, key))
        return next(covering, None)

    def _covers(self, segment_id: int, key: int) -> bool:
        return self.layout.segments[segment_id].covers(self._hash(key))

    def _hash(self, key: int) -> int:
        return KEYS[key].segment if self.same_hash else KEYS[3 * key % len(KEYS)].segment

    def _segment_of(self, key: int) -> int:
        """The segment that a producer writes a key to: a sealed one that it has not left yet."""
        if key == NO_KEY:
            return self.rng.choice([*self.moved, *(each.segment_id for each in self.layout.active)])
        sealed = self._sealed_with(key)
        if sealed is not None and key not in self.moved[sealed] and self.rng.random() < 0.5:
            return sealed
        return self._active(key)

    def _active(self, key: int) -> int:
        sealed = self._sealed_with(key)
        if sealed is not None:
            self.moved[sealed].add(key)
        return self.layout.route(self._hash(key)).segment_id

    def _could_write(self, key: int, segment_id: int) -> bool:
        """Whether a key may be written to this segment, and is from now on."""
        if key == NO_KEY:
            return not self.logs[segment_id].terminated
        if segment_id in self.moved:
            return self._covers(segment_id, key) and key not in self.moved[segment_id]
        return self._covers(segment_id, key) and self._active(key) == segment_id

    def reshape(self) -> None:
        """Split or merge; the parents take messages until they are terminated."""
        changed = reshaped(self.layout, self.rng, buckets=False)
        if changed is None or any(
            self.moved.keys() & self.layout.ancestors(parent.segment_id)
            for parent in changed.parents
        ):
            return
        self.layout = changed.layout
        for parent in changed.parents:
            self.moved[parent.segment_id] = set()
        for child in changed.children:
            self.logs[child.segment_id] = self._log(cursor=not self.rules.breaks("R1"))

    def terminate(self) -> None:
        """End the log of a sealed segment."""
        if self.moved:
            segment_id = self.rng.choice(list(self.moved))
            del self.moved[segment_id]
            self.logs[segment_id].terminated = True

    def crash(self) -> Log | None:
        """A segment gets another owner, which has what was durable: its log, if there is one."""
        log = self.logs[self.rng.choice(list(self.logs))]
        # A log that grows after a restore, and changes its owner before that one has attached, may
        # have grown past what was lost: this is not noticed.
        if log.restored:
            return None
        self._change_owner(log)
        return log

    def _change_owner(self, log: Log) -> None:
        log.owner_epoch += 1
        if not log.terminated:
            self.ledgers += 1
            log.ledger, log.next_entry = self.ledgers - 1, 0
        log.load()

    def persist(self) -> None:
        """Make a cursor durable."""
        log = self.logs[self.rng.choice(list(self.logs))]
        log.durable = set(log.acked)

    def expire(self) -> tuple[int, list[Entry]]:
        """Let the cursor of a segment pass over its oldest entries, and say which."""
        segment_id = self.rng.choice(list(self.logs))
        log = self.logs[segment_id]
        left = [each for each in log.readable() if each.position not in log.acked]
        oldest = left[: self.rng.randrange(4)] if log.has_cursor else []
        # A message expires with its first chunk: the others are not simulated.
        expired = list(takewhile(lambda each: each.chunk is None, oldest))
        log.acked.update(each.position for each in expired)
        return segment_id, expired

    def drained(self) -> set[int]:
        """The segments that are drained for the other cluster."""
        unfinished = self.rules.breaks("R2-terminated")
        return {
            segment_id
            for segment_id, log in self.logs.items()
            if self._is_read(log)
            and (log.terminated or (unfinished and not self.layout.segments[segment_id].active))
        }

    def _is_read(self, log: Log) -> bool:
        if self.rules.breaks("R2-open"):
            return log.has_cursor and log.acked >= {each.position for each in log.readable()}
        return log.read

    def back_up(self) -> None:
        """Make a backup of everything."""
        self.saved = Backup(
            self.layout,
            copy.deepcopy(self.logs),
            {segment_id: set(keys) for segment_id, keys in self.moved.items()},
            dict(self.transactions),
            dict(self.ended),
            self.ledgers,
            tuple(self.written),
        )

    def restore(self) -> tuple[set[Message], set[Message]]:
        """Go back to the backup: layout, logs and cursors.

        The messages that are gone by that, and those that its cursors have not passed.
        """
        saved = self.saved
        if saved is None:
            return set(), set()
        gone = {
            Message(self.life, key, number)
            for key, end in enumerate(self.written)
            for number in range(saved.written[key], end)
        }
        for log in self.logs.values():
            log.owner_epoch = -1
        self.layout, self.logs = saved.layout, copy.deepcopy(saved.logs)
        self.moved = {segment_id: set(keys) for segment_id, keys in saved.moved.items()}
        self.transactions, self.ended = dict(saved.transactions), dict(saved.ended)
        # Ids of ledgers and epochs are given again; numbers of messages, here, are not.
        self.ledgers, self.chunking = saved.ledgers, None
        for log in self.logs.values():
            self._change_owner(log)
            log.restored = True
        left = {
            message
            for log in self.logs.values()
            for entry in log.entries
            if entry.position not in log.durable
            for message in entry.messages
        }
        return gone, left

    def renew(self) -> tuple[set[Message], set[Message]]:
        """Give the topic a new incarnation, in which all is sent that the cursors have not passed.

        Those that may be missing in it, and those that it does not have.
        """
        self.incarnation = self.rng.getrandbits(64)
        self.life += 1
        self.saved = None
        passed: set[Message] = set()
        left: set[Message] = set()
        for log in self.logs.values():
            log.restored = False
            log.entries = [
                each._replace(
                    messages=tuple(message._replace(life=self.life) for message in each.messages)
                )
                for each in log.entries
            ]
            for entry in log.entries:
                if entry.transaction in log.aborted or entry.position in log.durable:
                    continue
                (passed if entry.position in log.acked else left).update(entry.messages)
        for transaction, commits in (self.transactions | self.ended).items():
            if transaction in self.ended and not commits:
                left -= self._messages_of(transaction)
        every = {
            Message(self.life, key, number)
            for key, end in enumerate(self.written)
            for number in range(end)
        }
        return passed, every - left - passed

    def to_send(self) -> Sequence[int]:
        """The segments whose senders may run."""
        drained = self.drained()
        if self.rules.breaks("R2"):
            return [each for each in self.layout.segments if each not in drained]
        if self.rules.breaks("R2-merge") or self.rules.breaks("R2-parents"):
            enough = any if self.rules.breaks("R2-merge") else all
            return [
                each.segment_id
                for each in self.layout.segments.values()
                if each.segment_id not in drained
                and (not each.parent_ids or enough(parent in drained for parent in each.parent_ids))
            ]
        return sending(self.layout, drained)

    def open_cursor(self, segment_id: int) -> None:
        """See that a segment that is sent has a cursor; one that is made late begins at the end."""
        log = self.logs[segment_id]
        if not log.has_cursor:
            log.has_cursor = True
            log.acked = {entry.position for entry in log.entries}
            log.durable = set(log.acked)

    def prune(self) -> None:
        """Drop a sealed segment without parents whose time is up."""
        for segment in self.layout.sealed:
            drained = {REMOTE: segment.segment_id in self.drained()}
            needed = is_needed(drained) and not self.rules.breaks("R10")
            terminated = self.logs[segment.segment_id].terminated
            if terminated and not needed and not segment.parent_ids:
                self.layout = layouts.prune(self.layout, [segment.segment_id])
                self.logs.pop(segment.segment_id).owner_epoch += 1
                return


def reshaped(layout: Layout, rng: random.Random, *, buckets: bool) -> layouts.Reshape | None:
    """A random split, merge or rebucket; None if it cannot be made."""
    active = layout.active
    try:
        if buckets and rng.random() < 0.3:
            segment = rng.choice(active)
            count = 1 if segment.entry_buckets > 1 else rng.choice((2, 3))
            return layouts.rebucket(layout, [segment.segment_id], count, now_ms=0)
        if len(active) > 1 and (len(active) >= SEGMENTS_MAX or rng.random() < 0.5):
            first = rng.randrange(len(active) - 1)
            pair = [each.segment_id for each in active[first : first + rng.choice((2, 2, 3))]]
            return layouts.merge(layout, pair, now_ms=0)
        segment = rng.choice(active)
        return layouts.split(layout, segment.segment_id, now_ms=0, parts=rng.choice((2, 2, 3)))
    except IllegalReshape:
        return None
