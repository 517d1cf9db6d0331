"""SIGKILL while ledgers are copied to S3, checked, and deleted: nothing is lost, little is left.

Between the broker and the object store is a proxy that kills the broker at a chosen request: before
the store has seen it, or before the broker has seen the answer.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import payload_of
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.object_store import REGION, s3_server
from tests.support.waiting import POLL_S, until

ENTRIES = 60
STEPS = 16
"""Requests by which two ledgers are copied, read again, looked at once more and deleted."""
KILLS = by_effort(quick=1, whole=1, nightly=STEPS)
"""At which a broker is killed, one after the other; at all of them that takes minutes."""
SETTINGS = {
    "ledger_max_entries": 30,
    "ledger_min_age_s": 0,
    "entry_cache_bytes": 0,
    "offload_deletion_lag_s": -1,
    "offload_region": REGION,
    "retention_time_minutes": -1,
    "retention_size_mb": -1,
}


class Proxy:
    """Hands requests on to an S3 server, and at one of them calls `interrupt`."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._left = 0
        self._before = True
        self._interrupt: Callable[[], None] | None = None
        self.requests: list[str] = []
        self.interrupted = False

    def arm(self, at: int, *, before: bool, interrupt: Callable[[], None]) -> None:
        self._left, self._before, self._interrupt = at, before, interrupt
        self.interrupted = False

    def disarm(self) -> None:
        self._interrupt = None

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path_qs}")
        self._left -= 1
        due = self._left == 0 and self._interrupt is not None
        if due and self._before:
            self._cut()
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method,
                self._store + request.path_qs,
                data=await request.read(),
                headers=headers,
            ) as answer,
        ):
            body = await answer.read()
        if due and not self._before:
            self._cut()
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in SKIPPED}
        if request.method == "HEAD":
            kept["Content-Length"] = answer.headers["Content-Length"]
        return web.Response(status=answer.status, body=body or None, headers=kept)

    def _cut(self) -> None:
        assert self._interrupt is not None
        self._interrupt()
        self.interrupted = True


SKIPPED = {"content-length", "transfer-encoding", "connection", "date", "server"}


@asynccontextmanager
async def proxy(store: str) -> AsyncIterator[tuple[Proxy, str]]:
    made = Proxy(store)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield made, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.timeout(600)
async def test_sigkill_at_requests_to_the_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(draw_seed())
    with s3_server() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        async with proxy(store.endpoint) as (between, endpoint):
            settings = {
                **SETTINGS,
                "offload_url": f"s3://{store.new_bucket()}/copies",
                "offload_endpoint": endpoint,
            }
            async with running(tmp_path, settings) as broker:
                for at in rng.sample(range(1, STEPS + 1), min(KILLS, STEPS)):
                    topic = Topic(broker, f"killed-at-{at}")
                    await topic.fill()
                    await topic.killed(between, at, before=rng.random() < 0.5)
                    await topic.is_offloaded_in_the_end()
                assert not broker.faults()


class Topic:
    """A sealed topic of two ledgers."""

    def __init__(self, broker: BrokerProcess, name: str) -> None:
        self._broker = broker
        self._name = f"persistent://public/default/{name}"
        self._path = f"/persistent/public/default/{name}"

    async def fill(self) -> None:
        client = await self._broker.connect()
        producer = await client.create_producer(self._name)
        for number in range(ENTRIES):
            await producer.send(b"%d" % number)
        await client.close()
        assert (await self._broker.rest("POST", f"{self._path}/terminate"))[0] == 200

    async def killed(self, between: Proxy, at: int, *, before: bool) -> None:
        """Offload it and delete its ledgers, with a broker that is killed at that request."""
        between.arm(at, before=before, interrupt=self._broker.kill)
        try:
            await self._broker.rest("PUT", f"{self._path}/offload")
            await self._not_running()
            await self._broker.rest("POST", f"{self._path}/offload/dropHot")
        except aiohttp.ClientError:
            pass
        between.disarm()
        assert between.interrupted, between.requests[-STEPS:]
        await until(lambda: not self._broker.running)
        await self._broker.start()
        await self._is_whole()

    async def is_offloaded_in_the_end(self) -> None:
        await self._broker.rest("PUT", f"{self._path}/offload")
        await self._not_running()
        await self._broker.rest("POST", f"{self._path}/offload/dropHot")
        _, manifest = await self._broker.rest("GET", f"{self._path}/offload/manifest")
        assert isinstance(manifest, dict)
        assert [(each["entries"], each["bookkeeperDeleted"]) for each in manifest["ledgers"]] == [
            (30, True),
            (30, True),
        ]
        await self._is_whole()
        assert await self._broker.rest("GET", "/offload/orphans") == (200, [])
        assert (await self._broker.rest("DELETE", self._path, force="true"))[0] == 204

    async def _is_whole(self) -> None:
        client = await self._broker.connect()
        options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
        consumer = await client.subscribe(self._name, "s", options, permits=ENTRIES)
        found = [bytes(payload_of((await consumer.receive()).entry)) for _ in range(ENTRIES)]
        assert found == [b"%d" % number for number in range(ENTRIES)]
        await consumer.unsubscribe()
        await client.close()

    async def _not_running(self) -> None:
        while True:
            _, status = await self._broker.rest("GET", f"{self._path}/offload")
            assert isinstance(status, dict)
            if status["status"] != "RUNNING":
                return
            await asyncio.sleep(POLL_S)
