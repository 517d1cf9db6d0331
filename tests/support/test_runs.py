"""The runs of the tests: their parts, what becomes of a part, and the times that they show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import ON_LEFTOVER_TIME, ROOT, End, chosen, run, run_all
from tests.support.effort import SEED_VARIABLE, VARIABLE, by_effort, draw_seed
from tests.support.run_parts import RUNS, WITH_CLUSTER_TESTS, Command, Part, parts_of
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


def test_a_part_beside_the_others_runs_meanwhile_and_is_shown_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the two waits for the other."""
    one, two = tmp_path / "one", tmp_path / "two"

    def meeting(own: Path, other: Path) -> Command:
        return python(f"""
import pathlib, time
pathlib.Path({str(own)!r}).touch()
while not pathlib.Path({str(other)!r}).exists():
    time.sleep(0.01)
print("they met")
""")

    parts = [Part("beside", [meeting(one, two)], beside=True), Part("front", [meeting(two, one)])]
    outcomes = run_all(parts, on_leftover_time=())
    assert [(each.name, each.end) for each in outcomes] == [
        ("front", End.PASSED),
        ("beside", End.PASSED),
    ]
    shown = capfd.readouterr().out
    assert shown.index("part 1 of 1: front") < shown.index("beside the other parts: beside =====")
    assert shown.count("they met") == 2


def test_each_part_has_the_processor_time_of_its_own_commands() -> None:
    script = "import time\nwhile time.process_time() < 0.3: pass"
    parts = [Part("beside", [python(script)], beside=True, leftover=True)]
    parts += [Part("front", [python("pass")])]
    front, beside = run_all(parts, on_leftover_time=())
    assert beside.end is End.PASSED
    assert beside.processor_s >= 0.3
    assert front.processor_s < 0.3


def test_a_program_on_leftover_time_has_the_lowest_priority() -> None:
    line = [*ON_LEFTOVER_TIME, sys.executable, "-c", "import os; raise SystemExit(os.nice(0))"]
    ended = subprocess.run(line, cwd=ROOT, check=False, start_new_session=True)
    assert ended.returncode == 19


def test_a_part_beside_ends_when_the_run_is_interrupted(tmp_path: Path) -> None:
    begun, mark = tmp_path / "begun", tmp_path / "mark"
    cleaning = f"""
import pathlib, time
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
finally:
    pathlib.Path({str(mark)!r}).touch()
"""
    interrupting = f"""
import os, pathlib, signal, time
while not pathlib.Path({str(begun)!r}).exists():
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    never = python(f"open({str(tmp_path / 'never')!r}, 'w').close()")
    parts = [Part("beside", [python(cleaning), never], beside=True)]
    parts += [Part("front", [python(interrupting)]), Part("next", [never])]
    outcomes = run_all(parts, on_leftover_time=())
    assert [(each.name, each.end) for each in outcomes] == [
        ("front", End.INTERRUPTED),
        ("beside", End.INTERRUPTED),
    ]
    assert mark.exists()
    assert not (tmp_path / "never").exists()


def test_a_part_beside_that_cannot_be_run_fails_the_run(tmp_path: Path) -> None:
    parts = [Part("beside", [Command([str(tmp_path / "no such program")])], beside=True)]
    with pytest.raises(FileNotFoundError, match="no such program"):
        run_all([*parts, Part("front", [python("pass")])])


def test_a_part_beside_that_is_chosen_alone_runs_in_front(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (outcome,) = run_all([Part("beside", [python("print('here')")], beside=True)])
    assert outcome.end is End.PASSED
    assert capfd.readouterr().out.splitlines()[-1] == "here"


def test_a_part_that_no_run_has_is_refused() -> None:
    parts = parts_of("all", seed=1)
    assert [part.name for part in chosen(parts, ["cluster"])] == ["cluster"]
    with pytest.raises(ValueError, match="there is no part clusters: give one of builds, check"):
        chosen(parts, ["cluster", "clusters"])


def test_all_tests_marked_cluster_are_where_the_part_looks_for_them() -> None:
    marked = [
        file.relative_to(ROOT)
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(r"mark\.cluster\b", file.read_text("utf-8"))
    ]
    assert len(marked) > 10
    places = [Path(place) for place in WITH_CLUSTER_TESTS]
    assert [file for file in marked if not any(file.is_relative_to(each) for each in places)] == []


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
