"""A client beside a load: how long its requests take, in a process of its own.

    python -m bench.bystander --port PORT --topic TOPIC

It asks one thing after the other on one connection: a PING, a transaction begun, one message sent
in it, its commit.  Each is a line of JSON on standard output: when it was asked (seconds of the
machine's monotonic clock), what it was, and how long the answer took, in seconds.  While the broker
is down it connects again and again; what that takes is not told.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable
from typing import Final, TypeVar

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.child_process import HOST
from tests.support.raw_client import RawClient
from tests.support.raw_handles import BrokerError, RawProducer

T = TypeVar("T")
Kind = pb.BaseCommand
PAUSE_S: Final = 0.02
ANSWER_TIMEOUT_S: Final = 120.0
TRANSACTION_TIMEOUT_MS: Final = 600_000


async def told(what: str, asking: Awaitable[T]) -> T:
    """The answer, once it is told how long it took."""
    asked_s = time.monotonic()
    answer = await asking
    print(json.dumps([asked_s, what, time.monotonic() - asked_s]), flush=True)
    return answer


async def run_transaction(client: RawClient, producer: RawProducer) -> None:
    """A PING, and a transaction of one message."""
    await told("PING", client.ping())
    command = pb.CommandNewTxn(txn_ttl_millis=TRANSACTION_TIMEOUT_MS, scalable=True)
    begun = (await told("NEW_TXN", client.request(Kind.NEW_TXN, command))).new_txn_response
    most, least = begun.txnid_most_bits, begun.txnid_least_bits
    sending = producer.send(
        b"x",
        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
    )
    await told("SEND", sending)
    end = pb.CommandEndTxn(
        txnid_most_bits=most, txnid_least_bits=least, txn_action=pb.COMMIT, scalable=True
    )
    await told("END_TXN", client.request(Kind.END_TXN, end))


async def stand_by(port: int, topic: str) -> None:
    """Until the process is ended."""
    while True:
        try:
            client = await RawClient.open(HOST, port, timeout_s=ANSWER_TIMEOUT_S)
            producer = await told("PRODUCER", client.create_producer(topic))
            while True:
                await run_transaction(client, producer)
                await asyncio.sleep(PAUSE_S)
        except (OSError, BrokerError):
            await asyncio.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bystander", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", required=True)
    options = parser.parse_args()
    asyncio.run(stand_by(options.port, options.topic))


if __name__ == "__main__":
    main()
