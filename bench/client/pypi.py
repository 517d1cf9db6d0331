"""The work done by `pulsar-client` from PyPI: Python over the C++ client, which knows v4 topics."""

import threading
import time

import pulsar

from bench.client.work import (
    NANOS_IN_US,
    PATIENCE_S,
    SIZE_BYTES,
    WINDOW,
    Figures,
    Work,
    given_work,
    percentiles,
    report,
    timed_s,
)

PAYLOAD = bytes(SIZE_BYTES)
MESSAGE_TIMEOUT_MS = PATIENCE_S * 1000


def producer_of(client: pulsar.Client, work: Work) -> pulsar.Producer:
    return client.create_producer(
        work.topic,
        batching_enabled=work.batching,
        batching_max_publish_delay_ms=1,
        max_pending_messages=WINDOW,
        block_if_queue_full=True,
    )


def publish_all(producer: pulsar.Producer, count: int) -> None:
    failures: list[pulsar.Result] = []

    def sent(result: pulsar.Result, _message_id: pulsar.MessageId) -> None:
        if result != pulsar.Result.Ok:
            failures.append(result)

    for _ in range(count):
        producer.send_async(PAYLOAD, sent)
    producer.flush()
    if failures:
        raise RuntimeError(f"{len(failures)} sends failed: {failures[0]}")


def consume(consumer: pulsar.Consumer, count: int) -> None:
    for _ in range(count):
        consumer.acknowledge(consumer.receive(MESSAGE_TIMEOUT_MS))


def throughput(client: pulsar.Client, work: Work) -> Figures:
    producer = producer_of(client, work)
    consumer = client.subscribe(
        work.topic,
        "bench",
        consumer_type=pulsar.ConsumerType.Shared,
        initial_position=pulsar.InitialPosition.Earliest,
    )

    def one_run() -> None:
        consuming = threading.Thread(target=consume, args=(consumer, work.count))
        consuming.start()
        publish_all(producer, work.count)
        consuming.join()

    return {"messages_per_s": [work.count / timed_s(one_run) for _ in range(work.runs + 1)][1:]}


def publish(client: pulsar.Client, work: Work) -> Figures:
    producer = producer_of(client, work)

    def one_run() -> None:
        publish_all(producer, work.count)

    return {"messages_per_s": [work.count / timed_s(one_run) for _ in range(work.runs + 1)][1:]}


def latency(client: pulsar.Client, work: Work) -> Figures:
    producer = producer_of(client, work)
    p50, p99 = [], []
    for _ in range(work.runs + 1):
        nanos = []
        for _ in range(work.count):
            begin = time.perf_counter_ns()
            producer.send(PAYLOAD)
            nanos.append(time.perf_counter_ns() - begin)
        half, most = percentiles(nanos, NANOS_IN_US)
        p50.append(half)
        p99.append(most)
    return {"p50_us": p50[1:], "p99_us": p99[1:]}


RUNS = {"throughput": throughput, "publish": publish, "latency": latency}


def main() -> None:
    work = given_work()
    client = pulsar.Client(
        work.url,
        authentication=pulsar.AuthenticationToken(work.token) if work.token else None,
        tls_trust_certs_file_path=work.trust or None,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    try:
        report(RUNS[work.kind](client, work))
    finally:
        client.close()


if __name__ == "__main__":
    main()
