"""The installed project: where Python, editors and type checkers find it."""

import asyncio
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Final

import pytest
import typer

from bench.beside.checkouts import projects_of, put_work_tree
from bench.beside.environments import site_packages
from broker.app.shared_stores import CLUSTER_LIBRARIES
from magnetar.spark.cli import EXTRA
from magnetar_broker.hatch_build import PACKAGES
from tests.support.broker_process import BrokerProcess, Code

ROOT: Final = Path(__file__).resolve().parents[2]
MYPY_CACHE: Final = ROOT / "build" / "mypy-elsewhere"
OF_A_USER: Final = (
    "broker.py",
    "config.py",
    "pipeline/__init__.py",
    "protocol.py",
    "storage/__init__.py",
    "txn.py",
)
HIS: Final = """
import magnetar, magnetar.sync, magnetar.cli.commands, magnetar.spark.cli
magnetar.connect
import broker, config, pipeline, protocol, storage, txn
for module in (broker, config, pipeline, protocol, storage, txn):
    assert module.WHOSE == "the user", module
"""
PROGRAM: Final = """
import sys
import config, storage
import magnetar.sync
with magnetar.sync.connect(sys.argv[1]) as client:
    name = "persistent://public/default/orders"
    with (
        client.queue_consumer(name, "mine", schema=str) as orders,
        client.producer(name, schema=str) as producer,
    ):
        producer.send("one coffee")
        assert orders.receive(timeout_s=20).value == "one coffee"
assert (config.WHOSE, storage.WHOSE) == ("the user", "the user")
"""
USER: Final = """
import magnetar
import magnetar.sync

reveal_type(magnetar.connect)
reveal_type(magnetar.sync.connect)
"""


@pytest.fixture(scope="module")
def installed() -> Distribution:
    for found in distributions(name="magnetar"):
        if '"editable": true' in (found.read_text("direct_url.json") or ""):
            return found
    pytest.skip("The project is not installed by `pip install --editable`.")


def test_an_editable_install_is_a_plain_path(installed: Distribution) -> None:
    """No import hook, which editors and type checkers do not run."""
    files = [Path(str(installed.locate_file(file))) for file in installed.files or []]
    (path_file,) = [file for file in files if file.suffix == ".pth"]
    assert path_file.read_text("utf-8").split() == [str(ROOT)]
    site = path_file.parent
    assert not [file for file in files if file.suffix == ".py" and file.is_relative_to(site)]


