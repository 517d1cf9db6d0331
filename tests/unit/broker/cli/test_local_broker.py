"""Commands beside a broker that was started with --secure: its files say where and who."""

import datetime
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from broker.cli.rest_commands import DEFAULT_ADMIN_URL, Admin
from magnetar.cli.main import build_app
from security.first_start import SecurityFiles, security_files
from tests.unit.broker.cli.test_rest_client import Server, started, stopped

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def files(tmp_path: Path) -> SecurityFiles:
    return security_files(tmp_path, "broker.example", now=NOW)


@pytest.fixture
def secured(files: SecurityFiles) -> Iterator[Server]:
    """The REST port of that broker."""
    server = Server()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.certificate_key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    stopped(server)


def run(command: str, data_dir: Path, port: int, **environment: str) -> Result:
    names = {
        "MAGNETAR_DATA_DIR": str(data_dir),
        "MAGNETAR_HTTP_PORT_TLS": str(port),
        **environment,
    }
    return CliRunner().invoke(build_app(), command.split(), env=names)


@pytest.mark.parametrize("command", ["health", "txn show 1_2"])
def test_files_in_the_data_directory_are_used(
    secured: Server, files: SecurityFiles, tmp_path: Path, command: str
) -> None:
    run(command, tmp_path, secured.server_port)
    # The server knows no such path, but it has been asked, with the token.
    assert len(secured.paths) == 1
    admin = Admin(data_dir=tmp_path)
    assert admin.authorization() == f"Bearer {files.admin_token.read_text().strip()}"


def test_token_of_the_data_directory_is_sent_to_no_other_address(
    secured: Server, tmp_path: Path
) -> None:
    other = started()
    try:
        url = f"{other.url}/x"
        done = run("health", tmp_path, secured.server_port, MAGNETAR_ADMIN_URL=url)
        assert done.exit_code == 0, done.output
        assert other.authorizations == [None]
        assert secured.paths == []
    finally:
        stopped(other)


def test_other_credentials_take_the_place_of_the_token(
    secured: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Admin(data_dir=tmp_path, token="e.y.J")
    assert admin.authorization() == "Bearer e.y.J"
    assert admin.url == "https://127.0.0.1:8443"
    monkeypatch.setenv("MAGNETAR_HTTP_PORT_TLS", "9443")
    assert Admin(data_dir=tmp_path).url == "https://127.0.0.1:9443"


def test_certificate_of_the_broker_is_not_shown_as_that_of_a_client(
    secured: Server, files: SecurityFiles, tmp_path: Path
) -> None:
    own = {
        "MAGNETAR_TLS_CERTIFICATE_FILE": str(tmp_path / "missing.pem"),
        "MAGNETAR_TLS_KEY_FILE": str(tmp_path / "missing.key"),
    }
    done = run("health", tmp_path, secured.server_port, **own)
    assert "missing" not in done.output
    assert len(secured.paths) == 1


def test_another_server_on_the_port_gets_no_token(tmp_path: Path, secured: Server) -> None:
    elsewhere = tmp_path / "other"
    security_files(elsewhere, "broker.example", now=NOW)
    done = run("health", elsewhere, secured.server_port)
    assert done.exit_code == 1
    assert "not trusted" in done.output
    assert secured.paths == []


def test_data_directory_without_these_files_changes_nothing(tmp_path: Path) -> None:
    for admin in (Admin(), Admin(data_dir=tmp_path / "missing"), Admin(data_dir=tmp_path)):
        assert admin.url == DEFAULT_ADMIN_URL
        assert admin.authorization() is None
        assert admin.tls_context() is None
