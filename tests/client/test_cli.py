"""The client's commands against a broker: what is sent is read, Ctrl-C ends, errors are told."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from magnetar.cli.main import build_app
from tests.client.conftest import MakeTopic, Service
from tests.support.child_process import dying_with_its_parent

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30


async def run(service: Service, *arguments: str, text: str | None = None) -> Result:
    """A command in this process, on another thread."""
    command = [*arguments, "--url", service.url]
    return await asyncio.to_thread(lambda: CliRunner().invoke(build_app(), command, input=text))


async def lines(service: Service, *arguments: str, text: str | None = None) -> list[str]:
    """What a command prints that ends well."""
    done = await run(service, *arguments, text=text)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


@asynccontextmanager
async def started(service: Service, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command in a process of its own, which is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        *dying_with_its_parent([sys.executable, "-m", "magnetar.cli.main", *arguments]),
        cwd=ROOT,
        env={**os.environ, "MAGNETAR_URL": service.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def interrupted(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Ctrl-C: status, rest of the output, errors."""
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_command_consumes_each_produced_message_once(
    service: Service, topic: MakeTopic
) -> None:
    name = str(await topic(segments=2))
    sent = await lines(
        service, "produce", name, "-m", "one", "-m", "two", "-k", "a", "-p", "x=y", "-n", "2"
    )
    assert sent == [f"Sent 4 message(s) to {name}."]
    told = await lines(service, "consume", name, "-s", "s", "-n", "4", "--json")
    messages = [json.loads(line) for line in told]
    assert [each["value"] for each in messages] == ["one", "two"] * 2
    assert {each["key"] for each in messages} == {"a"}
    assert messages[0]["properties"] == {"x": "y"}
    assert messages[0]["topic"] == name
    assert await lines(service, "consume", name, "-s", "s", "--idle-s", "0.3") == []


@pytest.mark.parametrize("kind", ["queue", "stream"])
async def test_lines_of_standard_input_come_out_in_order(
    service: Service, topic: MakeTopic, kind: str
) -> None:
    name = str(await topic())
    numbers = [str(number) for number in range(2000)]
    await lines(service, "produce", name, text="\n".join(numbers))
    told = await lines(service, "consume", name, "-s", "s", "--type", kind, "-n", "1500")
    assert told == numbers[:1500]
    told = await lines(service, "consume", name, "-s", "s", "--type", kind, "-n", "500")
    assert told == numbers[1500:]


async def test_peek_leaves_everything_where_it_is(service: Service, topic: MakeTopic) -> None:
    name = str(await topic())
    await lines(service, "produce", name, "-m", "first", "-m", "second", "-m", "third")
    for _ in range(2):
        told = await lines(service, "peek", name, "-n", "2")
        assert [line.split()[-1] for line in told] == ["first", "second"]
    told = await lines(service, "peek", name, "--idle-s", "0.3", "--json")
    assert [json.loads(line)["value"] for line in told] == ["first", "second", "third"]


async def test_tail_shows_what_comes_until_it_is_interrupted(
    service: Service, topic: MakeTopic
) -> None:
    name = str(await topic())
    await lines(service, "produce", name, "-m", "before")
    async with started(service, "tail", name) as tail:
        assert tail.stdout is not None
        coming = asyncio.ensure_future(tail.stdout.readline())
        sent = 0
        while not coming.done():  # Nothing tells when it has begun to read.
            await lines(service, "produce", name, "-m", f"after-{sent}")
            sent += 1
        assert b"after-" in await coming
        status, out, err = await interrupted(tail)
    assert (status, err) == (0, "")
    assert "before" not in out


async def test_consume_is_ended_by_an_interruption_and_what_was_printed_is_acknowledged(
    service: Service, topic: MakeTopic
) -> None:
    name = str(await topic())
    await lines(service, "produce", name, "-m", "one")
    async with started(service, "consume", name, "-s", "s") as consume:
        assert consume.stdout is not None
        assert await asyncio.wait_for(consume.stdout.readline(), PATIENCE_S) == b"one\n"
        assert await interrupted(consume) == (0, "", "")
    await lines(service, "produce", name, "-m", "two")
    assert await lines(service, "consume", name, "-s", "s", "-n", "1") == ["two"]


