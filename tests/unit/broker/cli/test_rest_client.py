"""The command line's requests go where brokers send them on to, as those of pulsar-admin do."""

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from broker.cli.rest_client import REDIRECTS_MAX, RestFailure, call, client_context
from magnetar.cli.main import build_app
from magnetar.cli.security_options import SecurityOptions
from tests.support.certificates import Certificate, make_certificate
from tests.support.oauth2_issuer import issuing, key_file

METHODS: Final = ("PUT", "POST", "DELETE", "GET")
HOST: Final = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """A broker's REST port.

    `/away/CODE/URL` redirects, `/refused/CODE/BODY` answers so; any other request is echoed.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self.server_port}"
        self.paths: list[str] = []
        self.authorizations: list[str | None] = []
        """The headers of the requests that were answered."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.paths.append(self.path)
        _, kind, code, *rest = self.path.split("/", 3)
        if kind == "away":
            self.send_response(int(code))
            self.send_header("Location", rest[0])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind == "refused":
            self._send(int(code), unquote(rest[0].partition("?")[0]).encode())
            return
        held = json.loads(body) if body else None
        said = {
            "method": self.command,
            "path": self.path,
            "body": held,
            "type": self.headers["Content-Type"],
        }
        self.server.authorizations.append(self.headers["Authorization"])
        self._send(200, json.dumps(said).encode())

    def _send(self, code: int, text: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def started() -> Server:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def stopped(server: Server) -> None:
    server.shutdown()
    server.server_close()


@pytest.fixture
def asked() -> Iterator[Server]:
    server = started()
    yield server
    stopped(server)


@pytest.fixture
def owner() -> Iterator[Server]:
    server = started()
    yield server
    stopped(server)


@pytest.mark.parametrize("code", [307, 308])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_sent_on_with_its_body(
    asked: Server, owner: Server, method: str, code: int
) -> None:
    body = None if method == "GET" else {"segments": 4}
    answer = call(asked.url, method, f"/away/{code}/{owner.url}/there/t?a=b", body)
    assert answer == {
        "method": method,
        "path": "/there/t?a=b",
        "body": body,
        "type": "application/json",
    }
    assert len(asked.paths) == len(owner.paths) == 1


def test_several_hops_are_followed(asked: Server, owner: Server) -> None:
    path = f"/there/{owner.url}"
    for _ in range(REDIRECTS_MAX):
        path = f"/away/307/{asked.url}{path}"
    answer = call(asked.url, "PUT", path, [1])
    assert isinstance(answer, dict)
    assert (answer["method"], answer["body"]) == ("PUT", [1])


@pytest.mark.parametrize("code", [307, 308])
def test_too_many_hops_are_not(asked: Server, owner: Server, code: int) -> None:
    path = f"/there/{owner.url}"
    for _ in range(REDIRECTS_MAX + 1):
        path = f"/away/{code}/{asked.url}{path}"
    with pytest.raises(RestFailure, match=f"more than {REDIRECTS_MAX} times"):
        call(asked.url, "PUT", path, [1])
    assert len(asked.paths) == REDIRECTS_MAX + 1


def test_unreachable_redirect_target_is_named(asked: Server) -> None:
    with socket.socket() as nobody:
        nobody.bind((HOST, 0))
        gone = f"http://{HOST}:{nobody.getsockname()[1]}"
        with pytest.raises(RestFailure, match=f"No broker answers at {gone} "):
            call(asked.url, "DELETE", f"/away/307/{gone}/t")


@pytest.mark.parametrize(
    ("code", "body", "message"),
    [
        (404, '{"reason": "Topic is missing"}', r"404 Not Found: Topic is missing"),
        (
            500,
            '{"reason": "No such segment\\n\\nStacktrace:\\n\\nx.Y\\n\\tat a.B.c(B.java:1)"}',
            r"500 Internal Server Error: No such segment",
        ),
        (502, "<html><h1>502 Bad Gateway</h1></html>", r"502 Bad Gateway: .* gives no reason, .*"),
        (404, "", r"404 Not Found: .* gives no reason, so it may not be a Magnetar broker; .*"),
        (404, "HTTP 404 Not Found", r"404 Not Found: .* gives no reason, .*"),
        (599, '{"reason": "Odd"}', r"599: Odd"),
        (
            401,
            '{"reason": "Who?"}',
            r"401 Unauthorized: Who\?\. Give credentials \(--token-file, .*",
        ),
        (401, "", r"401 Unauthorized: http://\S+ does not let this client do this\. Give cred.*"),
        (
            403,
            '{"reason": "No."}',
            r"403 Forbidden: No\. Give the credentials of a role that may.*",
        ),
        (403, "", r"403 Forbidden: http://\S+ does not let this client do this\. Give the cred.*"),
    ],
)
def test_refusal_is_one_line_with_status_and_reason(
    asked: Server, code: int, body: str, message: str
) -> None:
    with pytest.raises(RestFailure) as raised:
        call(asked.url, "POST", f"/refused/{code}/{quote(body, safe='')}")
    assert re.fullmatch(message, str(raised.value))


def test_page_of_another_server_is_refused(asked: Server) -> None:
    with pytest.raises(RestFailure, match="something else than JSON: name the REST address"):
        call(asked.url, "GET", f"/refused/200/{quote('<html>Welcome</html>', safe='')}")


def test_health_command_prints_the_reason_of_a_failure(asked: Server) -> None:
    reason = quote('{"reason": "The disk is full"}', safe="")
    command = ["health", "--admin-url", f"{asked.url}/refused/503/{reason}?"]
    done = CliRunner().invoke(build_app("health"), command)
    assert done.exit_code == 1
    assert "reports a failure, 503 Service Unavailable: The disk is full\n" in done.output


def test_names_that_clients_chose_are_printed_without_control_characters(asked: Server) -> None:
    stats = {"epoch": 0, "activeSegments": 1, "subscriptions": {"\x1b[2Jgone": {"msgBacklog": 1}}}
    body = quote(json.dumps(stats), safe="")
    command = ["topics", "stats", "t", "--admin-url", f"{asked.url}/refused/200/{body}?"]
    done = CliRunner().invoke(build_app("topics"), command)
    assert done.exit_code == 0
    assert "  \\x1b[2Jgone: backlog 1" in done.output


# Credentials


def test_credentials_are_sent_and_go_along_with_redirects(asked: Server, owner: Server) -> None:
    call(asked.url, "GET", "/x/y")
    call(asked.url, "PUT", f"/away/307/{owner.url}/x/y", [1], authorization="Bearer e.y.J")
    call(asked.url, "GET", f"/away/302/{owner.url}/x/y", authorization="Bearer e.y.J")
    assert asked.authorizations == [None]
    assert owner.authorizations == ["Bearer e.y.J"] * 2


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["https://localhost:1/x", "ftp://localhost/x", "file:///x"])
def test_redirect_of_credentials_to_another_scheme_is_not_followed(
    asked: Server, code: int, target: str
) -> None:
    with pytest.raises(RestFailure) as caught:
        call(asked.url, "GET", f"/away/{code}/{target}", authorization="Bearer marked")
    assert "marked" not in str(caught.value)
    assert len(asked.paths) == 1


