"""What SUBSCRIBE says of a consumer."""

import pytest

from magnetar.consume.commands import subscribe_of
from magnetar.consume.settings import (
    CheckpointSettings,
    QueueSettings,
    StreamSettings,
    SubscribeSettings,
)
from magnetar.message_id import EARLIEST_ENTRY

SEGMENT = "segment://public/default/t/0000-ffff-0"
PROPERTIES = {"team": "billing", "host": "a"}


@pytest.mark.parametrize("wanted", [True, False])
def test_subscribe_command_asks_for_a_replicated_subscription(wanted: bool) -> None:
    for how in (
        QueueSettings(replicate_subscription_state=wanted).of_segment("s", 0, None),
        StreamSettings(replicate_subscription_state=wanted).of_segment("s", "c", 0, None),
    ):
        told = subscribe_of(SEGMENT, 1, 0, how, None).subscribe
        assert told.replicate_subscription_state is wanted


@pytest.mark.parametrize(
    "how",
    [
        QueueSettings(consumer_properties=PROPERTIES).of_segment("s", 0, None),
        StreamSettings(consumer_properties=PROPERTIES).of_segment("s", "c", 0, None),
        CheckpointSettings(consumer_properties=PROPERTIES).of_segment(
            "r", "c", 0, None, EARLIEST_ENTRY
        ),
    ],
    ids=["queue", "stream", "checkpoint"],
)
@pytest.mark.parametrize("topic", [SEGMENT, "persistent://public/default/t"])
def test_subscribe_command_has_the_consumers_properties(how: SubscribeSettings, topic: str) -> None:
    told = subscribe_of(topic, 1, 0, how, None).subscribe
    assert not told.subscription_properties
    mine = {each.key: each.value for each in told.metadata if not each.key.startswith("__")}
    assert mine == PROPERTIES
    assert (len(told.metadata) > len(mine)) is (topic != SEGMENT)
