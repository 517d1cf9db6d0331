"""The first words and the end of a broker process."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs

from broker.cli import serving
from config.settings import Settings
from magnetar.cli import main

HOST: Final = "127.0.0.1"
STANDALONE: Final = (sys.executable, "-m", main.__name__, "standalone")


async def test_stores_that_do_not_answer_are_not_waited_for() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with capture_logs() as logged:
        await asyncio.wait_for(serving.stop_in_time(never, 0.01), 5)
    assert [each["event"] for each in logged] == ["stop_timed_out"]
    assert never.cancelled()


async def test_signal_ends_a_start_that_takes_long() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    assert not await asyncio.wait_for(serving.started_before(stop, asyncio.sleep(60)), 5)


async def test_error_of_a_start_is_raised() -> None:
    async def start() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await serving.started_before(asyncio.Event(), start())


def test_banner_suggests_a_command_with_this_brokers_url() -> None:
    hint = "topics get my-topic --admin-url http://127.0.0.1:18080\n"
    assert hint in serving.banner(Settings(), 16650, 18080, 0.1)
    assert "--admin-url" not in serving.banner(Settings(), 6650, 8080, 0.1)


@pytest.fixture
def ports_in_use() -> Iterator[tuple[int, int]]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind((HOST, 0))
            each.listen()
        yield one.getsockname()[1], other.getsockname()[1]


@pytest.mark.parametrize("in_use", ["port", "http_port", "both"])
def test_broker_names_each_port_that_is_in_use(
    tmp_path: Path, ports_in_use: tuple[int, int], in_use: str
) -> None:
    port, http_port = ports_in_use
    given = ["--port", str(port if in_use != "http_port" else 0)]
    given += ["--http-port", str(http_port if in_use != "port" else 0)]
    done = subprocess.run(
        [*STANDALONE, "--bind-host", HOST, "--data-dir", str(tmp_path), *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    named = [f"Port {port} for clients"] if in_use != "http_port" else []
    named += [f"Port {http_port} for REST and metrics"] if in_use != "port" else []
    errors = [line for line in done.stderr.splitlines() if line.startswith("magnetar: ")]
    assert [error.split(" is in use")[0] for error in errors] == [
        f"magnetar: {each}" for each in named
    ]


def test_broker_asks_for_another_bind_host_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [*STANDALONE, "--bind-host", "192.0.2.1", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("magnetar: ")]
    assert "set bind_host (--bind-host) to one of its addresses" in error