async def test_perf_counts_what_it_sends_and_reads(service: Service, topic: MakeTopic) -> None:
    name = str(await topic(segments=2))
    load = ("-n", "3000", "--size", "100", "--keys", "10", "--compression", "lz4")
    for command in (
        ("produce", name, *load),
        ("consume", name, "-n", "3000", "--from", "earliest"),
    ):
        async with started(service, "perf", *command, "--json") as perf:
            out, err = await perf.communicate()
        assert (perf.returncode, err) == (0, b"")
        told = json.loads(out)
        assert (told["messages"], told["bytes"], told["failed"]) == (3000, 300_000, 0)
        took = told["latency_ms"]
        assert took["p50"] <= took["p95"] <= took["p99"] <= took["p99.9"] <= took["max"]
        assert told["messages_per_s"] > 0
    (shown,) = await lines(service, "consume", name, "-s", "reader", "-n", "1")
    assert re.fullmatch(r"magnetar perf [a-zA-Z0-9]{86}", shown)


async def test_an_interruption_of_perf_ends_it_with_its_summary(
    service: Service, topic: MakeTopic
) -> None:
    name = str(await topic())
    async with started(
        service, "perf", "produce", name, "--rate", "200", "--seconds", "60"
    ) as perf:
        assert len(await lines(service, "consume", name, "-s", "s", "-n", "1", "--json")) == 1
        status, shown, err = await interrupted(perf)
    assert (status, err) == (0, "")
    assert re.match(r"Sent [\d,]+ messages in .* MB/s\nlatency  p50 .* max .* ms\n$", shown)


async def test_perf_says_why_messages_failed(service: Service, topic: MakeTopic) -> None:
    name = str(await topic())
    async with started(service, "perf", "produce", name, "--size", "6000000", "-n", "2") as perf:
        out, err = await perf.communicate()
    assert perf.returncode == 1
    assert out == b"Sent no messages.\n"
    # On a machine that is slow it first says that no receipt has come yet.
    *waiting, why = err.splitlines()
    assert why.startswith(b"magnetar: 2 messages failed; the first: A message has 6")
    assert all(line.startswith(b"magnetar: no receipt has come yet") for line in waiting)


async def test_perf_consume_says_that_nothing_comes(service: Service, topic: MakeTopic) -> None:
    name = str(await topic())
    async with started(service, "perf", "consume", name, "--seconds", "1") as perf:
        assert perf.stderr is not None
        told = await asyncio.wait_for(perf.stderr.readline(), PATIENCE_S)
        assert b"--from earliest" in told
        assert await interrupted(perf) == (1, "Received no messages.\n", "")


@pytest.mark.parametrize(
    "command",
    [["consume", "-s", "s", "-n", "1"], ["peek"], ["produce", "-m", "x"], ["perf", "produce"]],
    ids=" ".join,
)
async def test_a_full_disk_is_an_error_and_unprinted_messages_stay_unacknowledged(
    service: Service, topic: MakeTopic, command: list[str]
) -> None:
    name = str(await topic())
    await lines(service, "produce", name, "-m", "one")
    at = 2 if command[0] == "perf" else 1
    more = ["-n", "1"] if command[0] == "perf" else []
    with Path("/dev/full").open("wb") as full:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "magnetar.cli.main", *command[:at], name, *command[at:], *more],
            cwd=ROOT,
            env={**os.environ, "MAGNETAR_URL": service.url},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 1
    said = done.stderr.decode()
    assert said.startswith("magnetar: The output cannot be written (No space left on device); ")
    assert len(said.splitlines()) == 1
    assert (await lines(service, "consume", name, "-s", "s", "-n", "1")) == ["one"]


async def test_a_refusal_is_one_sentence_and_status_1(service: Service, topic: MakeTopic) -> None:
    name = f"{await topic()}-missing/x y"
    done = await run(service, "produce", f"topic://nobody/nowhere/{name[-3:]}", "-m", "x")
    assert done.exit_code == 1
    assert done.output.startswith("magnetar: ")
    assert len(done.output.splitlines()) == 1
