"""Policies of namespaces and topics, as v4 applications and the admin library meet them."""

import pytest

from tests.java.conftest import RunCase


def test_topics_above_the_maximum_of_a_namespace_are_refused(
    run_v4_case: RunCase, on_peer: bool
) -> None:
    facts = run_v4_case("v4_max_topics")
    assert facts["unset"] == 0
    assert facts["maximum"] == 4
    assert facts["partitioned"] == "412"
    if on_peer:
        # The topic grew, so that there is no room: docs/differences.md, topics of a namespace
        assert (facts["grow"], facts["unpartitioned"]) == ("done", "409")
    else:
        assert facts["grow"] == facts["unpartitioned"] == "412"
        assert facts["automatic"] == "done"
    assert facts["producer"] == facts["consumer"] == "NotAllowedException"
    assert facts["existing"] == facts["without"] == "done"
    assert on_peer or facts["after_delete"] == "done"


def test_a_namespace_that_requires_encryption_takes_no_other_producer(
    run_v4_case: RunCase,
) -> None:
    facts = run_v4_case("v4_encryption_required")
    assert not facts["before"]
    assert facts["after"]
    assert facts["closed"]
    assert facts["new"] not in ("done", "TimeoutException")
    assert facts["received_before"]
    assert facts["received_secret"]
    assert facts["stuck"] == "TimeoutException"
    assert facts["back"]
    assert facts["again"] == "done"


def test_policies_say_which_schemas_clients_bring(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_schema_policies")
    assert facts["automatic"]
    assert not facts["automatic_set"]
    assert facts["unknown_producer"] == "IncompatibleSchemaException"
    assert facts["unknown_consumer"] == "IncompatibleSchemaException"
    assert facts["known_producer"] == facts["without_schema"] == "done"
    assert not facts["validated"]
    assert not facts["of_topic"]
    assert facts["of_topic_set"]
    assert facts["without_schema_enforced"] == "IncompatibleSchemaException"
    assert facts["validated_set"]
    assert facts["older"] == "AutoUpdateDisabled"
    assert facts["strategy"] == "ALWAYS_INCOMPATIBLE"
    assert facts["incompatible"] == "IncompatibleSchemaException"
    assert facts["strategy_set"] == "ALWAYS_COMPATIBLE"
    assert facts["compatible"] == "done"
    assert facts["removed"]


def test_the_admin_library_sets_and_reads_the_persistence_policy(
    run_v4_case: RunCase, on_peer: bool, request: pytest.FixtureRequest
) -> None:
    facts = run_v4_case("v4_persistence")
    on_bookies = request.config.getoption("--cluster") is not None
    assert facts["unset"]
    assert facts["of_namespace"] == facts["inherited"] == "1 1 1 0.5"
    assert facts["of_topic_set"]
    assert facts["applied"] == "1 1 1 2.0"
    assert facts["sent"]
    assert facts["of_topic_removed"]
    assert facts["older_set"]
    assert facts["older"] == ["1 1 1 3.0", "1 1 1 3.0"]
    assert facts["older_removed"]
    assert facts["removed"]
    if on_peer:
        # docs/differences.md, persistence
        assert (facts["impossible"], facts["more_copies"]) == ("400", "done")
    else:
        assert facts["of_broker"] == ("3 2 2 10.0" if on_bookies else "1 1 1 10.0")
        assert facts["impossible"] == "412"
        assert facts["more_copies"] == ("done" if on_bookies else "412")


@pytest.mark.parametrize("replicated", [False, True], ids=["alone", "replicated"])
def test_operations_reach_all_topics_of_a_namespace(
    run_v4_case: RunCase, *, replicated: bool
) -> None:
    facts = run_v4_case("v4_namespace_operations", replicated=replicated)
    # That a subscription is to be replicated is noted, and all.
    assert facts["replicated"] == [replicated, replicated]
    assert facts["shown"] is replicated
    assert facts["reset"] == [False, False]
    assert facts["cleared"] == facts["all"] == 0
    assert facts["other"] == 4
    assert facts["busy"] == "412"
    assert facts["left"] == []
    assert facts["properties"] == {"owner": "billing", "tier": "1"}
    assert facts["property"] == facts["removed"] == "1"
    assert facts["absent"]
    assert facts["no_properties"] == {}
