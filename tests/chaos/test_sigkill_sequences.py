"""SIGKILL in the middle of splits and merges, while a program publishes under ids of its own.

The program is killed too, and its next process sends again from a checkpoint.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import magnetar
from magnetar import InitialPosition
from magnetar.errors import MagnetarError
from tests.chaos.test_sigkill_reshape import LOCAL_NAME, TOPIC, reshape_and_kill
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.waiting import end, until

ROUNDS: Final = by_effort(quick=4, whole=6, nightly=60)
KEYS: Final = 16
CHECKPOINT: Final = 20
"""The next process sends again so many messages that have a receipt, at most."""
READ_S: Final = 60


class Program:
    """Sends numbers, each under its own sequence id and one of KEYS keys."""

    def __init__(self, broker: BrokerProcess, rng: random.Random) -> None:
        self.stored = 0
        """All numbers below have a receipt."""
        self.processes = 0
        self.stopping = False
        self._broker = broker
        self._rng = rng

    async def run(self) -> None:
        """Run one process after the other."""
        while not self.stopping:
            self.processes += 1
            try:
                async with asyncio.timeout(self._rng.uniform(1, 8)):
                    await self._run_process()
            except (MagnetarError, OSError, TimeoutError):
                await asyncio.sleep(0.05)

    async def _run_process(self) -> None:
        async with (
            magnetar.connect(f"pulsar://127.0.0.1:{self._broker.port}") as client,
            client.producer(TOPIC, name="program", batching=False) as producer,
        ):
            number = max(0, self.stored - self._rng.randrange(CHECKPOINT))
            while not self.stopping:
                await producer.send(b"%d" % number, key=f"k{number % KEYS}", sequence_id=number)
                number += 1
                self.stored = max(self.stored, number)


@pytest.mark.timeout(240 + 10 * ROUNDS)
async def test_no_message_of_a_program_is_stored_twice(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    async with running(tmp_path, {"deduplication": True}) as broker:
        await broker.create_scalable(LOCAL_NAME, 2)
        program = Program(broker, rng)
        publishing = asyncio.create_task(program.run())
        try:
            done: list[bool] = []
            for turn in range(ROUNDS):
                before = program.stored
                await until(lambda: program.stored > before + 50)  # noqa: B023
                done.append(await reshape_and_kill(broker, rng, publishing, turn))
            before = program.stored
            await until(lambda: program.stored > before + 50)
            program.stopping = True
            await publishing
        finally:
            await end(publishing)
        found = await everything(broker)
        assert not broker.faults()
    print(f"{program.stored} receipts by {program.processes} processes; changes done: {done}")
    assert [number for number, count in found.items() if count > 1] == []
    assert set(range(program.stored)) <= found.keys()


async def everything(broker: BrokerProcess) -> Counter[int]:
    """How often each number is in the topic."""
    found = Counter[int]()
    async with (
        magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client,
        client.queue_consumer(TOPIC, "all", initial_position=InitialPosition.EARLIEST) as consumer,
        asyncio.timeout(READ_S),
    ):
        while messages := await consumer.receive_batch(1000, timeout_s=3):
            for message in messages:
                found[int(message.data)] += 1
                await consumer.ack(message)
    return found
