"""Schemas of the official client."""

from tests.java.conftest import RunCase


def test_java_client_exchanges_strings(run_case: RunCase) -> None:
    facts = run_case("schema_string")
    assert facts["received"] == facts["sent"]
    assert len(facts["sent"]) == 5


def test_java_client_exchanges_json(run_case: RunCase) -> None:
    facts = run_case("schema_json")
    assert facts["received"] == sorted(f"s={i}" for i in range(20))


def test_java_client_reads_a_newer_version_of_a_record(run_case: RunCase) -> None:
    assert run_case("schema_evolution")["received"] == ["1/null", "2/K"]


def test_incompatible_record_is_refused(run_case: RunCase) -> None:
    facts = run_case("schema_incompatible")
    assert "ncompatible" in facts["refusal"]
    assert facts["works_after_refusal"]


def test_auto_consumer_gets_the_schema_of_the_broker(run_case: RunCase) -> None:
    assert run_case("schema_auto")["received"] == [f"s={i}" for i in range(8)]
