"""The policy of backlog quotas over REST."""

from pathlib import Path

from broker.policies.backlog_quotas import quota_json
from tests.support.embedded_broker import running
from tests.unit.broker.admin.conftest import Rest, asking_broker

NAMESPACES = "/admin/v2/namespaces/public"
NAMESPACE = f"{NAMESPACES}/default"
PATH = "/admin/v2/persistent/public/default/t"
SIZE, AGE = "destination_storage", "message_age"
HOLD = quota_json(1000, -1, "producer_request_hold")
EVICTION = quota_json(-1, 30, "consumer_backlog_eviction")
NONE = quota_json(-1, -1, "producer_request_hold")


async def test_quotas_of_a_namespace_are_set_shown_and_removed_by_type(rest: Rest) -> None:
    shown, one = f"{NAMESPACE}/backlogQuotaMap", f"{NAMESPACE}/backlogQuota"
    assert await rest.get(shown) == {}
    assert await rest.get(f"{shown}?applied=true") == {SIZE: NONE, AGE: NONE}
    await rest.done("POST", one, HOLD)
    await rest.done("POST", f"{one}?backlogQuotaType={AGE}", EVICTION)
    assert await rest.get(shown) == {SIZE: HOLD, AGE: EVICTION}
    policies = await rest.get(NAMESPACE)
    assert isinstance(policies, dict)
    assert policies["backlog_quota_map"] == {SIZE: HOLD, AGE: EVICTION}
    await rest.done("DELETE", f"{one}?backlogQuotaType={SIZE}")
    assert await rest.get(shown) == {AGE: EVICTION}
    assert await rest.get(f"{shown}?applied=true") == {SIZE: NONE, AGE: EVICTION}
    await rest.done("DELETE", f"{one}?backlogQuotaType={AGE}")
    assert await rest.get(shown) == {}


async def test_quotas_of_a_topic_come_before_those_of_its_namespace(rest: Rest) -> None:
    await rest.done("PUT", PATH)
    shown, one = f"{PATH}/backlogQuotaMap", f"{PATH}/backlogQuota"
    await rest.done("POST", f"{NAMESPACE}/backlogQuota", HOLD)
    assert await rest.get(shown) == {}
    assert await rest.get(f"{shown}?applied=true") == {SIZE: HOLD, AGE: NONE}
    await rest.done("POST", f"{one}?isGlobal=true&backlogQuotaType={AGE}", EVICTION)
    assert await rest.get(shown) == {}
    assert await rest.get(f"{shown}?isGlobal=true") == {AGE: EVICTION}
    own = quota_json(5, -1, "producer_exception")
    await rest.done("POST", one, own)
    assert await rest.get(shown) == {SIZE: own}
    assert await rest.get(f"{shown}?applied=true") == {SIZE: own, AGE: EVICTION}
    await rest.done("DELETE", one)
    await rest.done("DELETE", f"{one}?isGlobal=true&backlogQuotaType={AGE}")
    assert await rest.get(f"{shown}?isGlobal=true") == {}
    assert await rest.get(f"{shown}?applied=true") == {SIZE: HOLD, AGE: NONE}


async def test_a_quota_without_a_type_limits_the_size(rest: Rest) -> None:
    old = {"limit": 7, "policy": "producer_exception"}
    await rest.done("POST", f"{NAMESPACE}/backlogQuota", old)
    wanted = {SIZE: quota_json(7, -1, "producer_exception")}
    assert await rest.get(f"{NAMESPACE}/backlogQuotaMap") == wanted


async def test_invalid_quotas_and_missing_topics_are_refused(rest: Rest) -> None:
    path = f"{NAMESPACE}/backlogQuota"
    reason = await rest.refused(412, "POST", path, {"limitSize": 5, "policy": "wait"})
    assert "producer_request_hold, producer_exception, consumer_backlog_eviction" in reason
    await rest.refused(412, "POST", path, "nonsense")
    reason = await rest.refused(412, "POST", f"{path}?backlogQuotaType=messages", HOLD)
    assert "no backlogQuotaType 'messages': give destination_storage or message_age" in reason
    await rest.refused(404, "POST", f"{PATH}/backlogQuota", HOLD)
    await rest.refused(404, "POST", f"{NAMESPACES}/none/backlogQuota", HOLD)
    await rest.refused(404, "GET", f"{NAMESPACES}/none/backlogQuotaMap")


