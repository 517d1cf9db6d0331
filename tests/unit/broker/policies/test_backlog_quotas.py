"""Backlog quotas: their JSON, when they are exceeded, what eviction leaves, and retention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.policies.applied_policies import (
    applied_policies,
    applied_value,
    broker_policies,
    values_of_broker,
)
from broker.policies.backlog_quotas import (
    BacklogQuota,
    QuotaPolicy,
    QuotaType,
    RetentionTooSmall,
    are_quotas,
    is_quota,
    normalized,
    quota_in,
    quota_json,
    require_retention_above_quotas,
)
from broker.policies.namespaces import Policies
from broker.policies.policy_kinds import BACKLOG_QUOTAS
from broker.policies.topic_policies import UNSET, PoliciesOfTopic
from config.settings import load_settings

HOLD, SIZE, AGE = QuotaPolicy.HOLD.value, QuotaType.SIZE.value, QuotaType.AGE.value
MIB = 2**20


@pytest.mark.parametrize(
    ("value", "size", "time"),
    [
        ({"limitSize": 5, "limitTime": 6, "policy": HOLD}, 5, 6),
        ({"limit": 5, "policy": HOLD}, 5, -1),
        ({"limit": 5, "limitSize": 7, "limitTime": None, "policy": HOLD}, 7, -1),
        ({"limit": 5, "limitSize": None, "policy": HOLD}, 5, -1),
        ({"limitTime": 6, "policy": HOLD}, -1, 6),
    ],
)
def test_a_quota_is_read_in_old_and_new_forms(
    value: dict[str, object], size: int, time: int
) -> None:
    assert is_quota(value)
    assert normalized(value) == quota_json(size, time, HOLD)


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        {},
        {"limitSize": 5},
        {"limitSize": 5, "policy": "wait"},
        {"limitSize": 5, "policy": None},
        {"limitSize": "5", "policy": HOLD},
        {"limitSize": True, "policy": HOLD},
        {"limitTime": 2**31, "policy": HOLD},
        {"limitSize": 5, "policy": HOLD, "other": 1},
    ],
)
def test_values_that_are_no_quota_are_invalid(value: object) -> None:
    assert not is_quota(value)
    assert not are_quotas({SIZE: value})


def test_quotas_are_of_the_two_types() -> None:
    quota = quota_json(1, 1, HOLD)
    assert are_quotas({})
    assert are_quotas({SIZE: quota, AGE: quota})
    assert not are_quotas({"other": quota})
    assert not are_quotas([])


@pytest.mark.parametrize(("size", "time"), [(-1, -1), (-5, 0)])
def test_a_negative_limit_and_an_age_of_0_are_no_quota(size: int, time: int) -> None:
    quotas = {SIZE: quota_json(size, time, HOLD), AGE: quota_json(size, time, HOLD)}
    assert quota_in(quotas, QuotaType.SIZE) is None
    assert quota_in(quotas, QuotaType.AGE) is None
    assert quota_in({}, QuotaType.SIZE) is None


def test_a_quota_of_each_type_has_its_own_limit() -> None:
    quotas = {SIZE: quota_json(7, 8, HOLD), AGE: quota_json(9, 10, "producer_exception")}
    assert quota_in(quotas, QuotaType.SIZE) == BacklogQuota(QuotaType.SIZE, 7, QuotaPolicy.HOLD)
    age = BacklogQuota(QuotaType.AGE, 10, QuotaPolicy.EXCEPTION)
    assert quota_in(quotas, QuotaType.AGE) == age


def test_a_backlog_that_reaches_the_limit_exceeds_it() -> None:
    size = BacklogQuota(QuotaType.SIZE, 100, QuotaPolicy.EVICTION)
    assert [size.is_exceeded_by_size(each) for each in (0, 99, 100)] == [False, False, True]
    age = BacklogQuota(QuotaType.AGE, 10, QuotaPolicy.EVICTION)
    assert not age.is_exceeded_by_age(None, 10**9)
    assert [age.is_exceeded_by_age(5_000, now) for now in (14_999, 15_000)] == [False, True]


@given(st.integers(0, 2**62), st.integers(1, 2**31 - 1), st.integers(2**41, 2**42))
def test_eviction_leaves_less_than_the_limit(size: int, time: int, now_ms: int) -> None:
    by_size = BacklogQuota(QuotaType.SIZE, size, QuotaPolicy.EVICTION)
    assert by_size.kept_bytes == size * 9 // 10
    assert size == 0 or not by_size.is_exceeded_by_size(by_size.kept_bytes)
    by_age = BacklogQuota(QuotaType.AGE, time, QuotaPolicy.EVICTION)
    kept_since_ms = by_age.kept_since_ms(now_ms)
    assert not by_age.is_exceeded_by_age(kept_since_ms, now_ms)
    assert by_age.is_exceeded_by_age(kept_since_ms - 1, now_ms)


def test_each_quota_comes_from_the_first_level_that_has_it() -> None:
    of_broker = values_of_broker(load_settings(None, {"backlog_quota_default_limit_bytes": 1}))
    by_size, by_age = quota_json(2, -1, HOLD), quota_json(-1, 3, HOLD)
    namespace = Policies({"backlog_quota_map": {SIZE: by_size}})

    def value(namespace: Policies, topic: PoliciesOfTopic) -> object:
        return applied_value(BACKLOG_QUOTAS, of_broker, namespace, topic)

    default = quota_json(1, -1, HOLD)
    assert value(Policies(), UNSET) == {SIZE: default, AGE: default}
    assert value(namespace, UNSET) == {SIZE: by_size, AGE: default}
    of_all = PoliciesOfTopic({}, {"backlogQuotaMap": {AGE: by_age}})
    assert value(namespace, of_all) == {SIZE: by_size, AGE: by_age}
    both = PoliciesOfTopic({"backlogQuotaMap": {AGE: quota_json(-1, 4, HOLD)}}, of_all.global_)
    applied = applied_policies(of_broker, namespace, both)
    assert applied.size_quota == BacklogQuota(QuotaType.SIZE, 2, QuotaPolicy.HOLD)
    assert applied.age_quota == BacklogQuota(QuotaType.AGE, 4, QuotaPolicy.HOLD)


def test_there_is_no_quota_by_default() -> None:
    applied = broker_policies(load_settings())
    assert applied.size_quota is applied.age_quota is None


@pytest.mark.parametrize(
    ("minutes", "megabytes", "time", "size"),
    [(0, 0, 10**6, 2**40), (-1, -1, 10**6, 2**40), (1, 1, 59, MIB - 1), (1, 1, -1, -1)],
)
def test_retention_that_is_more_than_the_quotas_or_none_agrees(
    minutes: int, megabytes: int, time: int, size: int
) -> None:
    quota = quota_json(size, time, HOLD)
    retention = {"retentionTimeInMinutes": minutes, "retentionSizeInMB": megabytes}
    require_retention_above_quotas(retention, {SIZE: quota, AGE: quota})


@pytest.mark.parametrize(("time", "size"), [(60, -1), (-1, MIB)])
def test_retention_that_is_not_more_than_a_quota_is_refused(time: int, size: int) -> None:
    quota = quota_json(size, time, HOLD)
    retention = {"retentionTimeInMinutes": 1, "retentionSizeInMB": 1}
    with pytest.raises(RetentionTooSmall, match="of 1 is not more than the backlog quota"):
        require_retention_above_quotas(retention, {SIZE: quota, AGE: quota})
