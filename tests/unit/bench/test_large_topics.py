"""The tables of the benchmark of large topics."""

import json
from pathlib import Path

from bench.growth_figures import growth_table
from bench.large_topics.__main__ import LOADS
from bench.large_topics.observed import Observed
from tests.support.broker_process import BrokerProcess


def test_each_load_has_a_table_with_one_row_for_each_figure() -> None:
    for load in LOADS.values():
        keys = [row.key for row in load.rows()]
        assert len(keys) == len(set(keys))
        table = growth_table(load.rows(), {size: dict.fromkeys(keys, 1.0) for size in (10, 100)})
        assert len(table) == 1 + len(keys)


def test_the_longest_ping_counts_for_the_phase_that_it_was_asked_in(tmp_path: Path) -> None:
    observed = Observed(BrokerProcess(tmp_path), tmp_path)
    observed.phases = [("first", 0.0, 1.0), ("second", 1.0, 2.0)]
    asked = [[0.5, "PING", 0.25], [0.75, "PING", 0.125], [1.0, "PING", 0.5], [1.5, "SEND", 0.75]]
    lines = "".join(f"{json.dumps(each)}\n" for each in [*asked, [3.0, "PING", 1.0]])
    (tmp_path / "beside.jsonl").write_text(lines)
    observed.end()
    assert observed.figures == {"first_ping_ms": 250.0, "second_ping_ms": 500.0}
