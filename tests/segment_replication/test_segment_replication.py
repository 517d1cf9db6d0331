"""Two clusters whose layouts change: each message arrives once and in order, by rules R1 to R12.

A pinned seed that shows nothing any more says that the runs have changed: `python -m
tests.segment_replication` looks for others.
"""

import pytest

from tests.segment_replication.rules import BROKEN, SPARE
from tests.segment_replication.world import problem_of
from tests.support.effort import by_effort

SEEDS = range(by_effort(quick=200, whole=2_000, nightly=20_000))
MISSING, REPEATED, STUCK = "missing before it", "one is repeated", "it does not end"
ABORTED = "is aborted"
CHUNK = "the last chunk of a message without the first"
FOUND = {
    "R1": (1, STUCK),
    "R2": (1, MISSING),
    "R2-merge": (6, MISSING),
    "R2-parents": (16, MISSING),
    "R2-open": (24, MISSING),
    "R2-terminated": (221, MISSING),
    "R3": (0, "several buckets"),
    "R3-order": (1, MISSING),
    "R3-bucket": (13, "several buckets"),
    "R3-chunks": (17, CHUNK),
    "R3-chunks-open": (2341, MISSING),
    "R3-keyless": (1, REPEATED),
    "R3-keyless-range": (1328, REPEATED),
    "R4": (1928, MISSING),
    "R5": (14, REPEATED),
    "R5-incarnation": (0, STUCK),
    "R6-nothing": (13, REPEATED),
    "R6-highest": (349, MISSING),
    "R6-lowest": (14, REPEATED),
    "R6-early": (0, REPEATED),
    "R7": (14, STUCK),
    "R7-rest": (349, MISSING),
    "R7-decided": (364, MISSING),
    "R7-order": (87, MISSING),
    "R8": (2121, MISSING),
    "R8-drained": (1682, REPEATED),
    "R8-durable": (10948, REPEATED),
    "R8-layout": (1340, REPEATED),
    "R9": (11, MISSING),
    "R9-sent": (1, MISSING),
    "R9-expired": (11, STUCK),
    "R10": (1, MISSING),
    "R11-open": (125, ABORTED),
    "R11-aborted": (5, ABORTED),
    "R12": (1296, MISSING),
    "R12-end": (3878, MISSING),
    "R12-drained": (1296, MISSING),
    "R12-epochs": (221, STUCK),
}
"""By rule: the first seed that shows that it is broken, and what goes wrong."""


def problems(broken: str, *, halves: bool = False) -> dict[int, str]:
    found = ((seed, problem_of(seed, broken, halves=halves)) for seed in SEEDS)
    return {seed: problem for seed, problem in found if problem is not None}


def test_each_message_arrives_once_and_in_order() -> None:
    assert problems("") == {}


def test_the_rest_of_an_entry_arrives_that_was_stored_in_part() -> None:
    assert problems("", halves=True) == {}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_run_shows_that_a_rule_is_broken(rule: str) -> None:
    seed, what = FOUND[rule]
    assert what in (problem_of(seed, rule) or "nothing")
    assert problem_of(seed) is None


@pytest.mark.parametrize("rule", SPARE)
def test_a_rule_that_others_make_spare_may_be_left_out(rule: str) -> None:
    assert problems(rule) == {}
