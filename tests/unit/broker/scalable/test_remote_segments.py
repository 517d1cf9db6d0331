"""What another broker is asked about a segment: positions that mean the same on every broker."""

from collections.abc import Mapping
from typing import cast

import pytest

from broker.placement import BrokerAddress, Placement
from broker.scalable.remote_segments import IllegalSegmentPosition, RemoteHost
from protocol.ids import EARLIEST, LATEST, Position
from protocol.names import SegmentName
from tests.unit.broker.scalable.node import TOPIC

WHOLE = SegmentName(TOPIC, 0, 0xFFFF, 0)


class Asked:
    """A placement that notes what other brokers are asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, str]]] = []

    async def call(
        self,
        _owner: BrokerAddress,
        method: str,
        path: str,
        query: Mapping[str, str],
        **_: object,
    ) -> object:
        asked = {key: value for key, value in query.items() if key != "authoritative"}
        self.calls.append((method, path.rpartition("0000-ffff-0/")[2], asked))
        return None

    def host(self) -> RemoteHost:
        return RemoteHost(cast("Placement", self), BrokerAddress("pulsar://b:1", broker_id="b:2"))


@pytest.mark.parametrize(
    ("position", "call", "start"),
    [
        (EARLIEST, ("POST", "subscription/s/seek", {"timestamp": "0"}), "earliest"),
        (LATEST, ("POST", "subscription/s/skip-all", {}), "latest"),
    ],
)
async def test_both_ends_are_asked_for(
    position: Position, call: tuple[str, str, dict[str, str]], start: str
) -> None:
    asked = Asked()
    await asked.host().seek(WHOLE, "s", position)
    await asked.host().create_subscription(WHOLE, "s", position, {})
    assert asked.calls == [call, ("PUT", "subscription/s", {"start": start})]


async def test_any_other_position_is_refused_and_nobody_is_asked() -> None:
    asked = Asked()
    with pytest.raises(IllegalSegmentPosition, match="give EARLIEST or LATEST"):
        await asked.host().seek(WHOLE, "s", Position(7, 3))
    with pytest.raises(IllegalSegmentPosition, match="give EARLIEST or LATEST"):
        await asked.host().create_subscription(WHOLE, "s", Position(7, 3), {})
    assert asked.calls == []
