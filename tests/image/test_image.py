"""The container image: the Dockerfile is built; its commands are run; a broker in it, secure as the
image is, is used by the official client, scraped, stopped; and started as an operator may tell it.

It needs root on Debian 12, buildah, debootstrap and prometheus.  On another machine it is skipped;
under CI (`CI=true`), and by `make image-test`, what is missing is installed.
"""

import datetime
import json
import os
import re
import socket
import ssl
import stat
import time
import tomllib
import urllib.error
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
from security.first_start import self_signed
from security.new_keys import new_secret
from tests.image.builder import (
    ROOT,
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
from tests.support.roles import java_arguments
from tests.support.tools import require

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]
START_TIMEOUT_S: Final = 60
POLL_S: Final = 0.2
OWN: Final = ("magnetar", "magnetar-broker")
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
INSTALLED: Final = """
import json
from importlib.metadata import distributions
print(json.dumps({each.metadata["Name"]: each.version for each in distributions()}))
"""
SBOM: Final = "/usr/share/doc/magnetar/sbom.json"
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
    port_tls: int
    http_port_tls: int

    @property
    def admin_url(self) -> str:
        """Of REST over TLS."""
        return f"https://127.0.0.1:{self.http_port_tls}"

    @property
    def security(self) -> Path:
        """The files that a secure start makes."""
        return self.image.volume / "security"

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
    port, http_port, port_tls, http_port_tls = (free_port() for _ in range(4))
    # All that differs from the image: it listens where nobody else does.  Ports with TLS are given
    # to the secure start alone.
    made = ImageContainer(
        {
            "MAGNETAR_PORT": str(port),
            "MAGNETAR_HTTP_PORT": str(http_port),
            "MAGNETAR_BIND_HOST": "127.0.0.1",
        }
    )
    try:
        yield Container(made, port, http_port, port_tls, http_port_tls)
    finally:
        made.close()


def start(container: ImageContainer, log: Path, *command: str) -> int:
    """Start a broker, wait until it is healthy, and return its process's id."""
    pid = container.start(log, *command)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not container.healthy():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(POLL_S)
    return pid


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
    assert config.status == 0, config
    settings = tomllib.loads(config.output)
    assert (settings["data_dir"], settings["port"]) == ("/data", container.port)
    assert (settings["authorization"], settings["plaintext_ports"]) == ("on", False)
    assert (unwell.status, len(unwell.error.splitlines())) == (1, 1)
    for answer in of_spark:
        assert answer.status == 1
        assert answer.error.startswith("magnetar: pyspark is not installed; install ")
        assert len(answer.error.splitlines()) == 1


def test_list_of_contents_is_what_is_installed(container: Container) -> None:
    image = container.image
    listed = json.loads(image.asked("cat", SBOM))
    found: dict[str, dict[str, str]] = {"pypi": {}, "deb": {}}
    for each in (listed["metadata"]["component"], *listed["components"]):
        kind = each.get("purl", "").partition(":")[2].partition("/")[0]
        if kind:
            found[kind][each["name"]] = each["version"]
        if kind == "pypi":
            assert each["licenses"], f"{each['name']} has no licence"
            assert [sum_["alg"] for sum_ in each["hashes"]] == ["SHA-256"]
    installed = json.loads(image.asked("python", "-c", INSTALLED))
    assert found["pypi"] == {canonical(name): number for name, number in installed.items()}
    assert found["pypi"] == locked() | dict.fromkeys(OWN, version("magnetar"))
    form = "${Package}\\t${Version}\\n"
    packages = image.asked("dpkg-query", "--show", "--showformat", form)
    assert found["deb"] == dict(line.split("\t") for line in packages.splitlines())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = (ROOT / "deploy/image/requirements.txt").read_text("utf-8")
    return dict(re.findall(r"^([\w-]+)==([\w.]+) ", lines, re.MULTILINE))


def test_the_image_is_secure_serves_is_scraped_and_drains(
    container: Container, tmp_path: Path
) -> None:
    require(stock_driver.missing_tools(), "image", "Maven and JDK 17")
    stock_driver.build()
    image = container.image
    assert image.uid != 0
    assert list(image.config["Volumes"]) == ["/data"]  # type: ignore[call-overload]
    try:
        ports = (f"--port-tls={container.port_tls}", f"--http-port-tls={container.http_port_tls}")
        pid = start(image, tmp_path / "broker.log", *image.words("Cmd"), *ports)
        check_confinement(image, pid)
        check_secrets(container, (tmp_path / "broker.log").read_text())
        use_with_the_official_client(container)
        target = f"localhost:{container.http_port_tls}"
        trust = container.security / "certificate.pem"
        with Prometheus(tmp_path / "prometheus", target, trust) as prometheus:
            assert prometheus.wait_for("sum(pulsar_in_messages_total) > 0")
        # A command inside needs no address and no token.
        listed = container.answers([["topics", "list"]])[0]
        assert (listed.status, "image" in listed.output) == (0, True), listed
        assert image.terminate() == 0
        serve_as_told(container, tmp_path)
    finally:
        image.kill()


