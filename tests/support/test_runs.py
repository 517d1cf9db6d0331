"""The runs of the tests: their parts, what becomes of a part, and the times that they show."""

import sys
from pathlib import Path

import pytest

from tests.__main__ import End, chosen, run
from tests.support.effort import SEED_VARIABLE, VARIABLE, by_effort, draw_seed
from tests.support.run_parts import RUNS, Command, Part, parts_of
from tests.support.run_times import (
    TestTime,
    UnreadableTimes,
    lines_by_folder,
    lines_of_failed,
    lines_of_slowest,
    read_times,
)

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.unit.txn.test_buffer" name="test_one[a]" time="2.5"/>
<testcase classname="tests.unit.txn.test_buffer.TestModel" name="runTest" time="1"/>
<testcase classname="tests.client.test_sync" name="test_two" time="4"><skipped/></testcase>
<testcase classname="tests.client.test_sync" name="test_three" time="1"><failure
message="AssertionError: [1, 2]&#10;assert False">traceback</failure></testcase>
<testcase classname="" name="tests.client.test_sync" time="0"><error/></testcase>
</testsuite></testsuites>"""


def python(script: str) -> Command:
    return Command([sys.executable, "-c", script])


def test_times_are_read_from_a_junit_file(tmp_path: Path) -> None:
    file = tmp_path / "part.xml"
    assert read_times(file) == []
    file.write_text(JUNIT)
    times = read_times(file)
    assert [each.skipped for each in times] == [False, False, True, False]
    assert list(lines_of_slowest(times, 2)) == [
        "    4.0 s  tests/client/test_sync.py::test_two",
        "    2.5 s  tests/unit/txn/test_buffer.py::test_one[a]",
    ]
    assert str(times[1]) == "tests/unit/txn/test_buffer.py::TestModel::runTest"
    assert list(lines_by_folder(times, least_s=3.8)) == ["  0:05       2 tests  tests/client"]
    assert list(lines_of_failed(times)) == [
        "tests/client/test_sync.py::test_three: AssertionError: [1, 2] assert False"
    ]


def test_a_damaged_junit_file_fails_its_part_and_the_next_command_runs(tmp_path: Path) -> None:
    file = tmp_path / "part.xml"
    file.write_text("<testsuites>")
    with pytest.raises(UnreadableTimes, match="run the part again"):
        read_times(file)
    mark = tmp_path / "mark"
    script = """
import pathlib, sys
file = pathlib.Path(sys.argv[1].partition("=")[2])
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text("<testsuites>")
"""
    damaging = Command([sys.executable, "-c", script], times="--junitxml")
    part = Part("damaged", [damaging, python(f"open({str(mark)!r}, 'w').close()")])
    assert run(part, "part 1 of 1").end is End.FAILED
    assert mark.exists()


def test_a_folder_below_unit_is_a_folder_of_its_own() -> None:
    assert TestTime("tests.unit.broker.topics.test_x", "test_y", 1).folder == "tests/unit/broker"
    assert TestTime("tests.unit.test_x", "test_y", 1).folder == "tests/unit"
    assert TestTime("tests.cluster.oxia.test_x", "test_y", 1).folder == "tests/cluster"


def test_a_part_runs_to_its_end_and_fails_if_one_command_does(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    commands = [python("raise SystemExit(3)"), python(f"open({str(mark)!r}, 'w').close()")]
    assert run(Part("two commands", commands), "part 1 of 1").end is End.FAILED
    assert mark.exists()
    assert run(Part("one command", commands[1:]), "part 1 of 1").end is End.PASSED


def test_an_interrupted_part_ends_with_its_command(tmp_path: Path) -> None:
    """The command cleans up; it is told by SIGINT, whoever sent SIGTERM to the run."""
    mark = tmp_path / "mark"
    script = f"""
import os, signal, time
try:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
finally:
    open({str(mark)!r}, "w").close()
"""
    assert run(Part("interrupted", [python(script)]), "part 1 of 1").end is End.INTERRUPTED
    assert mark.exists()


def test_a_part_that_no_run_has_is_refused() -> None:
    parts = parts_of("all", seed=1)
    assert [part.name for part in chosen(parts, ["cluster"])] == ["cluster"]
    with pytest.raises(ValueError, match="there is no part clusters: give one of builds, check"):
        chosen(parts, ["cluster", "clusters"])


@pytest.mark.parametrize("name", RUNS)
def test_parts_of_a_run_have_names_of_their_own(name: str) -> None:
    names = [part.name for part in parts_of(name, seed=1)]
    assert names
    assert len(set(names)) == len(names)


def test_an_unknown_effort_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(ValueError, match="'much': give it one of quick, whole, nightly"):
        by_effort(quick=1, whole=2, nightly=3)


def test_a_drawn_seed_is_shown_with_what_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "whole")
    monkeypatch.delenv(SEED_VARIABLE, raising=False)
    seed = draw_seed()
    shown = capsys.readouterr().out
    assert shown.startswith(f"again: {VARIABLE}=whole {SEED_VARIABLE}={seed} pytest tests/support")
    monkeypatch.setenv(SEED_VARIABLE, "7")
    assert draw_seed() == 7
