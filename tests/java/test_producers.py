"""Producers of the official client: access modes, names, sequence ids, missing topics."""

from tests.java.conftest import RunCase


def test_exclusive_producer_keeps_others_out_until_it_closes(run_case: RunCase) -> None:
    facts = run_case("access_exclusive")
    assert "ProducerFencedException" in facts["second_exclusive"]
    assert "ProducerBusyException" in facts["shared_beside"]
    assert facts["after_close"] == ""


def test_waiting_producer_is_ready_when_the_holder_closes(run_case: RunCase) -> None:
    facts = run_case("access_wait")
    assert not facts["ready_while_held"]
    assert facts["ready_after_close"]


def test_fencing_producer_takes_the_topic_from_the_holder(run_case: RunCase) -> None:
    facts = run_case("access_fencing")
    assert "ProducerFencedException" in facts["fenced_send"]
    assert facts["values"] == ["first", "second"]


def test_a_producer_name_is_used_once_at_a_time(run_case: RunCase) -> None:
    facts = run_case("producer_names")
    assert facts["name"] == "mine"
    assert "ProducerBusyException" in facts["same_name"]
    assert facts["last_sequence_id"] == 0


def test_deduplication_stores_a_sequence_id_once(run_case: RunCase) -> None:
    facts = run_case("sequence_ids")
    assert facts["values"] == [f"n{i}" for i in range(15)]
    assert facts["last_sequence_id_1"] == 14


def test_missing_scalable_topic_is_created(run_case: RunCase, on_peer: bool) -> None:
    facts = run_case("missing_topic")
    if on_peer:
        # It is never made by looking it up: docs/differences.md, auto-creation
        assert "TopicNotFound" in facts["create"]
    else:
        assert facts["create"] == ""
    assert facts["missing_tenant"] != ""


def test_messages_for_a_segment_over_its_backlog_quota_wait(run_case: RunCase) -> None:
    facts = run_case("backlog_quota", policy="producer_request_hold")
    assert "TimeoutException" in facts["beyond"]
    assert facts["below"] == ""
    assert facts["values"] == [*map(str, range(10)), "beyond", "below"]


def test_messages_for_a_segment_over_its_backlog_quota_fail(run_case: RunCase) -> None:
    facts = run_case("backlog_quota", policy="producer_exception")
    assert "ProducerBlockedQuotaExceededException" in facts["beyond"]
    assert facts["below"] == ""
    assert facts["values"] == [*map(str, range(10)), "below"]


def test_many_producers_in_turn_send_everything(run_case: RunCase) -> None:
    facts = run_case("producers_in_turn")
    assert facts["received"] == facts["rounds"] == 20
