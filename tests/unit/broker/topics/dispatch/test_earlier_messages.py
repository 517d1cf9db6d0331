"""L9: what a consumer was sent before it connected anew is not used behind another one's back."""

import pytest

from tests.support.raw_client import RawConsumer
from tests.unit.broker.topics.dispatch.test_outdated_messages import refused, use
from tests.unit.broker.topics.test_end_to_end import EARLIEST, FAILOVER, client_of, options
from tests.unit.broker.topics.test_transactional_acks import TOPIC, Stage, got, payloads, stage

__all__ = ["stage"]


async def subscribe(stage: Stage, name: str, permits: int = 10) -> RawConsumer:
    """A consumer with a connection of its own, which the stage acknowledges on from now on."""
    stage.client = await client_of(stage.broker)
    wanted = options(FAILOVER, initial_position=EARLIEST, consumer_name=name)
    return await stage.client.subscribe(TOPIC, "s", wanted, permits=permits)


MOMENTS = [
    "after the first one came",
    "before the other one",
    "before its acknowledgement",
    "before its commit",
    "after its commit",
    "after it left",
]


@pytest.mark.parametrize("moment", [None, *MOMENTS])
async def test_messages_in_hand_are_used_once_whenever_the_owner_changes(
    stage: Stage, moment: str | None
) -> None:
    first = await subscribe(stage, "first", 3)
    hand = await got(first, 3)
    await use(stage, first, hand[:1])
    if moment == "after the first one came":
        await stage.reload()
    await first.client.close()
    if moment == "before the other one":
        await stage.reload()
    other = await subscribe(stage, "other", 2)
    if moment == "before its acknowledgement":
        await stage.reload()
        other = await subscribe(stage, "other", 2)
    txn = await stage.begin()
    await stage.ack(other, txn, (await got(other, 1))[0], cumulative=True)
    if moment == "before its commit":
        await stage.reload()
    await stage.commit(txn)
    if moment == "after its commit":
        await stage.reload()
    await other.client.close()
    if moment == "after it left":
        await stage.reload()
    first = await subscribe(stage, "first")
    messages = await got(first, 3)
    assert payloads(messages) == ["2", "3", "4"]
    await refused(stage, first, hand[2])
    await use(stage, first, messages[:1])
    await use(stage, first, messages[1:])


@pytest.mark.parametrize("reloaded", [False, True])
async def test_a_message_that_was_not_sent_again_is_refused_behind_another_consumers(
    stage: Stage, *, reloaded: bool
) -> None:
    first = await subscribe(stage, "first", 3)
    hand = await got(first, 3)
    await first.client.close()
    if reloaded:
        await stage.reload()
    other = await subscribe(stage, "other", 1)
    await use(stage, other, await got(other, 1))
    await other.client.close()
    if reloaded:
        await stage.reload()
    first = await subscribe(stage, "first", 0)
    await refused(stage, first, hand[2])
    first.flow(10)
    await use(stage, first, await got(first, 4))


@pytest.mark.parametrize("reloaded", [False, True])
async def test_a_consumer_that_comes_back_alone_uses_what_it_has(
    stage: Stage, *, reloaded: bool
) -> None:
    first = await subscribe(stage, "first", 3)
    hand = await got(first, 3)
    await use(stage, first, hand[:1])
    await first.client.close()
    if reloaded:
        await stage.reload()
    first = await subscribe(stage, "first", 0)
    await use(stage, first, hand[1:])


@pytest.mark.parametrize("reloaded", [False, True])
async def test_consumers_that_are_new_are_not_refused(stage: Stage, *, reloaded: bool) -> None:
    for name in ("first", "other", "third", "fourth"):
        consumer = await subscribe(stage, name)
        await use(stage, consumer, (await got(consumer, 2))[:1])
        await stage.nothing_left()
        await (consumer.client if name == "other" else consumer).close()
        if reloaded:
            await stage.reload()


@pytest.mark.parametrize("reloaded", [False, True])
async def test_a_consumer_that_was_closed_has_nothing(stage: Stage, *, reloaded: bool) -> None:
    for name in ("first", "other", "first", "other"):
        consumer = await subscribe(stage, name)
        await use(stage, consumer, (await got(consumer, 2))[:1])
        await stage.nothing_left()
        await consumer.close()
        if reloaded:
            await stage.reload()


async def test_a_consumer_that_connects_anew_after_a_refusal_is_not_refused_again(
    stage: Stage,
) -> None:
    for name in ("first", "other"):
        consumer = await subscribe(stage, name)
        await use(stage, consumer, (await got(consumer, 2))[:1])
        await stage.nothing_left()
        await consumer.client.close()
    for is_refused in (True, False):
        first = await subscribe(stage, "first")
        messages = await got(first, 3)
        await (refused(stage, first, messages[0]) if is_refused else use(stage, first, messages))
        await first.client.close()


async def test_a_consumer_that_came_back_and_asks_for_redelivery_is_not_refused(
    stage: Stage,
) -> None:
    for name in ("first", "other"):
        consumer = await subscribe(stage, name)
        await use(stage, consumer, (await got(consumer, 2))[:1])
        await stage.nothing_left()
        await consumer.client.close()
    first = await subscribe(stage, "first")
    await got(first, 3)
    first.redeliver()
    await use(stage, first, await got(first, 3))
