"""What breaks unexpectedly is told to those it concerns, and all others go on."""

import asyncio
import random
from collections.abc import Callable, Sequence
from random import Random

import pytest
from structlog.testing import capture_logs

from storage.metadata.store import MetadataDefect, MetadataError, PutResult
from storage.metadata.zookeeper import pipeline as module
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.guard import Guard
from storage.metadata.zookeeper.plan import Plan, plan_put
from storage.metadata.zookeeper.requests import Answer, Done, Failure, Request, _Multi
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S
from tests.unit.storage.metadata.zookeeper.fake_zookeeper import FakeClient
from tests.unit.storage.metadata.zookeeper.pipelines import (
    LAYOUT,
    FakeSession,
    add,
    fresh_tree,
    pipeline,
    put,
    stored,
)


def once(kind: str) -> tuple[Callable[[], str], Callable[[], None]]:
    """What breaks a connection in the turn after it is armed."""
    armed: list[str] = []
    return (lambda: armed.pop() if armed else ""), (lambda: armed.append(kind))


def tracebacks(logs: object) -> list[BaseException]:
    """The errors that were logged with a traceback."""
    assert isinstance(logs, list)
    return [each["exc_info"] for each in logs if each.get("exc_info")]


async def test_a_defect_while_lost_answers_are_settled_ends_their_writes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = fresh_tree()
    breaks, break_now = once("break")
    read = Guard.read
    defects = 2

    async def broken(guard: Guard) -> int | None:
        nonlocal defects
        if defects:
            defects -= 1
            raise RuntimeError("defect")
        return await read(guard)

    monkeypatch.setattr(Guard, "read", broken)
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1, breaks) as (writes, _):
        with capture_logs() as logs:
            for level in ("/s/", "/t/"):
                await writes.submit(put("/known", b""), None)
                in_flight = writes.submit(put("/known", b"1"), None)
                break_now()
                behind = writes.submit(add(level, b"2"), None)
                with pytest.raises(MetadataError, match=r"unknown.*defect.*bug") as failed:
                    await in_flight
                assert isinstance(failed.value.__cause__, RuntimeError)
                assert isinstance(await behind, PutResult)
        assert [str(each) for each in tracebacks(logs)] == ["defect"] * 2
        await writes.submit(put("/known", b"3"), None)
        assert stored(tree)["/known"][0] == b"3"
        assert len(tree.children("/writers")) == 3


async def test_a_defect_in_the_plan_of_one_write_fails_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = fresh_tree()

    def broken(layout: object, request: object, *others: object) -> Plan:
        if request.key == "/bad":  # type: ignore[attr-defined]
            raise RuntimeError("defect")
        return plan_put(layout, request, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "plan_put", broken)
    keys = ("/a", "/b", "/bad", "/c")
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        with capture_logs() as logs:
            done = [writes.submit(put(key, b"1"), None) for key in keys]
            results = await asyncio.gather(*done, return_exceptions=True)
        assert [type(each) for each in results] == [
            PutResult,
            PutResult,
            MetadataDefect,
            PutResult,
        ]
        assert "nothing was stored" in str(results[2])
        assert len(tracebacks(logs)) == 1
        monkeypatch.undo()
        await writes.submit(put("/bad", b"2"), None)
        assert stored(tree) == {
            "/a": (b"1", 0),
            "/b": (b"1", 0),
            "/c": (b"1", 0),
            "/bad": (b"2", 0),
        }


@pytest.mark.parametrize("place", ["_outcome", "_recover"])
async def test_defect_in_handling_an_answer_fails_the_waiting_write(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    tree = fresh_tree()
    breaks, break_now = once("break")

    def broken(*_: object) -> None:
        raise RuntimeError("defect")

    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1, breaks) as (writes, _):
        await writes.submit(put("/a", b"0"), None)
        monkeypatch.setattr(writes, place, broken)
        in_flight = writes.submit(put("/a", b"1"), None)
        if place == "_recover":
            break_now()
        with capture_logs() as logs:
            with pytest.raises(MetadataError, match="unknown"):
                await in_flight
            monkeypatch.undo()
            await writes.submit(put("/a", b"2"), None)
        assert len(tracebacks(logs)) == 1
        assert stored(tree)["/a"][0] == b"2"


async def test_a_batch_that_cannot_be_handed_over_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, client):
        await writes.submit(put("/a", b"0"), None)
        submit = client.submit

        def broken(request: Request, done: Done) -> None:
            monkeypatch.undo()
            raise RuntimeError("defect")

        monkeypatch.setattr(client, "submit", broken)
        assert isinstance(await writes.submit(put("/a", b"1"), None), PutResult)
        assert client.submit == submit
        assert stored(tree) == {"/a": (b"1", 1)}


