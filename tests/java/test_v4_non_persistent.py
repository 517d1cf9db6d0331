"""The official v4 client and admin library on non-persistent topics."""

import pytest

from tests.java.conftest import RunCase


@pytest.mark.parametrize("partitions", [0, 2], ids=["unpartitioned", "partitioned"])
@pytest.mark.parametrize("kind", ["Exclusive", "Shared", "Failover", "Key_Shared"])
def test_v4_consumer_of_a_non_persistent_topic_gets_what_comes_while_it_is_connected(
    run_v4_case: RunCase, kind: str, partitions: int
) -> None:
    facts = run_v4_case(
        "v4_non_persistent", type=kind, partitions=partitions, batching=partitions > 0
    )
    assert facts["seen"] == 20
    assert not facts["saw_earlier"]
    assert not facts["more"]
    assert facts["listed"]
    assert facts["has_statistics"]
    assert facts["refusals"] == ["406"]
    assert facts["pattern"] == "pattern"
