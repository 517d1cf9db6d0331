"""The command line's requests go where brokers send them on to, as those of pulsar-admin do."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import quote, unquote

import pytest
from typer.testing import CliRunner

from broker.cli.rest_client import REDIRECTS_MAX, RestFailure, call
from magnetar.cli.main import build_app

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
