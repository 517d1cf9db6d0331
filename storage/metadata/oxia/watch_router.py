"""Events for watchers, made from notifications, acknowledgements and reads."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from config import bounds
from storage.metadata.group import Change, Stored
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.errors import ClientDefect, ShardGone
from storage.metadata.oxia.loops import log_defect
from storage.metadata.oxia.records import PROOF, SEQUENCES, SERVERS_PREFIX, ShardRecord
from storage.metadata.oxia.writes import Write
from storage.metadata.store import MetadataError, Wanted
from storage.metadata.watches import WatchHub, WatchQueue

RETRY_S = 1.0
"""Pause before something that watchers need is read again after a failure."""

Read = Callable[[int, str], "asyncio.Future[ShardRecord | None]"]
"""Reads a key on a shard."""
SequencesChanged = Callable[[int, str | None], None]
"""Called with the shard and key of a sequence's marker that changed; no key: any may have."""


class KnownState(NamedTuple):
    """The newest state of a key that is known.  `stored` is None if it was removed.

    `learned` is the number of changes published until then.
    """

    shard_id: int
    version_id: int
    stored: Stored | None
    learned: int


class WatchRouter:
    """Routes notifications, acknowledgements and reads to the watchers that they concern.

    Notifications have keys and versions, no values: records that concern a watcher are read, many
    at once, and a key that changes again before that is read once.  Made on the running loop.
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
        self._known: dict[str, KnownState] = {}
        self._changed: dict[int, dict[str, None]] = {}
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._removed: dict[str, int] = {}
        self._removed_forgotten = -1
        self._removal_count = 0
        self._change_count = 0
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

    # Acknowledgements, reads and notifications

    def removal_count(self) -> int:
        """Number of removals so far; take it when a write is issued (`Write.removals_seen`)."""
        return self._removal_count

    def change_count(self) -> int:
        """Number of published changes so far; take it before a read, for `missing`."""
        return self._change_count

    def stored(self, write: Write, found: ShardRecord) -> None:
        """Publish the record of an acknowledged put of this process."""
        key = found.record.key
        removed_at = self._removed.get(key, self._removed_forgotten)
        # The record may have been removed after the put: then only a read shows its state.
        if removed_at > write.removals_seen:
            self._known.pop(key, None)
            if self._hub.wants(key):
                self._mark(found.shard_id, key)
            return
        self.observe(found)

    def observe(self, found: ShardRecord) -> None:
        """Publish a record that was read, unless a newer state is known.

        Called before the reader gets it, so that no event after the read is older than it.
        """
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
        self._publish(change, found.shard_id, found.version_id)

    def observe_scanned(self, found: ShardRecord) -> None:
        """The same for a record of a scan, which other reads may have overtaken."""
        known = self._known.get(found.record.key)
        if known is not None and known.stored is not None and known.shard_id == found.shard_id:
            self.observe(found)

    def missing(self, shard_id: int, key: str, since: int, *, changed: bool = False) -> None:
        """Publish that a read found no record, unless it was learned of since.

        `since` is `change_count` before the read; `changed` if the read was made because the key
        had changed.
        """
        known = self._known.get(key)
        if known is None:
            if changed:
                self._publish(Change(key, None, None, b""), shard_id, -1)
            return
        if known.shard_id != shard_id or known.stored is None:
            return
        if known.learned <= since:
            self._publish(Change(key, known.stored, None, b""), shard_id, known.version_id)
        elif self._hub.wants(key):
            # Absence has no version to compare with what was learned since: read it again.
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
        """See `NotificationListener.gap`.  Every watcher lists again."""
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
        self._removal_count += 1
        self._removed.pop(key, None)
        self._removed[key] = self._removal_count
        if len(self._removed) > bounds.OXIA_KNOWN_RECORDS:
            self._removed_forgotten = self._removed.pop(next(iter(self._removed)))
        if self._hub.wants(key):
            self._mark(shard_id, key)
        else:
            self._known.pop(key, None)

    def _publish(self, change: Change, shard_id: int, version_id: int) -> None:
        key = change.key
        self._change_count += 1
        self._known.pop(key, None)
        self._known[key] = KnownState(shard_id, version_id, change.after, self._change_count)
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
                    # Notifications have no partitions, by which to find the keys of a shard that is
                    # gone.  Watchers that list use the map of now.
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
        """Read keys and publish their states, in the order of the reads.

        Raises the error of a failed read after the others were published.
        """
        since = self._change_count
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
