"""Who is told about which change, from notifications, acknowledgements and reads.

Rules:
- Notifications name keys and versions, no values: what concerns a watcher is read, many keys at
  once, and a key that changes again before it is read is read once.
- What an own put made is known from its answer and told at once; its notification is then old.
  Unless the record was removed meanwhile: then it is read.
- A read tells watchers what it saw before its caller has it, so nothing told later is older than
  what was read.  One that found nothing has no version: if the record was learned of after the read
  was asked for, nobody is told, and it is read again.
- Index keys of a record before a change are known from what was told of it before, or from a scan
  of the watched range, made when the watch begins.  A scan of the index by anybody waits for that,
  so what a holder listed is known here too.
- A gap empties all that is known, and every watcher lists again.  A defect of ours is one too, and
  so is a change on a shard that is gone: notifications name no partitions, by which its keys could
  be looked for elsewhere, and who lists goes by the map of now.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from config import bounds
from storage.metadata.group import Change, Stored
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.errors import ClientDefect, ShardGone
from storage.metadata.oxia.index_hits import IndexRange
from storage.metadata.oxia.loops import log_defect
from storage.metadata.oxia.records import PROOF, SEQUENCES, SERVERS_PREFIX, Found
from storage.metadata.oxia.writes import Write
from storage.metadata.store import MetadataError
from storage.metadata.watches import WatchHub, WatchQueue

RETRY_S = 1.0
"""Pause before something that watchers need is read again after a failure."""

Read = Callable[[int, str], "asyncio.Future[Found | None]"]
"""Reads a key on a shard."""
ScanIndex = Callable[[IndexRange], Awaitable[Sequence[Found]]]
"""Scans an index on all shards."""

SequencesChanged = Callable[[int, str | None], None]
"""Told of the shard and key of a sequence's marker that changed, or that any may have."""


class Known(NamedTuple):
    """The newest state of a key that is known.  `stored` is None if it was removed.

    `learned` counts what had been told until then.
    """

    shard_id: int
    version_id: int
    stored: Stored | None
    learned: int


