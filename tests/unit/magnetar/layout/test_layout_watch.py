"""The watch of a layout against a broker made of calls."""

import asyncio

import pytest

from magnetar.bounds import REFUSALS_IN_A_ROW
from magnetar.errors import (
    AuthorizationFailed,
    MagnetarError,
    NotSupported,
    OperationTimedOut,
    TopicNotFound,
)
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.backoff import Backoff
from magnetar.wire.attachment import AttachmentState
from magnetar.wire.connection import PeerKind
from tests.support.waiting import TIMEOUT_S
from tests.unit.magnetar.layout.fakes import (
    FakeConnection,
    FakePool,
    context_of,
    layout_refusal,
    layout_update,
)

LOOKUP = pb.BaseCommand.SCALABLE_TOPIC_LOOKUP
CLOSE = pb.BaseCommand.SCALABLE_TOPIC_CLOSE
WHOLE = (0, 0, 0xFFFF)
HALVES = ((1, 0, 0x7FFF), (2, 0x8000, 0xFFFF))


def say(connection: FakeConnection, update: pb.BaseCommand) -> None:
    connection.say(PeerKind.LAYOUT, update.scalable_topic_update.session_id, update)


async def opened(pool: FakePool, name: str = "orders") -> tuple[LayoutWatch, int]:
    """A watch that knows a layout, and its session."""
    watch = LayoutWatch(context_of(pool), name)
    opening = asyncio.create_task(watch.open(TIMEOUT_S))
    asked = (await pool.connection.next(LOOKUP)).scalable_topic_lookup
    say(pool.connection, layout_update(asked.session_id, WHOLE))
    await opening
    return watch, asked.session_id


async def reattached(pool: FakePool, *answers: pb.BaseCommand) -> list[pb.BaseCommand]:
    """Answer so many lookups, one after the other; the lookups."""
    asked = []
    for answer in answers:
        asked.append(await pool.connection.next(LOOKUP))
        say(pool.connection, answer)
    return asked


async def test_the_first_answer_opens_it() -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    assert pool.asked == ["orders"]
    assert watch.topic == "topic://public/default/orders"
    assert watch.controller_url == "pulsar://leader:6650"
    assert [segment.topic for segment in watch.layout.active] == [
        "segment://public/default/orders/0000-ffff-0"
    ]
    await watch.close()
    closed = await pool.connection.next(CLOSE)
    assert closed.scalable_topic_close.session_id == session_id


async def test_with_tls_the_controller_is_reached_by_tls() -> None:
    pool = FakePool()
    pool.tls = True
    watch, _ = await opened(pool)
    assert watch.controller_url == "pulsar+ssl://leader:6651"
    await watch.close()


@pytest.mark.parametrize(
    ("known", "controller"),
    [
        ({"pulsar://leader:6650": "pulsar+ssl://leader:6651"}, "pulsar+ssl://leader:6651"),
        ({}, None),
    ],
)
async def test_a_controller_without_tls_address_is_known_by_its_lookups_or_not_at_all(
    known: dict[str, str], controller: str | None
) -> None:
    pool = FakePool()
    pool.tls, pool.tls_urls = True, known
    watch = LayoutWatch(context_of(pool), "orders")
    opening = asyncio.ensure_future(watch.open(TIMEOUT_S))
    asked = await pool.connection.next(LOOKUP)
    answer = layout_update(asked.scalable_topic_lookup.session_id, WHOLE)
    answer.scalable_topic_update.dag.controller_broker_url_tls = ""
    say(pool.connection, answer)
    await opening
    assert watch.controller_url == controller
    await watch.close()


async def test_watch_reports_newer_layouts_and_ignores_older_ones() -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    told: list[Layout] = []
    stop = watch.on_change(told.append)
    say(pool.connection, layout_update(session_id, *HALVES, epoch=1))
    say(pool.connection, layout_update(session_id, WHOLE, epoch=0))
    say(pool.connection, layout_update(session_id, *HALVES, epoch=1))
    assert [layout.epoch for layout in told] == [1]
    assert watch.layout is told[0]
    stop()
    say(pool.connection, layout_update(session_id, (3, 0, 0xFFFF), epoch=2))
    assert len(told) == 1
    await watch.close()


async def test_a_topic_that_is_not_there_fails_the_opening_at_once() -> None:
    pool = FakePool()
    watch = LayoutWatch(context_of(pool), "orders", create_if_missing=False)
    opening = asyncio.create_task(watch.open(TIMEOUT_S))
    asked = (await pool.connection.next(LOOKUP)).scalable_topic_lookup
    assert not asked.create_if_missing
    say(pool.connection, layout_refusal(asked.session_id, pb.TopicNotFound))
    with pytest.raises(TopicNotFound):
        await opening


