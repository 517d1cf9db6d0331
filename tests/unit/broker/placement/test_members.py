"""Records of brokers and their load: Pulsar's form, and numbers that a moment does not decide."""

import json

import pytest

from broker.placement.load import LoadMeter, Totals
from broker.placement.members import (
    Load,
    Member,
    MemberState,
    decode_member,
    encode_member,
    member_key,
)
from broker.placement.placement import BrokerAddress
from storage.metadata.store import Record, Version

MEMBER = Member(
    BrokerAddress("pulsar://a:6650", None, "http://a:8080", "a:8080"),
    "0123",
    MemberState.DRAINING,
    Load(0.25, 10.0, 1000.0, 20.0, 2000.0, 7),
    "1.0",
    123,
)


def stored(value: bytes) -> Record:
    return Record(member_key("a:8080"), value, Version(1), 0, 0, 0, True, None)


def test_a_record_is_read_as_it_was_written() -> None:
    assert decode_member(stored(encode_member(MEMBER))) == MEMBER


def test_tools_for_pulsar_find_its_members() -> None:
    value = json.loads(encode_member(MEMBER))
    assert value["webServiceUrl"] == "http://a:8080"
    assert value["pulsarServiceUrl"] == "pulsar://a:6650"
    assert value["brokerVersion"] == "1.0"
    assert value["startTimestamp"] == 123
    assert value["cpu"] == {"usage": 25.0, "limit": 100.0}
    assert member_key("a:8080") == "/loadbalance/brokers/a:8080"


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"pulsarServiceUrl":"x"}', b"\xff"])
def test_unreadable_member_record_is_no_broker(value: bytes) -> None:
    assert decode_member(stored(value)) is None


def test_a_load_differs_when_it_moved_noticeably() -> None:
    load = Load(cpu=0.5, messages_in=1000.0)
    assert not load.differs(Load(cpu=0.52, messages_in=1000.0), 0.1)
    assert not load.differs(Load(cpu=0.5, messages_in=1050.0), 0.1)
    assert load.differs(Load(cpu=0.7, messages_in=1000.0), 0.1)
    assert load.differs(Load(cpu=0.5, messages_in=1200.0), 0.1)
    assert not Load(cpu=0.01).differs(Load(cpu=0.03), 0.1), "next to nothing"


def test_rates_are_smoothed_and_never_below_nothing() -> None:
    meter = LoadMeter()
    assert meter.sample(Totals(cpu_s=5.0, messages_in=500, topics=3), 10.0) == Load(topics=3)
    first = meter.sample(Totals(cpu_s=15.0, messages_in=1500, topics=3), 20.0)
    assert (first.cpu, first.messages_in) == (0.5, 50.0)
    second = meter.sample(Totals(cpu_s=25.0, messages_in=2500, topics=3), 30.0)
    assert (second.cpu, second.messages_in) == (0.75, 75.0)
    unloaded = meter.sample(Totals(cpu_s=25.0, messages_in=0), 40.0)
    assert (unloaded.cpu, unloaded.messages_in, unloaded.topics) == (0.375, 37.5, 0)
