"""Zombies with transaction keys, and a broker that is killed between any two of their steps.

A process consumes, transforms and produces under a key, and stands still.  Another one opens the
key and does the work, whole.  Then the first wakes: whatever it still asks for is refused, and a
reader sees the work once.  Many jobs go so beside each other, and the broker is killed once: that
finds each job after another step, or its zombie asleep after another one.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

import pytest

import magnetar
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess, running
from tests.support.child_process import HOST
from tests.support.key_client import KeyClient, Txn
from tests.support.key_worker_process import (
    INPUT,
    LATE,
    WorkerProcess,
    everything_in,
    put_input,
    workers,
    written_by,
)
from tests.support.raw_client import BrokerError

NEVER: Final[Txn] = (0, 2**40)
HALF: Final = ("open", "begin", "work")
WHOLE: Final = (*HALF, "commit")


@dataclass
class Job:
    """One piece of work, of which the first process does some steps, and the second all."""

    name: str
    first: Sequence[str]
    before: int
    """How many steps, of the first and then of the second, come before the broker is killed."""
    late: str
    """What the first asks for at once when it wakes."""
    txn: Txn = NEVER
    """Of the first."""

    @property
    def sleeps_early(self) -> bool:
        """Whether the first stands still when the broker is killed, or only later."""
        return self.before >= len(self.first)

    @property
    def is_done_by_first(self) -> bool:
        return "commit" in self.first

    @property
    def late_requests(self) -> Sequence[str]:
        """All that the first can ask for where it stands; a transaction that ended it has not."""
        is_open = "begin" in self.first and not self.is_done_by_first
        return [self.late, *LATE] if is_open else ["begin"]

    @property
    def source(self) -> str:
        return f"topic://public/default/source-{self.name}"

    @property
    def sink(self) -> str:
        return f"topic://public/default/sink-{self.name}"

    async def take_first(self, worker: WorkerProcess, steps: Sequence[str]) -> None:
        count = len(INPUT) if self.is_done_by_first else len(INPUT) // 2
        for step in steps:
            answer = await worker.take(step, self.name, count)
            if step == "begin":
                self.txn = (answer[0], answer[1])

    async def take_second(self, worker: WorkerProcess, url: str, steps: Sequence[str]) -> None:
        for step in steps:
            if step == "open":
                await worker.set_up(self.name, url, self.source, self.sink)
            answer = await worker.take(step, self.name, len(INPUT))
            if step == "open":
                committed = None if self.txn == NEVER else self.is_done_by_first
                assert answer == [1, committed], "one epoch more than the first had, and once"
                if committed:
                    return


def all_jobs() -> list[Job]:
    """Without a kill in it, once for each late request; killed after each step; asleep after it."""
    late = cycle(LATE)
    befores = range(1, len(HALF) + len(WHOLE) + 1)
    sleeps = (("open",), ("open", "begin"), ("open", "begin", "join"), WHOLE)
    return [
        *(Job(f"unhurt-{n}", HALF, 0, next(late)) for n in range(len(LATE))),
        *(Job(f"killed-after-{n}", HALF, n, next(late)) for n in befores),
        *(Job(f"asleep-after-{each[-1]}", each, len(each), next(late)) for each in sleeps),
    ]


@pytest.mark.timeout(240)
async def test_a_broker_killed_between_any_two_steps_lets_no_zombie_through(
    tmp_path: Path,
) -> None:
    jobs = all_jobs()
    async with running(tmp_path) as broker:
        url = f"pulsar://{HOST}:{broker.port}"
        with workers(tmp_path, "early", "first", "second") as (early, first, second):
            zombies = {job.name: early if job.sleeps_early else first for job in jobs}
            await set_up(broker, url, jobs, zombies)
            for job in jobs:
                await job.take_first(zombies[job.name], job.first[: job.before])
            early.pause()
            for job in jobs:
                await job.take_second(second, url, WHOLE[: max(0, job.before - len(job.first))])
            broker.kill()
            await broker.start()
            for job in jobs:
                await job.take_first(zombies[job.name], job.first[job.before :])
            first.pause()
            for job in jobs:
                await job.take_second(second, url, WHOLE[max(0, job.before - len(job.first)) :])
            for each in (early, first):
                each.resume()
            for job in jobs:
                await whatever_is_late_is_refused(broker, job, zombies[job.name])
        await the_work_is_seen_once(url, jobs, zombies)
        assert not broker.faults()


async def set_up(
    broker: BrokerProcess, url: str, jobs: Sequence[Job], zombies: dict[str, WorkerProcess]
) -> None:
    """Topics, input, and the first of each job."""
    async with magnetar.connect(url) as client:
        for job in jobs:
            for topic in (job.source, job.sink):
                await broker.create_scalable(topic.rpartition("/")[2], 1)
            await put_input(client, job.source)
            await zombies[job.name].set_up(job.name, url, job.source, job.sink)


async def whatever_is_late_is_refused(
    broker: BrokerProcess, job: Job, zombie: WorkerProcess
) -> None:
    """By its client, and by the broker whatever the client knows."""
    first, *others = job.late_requests
    assert await zombie.refusal(first, job.name) in LATE[first], (job.name, first)
    for request in others:
        await zombie.refusal(request, job.name)
    raw = await broker.connect()
    client = KeyClient(raw, job.name, 0)
    segment = f"segment://{job.sink.removeprefix('topic://')}/0000-ffff-0"
    requests: list[Callable[[], Awaitable[object]]] = [
        client.begin,
        lambda: client.attach(0),
        lambda: client.open(0),
        lambda: client.add(job.txn, segment),
        lambda: client.end(job.txn),
    ]
    for ask in requests:
        with pytest.raises(BrokerError) as refused:
            await ask()
        assert refused.value.code == pb.NotAllowedError, job.name
    if job.txn != NEVER:
        with pytest.raises(BrokerError):
            await client.send(job.txn, segment, b"late")
    await raw.close()


async def the_work_is_seen_once(
    url: str, jobs: Sequence[Job], zombies: dict[str, WorkerProcess]
) -> None:
    async with magnetar.connect(url) as client:
        for job in jobs:
            by = zombies[job.name].name if job.is_done_by_first else "second"
            assert await everything_in(client, job.sink) == written_by(by), job.name