async def test_retention_has_to_be_more_than_the_quota_whichever_is_set_last(rest: Rest) -> None:
    await rest.done("PUT", PATH)
    by_time = {"retentionTimeInMinutes": 1, "retentionSizeInMB": -1}
    by_size = {"retentionTimeInMinutes": -1, "retentionSizeInMB": 1}
    age = f"backlogQuota?backlogQuotaType={AGE}"
    for base in (PATH, NAMESPACE):
        await rest.done("POST", f"{base}/retention", by_time)
        await rest.done("POST", f"{base}/{age}", quota_json(-1, 59, "producer_exception"))
        too_long = quota_json(-1, 60, "producer_exception")
        reason = await rest.refused(412, "POST", f"{base}/{age}", too_long)
        assert "retentionTimeInMinutes of 1 is not more than the backlog quota of 60 s" in reason
        await rest.done("DELETE", f"{base}/retention")
        await rest.done("POST", f"{base}/{age}", too_long)
        await rest.refused(412, "POST", f"{base}/retention", by_time)
        await rest.done("POST", f"{base}/retention", by_size)
        await rest.done("DELETE", f"{base}/{age}")
        too_large = quota_json(2**20, -1, "producer_exception")
        await rest.refused(412, "POST", f"{base}/backlogQuota", too_large)
        await rest.done("DELETE", f"{base}/retention")
        await rest.done("POST", f"{base}/backlogQuota", too_large)
        await rest.refused(412, "POST", f"{base}/retention", by_size)
        await rest.done("DELETE", f"{base}/backlogQuota")


async def test_retention_of_a_namespace_counts_for_the_quota_of_a_topic(rest: Rest) -> None:
    await rest.done("PUT", PATH)
    retention = {"retentionTimeInMinutes": -1, "retentionSizeInMB": 1}
    await rest.done("POST", f"{NAMESPACE}/retention", retention)
    too_large = quota_json(2**20, -1, "producer_exception")
    await rest.refused(412, "POST", f"{PATH}/backlogQuota", too_large)
    await rest.done("POST", f"{PATH}/retention", retention | {"retentionSizeInMB": 2})
    await rest.done("POST", f"{PATH}/backlogQuota", too_large)


async def test_a_new_namespace_may_have_quotas_that_agree_with_its_retention(rest: Rest) -> None:
    body = {
        "backlog_quota_map": {SIZE: quota_json(2**20, -1, "producer_exception")},
        "retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": 1},
    }
    await rest.refused(412, "PUT", f"{NAMESPACES}/new", body)
    body["backlog_quota_map"] = {SIZE: HOLD}
    await rest.done("PUT", f"{NAMESPACES}/new", body)
    assert await rest.get(f"{NAMESPACES}/new/backlogQuotaMap") == {SIZE: HOLD}
    await rest.done("PUT", f"{NAMESPACES}/other", {"backlog_quota_map": {}})
    assert await rest.get(f"{NAMESPACES}/other/backlogQuotaMap") == {}
    await rest.refused(412, "PUT", f"{NAMESPACES}/bad", {"backlog_quota_map": {SIZE: {}}})


async def test_settings_of_the_broker_hold_where_nothing_else_is_set(tmp_path: Path) -> None:
    async with (
        running(
            tmp_path,
            backlog_quota_default_limit_bytes=1000,
            backlog_quota_default_limit_s=30,
            backlog_quota_default_retention_policy="consumer_backlog_eviction",
        ) as broker,
        asking_broker(broker) as rest,
    ):
        await rest.done("PUT", PATH)
        default = quota_json(1000, 30, "consumer_backlog_eviction")
        assert await rest.get(f"{PATH}/backlogQuotaMap?applied=true") == {
            SIZE: default,
            AGE: default,
        }
