"""`bench.beside`: the order of pairs, what figures say, and that a side runs its own code only."""

import argparse
import io
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from bench.beside import environments, measuring
from bench.beside.__main__ import chosen_measures
from bench.beside.checkouts import (
    Checkout,
    CheckoutFailed,
    code_digest,
    packages,
    projects_of,
    put_commit,
    put_work_tree,
)
from bench.beside.comparison import Figures, Spread, lines, order, ratio, spread, table_of
from bench.beside.environments import TOLD, Environment, WrongCode, make_environment, must_have_run
from bench.beside.measuring import MEASURES, Side, Taken, load_warning, take_rounds
from bench.beside.witness import VARIABLE
from bench.measures import Effort, Results
from bench.report import Row
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.support.broker_process import ROOT, Code

RATE = Row("rate", "sends", "sends/s")
TIME = Row("time", "start", "ms", 1)
ROUNDS: list[Figures] = [
    {"old": {"rate": 100, "time": 10}, "this": {"rate": 110, "time": 5}},
    {"this": {"rate": 180, "time": 4}, "old": {"rate": 200, "time": 4}},
    {"old": {"rate": 100, "time": 8}, "this": {"rate": 130}},
]

MAIN = """
import importlib, sys
import broker.part
for name in sys.argv[1:]:
    importlib.import_module(name)
print(broker.part.WHOSE)
"""


