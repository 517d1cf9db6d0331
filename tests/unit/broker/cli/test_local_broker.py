"""Commands beside a broker of the same machine: files in its data directory say where and who."""

import datetime
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from broker.cli.local_broker import AddressNote, LocalBroker
from broker.cli.rest_commands import DEFAULT_ADMIN_URL, Admin
from broker.placement import BrokerAddress
from config.settings import Settings, load_settings
from magnetar.cli.main import build_app
from security.first_start import security_files
from security.first_start_files import SecurityFiles
from storage.data_directory import ADDRESS_FILE, DataDirectory
from tests.support.authority import Authority
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


def test_data_directory_without_these_files_changes_nothing_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data_dir in (None, tmp_path / "missing", tmp_path):
        monkeypatch.setenv("MAGNETAR_DATA_DIR", str(data_dir or ""))
        admin = Admin(data_dir=data_dir)
        assert admin.url == DEFAULT_ADMIN_URL
        assert admin.authorization() is None
        assert admin.tls_context() is None


@pytest.mark.parametrize("command", ["health", "topics delete orders"])
def test_data_directory_of_no_broker_on_the_command_line_asks_no_other_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    other = started()
    monkeypatch.setattr("broker.cli.rest_commands.DEFAULT_ADMIN_URL", other.url)
    try:
        named = f"{command} --data-dir {tmp_path}"
        done = CliRunner().invoke(build_app(), named.split(), env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert "no broker with the data directory" in done.output
        assert other.paths == []
        # An address that is given besides counts alone.
        done = CliRunner().invoke(build_app(), [*named.split(), "--admin-url", other.url])
        assert len(other.paths) == 1
        run(command, tmp_path, 1)
        assert len(other.paths) == 2
    finally:
        stopped(other)


# The file ADDRESS


def note(
    data_dir: Path, *, http_port: int = 0, https_port: int = 0, **settings: object
) -> Settings:
    """A broker with this data directory has just started, and listens on these ports."""
    known = load_settings(None, {"data_dir": data_dir, **settings})
    me = BrokerAddress(
        "pulsar://broker.example:6650",
        web_url=f"http://broker.example:{http_port}" if http_port else "",
        web_url_tls=f"https://broker.example:{https_port}" if https_port else None,
    )
    AddressNote(known, me).write()
    return known


def test_an_insecure_broker_gets_no_token_though_there_is_one(
    files: SecurityFiles, tmp_path: Path
) -> None:
    plain = started()
    try:
        note(tmp_path, http_port=plain.server_port)
        done = run("health", tmp_path, 1)
        assert done.exit_code == 0, done.output
        assert plain.paths == ["/admin/v2/brokers/health"]
        assert plain.authorizations == [None]
    finally:
        stopped(plain)


def test_token_goes_to_the_noted_port_whatever_name_the_certificate_has(
    secured: Server, files: SecurityFiles, tmp_path: Path
) -> None:
    secured_note(secured, files, tmp_path)
    done = run("health", tmp_path, 1)
    assert done.exit_code == 0, done.output
    assert secured.authorizations == [f"Bearer {files.admin_token.read_text()}"]
    assert run("txn show 1_2", tmp_path, 1).output
    assert len(secured.authorizations) == 2


def secured_note(server: Server, files: SecurityFiles, data_dir: Path) -> None:
    settings = files.settings | {"https_port": server.server_port}
    note(data_dir, **settings)  # type: ignore[arg-type]


def test_only_the_certificate_of_the_broker_is_trusted_with_the_token(
    secured: Server, files: SecurityFiles, tmp_path: Path
) -> None:
    """Nor is another certificate of its authority, which the file of a chain may have too."""
    authority = Authority(tmp_path / "authority")
    other, ours = authority.issue("other"), authority.issue("broker")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(ours.chain.read_bytes() + authority.chain.read_bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(other.chain, other.key)
    server = Server()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        settings = files.settings | {"tls_certificate_file": chain, "tls_key_file": ours.key}
        note(tmp_path, https_port=server.server_port, **settings)  # type: ignore[arg-type]
        refused = run("txn show 1_2", tmp_path, 1)
        assert (refused.exit_code, server.paths) == (1, [])
        assert "not trusted" in refused.output
        # The health check asks without the token, as one who knows nothing.
        assert run("health", tmp_path, 1).exit_code == 0
        assert (server.paths, server.authorizations) == (["/admin/v2/brokers/ready"], [None])
        context.load_cert_chain(ours.chain, ours.key)
        run("txn show 1_2", tmp_path, 1)
        assert server.authorizations[1:] == [f"Bearer {files.admin_token.read_text()}"]
    finally:
        stopped(server)


def test_broker_with_other_authentication_is_asked_what_everybody_may_ask(tmp_path: Path) -> None:
    plain = started()
    try:
        key = "data:;base64," + "a" * 44
        note(
            tmp_path,
            http_port=plain.server_port,
            authentication_providers="token",
            token_secret_keys=key,
        )
        assert run("health", tmp_path, 1).exit_code == 0
        assert plain.paths == ["/admin/v2/brokers/ready"]
        # Credentials that are given are used, and may be wrong.
        assert run("health", tmp_path, 1, MAGNETAR_TOKEN="e.y.J").exit_code == 0
        assert plain.paths[1:] == ["/admin/v2/brokers/health"]
    finally:
        stopped(plain)


@pytest.mark.parametrize(
    ("bind_host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("fd00::1", "[fd00::1]"),
        ("192.0.2.1", "192.0.2.1"),
    ],
)
def test_note_names_an_address_that_the_broker_listens_on(
    tmp_path: Path, bind_host: str, reached: str
) -> None:
    note(tmp_path, http_port=8081, bind_host=bind_host, insecure=True)
    assert Admin(data_dir=tmp_path).url == f"http://{reached}:8081"


def test_note_ends_with_its_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNETAR_DATA_DIR", str(tmp_path))
    settings = note(tmp_path, http_port=8081)
    AddressNote(settings, BrokerAddress("", web_url="http://other:8082")).remove()
    assert Admin(data_dir=tmp_path).url == "http://127.0.0.1:8081"
    AddressNote(settings, BrokerAddress("", web_url="http://any:8081")).remove()
    assert Admin(data_dir=tmp_path).url == DEFAULT_ADMIN_URL
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_missing_is_not_made(tmp_path: Path) -> None:
    note(tmp_path / "missing", http_port=8081)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "\xff", '{"http": "http://127.0.0.1:1", "x": 2}']
)
def test_note_that_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MAGNETAR_DATA_DIR", str(tmp_path))
    (tmp_path / ADDRESS_FILE).write_text(text, "latin-1")
    assert Admin(data_dir=tmp_path).url == DEFAULT_ADMIN_URL


def test_note_that_others_may_have_written_is_none(tmp_path: Path) -> None:
    """The superuser's token would be sent to the address that it names."""
    note(tmp_path, http_port=8081)
    path = tmp_path / ADDRESS_FILE
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o664)
    assert LocalBroker.read(tmp_path) is None
    path.chmod(0o644)
    assert Admin(data_dir=tmp_path).url == "http://127.0.0.1:8081"
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert LocalBroker.read(tmp_path) is None


def test_note_is_no_named_pipe_and_follows_no_link(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / ADDRESS_FILE
    target.write_text("x")
    path.with_suffix(".tmp").symlink_to(target)
    note(tmp_path, http_port=8081)
    assert target.read_text() == "x"
    path.unlink()
    os.mkfifo(path, 0o644)
    assert LocalBroker.read(tmp_path) is None


def test_directory_with_a_note_alone_can_become_a_data_directory(tmp_path: Path) -> None:
    note(tmp_path, http_port=8081)
    DataDirectory.open(tmp_path).close()
