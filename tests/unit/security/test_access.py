"""Decisions on access: superusers, tenant admins, grants, subscriptions, names."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.names import NamespaceName, parse_topic_name
from security.access import (
    Access,
    Action,
    Grants,
    Need,
    Rights,
    authorization_name,
    grants_of,
    is_allowed,
    on_namespace,
    on_tenant,
    on_topic,
)

NAMESPACE = NamespaceName("acme", "orders")
TOPIC = parse_topic_name("persistent://acme/orders/new")
POLICIES: Mapping[str, object] = {
    "auth_policies": {
        "namespace_auth": {"writer": ["produce"], "reader": ["consume"], "svc*": ["consume"]},
        "destination_auth": {
            "persistent://acme/orders/new": {"clerk": ["produce", "consume"]},
            "topic://acme/orders/scaled": {"clerk": ["consume"], "*-batch": ["produce"]},
        },
        "subscription_auth_roles": {"audit": ["auditor"], "open": [], "broken": "auditor"},
    }
}


def rights(*, wildcards: bool = False, mode: str | None = None) -> Rights:
    """The rights of the policies above, with a superuser and a tenant admin."""
    policies = {**POLICIES, "subscription_auth_mode": mode}
    return Rights(
        superusers=frozenset({"root"}),
        tenant_admins=frozenset({"acme-admin"}),
        grants=grants_of(policies),
        wildcards=wildcards,
    )


@pytest.mark.parametrize(
    ("role", "need", "allowed"),
    [
        ("writer", Need.PRODUCE, True),
        ("writer", Need.CONSUME, False),
        ("writer", Need.LOOKUP, True),
        ("reader", Need.CONSUME, True),
        ("reader", Need.PRODUCE, False),
        ("clerk", Need.PRODUCE, True),
        ("stranger", Need.LOOKUP, False),
        ("acme-admin", Need.PRODUCE, True),
        ("acme-admin", Need.TENANT_ADMIN, True),
        ("acme-admin", Need.SUPERUSER, False),
        ("clerk", Need.TENANT_ADMIN, False),
        ("root", Need.SUPERUSER, True),
        ("root", Need.CONSUME, True),
        ("stranger", Need.AUTHENTICATED, True),
    ],
)
def test_a_role_may_have_what_it_is_granted(role: str, need: Need, *, allowed: bool) -> None:
    assert is_allowed([role], on_topic(need, TOPIC), rights()) is allowed


def test_without_a_role_only_what_needs_no_credentials_is_allowed() -> None:
    assert is_allowed([], Access(Need.NOTHING), rights())
    for need in set(Need) - {Need.NOTHING}:
        assert not is_allowed([], on_topic(need, TOPIC), rights()), need


@pytest.mark.parametrize("need", [Need.PRODUCE, Need.CONSUME, Need.LOOKUP])
def test_a_grant_on_a_topic_is_none_on_the_namespace_or_another_topic(need: Need) -> None:
    other = parse_topic_name("persistent://acme/orders/old")
    assert is_allowed(["clerk"], on_topic(need, TOPIC), rights())
    assert not is_allowed(["clerk"], on_topic(need, other), rights())
    assert not is_allowed(["clerk"], on_namespace(need, NAMESPACE), rights())


@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        ("persistent://acme/orders/new-partition-3", "persistent://acme/orders/new"),
        ("segment://acme/orders/scaled/0000-ffff-0", "topic://acme/orders/scaled"),
        ("segment://acme/orders/a/b/0000-ffff-12", "topic://acme/orders/a/b"),
        ("topic://acme/orders/scaled", "topic://acme/orders/scaled"),
        ("segment://acme/orders/new-partition-3/0000-ffff-0", "topic://acme/orders/new"),
        ("persistent://acme/orders/new-partition-x", "persistent://acme/orders/new-partition-x"),
    ],
)
def test_partitions_and_segments_go_by_their_topic(asked: str, whole: str) -> None:
    assert str(authorization_name(parse_topic_name(asked))) == whole


def test_a_grant_counts_for_partitions_segments_and_the_twin_in_another_domain() -> None:
    for name in (
        "persistent://acme/orders/new-partition-12",
        "topic://acme/orders/new",
        "segment://acme/orders/new/0000-7fff-1",
    ):
        assert is_allowed(["clerk"], on_topic(Need.PRODUCE, parse_topic_name(name)), rights())


@pytest.mark.parametrize(
    "name",
    [
        "persistent://acme/orders/__change_events",
        "persistent://acme/orders/__change_events-partition-0",
        "persistent://acme/orders/__transaction_buffer_snapshot",
        "persistent://pulsar/system/any",
    ],
)
def test_topics_of_the_system_are_for_superusers(name: str) -> None:
    asked = on_topic(Need.LOOKUP, parse_topic_name(name))
    assert is_allowed(["root"], asked, rights())
    assert not is_allowed(["reader"], asked, rights())
    assert not is_allowed(["acme-admin"], asked, rights())


def test_a_pattern_counts_only_where_wildcards_are_on() -> None:
    asked = on_topic(Need.CONSUME, TOPIC)
    assert not is_allowed(["svc-7"], asked, rights())
    assert is_allowed(["svc-7"], asked, rights(wildcards=True))
    assert not is_allowed(["a-svc"], asked, rights(wildcards=True))
    scaled = on_topic(Need.PRODUCE, parse_topic_name("topic://acme/orders/scaled"))
    assert is_allowed(["nightly-batch"], scaled, rights(wildcards=True))
    assert not is_allowed(["batch"], scaled, rights(wildcards=True))


def test_a_role_named_like_a_pattern_gains_nothing_by_it() -> None:
    granted = Rights(grants=Grants({"abc": frozenset({Action.CONSUME})}), wildcards=True)
    assert not is_allowed(["ab*"], on_topic(Need.CONSUME, TOPIC), granted)


def test_a_restricted_subscription_is_for_its_roles_that_may_consume() -> None:
    asked = on_topic(Need.CONSUME, TOPIC, "audit")
    assert not is_allowed(["reader"], asked, rights())
    assert not is_allowed(["auditor"], asked, rights()), "it is not granted consume"
    both = Rights(
        grants=Grants(
            {"auditor": frozenset({Action.CONSUME})},
            of_subscriptions={"audit": frozenset({"auditor"})},
        )
    )
    assert is_allowed(["auditor"], asked, both)
    assert is_allowed(["acme-admin"], asked, rights())


def test_an_emptied_list_of_roles_restricts_nothing_and_a_broken_one_all() -> None:
    assert is_allowed(["reader"], on_topic(Need.CONSUME, TOPIC, "open"), rights())
    assert not is_allowed(["reader"], on_topic(Need.CONSUME, TOPIC, "broken"), rights())


@pytest.mark.parametrize(
    ("subscription", "allowed"),
    [("reader", True), ("reader-1", True), ("readers", False), ("other", False)],
)
def test_in_prefix_mode_a_subscription_bears_the_name_of_the_role(
    subscription: str, *, allowed: bool
) -> None:
    asked = on_topic(Need.CONSUME, TOPIC, subscription)
    assert is_allowed(["reader"], asked, rights(mode="Prefix")) is allowed
    assert is_allowed(["acme-admin"], asked, rights(mode="Prefix"))


def test_reads_of_all_messages_are_for_admins_where_subscriptions_are_restricted() -> None:
    asked = on_topic(Need.READ_ALL, TOPIC)
    free = Rights(grants=Grants({"reader": frozenset({Action.CONSUME})}))
    assert is_allowed(["reader"], asked, free)
    assert not is_allowed(["reader"], asked, rights())
    assert not is_allowed(["reader"], asked, Rights(grants=grants_of(
        {"auth_policies": {"namespace_auth": {"reader": ["consume"]}},
         "subscription_auth_mode": "Prefix"}
    )))  # fmt: skip
    assert is_allowed(["acme-admin"], asked, rights())


def test_behind_a_proxy_both_roles_must_be_allowed() -> None:
    asked = on_topic(Need.PRODUCE, TOPIC)
    assert is_allowed(["root", "writer"], asked, rights())
    assert not is_allowed(["root", "stranger"], asked, rights())
    assert not is_allowed(["stranger", "writer"], asked, rights())


def test_an_admin_of_a_tenant_is_none_of_another() -> None:
    assert not is_allowed(["acme-admin"], on_tenant("other"), Rights())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["auth_policies", "subscription_auth_mode"]),
        st.dictionaries(
            st.sampled_from(["namespace_auth", "destination_auth", "subscription_auth_roles"]),
            json_values,
        )
        | json_values,
    )
)
def test_no_record_of_another_form_grants_anything_or_fails(policies: dict[str, object]) -> None:
    read = Rights(grants=grants_of(policies))
    for need in Need:
        assert is_allowed(["role"], on_topic(need, TOPIC, "s"), read) in (True, False)
    if "produce" not in repr(policies) and "consume" not in repr(policies):
        assert not is_allowed(["role"], on_topic(Need.LOOKUP, TOPIC), read)