class Watching:
    """See the module's rules.  Made on the running loop."""

    def __init__(
        self, read: Read, scan_index: ScanIndex, sequences_changed: SequencesChanged
    ) -> None:
        self._read = read
        self._scan_index = scan_index
        self._sequences_changed = sequences_changed
        self._hub = WatchHub()
        self._known: dict[str, Known] = {}
        self._members: dict[str, dict[str, Stored]] = {}
        self._ranges: dict[WatchQueue, IndexRange] = {}
        self._learning: dict[WatchQueue, asyncio.Task[None]] = {}
        self._changed: dict[int, dict[str, None]] = {}
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._removed: dict[str, int] = {}
        self._removed_forgotten = -1
        self._tick = 0
        self._told = 0
        self._closed = False

    # Watches

    def watch_key(self, key: str, partition: str | None) -> WatchQueue:
        """Changes of one record."""
        return self._hub.watch_key(key, partition)

    def watch_level(self, level: str) -> WatchQueue:
        """Changes of all records of a level."""
        return self._hub.watch_level(level)

    def watch_sequence(self, prefix: str, partition: str) -> WatchQueue:
        """New keys of a sequence."""
        return self._hub.watch_sequence(prefix, partition)

    def watch_index(self, index: str, lo: str, hi: str) -> WatchQueue:
        """Changes in a range of an index."""
        queue = self._hub.watch_index(index, lo, hi)
        self._ranges[queue] = IndexRange(index, lo, hi)
        self._members.setdefault(index, {})
        queue.on_close(lambda: self._forget_range(queue))
        self._learn(queue)
        return queue

    async def index_known(self, index: str) -> None:
        """Return when every watch on this index that there is now knows its records."""
        pending = [
            task for queue, task in self._learning.items() if self._ranges[queue].index == index
        ]
        if pending:
            await asyncio.wait(pending, timeout=bounds.OXIA_REQUEST_TIMEOUT_S)

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        for task in (*self._learning.values(), *self._reading.values()):
            task.cancel()
        self._hub.close()

    # What happens

    def tick(self) -> int:
        """When a write is issued: `stored` compares it with removals."""
        return self._tick

    def told(self) -> int:
        """When a read is asked for: `missing` compares it with what was learned since."""
        return self._told

    def stored(self, write: Write, found: Found) -> None:
        """An own put was acknowledged."""
        key = found.record.key
        removed_at = self._removed.get(key, self._removed_forgotten)
        if removed_at > write.removals_seen:
            self._known.pop(key, None)
            if self._wants(key):
                self._mark(found.shard_id, key)
            return
        self.observe(found)

    def observe(self, found: Found) -> None:
        """This is a state that the record has, or had a moment ago."""
        key = found.record.key
        known = self._known.get(key)
        if (
            known is not None
            and known.shard_id == found.shard_id
            and known.version_id >= found.version_id
        ):
            return
        stored = found.stored
        change = Change(key, self._before(key, known), stored, found.record.value)
        self._tell(change, found.shard_id, found.version_id)

    def observe_scanned(self, found: Found) -> None:
        """The same from a scan, which other reads may have overtaken."""
        known = self._known.get(found.record.key)
        if known is not None and known.stored is not None and known.shard_id == found.shard_id:
            self.observe(found)

    def missing(self, shard_id: int, key: str, since: int, *, changed: bool = False) -> None:
        """A read found nothing; `changed` if it was made because the key had changed.

        `since`: what `told` said when it was asked for.
        """
        known = self._known.get(key)
        if known is not None and (known.shard_id != shard_id or known.stored is None):
            return
        if known is not None and known.learned > since:
            if self._wants(key):
                self._mark(shard_id, key)
            return
        before = self._before(key, known)
        if before is None and not changed:
            return
        version_id = -1 if known is None else known.version_id
        self._tell(Change(key, before, None, b""), shard_id, version_id)

    def notified(self, shard_id: int, batch: pb.NotificationBatch) -> None:
        """See `NotificationListener.notified`."""
        for key in sorted(batch.notifications):
            if key == PROOF or key.startswith(SERVERS_PREFIX):
                continue
            notification = batch.notifications[key]
            if key.startswith(SEQUENCES):
                self._sequences_changed(shard_id, key)
            elif notification.type == pb.KEY_RANGE_DELETED:
                self.gap(shard_id)
            elif notification.type == pb.KEY_DELETED:
                self._note_removed(shard_id, key)
            else:
                self._note_changed(shard_id, key, notification.version_id)

    def gap(self, shard_id: int) -> None:
        """See `NotificationListener.gap`."""
        self._known.clear()
        for members in self._members.values():
            members.clear()
        self._changed.pop(shard_id, None)
        self._sequences_changed(shard_id, None)
        for queue in list(self._ranges):
            self._learn(queue)
        self._hub.resync()

    def _note_changed(self, shard_id: int, key: str, version_id: int) -> None:
        known = self._known.get(key)
        if known is not None and known.shard_id == shard_id and known.version_id >= version_id:
            if known.stored is not None:
                return
        elif known is not None and not self._wants(key):
            del self._known[key]
        if self._wants(key):
            self._mark(shard_id, key)

    def _note_removed(self, shard_id: int, key: str) -> None:
        self._tick += 1
        self._removed.pop(key, None)
        self._removed[key] = self._tick
        if len(self._removed) > bounds.OXIA_KNOWN_RECORDS:
            self._removed_forgotten = self._removed.pop(next(iter(self._removed)))
        known = self._known.get(key)
        indexed = known is not None and known.stored is not None and known.stored.indexes
        if (
            self._learning
            or self._hub.wants(key)
            or (indexed and self._members)
            or any(key in members for members in self._members.values())
        ):
            self._mark(shard_id, key)
        else:
            self._known.pop(key, None)

    def _wants(self, key: str) -> bool:
        return bool(self._members) or self._hub.wants(key)

    def _before(self, key: str, known: Known | None) -> Stored | None:
        if known is not None:
            return known.stored
        for members in self._members.values():
            stored = members.get(key)
            if stored is not None:
                return stored
        return None

    def _tell(self, change: Change, shard_id: int, version_id: int) -> None:
        key = change.key
        self._told += 1
        self._known.pop(key, None)
        self._known[key] = Known(shard_id, version_id, change.after, self._told)
        if len(self._known) > bounds.OXIA_KNOWN_RECORDS:
            del self._known[next(iter(self._known))]
        for index, members in self._members.items():
            after = change.after
            if after is not None and any(entry.index == index for entry in after.indexes):
                members[key] = after
            else:
                members.pop(key, None)
        if self._hub:
            try:
                self._hub.publish((change,))
            except Exception as error:  # noqa: BLE001 - a defect; watchers must not go without
                log_defect(f"the telling of a change of {key!r}", error)
                self.gap(shard_id)

    # Reading what changed

    def _mark(self, shard_id: int, key: str) -> None:
        if self._closed:
            return
        changed = self._changed.setdefault(shard_id, {})
        changed[key] = None
        if len(changed) > bounds.OXIA_CHANGED_KEYS:
            self.gap(shard_id)
        elif shard_id not in self._reading:
            task = asyncio.create_task(self._read_changed(shard_id), name="oxia-watch-reads")
            self._reading[shard_id] = task

    async def _read_changed(self, shard_id: int) -> None:
        try:
            while changed := self._changed.pop(shard_id, None):
                try:
                    await self._read_keys(shard_id, list(changed))
                except (ShardGone, ClientDefect):
                    self.gap(shard_id)
                except MetadataError:
                    self._changed[shard_id] = {**changed, **self._changed.get(shard_id, {})}
                    await asyncio.sleep(RETRY_S)
        except Exception as error:  # noqa: BLE001 - a defect; watchers must not go without
            log_defect(f"reads for watchers of shard {shard_id}", error)
            self.gap(shard_id)
        finally:
            del self._reading[shard_id]

    async def _read_keys(self, shard_id: int, keys: list[str]) -> None:
        """Completed in the order of the reads, so what is told of a key never goes back.

        Raises what failed, once the others are told.
        """
        since = self._told
        reads = [self._read(shard_id, key) for key in keys]
        results = await asyncio.gather(*reads, return_exceptions=True)
        failures: list[BaseException] = []
        for key, found in zip(keys, results, strict=True):
            if isinstance(found, BaseException):
                failures.append(found)
            elif found is None:
                self.missing(shard_id, key, since, changed=True)
            else:
                self.observe(found)
        for failure in failures:
            if isinstance(failure, ClientDefect):
                raise failure
        if failures:
            raise failures[0]

    # Index watches

    def _learn(self, queue: WatchQueue) -> None:
        former = self._learning.pop(queue, None)
        if former is not None:
            former.cancel()
        task = asyncio.create_task(self._learn_range(queue), name="oxia-watch-index")
        self._learning[queue] = task

    async def _learn_range(self, queue: WatchQueue) -> None:
        watched = self._ranges[queue]
        while True:
            try:
                records = await self._scan_index(watched)
                members = self._members.get(watched.index)
                if members is not None:
                    for found in records:
                        self._learn_record(members, watched.index, found)
                break
            except MetadataError:
                await asyncio.sleep(RETRY_S)
            except Exception as error:  # noqa: BLE001 - a defect; the watch must not go without
                log_defect(f"a scan of index {watched.index}", error)
                await asyncio.sleep(RETRY_S)
        if self._learning.get(queue) is asyncio.current_task():
            del self._learning[queue]

    def _learn_record(self, members: dict[str, Stored], index: str, found: Found) -> None:
        key, stored = found.record.key, found.stored
        known = self._known.get(key)
        if (
            known is not None
            and known.shard_id == found.shard_id
            and known.version_id >= found.version_id
        ):
            if known.stored is None:
                return
            stored = known.stored
        if any(entry.index == index for entry in stored.indexes):
            members[key] = stored

    def _forget_range(self, queue: WatchQueue) -> None:
        index = self._ranges.pop(queue).index
        task = self._learning.pop(queue, None)
        if task is not None:
            task.cancel()
        if all(each.index != index for each in self._ranges.values()):
            del self._members[index]
