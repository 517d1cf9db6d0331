"""Sequence ids of the official client over splits and merges, in a namespace that deduplicates."""

import pytest

from tests.conftest import Report
from tests.java.conftest import RunCase


@pytest.mark.parametrize("merge", [False, True], ids=["split", "merge"])
@pytest.mark.parametrize(
    "how", [{}, {"sameClient": True}, {"live": True}], ids=["restart", "same-client", "live"]
)
def test_ids_of_the_application_are_stored_once(
    run_case: RunCase, on_peer: bool, merge: bool, how: dict[str, bool]
) -> None:
    values = run_case("own_ids_over_changes", merge=merge, **how)["values"]
    if on_peer and "live" not in how:
        # Each segment counts by itself: docs/differences.md, deduplication over a split
        assert len(values) > 80
    else:
        assert values == sorted(f"n{i}" for i in range(80))


def test_ids_in_flight_while_the_layout_changes(
    run_case: RunCase, on_peer: bool, report: Report
) -> None:
    """Each segment drops a lower id that comes after a higher one, as on Apache Pulsar."""
    facts = run_case("own_ids_in_flight")
    values = facts["values"]
    missing = 3000 - len(set(values)) - facts["failed"]
    report(f"own ids in flight: {missing} dropped, {len(values) - len(set(values))} stored twice")
    # The peer seals before it publishes the layout: its client may send twice what had failed.
    assert on_peer or len(values) == len(set(values))


def test_program_that_begins_at_an_id_of_its_own_loses_nothing(run_case: RunCase) -> None:
    facts = run_case("initial_ids_over_changes")
    assert facts["values"] == sorted(f"n{i}" for i in range(60))


def test_generated_ids_go_on_in_the_children(run_case: RunCase, on_peer: bool) -> None:
    values = run_case("generated_ids_over_changes")["values"]
    assert sorted(set(values)) == sorted(f"n{i}" for i in range(2020))
    assert on_peer or len(values) == 2020
