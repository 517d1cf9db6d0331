"""A topic whose layout a policy changes, with a producer and stream consumers.

It is for tests that kill brokers meanwhile: no message may be lost or stored twice, each key stays
in order, and the policy keeps its cooldowns.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from typing import Final, cast

import aiohttp

import magnetar
from broker.scalable.steps import StepKind
from tests.client.streams import Readers
from tests.support.assignments import Assigned, assigned
from tests.support.dying_broker import DyingBroker, until_some_die
from tests.support.layout_steps import DiesAfter
from tests.support.waiting import end, until, until_awaited

NAMESPACE: Final = "public/default"
AUDIT: Final = "audit"
"""A subscription that has all messages, since nothing is acknowledged on it before the end."""
KEYS: Final = 24
PAUSE_S: Final = 0.05
COOLDOWN_S: Final = 3
KEEP_SPLIT_S: Final = COOLDOWN_S + 1
"""How long no merge undoes a split: `splitCooldownSeconds` and `mergeWindowSeconds`."""
CHANGE_S: Final = 60
"""Longest time until the policy has made a change, on a busy machine."""
READ_S: Final = 60
RETRY_S: Final = 0.05
SETTINGS: Final[Mapping[str, object]] = {
    "scalable_topic_auto_scale_enabled": True,
    "scalable_topic_auto_scale_interval_s": 1,
    "scalable_topic_load_report_interval_s": 1,
}
COOLDOWNS: Final[Mapping[str, object]] = {
    "splitCooldownSeconds": COOLDOWN_S,
    "mergeCooldownSeconds": COOLDOWN_S,
    "mergeWindowSeconds": 1,
    "rebucketCooldownSeconds": COOLDOWN_S,
}
NEVER: Final = 10**9
"""A rate that no segment reaches."""
Segment = Mapping[str, object]
Record = Mapping[str, object]


def splits(parts: int, active: int) -> Mapping[str, object]:
    """A policy that splits one of the `active` ACTIVE segments into `parts`, and no more."""
    return {
        **COOLDOWNS,
        "splitMsgRateInThreshold": 2,
        "mergeMsgRateInThreshold": 1,
        "minSegments": active,
        "maxSegments": active + parts - 1,
    }


def merges(least: int) -> Mapping[str, object]:
    """A policy that merges neighbours until `least` segments are left."""
    return {
        **COOLDOWNS,
        "splitMsgRateInThreshold": NEVER,
        "mergeMsgRateInThreshold": NEVER // 10,
        "minSegments": least,
    }


REBUCKETS: Final[Mapping[str, object]] = {
    **COOLDOWNS,
    "splitMsgRateInThreshold": NEVER,
    "mergeMsgRateInThreshold": 0,
}
"""A policy that splits and merges nothing by rates."""
OFF: Final[Mapping[str, object]] = {"enabled": False}
"""A policy that changes nothing."""


class ScaledTopic:
    """A topic of one or several brokers; see the module's docstring."""

    def __init__(
        self, brokers: Sequence[DyingBroker], local_name: str, names: Sequence[str]
    ) -> None:
        """`names` are those of the stream consumers."""
        self.local_name = local_name
        self.name = f"topic://{NAMESPACE}/{local_name}"
        self.names = list(names)
        self.sent = Counter[str]()
        self.readers: Readers
        self._brokers = brokers
        self._stopped = False
        self._sending: list[asyncio.Task[None]] = []

    # Requests

    async def rest(
        self, method: str, path: str = "", *, body: object = None, **query: str | int
    ) -> object:
        """Send a request for the topic to a running broker, until one answers."""
        found: list[object] = []
        full = f"/scalable/{NAMESPACE}/{self.local_name}{path}"

        async def is_answered() -> bool:
            broker = next(each for each in self._brokers if each.running)
            with suppress(aiohttp.ClientError):
                status, answer = await broker.rest(method, full, body=body, **query)
                assert status in (200, 204, 503), (method, full, status, answer)
                found[:] = [answer] if status != 503 else []
            if not found:
                await asyncio.sleep(RETRY_S)
            return bool(found)

        await until_awaited(is_answered, CHANGE_S)
        return found[0]

    async def record(self) -> Record:
        """The topic's record."""
        return cast("Record", await self.rest("GET"))

    async def segments(self) -> dict[int, Segment]:
        """All segments by their ids."""
        segments = cast("Mapping[str, Segment]", (await self.record())["segments"])
        return {int(number): each for number, each in segments.items()}

    async def active(self) -> list[int]:
        """The ids of the ACTIVE segments."""
        return [number for number, each in (await self.segments()).items() if each["active"]]

    async def use_policy(self, policy: Mapping[str, object]) -> None:
        """Replace the topic's policy."""
        await self.rest("POST", "/autoScalePolicy", body=policy)

    async def assigned(self) -> Assigned:
        """The segments of each consumer, once all are connected and have all ACTIVE segments."""
        found: Assigned = {}

        async def is_complete() -> bool:
            nonlocal found
            broker = next(each for each in self._brokers if each.running)
            with suppress(aiohttp.ClientError):
                found = await assigned(broker, self.local_name)
            given = {segment for own in found.values() for segment in own}
            complete = sorted(found) == sorted(self.names) and given == set(await self.active())
            if not complete:
                await asyncio.sleep(RETRY_S)
            return complete

        try:
            await until_awaited(is_complete, CHANGE_S)
        except TimeoutError as error:
            error.add_note(f"assigned: {found}, of {await self.active()}")
            raise
        return found

    # Clients

    @classmethod
    @asynccontextmanager
    async def with_clients(
        cls,
        brokers: Sequence[DyingBroker],
        url: str,
        local_name: str,
        segments: int,
        names: Sequence[str],
    ) -> AsyncIterator["ScaledTopic"]:
        """Create a topic and its clients; at the end all of its messages are checked."""
        topic = cls(brokers, local_name, names)
        await topic.rest("PUT", numInitialSegments=segments)
        await topic.use_policy(OFF)
        await topic.rest("PUT", f"/subscriptions/{AUDIT}", type="QUEUE")
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(magnetar.connect(url))
            topic.readers = await opened.enter_async_context(Readers(client, topic.name))
            for name in names:
                # Connections of their own: after a kill they come back in any order.
                own = await opened.enter_async_context(magnetar.connect(url))
                await topic.readers.add(name, own)
            producer = await opened.enter_async_context(client.producer(topic.name, schema=str))
            opened.push_async_callback(topic._end)
            topic._begin(producer)
            yield topic
            await topic._stop()
            topic.readers.check_order(exactly_once=False)
            await topic._check_stored(client)

    @classmethod
    @asynccontextmanager
    async def once_ordinary(
        cls, brokers: Sequence[DyingBroker], url: str, local_name: str, partitions: int
    ) -> AsyncIterator["ScaledTopic"]:
        """Create a partitioned topic and its producer; at the end it is read as a scalable one."""
        topic = cls(brokers, local_name, "ab")
        ordinary = f"persistent://{NAMESPACE}/{local_name}"
        path = f"/persistent/{NAMESPACE}/{local_name}"
        for target, body in (
            (f"{path}/partitions", partitions),
            (f"{path}/subscription/{AUDIT}", {"ledgerId": -1, "entryId": -1}),
        ):
            status, answer = await brokers[0].rest("PUT", target, body=body)
            assert status == 204, answer
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(magnetar.connect(url))
            producer = await opened.enter_async_context(client.producer(ordinary, schema=str))
            opened.push_async_callback(topic._end)
            topic._begin(producer)
            yield topic
            topic.readers = await opened.enter_async_context(Readers(client, topic.name))
            for name in topic.names:
                await topic.readers.add(name)
            await topic._stop()
            topic.readers.check_order(exactly_once=False)
            await topic._check_stored(client)

    def _begin(self, producer: magnetar.Producer[str]) -> None:
        keys = [f"k{number}" for number in range(KEYS)]
        self._sending = [asyncio.create_task(self._send(producer, key)) for key in keys]

    async def _end(self) -> None:
        await end(*self._sending)

    async def _stop(self) -> None:
        """Stop sending; return when the stream consumers have read everything."""
        self._stopped = True
        await asyncio.gather(*self._sending)
        total = self.sent.total()
        await until(lambda: len(set(self.readers.got)) >= total, READ_S, poll_s=0.1)

    async def _check_stored(self, client: magnetar.Client) -> None:
        """Raise unless every message is in the topic exactly once."""
        found = Counter[str]()
        async with (
            client.queue_consumer(self.name, AUDIT, schema=str) as consumer,
            asyncio.timeout(READ_S),
        ):
            while found.total() < self.sent.total() or found.total() == 0:
                for message in await consumer.receive_batch(1000, timeout_s=3):
                    found[message.value] += 1
                    await consumer.ack(message)
        sent = {f"{key}:{n}" for key, count in self.sent.items() for n in range(count)}
        assert found.keys() == sent, sorted(sent ^ found.keys())[:10]
        assert [value for value, times in found.items() if times > 1] == []

    async def _send(self, producer: magnetar.Producer[str], key: str) -> None:
        while not self._stopped:
            await producer.send(f"{key}:{self.sent[key]}", key=key)
            self.sent[key] += 1
            await asyncio.sleep(PAUSE_S)

    async def all_keys_get_on(self) -> None:
        """Return when each key has another receipt; raise the error of a sender that ended."""
        before = Counter(self.sent)
        await until(
            lambda: (
                all(self.sent[f"k{n}"] > before[f"k{n}"] for n in range(KEYS))
                or any(task.done() for task in self._sending)
            ),
            CHANGE_S,
        )
        for task in self._sending:
            if task.done():
                task.result()

    # Kills

    async def kill_in_change(
        self,
        kind: StepKind,
        at: DiesAfter,
        policy: Mapping[str, object],
        *,
        stays_away: bool = False,
    ) -> str:
        """Have the policy make a change, and the broker that makes it die at one of its steps.

        `stays_away`: whether the broker starts again only after the change.  Returns the outcome in
        words.
        """
        await self.all_keys_get_on()
        had, before = await self.assigned(), await self.record()
        # Of the parents of a rebucket one owner dies, not each of them at once.
        parent = min(await self.active()) if kind is StepKind.REBUCKET else None
        first_child = cast("int", before["nextSegmentId"])
        patterns = at.patterns(self.local_name, kind, first_child, AUDIT, parent)
        self._die_at(at, patterns)
        await self.use_policy(policy)
        try:
            await until_some_die(self._brokers, CHANGE_S)
        except TimeoutError as error:
            error.add_note(f"{kind}, to die after {at}: {await self.rest('GET', '/scaling')}")
            for each in self._brokers:
                error.add_note("\n".join(each.writes))
            raise
        died_ms = time.time() * 1000
        if not stays_away:
            await self._start_the_dead()
        made_ms = await self._await_change(first_child, kind)
        await self.use_policy(OFF)
        await self._start_the_dead()
        again = made_ms > died_ms
        assert again == at.undone, f"{kind} after {at}: made at {made_ms}, died at {died_ms}"
        now = await self.assigned()
        if kind is StepKind.SPLIT:
            # Parents of a merge are drained one after the other: segments may move meanwhile.
            _check_moves(had, now)
        outcome = f"decided again {(made_ms - died_ms) / 1000:.1f} s later" if again else "finished"
        return f"{kind.value} after {at.value}: {outcome}"

    def _die_at(self, at: DiesAfter, patterns: Sequence[str]) -> None:
        if at.by_an_owner and len(self._brokers) > 1:
            # The owner of a segment dies, which need not be the leader of the topic.
            patterns = patterns[-1:]
        for each in self._brokers:
            each.die_at(patterns)

    async def _start_the_dead(self) -> None:
        """Start all brokers that do not run: owners of several segments may have died at once."""
        await asyncio.gather(*(each.start() for each in self._brokers if not each.running))

    async def kill_in_migration(self, at: DiesAfter, partitions: int) -> str:
        """Migrate the topic, and have a broker die at a step of that; returns what came of it.

        Afterwards it is scalable, and all of its partitions are sealed.
        """
        await self.all_keys_get_on()
        self._die_at(at, at.patterns(self.local_name, StepKind.MIGRATE, partitions, AUDIT, 0))
        path = f"/scalable/{NAMESPACE}/{self.local_name}/migrate"
        request = asyncio.create_task(self._brokers[0].rest("POST", path))
        await until_some_die(self._brokers, CHANGE_S)
        with suppress(aiohttp.ClientError):
            status, _ = await request
            assert not (at.undone and status == 204), "confirmed before it was stored"
        await self._start_the_dead()

        async def is_migrated() -> bool:
            status, _ = await self._brokers[0].rest("GET", path.removesuffix("/migrate"))
            if status == 404 and at.undone:
                # An attempt beside the undo of the first one may be refused.
                await self._brokers[0].rest("POST", path)
            elif status != 404:
                segments = (await self.segments()).values()
                return sum(bool(each["active"]) for each in segments) == partitions
            assert status in (200, 503) or at.undone, status
            await asyncio.sleep(RETRY_S)
            return False

        await until_awaited(is_migrated, CHANGE_S)
        await self.all_keys_get_on()
        return f"migrate after {at.value}: {'undone, made again' if at.undone else 'finished'}"

    async def kill_at_rest(self) -> None:
        """Kill all brokers while nothing changes: each consumer keeps its segments."""
        await self.use_policy(OFF)
        had = await self.assigned()
        for each in self._brokers:
            each.kill()
        await asyncio.gather(*(each.start() for each in self._brokers))
        assert await self.assigned() == had

    async def _await_change(self, first_child: int, kind: StepKind) -> int:
        """Wait for the change that makes this segment; return its time in milliseconds."""

        async def is_made() -> bool:
            history = await self.history()
            kinds = {each["epoch"]: (each["kind"], "cause" in each) for each in history}
            segments = await self.segments()
            if first_child not in segments:
                return False
            made_by = kinds.get(segments[first_child]["createdAtEpoch"])
            assert made_by in ((kind.value, True), None), history
            return made_by is not None

        await until_awaited(is_made, CHANGE_S)
        return _created_ms((await self.segments())[first_child])

    async def history(self) -> Sequence[Mapping[str, object]]:
        """The entries of the topic's history that are changes."""
        entries = cast("list[Mapping[str, object]]", await self.rest("GET", "/history"))
        return [each for each in entries if each["kind"] != "refusal"]

    async def check_cooldowns(self) -> None:
        """Raise if a change of the policy ignores its cooldown, or a merge undoes a young split.

        The times are those of the segments in the topic's record.
        """
        segments = await self.segments()
        made_ms = {each["createdAtEpoch"]: _created_ms(each) for each in segments.values()}
        changes = [each for each in await self.history() if each["epoch"] in made_ms]
        for kind in StepKind:
            for before, after in pairwise(e for e in changes if e["kind"] == kind.value):
                gap_ms = made_ms[after["epoch"]] - made_ms[before["epoch"]]
                assert "cause" not in after or gap_ms >= COOLDOWN_S * 1000, (before, after)
        for merge in [each for each in changes if each["kind"] == StepKind.MERGE.value]:
            for parent in cast("list[int]", merge["parents"]):
                if len(cast("list[int]", segments[parent]["parentIds"])) == 1:
                    age_ms = made_ms[merge["epoch"]] - _created_ms(segments[parent])
                    assert age_ms >= KEEP_SPLIT_S * 1000, merge


def _created_ms(segment: Segment) -> int:
    return cast("int", segment["createdAtMs"])


def _check_moves(had: Assigned, now: Assigned) -> None:
    """Raise if a consumer has lost a segment that it could keep without having too many."""
    former = {segment: name for name, own in had.items() for segment in own}
    current = {segment: name for name, own in now.items() for segment in own}
    kept = former.keys() & current.keys()
    counts = [sum(former[segment] == name for segment in kept) for name in now]
    if max(counts) - min(counts) - len(current.keys() - kept) <= 1:
        assert {s: current[s] for s in kept} == {s: former[s] for s in kept}, (had, now)