async def test_a_broker_without_scalable_topics_is_not_supported() -> None:
    pool = FakePool()
    pool.connection.features.supports_scalable_topics = False
    with pytest.raises(NotSupported):
        await LayoutWatch(context_of(pool), "orders").open(TIMEOUT_S)


async def test_a_lookup_without_answer_is_tried_again() -> None:
    pool = FakePool()
    watch = LayoutWatch(context_of(pool, operation_timeout_s=0.01), "orders")
    opening = asyncio.create_task(watch.open(TIMEOUT_S))
    first = (await pool.connection.next(LOOKUP)).scalable_topic_lookup
    await pool.connection.next(CLOSE)
    await reattached(pool, layout_update(first.session_id, WHOLE))
    await opening
    await watch.close()


async def test_an_opening_without_answer_ends_in_time_and_closes_the_session() -> None:
    pool = FakePool()
    watch = LayoutWatch(context_of(pool), "orders")
    with pytest.raises(OperationTimedOut):
        await watch.open(0.01)
    await pool.connection.next(LOOKUP)
    await pool.connection.next(CLOSE)


async def test_a_lost_session_is_opened_again_under_its_number() -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    told: list[Layout] = []
    watch.on_change(told.append)
    lost, pool.connection = pool.connection, FakeConnection()
    lost.lose()
    (again,) = await reattached(pool, layout_update(session_id, *HALVES, epoch=1))
    assert again.scalable_topic_lookup.session_id == session_id
    assert not again.scalable_topic_lookup.create_if_missing
    assert [layout.epoch for layout in told] == [1]
    await watch.close()


async def test_a_connection_lost_before_the_first_answer_is_tried_again() -> None:
    pool = FakePool()
    watch = LayoutWatch(context_of(pool), "orders")
    opening = asyncio.create_task(watch.open(TIMEOUT_S))
    asked = (await pool.connection.next(LOOKUP)).scalable_topic_lookup
    lost, pool.connection = pool.connection, FakeConnection()
    lost.lose()
    await reattached(pool, layout_update(asked.session_id, WHOLE))
    await opening
    await watch.close()


async def test_an_error_on_an_established_session_is_looked_at_again() -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    failures: list[MagnetarError] = []
    watch.on_failure(failures.append)
    say(pool.connection, layout_refusal(session_id, pb.TopicNotFound))
    await pool.connection.next(CLOSE)
    await reattached(pool, layout_update(session_id, *HALVES, epoch=1))
    assert watch.layout.epoch == 1
    assert failures == []
    await watch.close()


async def test_a_layout_that_cannot_be_is_asked_for_again() -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    say(pool.connection, layout_update(session_id, (1, 0, 9), epoch=1))
    await pool.connection.next(CLOSE)
    await reattached(pool, layout_update(session_id, *HALVES, epoch=1))
    assert watch.layout.epoch == 1
    await watch.close()


async def test_a_deleted_topic_ends_it_after_some_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    monkeypatch.setattr(Backoff, "pause_s", lambda backoff: 0)
    failures: asyncio.Queue[MagnetarError] = asyncio.Queue()
    watch.on_failure(failures.put_nowait)
    lost, pool.connection = pool.connection, FakeConnection()
    lost.lose()
    refusal = layout_refusal(session_id, pb.TopicNotFound)
    await reattached(pool, *([refusal] * (REFUSALS_IN_A_ROW + 1)))
    assert isinstance(await asyncio.wait_for(failures.get(), TIMEOUT_S), TopicNotFound)
    assert watch.state is AttachmentState.FAILED
    assert watch.layout.epoch == 0
    await watch.close()


async def test_a_withdrawn_permission_ends_it_at_once() -> None:
    pool = FakePool()
    watch, session_id = await opened(pool)
    failures: asyncio.Queue[MagnetarError] = asyncio.Queue()
    watch.on_failure(failures.put_nowait)
    lost, pool.connection = pool.connection, FakeConnection()
    lost.lose()
    await reattached(pool, layout_refusal(session_id, pb.AuthorizationError))
    assert isinstance(await asyncio.wait_for(failures.get(), TIMEOUT_S), AuthorizationFailed)
    await watch.close()


async def test_refusal_right_behind_the_first_answer_is_handled() -> None:
    pool = FakePool()
    watch = LayoutWatch(context_of(pool), "orders")
    opening = asyncio.create_task(watch.open(TIMEOUT_S))
    asked = (await pool.connection.next(LOOKUP)).scalable_topic_lookup
    say(pool.connection, layout_update(asked.session_id, WHOLE))
    say(pool.connection, layout_refusal(asked.session_id, pb.TopicNotFound))
    await pool.connection.next(CLOSE)
    await reattached(pool, layout_update(asked.session_id, *HALVES, epoch=1))
    await opening
    assert watch.layout.epoch == 1
    await watch.close()
