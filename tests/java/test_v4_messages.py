"""Single messages of a topic with the official v4 client's admin library."""

from tests.java.conftest import RunCase


def test_single_messages_are_peeked_at_examined_and_skipped(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_single_messages")
    batched = ["batched 0", "batched 1", "batched 2"]
    assert facts["peeked"] == ["alone", *batched]
    assert (facts["alone"], facts["key"], facts["property"]) == ("alone", "k", "b")
    assert facts["producer"] == "alone"
    assert facts["event_time"]
    assert facts["published"]
    assert (facts["first"], facts["last"]) == ("alone", "batched 0")
    assert facts["id_since_its_time"]
    assert facts["bytes_from_it_on"]
    assert facts["after_skip"] == batched
    assert facts["terminated"] == 2
