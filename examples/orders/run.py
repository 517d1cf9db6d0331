"""Orders to totals, with the driver killed in the middle.

make run                         # a broker, in another terminal
python examples/orders/run.py
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from pathlib import Path
from typing import TypedDict

from access import access

import magnetar.sync

SETTINGS, _ = access()
NUMBER = 1000
CUSTOMERS = 10
PATIENCE_S = 300
SILENCE_S = 10


class Order(TypedDict):
    """An order, published as JSON."""

    number: int
    customer: str
    cents: int


def publish(url: str, topic: str) -> list[Order]:
    """Publish the orders; returns them."""
    orders: list[Order] = [
        {"number": number, "customer": f"customer-{number % CUSTOMERS}", "cents": 100 + number % 7}
        for number in range(NUMBER)
    ]
    with (
        magnetar.sync.connect(url, **SETTINGS) as client,
        client.producer(topic, schema=str, batch_max_messages=20) as producer,
    ):
        for order in orders:
            producer.send_nowait(json.dumps(order), key=order["customer"])
        producer.flush()
    return orders


def driver(url: str, topic: str, checkpoints: str) -> subprocess.Popen[bytes]:
    """Start `query.py`, in a process group of its own, to be killed with its JVM."""
    script = str(Path(__file__).with_name("query.py"))
    command = [sys.executable, script, "--url", url]
    command += ["--orders", topic, "--checkpoints", checkpoints]
    return subprocess.Popen(command, start_new_session=True)


def first_of(url: str, topic: str, writer: subprocess.Popen[bytes]) -> None:
    """Wait until the driver has written a first message that readers see."""
    with (
        magnetar.sync.connect(url, **SETTINGS) as client,
        client.checkpoint_consumer(topic) as reader,
    ):
        while not reader.receive_batch(1, timeout_s=1):
            if writer.poll() is not None:
                sys.exit("The driver has ended, and written nothing.")


def everything_in(url: str, topic: str) -> list[dict[str, object]]:
    """The messages that readers of a topic see, those of each key in order."""
    found = []
    with (
        magnetar.sync.connect(url, **SETTINGS) as client,
        client.checkpoint_consumer(topic) as reader,
    ):
        while batch := reader.receive_batch(500, timeout_s=SILENCE_S):
            found += [json.loads(message.value) for message in batch]
    return found


def main() -> None:
    """Publish, kill the driver, start another one, and compare the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=os.environ.get("MAGNETAR_URL", "pulsar://127.0.0.1:6650"))
    url = parser.parse_args().url
    topic = f"topic://public/default/orders-{uuid.uuid4().hex[:8]}"
    orders = publish(url, topic)
    with tempfile.TemporaryDirectory() as checkpoints:
        doomed = driver(url, topic, checkpoints)
        first_of(url, f"{topic}-enriched", doomed)
        os.killpg(doomed.pid, signal.SIGKILL)
        doomed.wait()
        done = len(everything_in(url, f"{topic}-enriched"))
        print(f"The driver was killed when {done} of {NUMBER} orders were enriched.", flush=True)
        if driver(url, topic, checkpoints).wait(PATIENCE_S) != 0:
            sys.exit("The second driver failed.")

    numbers = Counter(order["number"] for order in everything_in(url, f"{topic}-enriched"))
    assert numbers == Counter(range(NUMBER)), "an order is missing, or there twice"
    expected = Counter[str]()
    for order in orders:
        expected[order["customer"]] += order["cents"]
    totals = {total["customer"]: total["cents"] for total in everything_in(url, f"{topic}-totals")}
    assert totals == expected, f"{totals} are not the totals {expected}"
    print(f"All {NUMBER} orders were enriched once, and the totals are right.")


if __name__ == "__main__":
    main()