def test_refused_credentials_are_told_from_missing_ones(asked: Server) -> None:
    with pytest.raises(RestFailure, match=r"401 Unauthorized: .* Give other credentials"):
        call(asked.url, "GET", "/refused/401/x", authorization="Bearer marked")


@pytest.mark.parametrize(
    ("options", "header"),
    [
        (["--token", "e.y.J"], "Bearer e.y.J"),
        (["--basic-user", "ann", "--basic-password", "x"], "Basic YW5uOng="),
        ([], None),
    ],
)
@pytest.mark.parametrize("command", [["health"], ["topics", "get", "t"], ["txn", "show", "1_2"]])
def test_commands_send_their_credentials(
    asked: Server, command: list[str], options: list[str], header: str | None
) -> None:
    done = CliRunner().invoke(build_app(), [*command, "--admin-url", f"{asked.url}/x", *options])
    assert done.exit_code == 0, done.output
    assert asked.authorizations == [header]


def test_command_sends_the_token_of_an_issuer(asked: Server, tmp_path: Path) -> None:
    with issuing() as issuer:
        options = ["--oauth2-key-file", str(key_file(tmp_path, issuer_url=issuer.url))]
        environment = {"MAGNETAR_ADMIN_URL": f"{asked.url}/x"}
        refused = CliRunner().invoke(build_app(), ["health", *options], env=environment)
        assert refused.exit_code == 1
        assert "issuer_url is not the https address" in refused.output
        options.append("--no-oauth2-require-https")
        done = CliRunner().invoke(build_app(), ["health", *options], env=environment)
        assert done.exit_code == 0, done.output
    assert asked.authorizations == ["Bearer token-1"]


