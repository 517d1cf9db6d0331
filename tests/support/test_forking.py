"""A process that uses gRPC can start programs by `fork`, as pyspark starts its JVM."""

import random
import signal
import subprocess

import pytest

from storage.clock import SystemClock
from storage.metadata.oxia.store import OxiaMetadataStore
from tests.support.fake_oxia import FakeOxia, World

STARTS = 50


def ignore_sigint() -> None:
    """Run in the child, as pyspark does; this makes Python call `fork` instead of `vfork`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def test_forked_child_of_a_process_with_grpc_does_not_abort(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """gRPC's own handlers of a fork let some three of a hundred children abort."""
    world = World()
    server = FakeOxia(world)
    await server.start()
    world.lead(server.address)
    store = await OxiaMetadataStore.open(
        f"oxia://{server.address}/default", SystemClock(), random.Random(1)
    )
    await store.put("/a", b"")
    statuses = [
        subprocess.run(["true"], preexec_fn=ignore_sigint, check=False).returncode
        for _ in range(STARTS)
    ]
    await store.close()
    await server.stop()
    assert statuses == [0] * STARTS
    assert "fork" not in capfd.readouterr().err
