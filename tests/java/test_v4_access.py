"""Access modes and names of producers with the official v4 client."""

from tests.java.conftest import RunCase


def test_exclusive_producers_keep_the_topic_to_themselves(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_access_modes")
    assert facts["shared_epoch"] == "null"
    assert facts["exclusive_beside_shared"] == "ProducerFencedException"
    assert facts["shared_beside_shared"] == "ok"
    assert facts["shared_beside_exclusive"] == "ProducerBusyException"
    assert facts["exclusive_beside_exclusive"] == "ProducerFencedException"
    assert facts["send"] == "ok"
    assert (facts["epoch"], facts["next_epoch"]) == ("0", "1")
    assert facts["shared_after_exclusive"] == "ok"


def test_waiting_producers_get_the_topic_in_turn(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_access_waiting")
    assert facts["second_waits"]
    assert facts["third_waits"]
    assert facts["exclusive_meanwhile"] == "ProducerFencedException"
    assert facts["shared_meanwhile"] == "ProducerBusyException"
    assert facts["second"] == facts["send"] == "ok"
    assert facts["third_still_waits"]
    assert facts["third"] == facts["send_of_third"] == "ok"


def test_fencing_producer_closes_the_holder_and_fails_those_that_wait(
    run_v4_case: RunCase, on_peer: bool
) -> None:
    facts = run_v4_case("v4_access_fencing")
    assert facts["waits"]
    assert facts["waiting"] == "ProducerFencedException"
    assert facts["send_of_fencing"] == "ok"
    assert facts["send_of_fenced"] in ("ProducerFencedException", "AlreadyClosedException")
    assert facts["shared_beside_fencing"] == "ProducerBusyException"
    assert facts["send_of_second_fencing"] == "ok"
    fenced = ("ProducerFencedException", "AlreadyClosedException")
    assert facts["send_of_first_fencing"] in fenced
    # Apache Pulsar leaves it waiting for its turn, though it was fenced.
    waited = ("TimeoutException",) if on_peer else fenced
    assert facts["send_of_fenced_that_waited"] in waited


def test_a_name_belongs_to_one_producer_at_a_time(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_producer_names")
    assert facts["same_client"] == facts["other_client"] == "ProducerBusyException"
    assert facts["send"] == facts["send_of_second"] == "ok"