def test_health_command_reads_the_token_file_that_the_environment_names(
    asked: Server, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    environment = {"MAGNETAR_ADMIN_URL": f"{asked.url}/x", "MAGNETAR_TOKEN_FILE": str(file)}
    missing = CliRunner().invoke(build_app("health"), ["health"], env=environment)
    assert missing.exit_code == 1
    assert f"{str(file)!r}, cannot be read" in missing.output
    file.write_text("e.y.J\n")
    done = CliRunner().invoke(build_app("health"), ["health"], env=environment)
    assert (done.exit_code, asked.authorizations) == (0, ["Bearer e.y.J"])


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, HOST)


@pytest.fixture
def secured(certificate: Certificate) -> Iterator[Server]:
    """A broker's REST port with TLS."""
    server = Server()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.chain, certificate.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = server.url.replace("http:", "https:")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    stopped(server)


@pytest.mark.parametrize("command", [["health"], ["topics", "get", "t"]])
def test_commands_take_tls_and_a_token_from_the_environment(
    secured: Server, certificate: Certificate, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "token").write_text("e.y.J\n")
    environment = {
        "MAGNETAR_ADMIN_URL": f"{secured.url}/x",
        "MAGNETAR_TOKEN_FILE": str(tmp_path / "token"),
        "MAGNETAR_TLS_TRUST_FILE": str(certificate.chain),
    }
    done = CliRunner().invoke(build_app(), command, env=environment)
    assert done.exit_code == 0, done.output
    assert secured.authorizations == ["Bearer e.y.J"]


@pytest.mark.parametrize("command", [["health"], ["topics", "get", "t"]])
def test_broker_without_a_trusted_certificate_gets_no_token(
    secured: Server, certificate: Certificate, command: list[str]
) -> None:
    by_name = secured.url.replace(HOST, "localhost")
    for url, trust in ((secured.url, []), (by_name, ["--tls-trust-file", str(certificate.chain)])):
        options = ["--admin-url", f"{url}/x", "--token", "marked", *trust]
        done = CliRunner().invoke(build_app(), [*command, *options])
        assert done.exit_code == 1
        assert "certificate" in done.output.lower()
        assert "marked" not in done.output
    assert secured.paths == []


def test_redirect_from_https_to_http_is_not_followed(
    secured: Server, certificate: Certificate, asked: Server
) -> None:
    tls = client_context(certificate.chain, None, None)
    path = f"/away/307/{asked.url}/x/y"
    for authorization in (None, "Bearer marked"):
        with pytest.raises(RestFailure, match="not followed"):
            call(secured.url, "GET", path, authorization=authorization, tls=tls)
    assert asked.paths == []


def commands_of(group: TyperGroup, names: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Every command, with its options."""
    for name, each in group.commands.items():
        if isinstance(each, TyperGroup):
            yield from commands_of(each, (*names, name))
        else:
            yield " ".join((*names, name)), {text for one in each.params for text in one.opts}


def test_every_command_that_asks_a_broker_takes_credentials() -> None:
    app = get_command(build_app())
    assert isinstance(app, TyperGroup)
    found = {name: options for name, options in commands_of(app) if name != "demo-worker"}
    wanted = {"--" + each.name.replace("_", "-") for each in fields(SecurityOptions)}
    asking = {name for name, options in found.items() if options & {"--admin-url", "--url"}}
    assert {"health", "txn keys list", "topics split", "ledgers orphans", "peek"} <= asking
    offload = {name for name in asking if "offload" in name}
    assert len(offload) >= 3
    for name in asking:
        assert wanted <= found[name], name
