"""The `magnetar` command: what it does with commands that are misspelt, or not to be had."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from magnetar.cli import main
from magnetar.cli.main import build_app
from magnetar.spark.cli import EXTRA

WITHOUT: Final = """
import json, sys
for name in json.loads(sys.argv.pop(1)):
    sys.modules[name] = None  # So it cannot be imported.
from magnetar.cli.main import main
main()
"""


def without(libraries: Sequence[str], *words: str) -> "subprocess.CompletedProcess[str]":
    """`magnetar` with these words in a Python that lacks these libraries."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(libraries), *words],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "meant"), [(["pipelin"], "pipeline"), (["topics", "lst"], "list")]
)
def test_a_misspelt_command_is_refused_with_the_one_that_is_meant(
    words: list[str], meant: str
) -> None:
    done = CliRunner().invoke(build_app(words[0]), words, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"No such command '{words[-1]}'. Did you mean '{meant}'?" in done.output


def test_commands_that_cannot_be_loaded_cost_no_other_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = "magnetar.commands"
    spoilt = EntryPoint("also", "no_such_module.cli:register", group)
    monkeypatch.setattr(
        main, "entry_points", lambda group: EntryPoints([spoilt, *entry_points(group=group)])
    )
    app = build_app()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("magnetar: the commands of `also` cannot be loaded (No module named ")
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    assert {"standalone", "peek", "pipeline"} <= set(listed.output.split())


@pytest.mark.parametrize(
    ("lacking", "store", "installed"),
    [
        ("grpc", "oxia://127.0.0.1:1/default", "grpcio"),
        ("xxhash", "oxia://127.0.0.1:1/default", "xxhash"),
        ("kazoo", "zk:127.0.0.1:1", "kazoo"),
    ],
)
def test_a_broker_of_a_cluster_says_what_to_install_where_its_libraries_are_not(
    tmp_path: Path, lacking: str, store: str, installed: str
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(
        f"metadata_store_url = {store!r}\ndata_dir = {str(tmp_path / 'data')!r}\n"
        f"bookkeeper_metadata_service_uri = 'metadata-store:{store}'\n"
    )
    ports = ("--port", "0", "--http-port", "1", "--bind-host", "127.0.0.1")
    done = without([lacking], "broker", "--config", str(file), *ports)
    assert done.returncode == 1
    assert done.stderr == (
        f"magnetar: {installed}, which brokers with shared stores need, is not installed: install "
        "magnetar-broker[cluster] (pip install './magnetar_broker[cluster]' in a checkout of the "
        "project).\n"
    )


def test_every_command_is_listed_where_spark_is_not_installed() -> None:
    done = without(EXTRA, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"standalone", "peek", "pipeline"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "orders"],
        ["replay", "orders", "again", "--checkpoint", "replay"],
        ["compact", "orders", "latest"],
        ["offload", "orders", "--to", "/tmp/table"],
    ],
    ids=lambda words: words[0],
)
def test_a_job_says_what_to_install_where_the_extra_is_not(words: list[str]) -> None:
    """The client alone has nothing of the extra.  Beside a broker of a cluster, obstore and xxhash
    are there.
    """
    of_broker = ("obstore", "xxhash")
    for lacking in (EXTRA, [name for name in EXTRA if name not in of_broker]):
        done = without(lacking, "pipeline", *words)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        found = re.fullmatch(r"magnetar: (\w+) is not installed; install the project with .*", line)
        assert found is not None
        assert found[1] in lacking
