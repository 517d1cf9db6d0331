"""The work done by `import magnetar`: one process, one thread, one event loop (uvloop)."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop

import magnetar
from bench.client.work import (
    CONCURRENT,
    NANOS_IN_MS,
    NANOS_IN_US,
    PATIENCE_S,
    SENDS_IN_TRANSACTION,
    SIZE_BYTES,
    WINDOW,
    Figures,
    Work,
    given_work,
    percentiles,
    report,
)

PAYLOAD = bytes(SIZE_BYTES)
Run = Callable[[magnetar.Client, Work], Awaitable[Figures]]


async def throughput(client: magnetar.Client, work: Work) -> Figures:
    """Messages per second from the first send to the last acknowledged delivery."""
    async with (
        client.producer(
            work.topic, batching=work.batching, max_pending_messages=WINDOW
        ) as producer,
        client.queue_consumer(work.topic, "bench", initial_position="earliest") as consumer,
    ):
        rates = []
        for _ in range(work.runs + 1):
            begin = time.perf_counter()
            consuming = asyncio.create_task(consume(consumer, work.count))
            await publish_all(producer, work.count)
            await consuming
            rates.append(work.count / (time.perf_counter() - begin))
    return {"messages_per_s": rates[1:]}


async def publish(client: magnetar.Client, work: Work) -> Figures:
    """Messages per second from the first send to the last receipt."""
    async with client.producer(
        work.topic, batching=work.batching, max_pending_messages=WINDOW
    ) as producer:
        rates = []
        for _ in range(work.runs + 1):
            begin = time.perf_counter()
            await publish_all(producer, work.count)
            rates.append(work.count / (time.perf_counter() - begin))
    return {"messages_per_s": rates[1:]}


async def publish_all(producer: magnetar.Producer[bytes], count: int) -> None:
    for _ in range(count):
        while True:
            try:
                producer.send_nowait(PAYLOAD)
                break
            except magnetar.errors.ProducerQueueFull:
                await producer.room()
    await producer.flush()


async def consume(consumer: magnetar.QueueConsumer[bytes], count: int) -> None:
    left = count
    while left:
        batch = await consumer.receive_batch(max_messages=min(left, 100), timeout_s=PATIENCE_S)
        if not batch:
            raise TimeoutError(f"{left} of {count} messages did not come")
        for message in batch:
            await consumer.ack(message)
        left -= len(batch)


async def latency(client: magnetar.Client, work: Work) -> Figures:
    """Microseconds of an awaited send."""
    async with client.producer(work.topic, batching=work.batching) as producer:
        p50, p99 = [], []
        for _ in range(work.runs + 1):
            nanos = []
            for _ in range(work.count):
                begin = time.perf_counter_ns()
                await producer.send(PAYLOAD)
                nanos.append(time.perf_counter_ns() - begin)
            half, most = percentiles(nanos, NANOS_IN_US)
            p50.append(half)
            p99.append(most)
    return {"p50_us": p50[1:], "p99_us": p99[1:]}


async def transactions(client: magnetar.Client, work: Work) -> Figures:
    """Committed transactions per second, `CONCURRENT` at once, and milliseconds of a commit."""
    rates, p50, p99 = [], [], []
    async with client.producer(work.topic, batching=work.batching) as producer:
        for _ in range(work.runs + 1):
            nanos: list[int] = []
            begin = time.perf_counter()
            until = begin + work.count
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENT):
                    group.create_task(transact(client, producer, until, nanos))
            rates.append(len(nanos) / (time.perf_counter() - begin))
            half, most = percentiles(nanos, NANOS_IN_MS)
            p50.append(half)
            p99.append(most)
    return {
        "transactions_per_s": rates[1:],
        "commit_p50_ms": p50[1:],
        "commit_p99_ms": p99[1:],
    }


async def transact(
    client: magnetar.Client,
    producer: magnetar.Producer[bytes],
    until: float,
    nanos: list[int],
) -> None:
    while time.perf_counter() < until:
        transaction = await client.transaction(timeout_s=120)
        await asyncio.gather(
            *(
                producer.send(PAYLOAD, key=f"k{number}", transaction=transaction)
                for number in range(SENDS_IN_TRANSACTION)
            )
        )
        begin = time.perf_counter_ns()
        await transaction.commit()
        nanos.append(time.perf_counter_ns() - begin)


RUNS: dict[str, Run] = {
    "throughput": throughput,
    "publish": publish,
    "latency": latency,
    "transactions": transactions,
}


async def main() -> None:
    work = given_work()
    async with magnetar.connect(work.url) as client:
        report(await RUNS[work.kind](client, work))


if __name__ == "__main__":
    uvloop.run(main())
