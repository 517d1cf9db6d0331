"""A broker is killed and stays away: how long until another one answers for what it had.

Counted, not judged, beside the session timeout: nobody may take over while the session may still
live, and operators want to know how much later it is.  ZooKeeper ends a session one timeout after
its last beat, rounded up to its tick.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Final

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.cluster.conftest import SESSION_TIMEOUT_MS
from tests.cluster.faults import FOUND_TIMEOUT_S, Site
from tests.conftest import Report
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import once_it_is
from tests.support.raw_client import BrokerError, RawClient

TIMES: Final = 3
NOT_YET: Final = frozenset({pb.ServiceNotReady, pb.TransactionCoordinatorNotFound})

pytestmark = pytest.mark.cluster


async def attach(client: RawClient, segment: str) -> None:
    """A producer on a segment."""
    await client.create_producer(segment)


async def begin(client: RawClient, _segment: str) -> None:
    """A transaction of the first coordinator."""
    new = pb.CommandNewTxn(tc_id=0, txn_ttl_millis=60_000, scalable=True)
    await client.request(pb.BaseCommand.NEW_TXN, new)


ASKING: Final = {"a segment": attach, "a coordinator": begin}


async def until_answered(what: str, segment: str, brokers: Sequence[BrokerProcess]) -> None:
    """Ask one after the other until one of them does it."""

    async def is_answered() -> bool:
        for broker in brokers:
            client = await broker.connect()
            try:
                await ASKING[what](client, segment)
            except BrokerError as error:
                if error.code not in NOT_YET:
                    raise
            else:
                return True
            finally:
                await client.close()
        return False

    await once_it_is(is_answered, f"an answer for {what}", FOUND_TIMEOUT_S)


@pytest.mark.parametrize("what", ASKING)
def test_another_broker_takes_over(
    ground: Ground, brokers: BrokerCluster, report: Report, what: str
) -> None:
    name = f"take-over-{uuid.uuid4().hex[:8]}"
    topic = f"topic://public/default/{name}"
    asyncio.run(brokers.brokers[0].create_scalable(name, 1))
    site = Site(ground, brokers, topic=topic, led=topic)
    segment = site.segment()
    asyncio.run(until_answered(what, segment, brokers.brokers))
    took_ms: list[int] = []
    for _ in range(TIMES):
        number = site.coordinator() if what == "a coordinator" else site.owner(segment)
        others = [each for n, each in enumerate(brokers.brokers) if n != number]
        began = time.monotonic()
        brokers.kill_one(number)
        asyncio.run(until_answered(what, segment, others))
        took_ms.append(round((time.monotonic() - began) * 1000))
        brokers.start_one(number)
    report(
        f"take-over of {what}: {', '.join(map(str, took_ms))} ms after SIGKILL, with a session "
        f"timeout of {SESSION_TIMEOUT_MS} ms"
    )
    assert not brokers.faults(), brokers.faults()
