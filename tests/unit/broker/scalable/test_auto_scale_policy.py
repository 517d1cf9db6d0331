"""The policy of automatic splits and merges: members, levels, and what does not fit together."""

import pytest

from broker.scalable.auto_scale_policy import (
    MEMBERS,
    AutoScalePolicy,
    InvalidAutoScalePolicy,
    Rates,
    checked_override,
    merged,
    require_valid,
)

DEFAULTS = AutoScalePolicy()


def test_the_members_are_those_of_pulsar() -> None:
    assert set(MEMBERS) == {
        "enabled",
        "maxSegments",
        "minSegments",
        "maxDagDepth",
        "splitCooldownSeconds",
        "mergeCooldownSeconds",
        "mergeWindowSeconds",
        "rebucketCooldownSeconds",
        "splitVsRebucketMinMsgRateInThreshold",
        *(
            f"{kind}{unit}Rate{way}Threshold"
            for kind in ("split", "merge")
            for unit in ("Msg", "Bytes")
            for way in ("In", "Out")
        ),
    }


def test_a_topic_overrides_its_namespace_and_that_the_broker() -> None:
    namespace = {"maxSegments": 8, "minSegments": 2, "splitMsgRateInThreshold": 500}
    topic = {"maxSegments": 4, "minSegments": None, "mergeMsgRateInThreshold": 50.5}
    policy = merged(DEFAULTS, namespace, topic)
    assert (policy.max_segments, policy.min_segments) == (4, 2)
    assert (policy.split.msg_in, policy.merge.msg_in) == (500, 50.5)
    assert policy.split.bytes_in == DEFAULTS.split.bytes_in
    assert merged(DEFAULTS, None, {}) == DEFAULTS


def test_each_member_that_is_shown_can_be_set() -> None:
    shown = DEFAULTS.to_json()
    changed = {
        name: value is not True if isinstance(value, bool) else value + 1
        for name, value in shown.items()
        if isinstance(value, int | float)
    }
    assert merged(DEFAULTS, checked_override(changed)).to_json() == changed


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"maxSegmnets": 3}, "maxSegmnets"),
        ({"enabled": 1}, "true or false"),
        ({"maxSegments": "8"}, "a whole number"),
        ({"maxSegments": 2.5}, "a whole number"),
        ({"maxSegments": 2**40}, "a whole number"),
        ({"splitMsgRateInThreshold": True}, "a number"),
        ({"splitMsgRateInThreshold": 10**400}, "a number"),
        ({"mergeMsgRateInThreshold": float("inf")}, "a number"),
        ({"mergeMsgRateInThreshold": float("nan")}, "a number"),
        ([], "JSON object"),
    ],
)
def test_a_wrong_member_is_refused(override: object, reason: str) -> None:
    with pytest.raises(InvalidAutoScalePolicy, match=reason):
        checked_override(override)


def test_a_stored_member_that_cannot_be_used_inherits() -> None:
    assert merged(DEFAULTS, {"ofTomorrow": 1, "maxSegments": "many"}) == DEFAULTS


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"minSegments": 0}, "minSegments = 0 is below 1"),
        ({"maxSegments": 1, "minSegments": 2}, "maxSegments = 1 is below minSegments = 2"),
        ({"maxDagDepth": -1}, "maxDagDepth = -1 is below 0"),
        ({"splitCooldownSeconds": -1}, "splitCooldownSeconds"),
        ({"mergeCooldownSeconds": -1}, "mergeCooldownSeconds"),
        ({"mergeWindowSeconds": -1}, "mergeWindowSeconds"),
        ({"rebucketCooldownSeconds": -1}, "rebucketCooldownSeconds"),
        ({"splitMsgRateInThreshold": 0}, "splitMsgRateInThreshold = 0 is not above 0"),
        ({"mergeBytesRateOutThreshold": -1}, "mergeBytesRateOutThreshold = -1 is below 0"),
        (
            {"splitBytesRateInThreshold": 7, "mergeBytesRateInThreshold": 7},
            "splitBytesRateInThreshold = 7 is not above mergeBytesRateInThreshold = 7",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused(
    override: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidAutoScalePolicy, match=reason):
        require_valid(merged(DEFAULTS, checked_override(override)))


def test_rates_are_compared_with_limits_one_by_one() -> None:
    limits = Rates(10, 100, 10, 0)
    assert Rates(9, 99, 9, 0).below(limits)
    assert not Rates(10, 0, 0, 0).below(limits)
    assert not Rates(0, 0, 0, 1).below(limits)
    assert Rates(5, 10, 30, 0).share_of(Rates(10, 100, 10, 1)) == 3