def make_checkout(directory: Path, whose: str) -> Path:
    files = {
        "pyproject.toml": '[project]\nname = "magnetar"\nversion = "7"\n'
        f'[project.entry-points."magnetar.commands"]\nbroker = "broker.part:{whose}"\n',
        "broker/__init__.py": "",
        "broker/cli/__init__.py": "",
        "broker/cli/main.py": MAIN,
        "broker/part.py": f"WHOSE = {whose!r}\n",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def run(code: Code, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(code.python), "-m", "broker.cli.main", *arguments],
        cwd=code.checkout,
        env=os.environ | dict(code.variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Of a checkout that has no package `magnetar`, with the packages of this run."""
    place = tmp_path_factory.mktemp("old")
    checkout = make_checkout(place / "code", "old")
    installed = environments.site_packages(Path(sys.prefix))
    python = make_environment(checkout, place / "environment", installed)
    return Environment(Code(checkout, python, {"PYTHONPATH": ""}), ())


def git(directory: Path, *arguments: str) -> None:
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=directory, check=True, capture_output=True)


# Order and statistics


def test_rounds_alternate_whom_they_begin_with() -> None:
    assert [order(["A", "B"], number) for number in range(3)] == [
        ["A", "B"],
        ["B", "A"],
        ["A", "B"],
    ]
    assert order(["A", "B", "peer"], 1) == ["peer", "B", "A"]


def test_a_spread_is_median_least_and_greatest() -> None:
    assert spread([3, 1, 2, 10]) == Spread(2.5, 1, 10)
    assert spread([]) is None
    assert Spread(1234.5, 1000, 2000.25).text(1) == "1,234.5 (1,000.0..2,000.2)"


def test_a_ratio_is_taken_within_each_pair() -> None:
    found = ratio(RATE, ROUNDS, "this", "old")
    assert found is not None
    assert found.spread == Spread(1.1, 0.9, 1.3)
    assert found.cells() == ("1.100 (0.900..1.300)", "2 of 3")


def test_a_ratio_of_times_is_better_below_one_and_leaves_pairs_out_that_are_not_whole() -> None:
    found = ratio(TIME, ROUNDS, "this", "old")
    assert found is not None
    assert (found.better, found.pairs) == (1, 2)
    assert found.spread == Spread(0.75, 0.5, 1.0)
    assert ratio(TIME, ROUNDS, "this", "peer") is None


def test_a_table_has_all_sides_and_a_dash_for_what_was_not_measured() -> None:
    sides = ["old", "this", "peer"]
    found = lines([RATE, TIME, Row("none", "nothing", "ms")], ROUNDS, sides, "this")
    assert [line.row for line in found] == [RATE, TIME]
    console = Console(width=180, record=True, file=io.StringIO())
    console.print(table_of(found, sides, "this", "3 pairs"))
    text = console.export_text()
    assert "this by old" in text
    row = next(line for line in text.splitlines() if "sends/s" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        *("sends", "sends/s", "100 (100..200)", "130 (110..180)", "-"),
        *("1.100 (0.900..1.300)", "2 of 3", "-", "-"),
    ]


# Options


def test_measures_are_chosen_by_name_and_kind() -> None:
    assert chosen_measures("raw, start") == ["start", "raw"]
    assert chosen_measures("transactions") == ["transactions-batched", "transactions-single"]
    assert chosen_measures(" ") == list(MEASURES)
    with pytest.raises(argparse.ArgumentTypeError, match="nothing: not one of start"):
        chosen_measures("raw nothing")


def test_a_busy_machine_is_told() -> None:
    assert load_warning(0.4) is None
    assert "load average 1.25" in (load_warning(1.25) or "")


# Which code is run


def test_a_side_runs_its_checkout_and_tells_so(old: Environment, tmp_path: Path) -> None:
    done = run(old.code_telling(tmp_path))
    assert done.stdout == "old\n", done.stderr
    project = packages(old.code.checkout) | packages(ROOT)
    modules = must_have_run(old.code.checkout, tmp_path / TOLD, project)
    assert modules["broker.part"] == old.code.checkout / "broker" / "part.py"


def test_a_side_does_not_find_the_editable_install_of_this_tree(old: Environment) -> None:
    assert run(old.code, "rich").returncode == 0
    assert "No module named 'magnetar'" in run(old.code, "magnetar").stderr


def test_a_side_has_the_entry_points_of_its_checkout(old: Environment) -> None:
    asking = (
        "from importlib.metadata import entry_points, version; print(version('magnetar'), "
        "[e.value for e in entry_points(group='magnetar.commands')])"
    )
    done = subprocess.run(
        [str(old.code.python), "-c", asking], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout == "7 ['broker.part:old']\n"


def test_modules_are_compiled_before_anything_runs(old: Environment) -> None:
    assert list((old.code.checkout / "broker" / "__pycache__").glob("part.*.pyc"))


def test_a_broker_that_ran_other_code_is_refused(old: Environment, tmp_path: Path) -> None:
    other = make_checkout(tmp_path / "other", "other")
    elsewhere = Code(other, old.code.python, {VARIABLE: str(tmp_path / TOLD)})
    assert run(elsewhere).stdout == "other\n"
    with pytest.raises(WrongCode, match=r"ran other code: __main__ .*other/broker/cli/main.py"):
        must_have_run(old.code.checkout, tmp_path / TOLD, {"broker"})


def test_a_broker_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongCode, match="did not tell"):
        must_have_run(tmp_path, tmp_path / TOLD, {"broker"})
    (tmp_path / TOLD).write_text("json\t/usr/json.py\n")
    with pytest.raises(WrongCode, match="no module of `broker`"):
        must_have_run(tmp_path, tmp_path / TOLD, {"broker"})


def test_a_broker_runs_the_checkout_and_the_interpreter_that_it_is_given(tmp_path: Path) -> None:
    code = Code(tmp_path / "code", tmp_path / "python", {"WORD": "said"})
    process = MagnetarProcess(tmp_path, {"log_level": "info"}, code)._broker
    assert process.command()[:3] == [str(tmp_path / "python"), "-m", "magnetar.cli.main"]
    assert process.working_directory == tmp_path / "code"
    assert process.environment()["WORD"] == "said"
    assert process.environment()["MAGNETAR_LOG_LEVEL"] == "info"


@pytest.mark.parametrize("other", [["rich>=13"], ["rich >= 13", "aiohttp"], []])
def test_a_checkout_with_other_dependencies_has_an_environment_of_its_own(
    other: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def installed(requirements: list[str]) -> Path:
        asked.append(requirements)
        return tmp_path

    monkeypatch.setattr(environments, "_installed", installed)
    ours, theirs = (make_checkout(tmp_path / name, name) for name in ("ours", "theirs"))
    for checkout, needs in ((ours, ["rich>=13"]), (theirs, other)):
        with (checkout / "pyproject.toml").open("r+") as file:
            text = file.read().replace("[project]\n", f"[project]\ndependencies = {needs!r}\n")
            file.seek(0)
            file.write(text)
    environment = environments.environment_of(theirs, tmp_path / "environment", ours)
    assert (asked != []) == (other != ["rich>=13"])
    assert bool(environment.own_dependencies) == (asked != [])


def test_what_both_ask_for_is_installed_as_it_is_here() -> None:
    wanted = environments.to_install({"rich>=13", "typer>1"}, {"rich>=13", "aiohttp>=3"})
    assert wanted == ["aiohttp>=3", f"rich=={version('rich')}"]


def test_both_distributions_of_a_checkout_are_described(tmp_path: Path) -> None:
    library, broker = projects_of(ROOT)
    assert (library["name"], broker["name"]) == ("magnetar", "magnetar-broker")
    assert broker["version"] == library["version"]
    assert environments.dependencies([library, broker]) >= {"lz4>=4.4,<5", "aiohttp>=3.10,<4"}
    assert environments.main_of(ROOT) == "magnetar.cli.main"
    assert environments.main_of(make_checkout(tmp_path, "old")) == "broker.cli.main"


# Checkouts


def test_a_commit_and_the_work_tree_are_put_beside_each_other(tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "root", "committed")
    (root / ".gitignore").write_text("ignored\n__pycache__/\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "The first")
    (root / "broker" / "part.py").write_text("WHOSE = 'changed'\n")
    (root / "broker" / "new.py").write_text("")
    (root / "broker" / "cli" / "main.py").unlink()
    (root / "ignored").write_text("")
    commit, this = put_commit("HEAD", tmp_path, root), put_work_tree(tmp_path, root)
    assert "committed" in (commit.directory / "broker" / "part.py").read_text()
    assert "changed" in (this.directory / "broker" / "part.py").read_text()
    assert not (this.directory / "broker" / "cli" / "main.py").exists()
    assert not (this.directory / "ignored").exists()
    assert set(this.changed) == {"broker/part.py", "broker/new.py", "broker/cli/main.py"}
    assert commit.described == f"{commit.commit[:8]}: The first"
    assert this.described.startswith(f"this: {commit.commit[:8]} The first, with uncommitted")
    assert code_digest(commit.directory, ["broker"]) != code_digest(this.directory, ["broker"])


def test_what_names_no_commit_is_told(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    with pytest.raises(CheckoutFailed, match="'gone' names no commit"):
        put_commit("gone", tmp_path, tmp_path)


def test_a_clean_work_tree_is_not_said_to_be_changed() -> None:
    assert Checkout("this", ROOT, "0" * 40, "The last").described == "this: 00000000 The last"


# Rounds


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sides did; a measurement `raw` that fails on `weak`, and checks that end the run."""
    done: list[str] = []

    def take(make: measuring.Make, effort: Effort) -> Results:
        make()
        if done[-1] == "weak":
            raise RuntimeError("It broke.\nMore of it")
        return {"rate": 1.0, "more": 2.0}

    monkeypatch.setitem(measuring.MEASURES, "raw", measuring.Measure(take, (RATE,), 1))
    monkeypatch.setattr(measuring, "say", lambda _: None)
    monkeypatch.setattr(os, "sync", lambda: None)
    return done


def test_an_interrupt_that_a_lock_hides_ends_the_run(steps: list[str], tmp_path: Path) -> None:
    def make(_: Path) -> BrokerUnderTest:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    with pytest.raises(KeyboardInterrupt):
        take_rounds(Taken(), {"A": Side("A", make)}, ["raw"], 2, Effort.quick(), tmp_path)
    assert steps == []
    assert not list(tmp_path.iterdir())


class NoBroker:
    def faults(self) -> str:
        return ""


def side(name: str, steps: list[str], places: list[Path]) -> Side:
    def make(directory: Path) -> BrokerUnderTest:
        steps.append(name)
        places.append(directory)
        return NoBroker()  # type: ignore[return-value]

    return Side(name, make)


def test_rounds_take_sides_in_turn_and_give_up_on_what_failed_twice(
    steps: list[str], tmp_path: Path
) -> None:
    taken = Taken()
    places: list[Path] = []
    sides = {name: side(name, steps, places) for name in ("weak", "this")}
    take_rounds(taken, sides, ["raw"], 4, Effort.quick(), tmp_path)
    assert steps == ["weak", "this", "this", "weak", "this", "this"]
    assert [each.figures["this"] for each in taken.rounds] == [{"rate": 1.0}] * 4
    assert taken.notes == ["Pair 1, raw, weak: It broke.", "Pair 2, raw, weak: It broke."]
    assert len(set(places)) == len(places)
    assert not list(tmp_path.iterdir())


def test_a_broker_with_other_code_ends_the_run_and_its_data_goes(
    steps: list[str], tmp_path: Path
) -> None:
    def check(_: Path) -> None:
        raise WrongCode("other code")

    wrong = Side("wrong", side("wrong", steps, []).make, check)
    with pytest.raises(WrongCode):
        take_rounds(Taken(), {"wrong": wrong}, ["raw"], 2, Effort.quick(), tmp_path)
    assert not list(tmp_path.iterdir())
