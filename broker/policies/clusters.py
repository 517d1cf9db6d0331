"""The clusters that are registered in this one, in Pulsar's own metadata records.

The record of another cluster is `/admin/clusters/<name>`, ClusterData as JSON.  All of them are
followed, so that they are read from memory.  The local cluster has no record: its settings describe
it.  Its name is stored once another cluster is registered, as it is the origin of all messages that
are replicated from here.
"""

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import ClassVar, Final

import structlog

from broker.policies.cluster_data import (
    ClusterData,
    InvalidClusterData,
    is_cluster_name,
    require_cluster_name,
    stored_cluster_data,
)
from config.bounds import MAX_CLUSTERS, RECORD_CHANGE_TRIES
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import OperatorError, PeerError, ServerError
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import ABSENT, Event, MetadataStore, Record, VersionConflict
from storage.metadata.watch_follower import WatchFollower

log = structlog.get_logger(__name__)

ROOT: Final = "/admin/clusters"
LOCAL_NAME_KEY: Final = "/magnetar/cluster-name"
"""The record with the name of the local cluster, from the first registration on."""


class ClusterNameDiffers(OperatorError):
    """The setting and the metadata store have different names of the local cluster."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class ClusterNotFound(PeerError):
    """There is no cluster of that name."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class ClusterExists(PeerError):
    """A cluster of that name exists already."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class ClusterRefused(PeerError):
    """A change of the clusters cannot be made as it stands."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class Clusters:
    """Registers other clusters, and follows their records."""

    def __init__(self, metadata: MetadataStore, local_name: str) -> None:
        self.local_name = local_name
        self._metadata = metadata
        self._tasks = BackgroundTasks(log)
        self._known: dict[str, ClusterData] = {}
        self._changed_while_reading: set[str] = set()
        """Names that were written here since the last scan began: what it found may be older."""
        self._listeners: list[Callable[[str], None]] = []

    async def start(self) -> None:
        """Read all records, and follow them.  Raises `ClusterNameDiffers`, `MetadataError`."""
        await self._require_local_name(await self._metadata.get(LOCAL_NAME_KEY))
        follower = WatchFollower(
            lambda: self._metadata.watch_children(ROOT), self._read_all, self._take_event
        )
        try:
            await follower.begin()
        except BaseException:
            follower.close()
            raise
        self._tasks.keep("clusters", follower.run)

    async def stop(self) -> None:
        """Stop following changes."""
        await self._tasks.stop()

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each other cluster whose record changed or went."""
        self._listeners.append(listener)

    def get(self, name: str) -> ClusterData | None:
        """Another cluster, from memory; None for the local one and for unknown ones."""
        return self._known.get(name)

    def names(self) -> list[str]:
        """The names of all clusters, the local one included, from memory."""
        return sorted({self.local_name, *self._known})

    async def find(self, name: str) -> ClusterData | None:
        """Another cluster; None for the local one and for unknown ones.

        One that is not in memory is read, as another broker may just have registered it.  Raises
        `MetadataError`.
        """
        data = self._known.get(name)
        if data is not None or name == self.local_name or not is_cluster_name(name):
            return data
        record = await self._metadata.get(_key(name))
        return None if record is None else _decode(record)

    async def require(self, name: str) -> ClusterData:
        """As `find`.  Raises `ClusterNotFound`, also for the local one."""
        data = await self.find(name)
        if data is None:
            raise self._not_found(name)
        return data

    async def create(self, name: str, data: ClusterData) -> None:
        """Register a cluster.

        Raises `InvalidClusterName`, `ClusterExists`, `ClusterRefused`, `ClusterNameDiffers`,
        `MetadataError`.
        """
        require_cluster_name(name)
        if name == self.local_name:
            raise ClusterExists(
                f"{name} is the name of this cluster itself: register the other one by its own "
                "name (its cluster_name), which has to differ."
            )
        if name in self._known:
            raise ClusterExists(f"The cluster {name} exists already: change it with POST.")
        if len(self._known) >= MAX_CLUSTERS:
            raise ClusterRefused(
                f"There are {len(self._known)} other clusters, and the maximum is {MAX_CLUSTERS}: "
                "delete one."
            )
        await self._require_peers(name, data)
        await self._store_local_name()
        try:
            await self._metadata.put(_key(name), _encode(data), expect=ABSENT)
        except VersionConflict as error:
            raise ClusterExists(
                f"The cluster {name} exists already: change it with POST."
            ) from error
        self._put(name, data)

    async def change(self, name: str, change: Callable[[ClusterData], ClusterData]) -> None:
        """Write what `change` makes of a cluster's description.

        `change` may be called up to RECORD_CHANGE_TRIES times, each time with a description that
        was read anew.  Raises `ClusterNotFound`, `ClusterRefused`, `MetadataError`, and
        `VersionConflict` after the last conflict.
        """
        self._require_other(name, "changed")
        for tries_left in reversed(range(RECORD_CHANGE_TRIES)):
            record = await self._metadata.get(_key(name))
            if record is None:
                raise self._not_found(name)
            data = change(_decode(record) or ClusterData())
            await self._require_peers(name, data)
            try:
                await self._metadata.put(_key(name), _encode(data), expect=record.version)
            except VersionConflict:
                if not tries_left:
                    raise
                continue
            self._put(name, data)
            return

    async def delete(self, name: str) -> None:
        """Forget a cluster.  The caller has checked that no tenant and no namespace names it.

        Raises `ClusterNotFound`, `ClusterRefused` while it is a peer of another, `MetadataError`.
        """
        self._require_other(name, "deleted")
        for other, data in self._known.items():
            if name in data.peer_cluster_names:
                raise ClusterRefused(
                    f"The cluster {name} is a peer of {other}: change the peers of {other} first."
                )
        if not await self._metadata.delete(_key(name)):
            raise self._not_found(name)
        self._put(name, None)

    def _not_found(self, name: str) -> ClusterNotFound:
        return ClusterNotFound(
            f"There is no cluster {name!r:.100}: register it with PUT /admin/v2/clusters/NAME. "
            f"This one is {self.local_name!r}."
        )

    def _require_other(self, name: str, what: str) -> None:
        require_cluster_name(name)
        if name == self.local_name:
            raise ClusterRefused(
                f"{name} is the local cluster and cannot be {what} over REST: its brokers' "
                "settings describe it (cluster_name, advertised_host, port, http_port and those "
                "with TLS). Its peers are set as peers of the other cluster."
            )

    async def _require_peers(self, name: str, data: ClusterData) -> None:
        """Raise `ClusterRefused` for peers that do not exist, or are the cluster itself."""
        for peer in data.peer_cluster_names:
            if peer == name:
                raise ClusterRefused(f"{name} cannot be its own peer: leave it out.")
            if peer != self.local_name and await self.find(peer) is None:
                raise ClusterRefused(
                    f"The peer {peer!r:.100} does not exist: register it as a cluster first."
                )

    async def _store_local_name(self) -> None:
        """Store the name of the local cluster, or check the one that is stored."""
        try:
            await self._metadata.put(LOCAL_NAME_KEY, self.local_name.encode(), expect=ABSENT)
        except VersionConflict:
            await self._require_local_name(await self._metadata.get(LOCAL_NAME_KEY))

    async def _require_local_name(self, record: Record | None) -> None:
        stored = self.local_name if record is None else record.value.decode(errors="replace")
        if stored != self.local_name:
            raise ClusterNameDiffers(
                f"Other clusters are registered in the metadata store of the cluster {stored!r}, "
                f"and cluster_name is {self.local_name!r}: set it to {stored!r}. Replicated "
                "messages name the cluster that they come from, so its name cannot change."
            )

    async def _read_all(self) -> None:
        self._changed_while_reading.clear()
        found = {
            name_of(record.key): _decode(record)
            for record in await self._metadata.scan(*children_range(ROOT))
        }
        for name in found.keys() | self._known.keys():
            if name not in self._changed_while_reading:
                self._take(name, found.get(name))

    async def _take_event(self, event: Event) -> None:
        record = event.record
        self._take(name_of(event.key), None if record is None else _decode(record))

    def _put(self, name: str, data: ClusterData | None) -> None:
        """Use what this process has written at once, before the watch reports it."""
        self._changed_while_reading.add(name)
        self._take(name, data)

    def _take(self, name: str, data: ClusterData | None) -> None:
        if self._known.get(name) == data:
            return
        if data is None:
            del self._known[name]
        else:
            self._known[name] = data
        for listener in self._listeners:
            listener(name)


def _key(name: str) -> str:
    return f"{ROOT}/{name}"


def _encode(data: ClusterData) -> bytes:
    return json.dumps(data.json(), separators=(",", ":")).encode()


def _decode(record: Record) -> ClusterData | None:
    """The description; None for an unreadable record, which counts as none."""
    try:
        value = json.loads(record.value)
        if not isinstance(value, Mapping):
            raise InvalidClusterData("The record is no JSON object.")
        return stored_cluster_data(value)
    except (ValueError, InvalidClusterData) as error:
        # The error has nothing of the record, which may have a secret.
        log.error("cluster_record_unreadable", key=record.key, error=str(error))
        return None
