"""The official client's consumers of a whole namespace."""

import pytest

from tests.java.conftest import RunCase


@pytest.mark.parametrize(
    ("case", "messages"),
    [("namespace_queue", 40), ("namespace_filtered", 30), ("namespace_stream", 40)],
)
def test_namespace_consumer_gets_existing_and_later_topics(
    run_case: RunCase, case: str, messages: int
) -> None:
    facts = run_case(case)
    assert facts["expected"] == messages
    assert facts["missing"] == []
    assert facts["unexpected"] == []
