"""One topic with many segments: the times of its changes, and its first use after a restart."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import encode_command
from magnetar.protocol.names import parse_topic_name
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import HOST
from tests.support.embedded_broker import running as embedded
from tests.support.raw_client import RawClient
from tests.support.raw_handles import Session, basecommand

TOPIC: Final = "topic://public/default/orders"
PATH: Final = "/scalable/public/default/orders"
SUBSCRIPTION: Final = "ordered"
WATCHERS: Final = 100
ATTACHING: Final = 64
"""SUBSCRIBEs of the ordered consumer in flight."""
TIMEOUT_S: Final = 120.0
PING_S: Final = 0.5
SETTINGS: Final = {
    "scalable_topic_auto_scale_enabled": True,
    "scalable_topic_max_segments": 2048,
    # Every pair of neighbours is checked for a merge, and none is merged.
    "scalable_topic_merge_window_s": 86_400,
    "sealed_segment_prune_interval_s": 1,
}


class LargeTopic:
    """A topic on a broker of its own; `figures` has those that were taken so far."""

    def __init__(self, broker: BrokerProcess, segments: int, rounds: int) -> None:
        self.broker = broker
        self.segments = segments
        self.figures: dict[str, float] = {}
        self._rounds = rounds
        self._last = segments - 1

    async def measure(self) -> RawClient:
        """Take the figures; returns a client whose ordered consumer is attached everywhere."""
        began_s = time.perf_counter()
        await self.broker.create_scalable("orders", self.segments)
        self.figures["create_ms"] = _ms_since(began_s)
        await self._watch()
        await self.broker.terminate()
        await self.broker.start()
        client = await self._client()
        began_s = time.perf_counter()
        await client.watch_dag(TOPIC)
        self.figures["loaded_ms"] = _ms_since(began_s)
        await client.close()
        return await self._consume()

    async def _client(self) -> RawClient:
        return await RawClient.open(HOST, self.broker.port, timeout_s=TIMEOUT_S)

    # Layouts

    async def _watch(self) -> None:
        client = await self._client()
        session, update = await client.watch_dag(TOPIC)
        pushed = basecommand(pb.BaseCommand.SCALABLE_TOPIC_UPDATE, update)
        self.figures["push_bytes"] = len(encode_command(pushed))
        times: list[float] = []
        for _ in range(4 * self._rounds):
            began_s = time.perf_counter()
            other, _ = await client.watch_dag(TOPIC)
            times.append(_ms_since(began_s))
            client.close_dag(other)
        self.figures["lookup_ms"] = statistics.median(times)
        self.figures |= await self._change([session])
        others = [(await client.watch_dag(TOPIC))[0] for _ in range(WATCHERS - 1)]
        pushed_ms = (await self._change([session, *others]))["split_pushed_ms"]
        self.figures["push_100_ms"] = pushed_ms
        await client.close()

    async def _change(self, sessions: Sequence[Session]) -> dict[str, float]:
        """Split the last segment and merge its halves, round by round; the first does not count."""
        times: dict[str, list[float]] = {}
        for number in range(self._rounds + 1):
            for kind in ("split", "merge"):
                low = "" if kind == "split" else f"{self._last - 1}/"
                answered_ms, pushed_ms = await self._make(f"{kind}/{low}{self._last}", sessions)
                if number:
                    times.setdefault(f"{kind}_ms", []).append(answered_ms)
                    times.setdefault(f"{kind}_pushed_ms", []).append(pushed_ms)
        return {name: statistics.median(each) for name, each in times.items()}

    async def _make(self, path: str, sessions: Collection[Session]) -> tuple[float, float]:
        """Milliseconds until a change is answered, and until all sessions have its layout."""

        async def answered() -> float:
            status, answer = await self.broker.rest("POST", f"{PATH}/{path}")
            assert status == 204, answer
            return _ms_since(began_s)

        async def pushed() -> float:
            for session in sessions:
                dags[session] = await _next_layout(session)
            return _ms_since(began_s)

        dags: dict[Session, pb.ScalableTopicDAG] = {}
        began_s = time.perf_counter()
        answered_ms, pushed_ms = await asyncio.gather(answered(), pushed())
        for session, dag in dags.items():
            while any(each.state == pb.SEALED for each in dag.segments):
                dag = await _next_layout(session)  # until it is pruned
            self._last = max(each.segment_id for each in dag.segments)
        return answered_ms, pushed_ms

    # An ordered consumer

    async def _consume(self) -> RawClient:
        """Have an ordered consumer attach everywhere, lose its connection, and attach again."""
        client = await self._client()
        began_s = time.perf_counter()
        _, assignment = await client.subscribe_scalable(TOPIC, SUBSCRIPTION, "c")
        self.figures["registered_ms"] = _ms_since(began_s)
        await _attach(client, assignment)
        self.figures["attached_ms"] = _ms_since(began_s)
        self.figures["lost_ms"] = await self._longest_ping_ms(client.close)
        client = await self._client()
        _, assignment = await client.subscribe_scalable(TOPIC, SUBSCRIPTION, "c")
        assert len(assignment.segments) == self.segments
        began_s = time.perf_counter()
        await _attach(client, assignment)
        self.figures["attached_again_ms"] = _ms_since(began_s)
        return client

    async def _longest_ping_ms(self, event: Callable[[], Awaitable[None]]) -> float:
        """The longest PING of another client after an event."""
        other = await self._client()
        longest_ms = 0.0
        await event()
        until_s = time.perf_counter() + PING_S
        while time.perf_counter() < until_s:
            began_s = time.perf_counter()
            await other.ping()
            longest_ms = max(longest_ms, _ms_since(began_s))
        await other.close()
        return longest_ms


async def _next_layout(session: Session) -> pb.ScalableTopicDAG:
    return (await session.next()).scalable_topic_update.dag


async def _attach(client: RawClient, assignment: pb.ScalableConsumerAssignment) -> None:
    """Attach the segment consumers of an ordered consumer."""
    places = asyncio.Semaphore(ATTACHING)

    async def attach(segment: pb.ScalableAssignedSegment) -> None:
        async with places:
            options = pb.CommandSubscribe(consumer_name=f"c-seg-{segment.segment_id}")
            await client.subscribe(segment.segment_topic, SUBSCRIPTION, options)

    await asyncio.gather(*(attach(each) for each in assignment.segments))


async def evaluation_ms(segments: int, directory: Path, rounds: int) -> float:
    """Milliseconds of one evaluation of the scaling policy, in a broker in this process."""
    async with embedded(directory, **SETTINGS) as broker:
        name = parse_topic_name(TOPIC)
        await broker.scalable.create(name, segments=segments, properties={})
        (live,) = broker.scalable.in_memory()
        times: list[float] = []
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            await broker.scalable.scaler.evaluate(live)
            times.append(_ms_since(began_s))
        return statistics.median(times[1:])


def _ms_since(began_s: float) -> float:
    return (time.perf_counter() - began_s) * 1000
