"""A zombie with a transaction key, and a broker that is killed between any two of its steps.

The zombie does part of its work and stands still.  The broker is killed and started again.  Another
process opens the key and does the work, whole.  Then the zombie wakes: whatever it still does is
refused, and a reader sees the work once.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess, running
from tests.support.key_client import KeyClient, Txn
from tests.support.raw_client import BrokerError

STEPS: Final = ("open", "begin", "add", "send", "end")
NEVER: Final[Txn] = (0, 2**40)
EARLIEST: Final = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


class Worker:
    """Does the work of one topic, once, in a transaction under its key."""

    def __init__(self, client: KeyClient, topic: str, payload: bytes) -> None:
        self.client = client
        self.topic = topic
        self.payload = payload
        self.txn: Txn = NEVER

    async def do(self, steps: tuple[str, ...]) -> bool:
        """Take those steps; False if the work was done before."""
        client = self.client
        for step in steps:
            if step == "open":
                opened = await client.open()
                if opened.last_committed:
                    return False
            elif step == "begin":
                self.txn = await client.begin()
            elif step == "add":
                await client.add(self.txn, self.topic)
            elif step == "send":
                await client.send(self.txn, self.topic, self.payload)
            else:
                await client.end(self.txn)
        return True

    async def wake(self, broker: BrokerProcess) -> None:
        """Go on where it stood, on a new connection: everything is refused."""
        raw = await broker.connect()
        client = self.client = KeyClient(raw, self.client.key, self.client.epoch)
        requests: list[Callable[[], Awaitable[object]]] = [
            client.begin,
            lambda: client.attach(client.epoch),
            lambda: client.open(client.epoch),
            lambda: client.add(self.txn, self.topic),
            lambda: client.end(self.txn),
        ]
        for request in requests:
            with pytest.raises(BrokerError) as refused:
                await request()
            assert refused.value.code == pb.NotAllowedError
        if self.txn != NEVER:
            with pytest.raises(BrokerError):
                await client.send(self.txn, self.topic, b"late")
        await raw.close()


@pytest.mark.timeout(120)
async def test_a_broker_killed_between_any_two_steps_lets_no_zombie_through(
    tmp_path: Path,
) -> None:
    """Each zombie has a key and a topic of its own, and stands still after another step."""
    async with running(tmp_path) as broker:
        zombies = []
        for number in range(1, len(STEPS) + 1):
            topic, raw = f"persistent://public/default/out-{number}", await broker.connect()
            await (await raw.subscribe(topic, "audit", EARLIEST)).close()
            zombies.append(Worker(KeyClient(raw, f"task {number}"), topic, b"first"))
            assert await zombies[-1].do(STEPS[:number])
        broker.kill()
        await broker.start()
        for number, zombie in enumerate(zombies, 1):
            raw = await broker.connect()
            client = KeyClient(raw, zombie.client.key)
            did_it = await Worker(client, zombie.topic, b"second").do(STEPS)
            assert did_it == (number < len(STEPS)), "it learns what the zombie had done"
            await zombie.wake(broker)
            assert await seen(broker, zombie.topic) == [b"second" if did_it else b"first"]
            await raw.close()
        assert not broker.faults()


async def seen(broker: BrokerProcess, topic: str) -> list[bytes]:
    """What is read of a topic up to a message that is sent now."""
    raw = await broker.connect()
    await (await raw.create_producer(topic)).send(b"the last")
    consumer = await raw.subscribe(topic, "audit", EARLIEST, permits=100)
    found: list[bytes] = []
    while b"the last" not in found:
        found.append((await consumer.receive()).payload)
    await raw.close()
    return found[:-1]