def check_confinement(image: ImageContainer, pid: int) -> None:
    """The broker can write nothing but its volume, and has no rights that it could use."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == [str(image.uid)] * 4
    assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {
        "0" * 16
    }
    assert status["NoNewPrivs"] == "1"
    assert image.asked("sh", "-c", "touch /tmp/x 2>&1 || true").endswith("Read-only file system\n")
    assert image.asked("sh", "-c", "ls /opt/magnetar/bin").split().count("pip") == 0


def check_secrets(container: Container, log: str) -> None:
    """Files of the first start are for the broker alone, and none of them is in its log."""
    files = {path.name: path for path in container.security.iterdir()}
    assert set(files) == {"secret.key", "admin.token", "certificate.pem", "certificate.key"}
    for path in (container.security, *files.values()):
        status = path.stat()
        assert status.st_uid == container.image.uid
        assert stat.S_IMODE(status.st_mode) == (0o700 if path.is_dir() else 0o600)
    assert "MAGNETAR_TOKEN_FILE=/data/security/admin.token" in log
    for name in ("admin.token", "certificate.key"):
        assert files[name].read_text().splitlines()[-2:][0] not in log


def use_with_the_official_client(container: Container) -> None:
    """Over TLS with the token; whoever has no token, or does not trust the broker, gets nothing."""
    trust = container.security / "certificate.pem"
    token = (container.security / "admin.token").read_text()
    admin = container.admin_url
    driver = stock_driver.StockDriver()
    try:
        case = driver.start(
            "queue",
            f"pulsar+ssl://localhost:{container.port_tls}",
            admin,
            topic="image",
            trust=str(trust),
            **java_arguments(token, admin_token=token),
        )
        assert case.result()["left_after_acks"] == 0
    finally:
        driver.close()
    context = ssl.create_default_context(cafile=str(trust))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{admin}/admin/v2/brokers/health", timeout=5, context=context)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{admin}/metrics", timeout=5)
    for port in (container.port, container.http_port):  # Nothing listens without TLS.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


def serve_as_told(container: Container, tmp_path: Path) -> None:
    """On the same volume: without security, and by settings of the operator's own.

    The health check needs no arguments in either, though the files of the first start are there.
    """
    image = container.image
    start(image, tmp_path / "insecure.log", "standalone", "--insecure")
    # What was stored is in the volume: a new process finds it.
    topics = f"http://127.0.0.1:{container.http_port}/admin/v2/scalable/public/default"
    with urllib.request.urlopen(topics, timeout=5) as answer:
        assert json.load(answer) == ["topic://public/default/image"]
    assert image.terminate() == 0
    trust = mount_as_kubernetes(image, container)
    start(image, tmp_path / "own.log", *image.words("Cmd"), "--config=/data/mounted/broker.toml")
    topics = topics.replace(f"http://127.0.0.1:{container.http_port}", container.admin_url)
    context = ssl.create_default_context(cafile=str(trust))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(topics, timeout=5, context=context)
    assert image.terminate() == 0


def mount_as_kubernetes(image: ImageContainer, container: Container) -> Path:
    """Settings and secrets that belong to root, which the group may read (`fsGroup`)."""
    mounted = image.volume / "mounted"
    mounted.mkdir()
    key, certificate = self_signed(["127.0.0.1"], now=datetime.datetime.now(datetime.UTC))
    settings = f"""
        plaintext_ports = false
        port_tls = {container.port_tls}
        http_port_tls = {container.http_port_tls}
        tls_certificate_file = "/data/mounted/tls.crt"
        tls_key_file = "/data/mounted/tls.key"
        authentication_providers = ["token"]
        token_secret_keys = ["file:///data/mounted/secret.key"]
    """
    contents = {
        "broker.toml": settings.encode(),
        "tls.crt": certificate,
        "tls.key": key,
        "secret.key": new_secret("HS256"),
    }
    for name, content in contents.items():
        (mounted / name).write_bytes(content)
        os.chown(mounted / name, 0, image.gid)
        (mounted / name).chmod(0o440)
    return mounted / "tls.crt"
