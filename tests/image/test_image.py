"""The container image: the Dockerfile is built; its commands are run; a broker in it is used by the
official client, scraped, stopped.

It needs root on Debian 12, buildah, debootstrap and prometheus.  On another machine it is skipped;
under CI (`CI=true`), and by `make image-test`, what is missing is installed.
"""

import json
import os
import time
import tomllib
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import typer.main
from typer.core import TyperGroup

from magnetar.cli.main import build_app
from tests.image.builder import (
    TOOLS,
    ImageContainer,
    built_image,
    install_tools,
    missing_tools,
    wrong_machine,
)
from tests.image.prometheus import Prometheus
from tests.java import stock_driver
from tests.support.child_process import free_port
from tests.support.tools import require

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]
START_TIMEOUT_S: Final = 60
POLL_S: Final = 0.2
ASKING: Final = """
import json, subprocess, sys
from concurrent.futures import ThreadPoolExecutor

def asked(words):
    done = subprocess.run(["magnetar", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr

with ThreadPoolExecutor(2) as pool:
    print(json.dumps(list(pool.map(asked, json.loads(sys.argv[1])))))
"""
EXPLAINING: Final = """
import json, sys
from typer.testing import CliRunner
from magnetar.cli.main import build_app

app, runner = build_app(), CliRunner()
answers = [runner.invoke(app, [*words, "--help"]) for words in json.loads(sys.argv[1])]
print(json.dumps([[each.exit_code, each.stdout, each.stderr] for each in answers]))
"""
OF_SPARK: Final = (
    ("pipeline", "audit", "orders"),
    ("pipeline", "replay", "orders", "again", "--checkpoint", "/tmp/replay"),
    ("pipeline", "compact", "orders", "latest"),
    ("pipeline", "offload", "orders", "--to", "/tmp/table"),
)


class Answer(NamedTuple):
    """What became of a command."""

    status: int
    output: str
    error: str


class Container(NamedTuple):
    """A container of the image, and the ports that a broker in it takes."""

    image: ImageContainer
    port: int
    http_port: int

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def answers(self, commands: Sequence[Sequence[str]], script: str = ASKING) -> list[Answer]:
        """Of `magnetar` with these words, in the container, as a script there asks for them."""
        told = self.image.asked("python", "-c", script, json.dumps(commands))
        return [Answer(*each) for each in json.loads(told)]


@pytest.fixture(scope="module")
def image() -> Iterator[None]:
    wrong = wrong_machine()
    if wrong is not None:
        line = f"IMAGE TESTS DO NOT RUN: {wrong}. They need root on Debian 12."
        warnings.warn(line, stacklevel=1)
        pytest.skip(line)
    if os.environ.get("CI") == "true":
        install_tools()
    require(missing_tools(), "image", f"Debian's packages {' '.join(TOOLS)}")
    with built_image():
        yield


@pytest.fixture(scope="module")
def container(image: None) -> Iterator[Container]:
    port, http_port = free_port(), free_port()
    made = ImageContainer(
        {
            "MAGNETAR_PORT": str(port),
            "MAGNETAR_HTTP_PORT": str(http_port),
            "MAGNETAR_BIND_HOST": "127.0.0.1",
            "MAGNETAR_ADMIN_URL": f"http://127.0.0.1:{http_port}",
        },
    )
    try:
        yield Container(made, port, http_port)
    finally:
        made.close()


def start(container: ImageContainer, log: Path) -> None:
    container.start(log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not container.healthy():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(POLL_S)


def all_commands(group: TyperGroup, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of it and of all below it that are shown."""
    found = [words]
    for name, each in group.commands.items():
        if isinstance(each, TyperGroup):
            found += all_commands(each, (*words, name))
        elif not each.hidden:
            found.append((*words, name))
    return found


def test_every_command_of_the_project_is_there_and_explains_itself(container: Container) -> None:
    app = typer.main.get_command(build_app())
    assert isinstance(app, TyperGroup)
    commands = all_commands(app)
    assert {("standalone",), ("peek",), ("pipeline", "audit")} < set(commands)
    answers = container.answers(commands, EXPLAINING)
    for words, answer in zip(commands, answers, strict=True):
        assert (answer.status, answer.error) == (0, ""), (words, answer)
        assert "Usage: " in answer.output
    (overview,) = container.answers([["--help"]])
    assert {words[0] for words in commands if words} <= set(overview.output.split())


def test_commands_that_need_no_broker(container: Container) -> None:
    told, misspelt, config, unwell, *of_spark = container.answers(
        [["--version"], ["standalon"], ["config"], ["health"], *OF_SPARK]
    )
    assert told == Answer(0, f"magnetar {version('magnetar')}\n", "")
    assert misspelt.status == 2
    assert "No such command 'standalon'. Did you mean 'standalone'?" in misspelt.error
    assert "Traceback" not in misspelt.error
    settings = tomllib.loads(config.output)
    assert (config.status, settings["data_dir"], settings["port"]) == (0, "/data", container.port)
    assert (unwell.status, len(unwell.error.splitlines())) == (1, 1)
    for answer in of_spark:
        assert answer.status == 1
        assert answer.error.startswith("magnetar: pyspark is not installed; install ")
        assert len(answer.error.splitlines()) == 1


def test_the_image_serves_is_scraped_and_drains(container: Container, tmp_path: Path) -> None:
    require(stock_driver.missing_tools(), "image", "Maven and JDK 17")
    stock_driver.build()
    image, admin = container.image, container.admin_url
    assert image.uid != 0
    assert list(image.config["Volumes"]) == ["/data"]  # type: ignore[call-overload]
    try:
        start(image, tmp_path / "broker.log")
        driver = stock_driver.StockDriver()
        try:
            url = f"pulsar://127.0.0.1:{container.port}"
            case = driver.start("queue", url, admin, topic="image")
            assert case.result()["left_after_acks"] == 0
        finally:
            driver.close()
        with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{container.http_port}") as prometheus:
            assert prometheus.wait_for("sum(pulsar_in_messages_total) > 0")
        with urllib.request.urlopen(f"{admin}/admin/v2/brokers/health", timeout=5) as answer:
            assert answer.read() == b"ok"
        assert image.terminate() == 0
        # What it stored is in the volume: a new process finds it.
        start(image, tmp_path / "again.log")
        topics = f"{admin}/admin/v2/scalable/public/default"
        with urllib.request.urlopen(topics, timeout=5) as answer:
            assert json.load(answer) == ["topic://public/default/image"]
        assert image.terminate() == 0
    finally:
        image.kill()