@pytest.mark.timeout(300)
def test_a_type_checker_finds_the_client_from_elsewhere(
    installed: Distribution, tmp_path: Path
) -> None:
    user = tmp_path / "user.py"
    user.write_text(USER, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", MYPY_CACHE, user],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(revealed) == 2
    assert "magnetar.client.Client" in revealed[0]
    assert "magnetar.sync." in revealed[1]


def test_the_image_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    packages |= {"magnetar_broker", *PACKAGES}
    copied = re.findall(r"^COPY (\w+) \w+$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert set(copied) == packages
    sent = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {f"!{name}" for name in packages} <= set(sent)


def test_bounds_that_both_distributions_name_are_the_same() -> None:
    library, broker = projects_of(ROOT)
    named = {*library["dependencies"], *broker["dependencies"]}
    named |= set(library["optional-dependencies"]["spark"])
    named |= set(broker["optional-dependencies"]["cluster"])
    names = [re.match(r"[\w-]+", each) for each in named]
    assert len({found[0] for found in names if found}) == len(named)
    assert not {"magnetar", *broker["dependencies"]} & set(library["dependencies"])


def test_a_broker_knows_every_library_of_the_extra_for_clusters() -> None:
    """It says what to install where one of these is missing, and raises for any other."""
    extra = projects_of(ROOT)[1]["optional-dependencies"]["cluster"]
    names = re.findall(r"^[\w-]+", "\n".join(extra), re.MULTILINE)
    assert sorted(names) == sorted(CLUSTER_LIBRARIES.values())


def test_the_libraries_for_clusters_are_in_the_image_and_not_in_make_run() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    assert "'magnetar-broker[cluster]'" in dockerfile
    makefile = (ROOT / "Makefile").read_text("utf-8")
    installs = dict(re.findall(r"^\$\(VENV\)/\.(\w+): .*\n\t(.*)$", makefile, re.MULTILINE))
    with_them = {name for name, install in installs.items() if "[cluster]" in install}
    assert (set(installs), with_them) == ({"broker", "tests", "spark"}, {"tests", "spark"})


def test_the_commands_of_spark_know_every_library_of_the_extra() -> None:
    """They say what to install where one of these is missing, and raise for any other."""
    extra = projects_of(ROOT)[0]["optional-dependencies"]["spark"]
    assert sorted(re.findall(r"^[\w-]+", "\n".join(extra), re.MULTILINE)) == sorted(EXTRA)


def test_an_entry_point_has_the_name_of_a_command() -> None:
    """`magnetar` loads the one that it is asked for."""
    library, broker = (each["entry-points"]["magnetar.commands"] for each in projects_of(ROOT))
    assert {each.partition(":")[0] for each in broker.values()} == {"magnetar_broker"}
    app = typer.Typer()
    for target in sorted({*library.values(), *broker.values()}):
        EntryPoint("any", target, "magnetar.commands").load()(app)
    commands = {each.name for each in app.registered_commands}
    assert commands | {each.name for each in app.registered_groups} == {*library, *broker}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, built of the files that git knows."""
    place = tmp_path_factory.mktemp("wheels")
    tree = put_work_tree(place).directory
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(place)]
    subprocess.run([*pip, str(tree), str(tree / "magnetar_broker")], check=True, timeout=120)
    return place


def test_each_wheel_puts_one_name_into_site_packages(wheels: Path) -> None:
    tops = {}
    for wheel in wheels.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        tops[wheel.name.partition("-")[0]] = {
            name.partition("/")[0] for name in names if ".dist-info/" not in name
        }
    assert tops == {"magnetar": {"magnetar"}, "magnetar_broker": {"magnetar_broker"}}


def make_user(directory: Path) -> None:
    """Modules of a user, with the names of ours."""
    for name in OF_A_USER:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("WHOSE = 'the user'\n", "utf-8")


@pytest.mark.parametrize("with_broker", [False, True])
def test_modules_of_a_user_stay_his_beside_each_distribution(
    wheels: Path, tmp_path: Path, with_broker: bool
) -> None:
    python = install(wheels, tmp_path / "environment", with_broker=with_broker)
    make_user(tmp_path / "user")
    variables = os.environ | {"PYTHONPATH": str(tmp_path / "user"), "COLUMNS": "200"}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(python), *words],
            cwd=tmp_path / "user",
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    his = run("-c", HIS)
    assert his.returncode == 0, his.stderr
    for words in (["--help"], ["--version"], ["pipeline", "--help"]):
        done = run("-m", "magnetar.cli.main", *words)
        assert (done.returncode, done.stderr) == (0, "")
    listed = run("-m", "magnetar.cli.main", "--help").stdout
    assert ("standalone" in listed) == with_broker
    shown = run("-m", "magnetar.cli.main", "config")
    assert (shown.returncode == 0) == with_broker, shown.stderr
    if with_broker:
        serve(python, tmp_path / "user", variables)


def install(wheels: Path, place: Path, *, with_broker: bool) -> Path:
    """Unpack wheels as pip does, beside the libraries of this run and without its own project."""
    venv.create(place, symlinks=True)
    site = site_packages(place)
    libraries = [each for each in sys.path if each.endswith("-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries), "utf-8")
    for wheel in wheels.glob("magnetar*.whl" if with_broker else "magnetar-*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    if not with_broker:  # The metadata of this run's own install is hidden by its name.
        metadata = site / "magnetar_broker-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: magnetar-broker\nVersion: 0\n", "utf-8")
    return place / "bin" / "python"


def serve(python: Path, user: Path, variables: Mapping[str, str]) -> None:
    """A broker starts beside the user's modules, and a program of his sends and receives."""
    code = Code(user, python, {"PYTHONPATH": variables["PYTHONPATH"]})
    broker = BrokerProcess(user.parent, code=code)

    async def use() -> None:
        try:
            await broker.start()
            program = [str(python), "-c", PROGRAM, f"pulsar://127.0.0.1:{broker.port}"]
            done = await asyncio.to_thread(
                subprocess.run, program, cwd=user, env=variables, timeout=60, check=False
            )
            assert done.returncode == 0
        finally:
            broker.kill()

    asyncio.run(use())
