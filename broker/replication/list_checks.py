"""`ListChecks`: whether the lists of other clusters name all clusters that the list here names.

Messages from another cluster are not sent on.  So with three clusters or more, each must have the
list of all: what a cluster that leaves one out publishes is missing there.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import structlog

from config.bounds import REPLICATION_LISTS_PERIOD_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import NamespaceName, TopicName
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)
CHECKED_FROM: Final = 2
"""Other clusters in a list that is checked: with one, it may go one way on purpose."""


class ReplicationList(NamedTuple):
    """A list of clusters in force, of a namespace, or of a topic that has its own."""

    holder: NamespaceName | TopicName
    """The namespace, or the topic, without partition."""
    others: frozenset[str]
    """Its clusters without this one."""

    @property
    def namespace(self) -> NamespaceName:
        """The namespace whose topics it is about."""
        return self.holder if isinstance(self.holder, NamespaceName) else self.holder.namespace_name


def incompleteness(
    here: ReplicationList, local: str, remote: str, there: frozenset[str]
) -> str | None:
    """Say which clusters the list of another cluster leaves out; None if it is in order.

    A cluster whose list names no other one only receives, which may be on purpose.
    """
    if there <= {remote}:
        return None
    missing = ({local} | here.others) - there - {remote}
    if not missing:
        return None
    return (
        f"The list of clusters of {here.holder} in cluster {remote!r} lacks "
        f"{', '.join(sorted(missing))}, where messages of {remote!r} do not arrive: no cluster "
        f"sends on what it gets from another one. Add to that list what is missing, in {remote!r}."
    )


class ListChecks:
    """Asks other clusters for their lists: once for each list here, and then once a period.

    It asks one at a time.  A cluster that does not answer is asked again in the next period, or
    when its record is changed.  Without a list of three clusters it does nothing.
    """

    def __init__(
        self,
        local: str,
        in_force: Callable[[], Iterable[ReplicationList]],
        ask: Callable[[str, ReplicationList], Awaitable[frozenset[str] | None]],
        tasks: BackgroundTasks,
    ) -> None:
        """`in_force` gives the lists of all loaded topics.

        `ask` gives the list of another cluster, or None if that does not say; it raises
        `MagnetarError` if there is no answer.
        """
        self._local = local
        self._in_force = in_force
        self._ask = ask
        self._tasks = tasks
        self._reports: dict[ReplicationList, dict[str, str]] = {}
        """What is wrong, by the other cluster; lists that are in order have none."""
        self._unasked: dict[ReplicationList, None] = {}
        self._silent: set[str] = set()
        """Clusters that did not answer in this period."""
        self._noted = asyncio.Event()
        self._running = False

    def note(self, here: ReplicationList) -> None:
        """Check a list soon, unless it is known."""
        if len(here.others) < CHECKED_FROM or here in self._reports:
            return
        self._reports[here] = {}
        self._ask_soon((here,))

    def cluster_changed(self, remote: str) -> None:
        """Ask a cluster again, as its record was changed."""
        self._silent.discard(remote)
        self._ask_soon(each for each in self._reports if remote in each.others)

    def report(self, here: ReplicationList, remote: str) -> str | None:
        """What is wrong with the list of another cluster, as it said last; None if nothing is."""
        return self._reports.get(here, {}).get(remote)

    @property
    def counts(self) -> Mapping[tuple[NamespaceName, str], int]:
        """How many lists of a namespace and its topics are incomplete in another cluster.

        0 for those of which nothing is known to be wrong.
        """
        counts: Counter[tuple[NamespaceName, str]] = Counter()
        for here, found in self._reports.items():
            counts.update(
                {(here.namespace, remote): int(remote in found) for remote in here.others}
            )
        return counts

    def _ask_soon(self, lists: Iterable[ReplicationList]) -> None:
        self._unasked.update(dict.fromkeys(lists))
        self._noted.set()
        if self._unasked and not self._running:
            self._running = True
            self._tasks.start(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._reports:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(loop.time() + REPLICATION_LISTS_PERIOD_S):
                        await self._check_noted()
                self._begin_period()
        finally:
            self._running = False

    async def _check_noted(self) -> None:
        """Check what is noted, until it is cancelled."""
        while True:
            self._noted.clear()
            while self._unasked:
                here = next(iter(self._unasked))
                for remote in sorted(here.others - self._silent):
                    await self._check(here, remote)
                self._unasked.pop(here, None)
            await self._noted.wait()

    def _begin_period(self) -> None:
        """Ask about all lists again, without those that are no longer in force."""
        lists = {each for each in self._in_force() if len(each.others) >= CHECKED_FROM}
        self._reports = {each: self._reports.get(each, {}) for each in lists}
        # What the last period did not come to goes first.
        self._unasked = {each: None for each in self._unasked if each in lists}
        self._unasked.update(dict.fromkeys(lists))
        self._silent.clear()

    async def _check(self, here: ReplicationList, remote: str) -> None:
        try:
            there = await self._ask(remote, here)
        except MagnetarError as error:
            self._silent.add(remote)
            log.debug("replication_list_unknown", cluster=remote, error=str(error))
            return
        reports = self._reports.get(here)
        if reports is None or there is None:
            return
        wrong = incompleteness(here, self._local, remote, there)
        before = reports.pop(remote, None)
        if wrong is not None:
            reports[remote] = wrong
            if wrong != before:
                log.warning(
                    "replication_list_incomplete",
                    list=str(here.holder),
                    cluster=remote,
                    error=wrong,
                )
        elif before is not None:
            log.info("replication_list_complete", list=str(here.holder), cluster=remote)
