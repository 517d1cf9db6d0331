"""The first words and the end of a broker process."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

import magnetar
from broker.cli import commands, serving
from broker.placement import BrokerAddress
from config.settings import ProviderName, Settings
from magnetar.cli import main
from magnetar.cli.main import build_app
from magnetar.errors import AuthenticationFailed
from storage.data_directory import ADDRESS_FILE
from tests.support.authority import Authority
from tests.support.child_process import free_port

HOST: Final = "127.0.0.1"
STANDALONE: Final = (sys.executable, "-m", main.__name__, "standalone")


async def test_stores_that_do_not_answer_are_not_waited_for() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with capture_logs() as logged:
        await asyncio.wait_for(serving.stop_in_time(never, 0.01), 5)
    assert [each["event"] for each in logged] == ["stop_timed_out"]
    assert never.cancelled()


async def test_signal_ends_a_start_that_takes_long() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    assert not await asyncio.wait_for(serving.started_before(stop, asyncio.sleep(60)), 5)


async def test_error_of_a_start_is_raised() -> None:
    async def start() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await serving.started_before(asyncio.Event(), start())


def address(http_port: int) -> BrokerAddress:
    return BrokerAddress("pulsar://127.0.0.1:6650", None, f"http://127.0.0.1:{http_port}")


def test_banner_names_each_address() -> None:
    both = BrokerAddress(
        "pulsar://b:6650", "pulsar+ssl://b:6651", "http://b:8080", "", "https://b:1"
    )
    banner = serving.banner(Settings(), both, 0.1)
    for url in (both.url, both.url_tls, both.web_url, both.web_url_tls):
        assert f" {url}" in banner
    only_tls = BrokerAddress("", "pulsar+ssl://b:6651", "", "", "https://b:8443")
    banner = serving.banner(Settings(), only_tls, 0.1)
    assert "http://" not in banner
    assert "pulsar://" not in banner
    assert "topics get my-topic --admin-url https://b:8443 --tls-trust-file FILE\n" in banner


@pytest.mark.parametrize(
    ("provider", "shown"),
    [
        ("token", "--token-file FILE"),
        ("oidc", "--token-file FILE"),
        ("basic", "--basic-user USER --basic-password-file FILE"),
        ("tls", "--tls-certificate-file FILE --tls-key-file FILE"),
    ],
)
def test_banner_has_the_options_that_its_commands_need(provider: ProviderName, shown: str) -> None:
    settings = Settings.model_construct(authentication_providers=(provider,))
    me = BrokerAddress("pulsar://a:6650", web_url="http://a:8080")
    assert f"topics get my-topic {shown}\n" in serving.banner(settings, me, 0.1)
    # By the hints of --secure they are in the environment.
    hinted = serving.banner(settings, me, 0.1, ["export MAGNETAR_TOKEN_FILE=t"])
    assert "topics get my-topic\n" in hinted


def test_banner_suggests_a_command_with_this_brokers_url() -> None:
    hint = "topics get my-topic --admin-url http://127.0.0.1:18080\n"
    assert hint in serving.banner(Settings(), address(18080), 0.1)
    assert "--admin-url" not in serving.banner(Settings(), address(8080), 0.1)


@pytest.fixture
def ports_in_use() -> Iterator[tuple[int, int]]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind((HOST, 0))
            each.listen()
        yield one.getsockname()[1], other.getsockname()[1]


@pytest.mark.parametrize("in_use", ["port", "http_port", "both"])
def test_broker_names_each_port_that_is_in_use(
    tmp_path: Path, ports_in_use: tuple[int, int], in_use: str
) -> None:
    port, http_port = ports_in_use
    given = ["--port", str(port if in_use != "http_port" else 0)]
    given += ["--http-port", str(http_port if in_use != "port" else 0)]
    done = subprocess.run(
        [*STANDALONE, "--bind-host", HOST, "--data-dir", str(tmp_path), *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    named = [f"Port {port} for clients"] if in_use != "http_port" else []
    named += [f"Port {http_port} for REST and metrics"] if in_use != "port" else []
    errors = [line for line in done.stderr.splitlines() if line.startswith("magnetar: ")]
    assert [error.split(" is in use")[0] for error in errors] == [
        f"magnetar: {each}" for each in named
    ]


def test_broker_asks_for_another_bind_host_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [*STANDALONE, "--insecure", "--bind-host", "192.0.2.1", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("magnetar: ")]
    assert "set bind_host (--bind-host) to one of its addresses" in error


def test_hangup_loads_the_new_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    made = authority.issue("broker")
    given = ["--port", "0", "--http-port", "0", "--port-tls", str(port := free_port())]
    files = {"TLS_CERTIFICATE_FILE": made.chain, "TLS_KEY_FILE": made.key}
    process = subprocess.Popen(
        [*STANDALONE, "--bind-host", HOST, "--data-dir", str(tmp_path / "data"), *given],
        env={**os.environ, **{f"MAGNETAR_{name}": str(path) for name, path in files.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        assert any(f"pulsar+ssl://{HOST}:{port}" in line for line in lines)
        assert any("Ctrl-C" in line for line in lines)
        assert ssl.get_server_certificate((HOST, port)) == made.chain.read_text()
        authority.issue("broker")
        process.send_signal(signal.SIGHUP)
        assert any("security_files_loaded" in line for line in lines)
        assert ssl.get_server_certificate((HOST, port)) == made.chain.read_text()
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0


async def _produce_without_a_token(url: str, trust: Path) -> None:
    async with (
        magnetar.connect(url, tls_trust_file=trust) as client,
        client.producer("topic://public/default/t", schema=str) as producer,
    ):
        await producer.send("hello")


async def test_secure_start_serves_the_token_that_it_prints_the_file_of(tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    process = subprocess.Popen(
        [
            *STANDALONE,
            *("--secure", "--data-dir", str(tmp_path / "data")),
            *("--port-tls", str(port), "--http-port-tls", str(http_port)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        exported = {}
        for line in iter(process.stdout.readline, ""):
            if "export " in line:
                name, _, value = line.partition("export ")[2].strip().partition("=")
                exported[name] = value
            if "Ctrl-C" in line:
                break
        trust = Path(exported["MAGNETAR_TLS_TRUST_FILE"])
        token = Path(exported["MAGNETAR_TOKEN_FILE"]).read_text()
        assert exported["MAGNETAR_ADMIN_URL"] == f"https://{HOST}:{http_port}"
        url = exported["MAGNETAR_URL"]
        async with (
            magnetar.connect(url, tls_trust_file=trust, token=token) as client,
            client.producer("topic://public/default/t", schema=str) as producer,
        ):
            await producer.send("hello")
        with pytest.raises(AuthenticationFailed):
            await _produce_without_a_token(url, trust)
        await asyncio.to_thread(_check_health_beside, tmp_path / "data")
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert not (tmp_path / "data" / ADDRESS_FILE).exists()


def _check_health_beside(data_dir: Path) -> None:
    """The health check needs no arguments, and no token that has not expired."""
    here = {"MAGNETAR_DATA_DIR": str(data_dir)}
    for token in (None, "e.y.J"):
        if token is not None:
            (data_dir / "security" / "admin.token").write_text(token)
        done = CliRunner().invoke(build_app(), ["health"], env=here)
        assert (done.exit_code, done.stdout) == (0, "ok\n")
    refused = CliRunner().invoke(build_app(), ["health"], env=here | {"MAGNETAR_TOKEN": "e.y.J"})
    assert refused.exit_code == 1
    assert "Give other credentials" in refused.output


@pytest.mark.parametrize(
    ("words", "variables", "file"),
    [
        (["--secure", "--insecure"], {}, ""),
        (["--secure"], {"MAGNETAR_INSECURE": "true"}, ""),
        (["--secure"], {}, "insecure = true"),
    ],
)
def test_secure_and_insecure_exclude_each_other(
    tmp_path: Path, words: list[str], variables: dict[str, str], file: str
) -> None:
    done = standalone(tmp_path, words, variables, file)
    assert done.exit_code == 1
    assert "give one of them" in done.output
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("words", "variables", "file", "secure"),
    [
        ([], {}, "", True),
        ([], {"MAGNETAR_INSECURE": "false"}, "", True),
        ([], {}, "cluster_name = 'c'", True),
        (["--insecure"], {}, "", False),
        ([], {"MAGNETAR_INSECURE": "1"}, "", False),
        ([], {}, "insecure = true", False),
        ([], {"MAGNETAR_AUTHENTICATION_PROVIDERS": "tls"}, "", False),
        ([], {}, "authentication_providers = ['basic']", False),
        # An empty variable counts as none, as for all settings.
        (
            [],
            {"MAGNETAR_AUTHENTICATION_PROVIDERS": ""},
            "authentication_providers = ['tls']",
            False,
        ),
        ([], {"MAGNETAR_INSECURE": ""}, "insecure = true", False),
        (["--secure"], {"MAGNETAR_AUTHENTICATION_PROVIDERS": "token"}, "", True),
    ],
)
def test_secure_of_the_environment_gives_way_to_what_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    variables: dict[str, str],
    file: str,
    secure: bool,
) -> None:
    """The image sets it, so that only a container that is told so serves everybody."""
    served: list[Settings] = []
    monkeypatch.setattr(commands, "_serve", lambda settings, hints: served.append(settings))
    variables |= {"MAGNETAR_SECURE": "true", "MAGNETAR_BIND_HOST": "0.0.0.0"}
    done = standalone(tmp_path, words, variables, file)
    assert done.exit_code == 0, done.output
    (settings,) = served
    assert settings.plaintext_ports is not secure
    assert (tmp_path / "data").exists() is secure


def standalone(
    directory: Path, words: Sequence[str], variables: Mapping[str, str], file: str
) -> Result:
    config = directory / "broker.toml"
    config.write_text(file)
    command = ["standalone", "--config", str(config), "--data-dir", str(directory / "data")]
    return CliRunner().invoke(build_app(), [*command, *words], env=dict(variables))
