"""Commands that need a broker say what to install where only the library is installed."""

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magnetar.cli import broker_commands, main
from magnetar.cli.broker_commands import BROKER_COMMANDS
from magnetar.cli.main import build_app

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def without_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the entry points of `magnetar-broker`."""

    def of_library(*, group: str, name: str = "") -> EntryPoints:
        found = entry_points(group=group)
        kept = [each for each in found if each.module != "magnetar_broker"]
        return EntryPoints(each for each in kept if name in ("", each.name))

    with monkeypatch.context() as patch:
        for module in (main, broker_commands):
            patch.setattr(module, "entry_points", of_library)
        yield


def test_the_names_are_those_that_the_broker_adds() -> None:
    metadata = tomllib.loads((ROOT / "magnetar_broker" / "pyproject.toml").read_text("utf-8"))
    assert sorted(metadata["project"]["entry-points"]["magnetar.commands"]) == [*BROKER_COMMANDS]


@pytest.mark.parametrize(
    "words",
    [["demo"], ["topics", "list", "--json"], ["broker", "--help"], *([n] for n in BROKER_COMMANDS)],
    ids=" ".join,
)
def test_a_command_that_needs_a_broker_ends_with_what_to_install(words: list[str]) -> None:
    done = CliRunner().invoke(build_app(words[0]), words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"magnetar: `magnetar {words[0]}` needs the distribution magnetar-broker, which is not "
        "installed; install it (pip install ./magnetar_broker in a checkout of the project).\n"
    )


def test_help_lists_only_the_commands_of_the_library() -> None:
    done = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "200"})
    assert {"demo", "peek"} <= set(done.output.split())
    assert "standalone" not in done.output
    assert "come with magnetar-broker" in done.output