async def test_a_write_that_cannot_be_sent_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = fresh_tree()
    multi = requests.multi
    keys = ("/a", "/b", "/bad", "/c")

    def broken(operations: Sequence[Request]) -> Request:
        if any("bad" in each.path for each in operations):  # type: ignore[attr-defined]
            raise RuntimeError("defect")
        return multi(operations)

    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        for key in keys:
            await writes.submit(put(key, b"0"), None)
        monkeypatch.setattr(requests, "multi", broken)
        with capture_logs() as logs:
            done = [writes.submit(put(key, b"1"), None) for key in keys]
            results = await asyncio.gather(*done, return_exceptions=True)
        kinds = [type(each) for each in results]
        assert kinds == [PutResult, PutResult, MetadataDefect, PutResult]
        assert "nothing was stored" in str(results[2])
        assert str(tracebacks(logs)[-1]) == "defect"
        monkeypatch.undo()
        assert isinstance(await writes.submit(put("/bad", b"2"), None), PutResult)
        assert stored(tree)["/bad"] == (b"2", 1)


async def test_write_given_up_in_a_session_ends_before_others_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = fresh_tree()
    lane = FakeSession(tree)
    submit, held = lane.connection.submit, list[tuple[Request, Done]]()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        await writes.submit(lane.put("/e", b"0"), lane)

        def slow(request: Request, done: Done) -> None:
            if len(held) == 1 or not isinstance(request, _Multi):
                for each in held:
                    submit(*each)
                held.clear()
                submit(request, done)
            else:
                held.append((request, done))

        monkeypatch.setattr(lane.connection, "submit", slow)
        in_flight = writes.submit(lane.put("/e", b"1"), lane)
        while not held:
            await asyncio.sleep(0)
        with capture_logs():
            writes._give_up_flight(RuntimeError("defect"))
            writes._settle_later()
            with pytest.raises(MetadataError, match="unknown"):
                await in_flight
            await writes.submit(put("/other", b"2"), None)
        assert held == []
        assert stored(tree)["/e"] == (b"1", 1)


async def test_a_defect_in_reading_what_a_write_needs_fails_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        learn = writes._loader._learn

        def broken(write: object, *others: object, newer: bool) -> None:
            if write.name == "/bad":  # type: ignore[attr-defined]
                raise RuntimeError("defect")
            learn(write, *others, newer=newer)  # type: ignore[arg-type]

        monkeypatch.setattr(writes._loader, "_learn", broken)
        keys = ("/a", "/bad", "/c")
        done = [writes.submit(put(key, b"1"), None) for key in keys]
        results = await asyncio.gather(*done, return_exceptions=True)
        assert [type(each) for each in results] == [PutResult, MetadataDefect, PutResult]


@pytest.mark.parametrize(
    "header", [b'{"life":"","modifications":1', b'{"life":"ab","modifications":"1"']
)
async def test_node_written_by_another_program_is_reported_unreadable(header: bytes) -> None:
    tree = fresh_tree()
    tree.make(["/records/=a", "/records/s", "/records/s/=^FF"])
    tree.nodes["/records/=a"].data = header + b',"created":1,"modified":1}\nvalue'
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        with pytest.raises(MetadataError, match="written by something else"):
            await writes.submit(put("/a", b"1"), None)
        assert isinstance(await writes.submit(add("/s/", b"1"), None), PutResult)


@pytest.mark.parametrize("failing", [True, False])
async def test_ephemeral_put_not_visible_in_time_fails(
    monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_VISIBLE_S", 0.05)
    set_bound(monkeypatch, "ZOOKEEPER_LOOK_S", 0.02)
    set_bound(monkeypatch, "ZOOKEEPER_RECONNECT_MAX_S", 0.01)
    tree = fresh_tree()
    lane = FakeSession(tree)
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, client):
        submit = client.submit
        await writes.submit(lane.put("/e", b"1"), lane)

        def broken(request: Request, done: Done) -> None:
            if stored(tree)["/e"] == (b"1", 0):
                submit(request, done)
            elif failing:
                asyncio.get_running_loop().call_soon(done, Answer(None, Failure.OTHER, 0))

        monkeypatch.setattr(client, "submit", broken)
        with pytest.raises(MetadataError, match="took effect"):
            await writes.submit(lane.put("/e", b"2"), lane)
        assert stored(tree) == {"/e": (b"2", 1)}
        monkeypatch.setattr(client, "submit", submit)
        assert await writes.submit(lane.put("/e", b"3"), lane)


async def test_writes_that_timed_out_are_dropped_from_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_REQUEST_S", 0.05)
    set_bound(monkeypatch, "ZOOKEEPER_LOOK_S", 0.02)
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, client):
        monkeypatch.setattr(client, "submit", lambda *_: None)
        done = [writes.submit(put(f"/{number}", b"1"), None) for number in range(10)]
        for each in done:
            with pytest.raises(MetadataError, match="nothing was stored"):
                await each
        while writes._queue:
            await asyncio.sleep(0.01)


async def test_a_guard_that_never_gets_an_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_REQUEST_S", 0.1)
    client = FakeClient(fresh_tree(), Random(1), lambda: "break")
    guard = Guard(client, LAYOUT, random.Random(1), "me")  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match="look at its servers"):
        async with asyncio.timeout(TIMEOUT_S):
            await guard.open()
