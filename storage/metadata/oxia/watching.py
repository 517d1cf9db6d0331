"""Who is told about which change, from notifications, acknowledgements and reads.

Rules:
- Notifications name keys and versions, no values: what concerns a watcher is read, many keys at
  once, and a key that changes again before it is read is read once.
- What an own put made is known from its answer and told at once; its notification is then old.
  Unless the record was removed meanwhile: then it is read.
- A read tells watchers what it saw before its caller has it, so nothing told later is older than
  what was read.  One that found nothing has no version: if the record was learned of after the read
  was asked for, nobody is told, and it is read again.
- A gap empties all that is known, and every watcher lists again.  A defect of ours is one too, and
  so is a change on a shard that is gone: notifications name no partitions, by which its keys could
  be looked for elsewhere, and who lists goes by the map of now.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from config import bounds
from storage.metadata.group import Change, Stored
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.errors import ClientDefect, ShardGone
from storage.metadata.oxia.loops import log_defect
from storage.metadata.oxia.records import PROOF, SEQUENCES, SERVERS_PREFIX, Found
from storage.metadata.oxia.writes import Write
from storage.metadata.store import MetadataError, Wanted
from storage.metadata.watches import WatchHub, WatchQueue

RETRY_S = 1.0
"""Pause before something that watchers need is read again after a failure."""

Read = Callable[[int, str], "asyncio.Future[Found | None]"]
"""Reads a key on a shard."""
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
    """Routes notifications, acknowledgements and reads to the watchers that they concern.

    Made on the running loop.
    """

    def __init__(
        self,
        read: Read,
        sequences_changed: SequencesChanged,
        *,
        retry_s: float = RETRY_S,
        max_changed: int = bounds.OXIA_CHANGED_KEYS,
    ) -> None:
        self._read = read
        self._retry_s = retry_s
        self._max_changed = max_changed
        self._sequences_changed = sequences_changed
        self._hub = WatchHub()
        self._known: dict[str, Known] = {}
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

    def watch_level(self, level: str, wanted: Wanted | None = None) -> WatchQueue:
        """Changes of the records of a level, all of them or those that are wanted."""
        return self._hub.watch_level(level, wanted)

    def watch_sequence(self, prefix: str, partition: str) -> WatchQueue:
        """New keys of a sequence."""
        return self._hub.watch_sequence(prefix, partition)

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        for task in self._reading.values():
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
            if self._hub.wants(key):
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
        before = None if known is None else known.stored
        change = Change(key, before, found.stored, found.record.value)
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
        if known is None:
            if changed:
                self._tell(Change(key, None, None, b""), shard_id, -1)
            return
        if known.shard_id != shard_id or known.stored is None:
            return
        if known.learned <= since:
            self._tell(Change(key, known.stored, None, b""), shard_id, known.version_id)
        elif self._hub.wants(key):
            self._mark(shard_id, key)

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
        self._changed.pop(shard_id, None)
        self._sequences_changed(shard_id, None)
        self._hub.resync()

    def _note_changed(self, shard_id: int, key: str, version_id: int) -> None:
        known = self._known.get(key)
        if known is not None and known.shard_id == shard_id and known.version_id >= version_id:
            if known.stored is not None:
                return
        elif known is not None and not self._hub.wants(key):
            del self._known[key]
        if self._hub.wants(key):
            self._mark(shard_id, key)

    def _note_removed(self, shard_id: int, key: str) -> None:
        self._tick += 1
        self._removed.pop(key, None)
        self._removed[key] = self._tick
        if len(self._removed) > bounds.OXIA_KNOWN_RECORDS:
            self._removed_forgotten = self._removed.pop(next(iter(self._removed)))
        if self._hub.wants(key):
            self._mark(shard_id, key)
        else:
            self._known.pop(key, None)

    def _tell(self, change: Change, shard_id: int, version_id: int) -> None:
        key = change.key
        self._told += 1
        self._known.pop(key, None)
        self._known[key] = Known(shard_id, version_id, change.after, self._told)
        if len(self._known) > bounds.OXIA_KNOWN_RECORDS:
            del self._known[next(iter(self._known))]
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
        if len(changed) > self._max_changed:
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
                    await asyncio.sleep(self._retry_s)
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
