"""An OAuth 2.0 issuer in this process, which gives tokens to one client."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote

from tests.support.certificates import Certificate
from tests.support.child_process import HOST

CLIENT_ID: Final = "orders"
SECRET: Final = "marked+s3cret/of the client"
DISCOVERY: Final = "/realm/.well-known/openid-configuration"
KEYS: Final = "/keys"


class Issuer(ThreadingHTTPServer):
    """Gives `token-1`, `token-2`, ... to those who have the id and the secret.

    Tests set the attributes to have it answer otherwise.
    """

    daemon_threads = True

    def __init__(self, certificate: Certificate | None = None) -> None:
        super().__init__((HOST, 0), _Handler)
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate.chain, certificate.key)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.origin = f"{scheme}://{HOST}:{self.server_port}"
        self.url = f"{self.origin}/realm"
        self.token_endpoint: object = f"{self.origin}/token"
        self.methods: list[str] | None = ["client_secret_post", "client_secret_basic"]
        self.secret = SECRET
        self.lifetime_s: object = 3600
        self.make_token: Callable[[], str] = lambda: f"token-{self.issued}"
        self.key_set: object = {"keys": []}
        """By which those who get the tokens verify them."""
        self.forms: list[dict[str, str]] = []
        """The forms that were sent for tokens."""
        self.headers: list[Mapping[str, str]] = []
        """The headers of these requests."""
        self.discoveries = 0
        self.raw: dict[str, tuple[int, bytes]] = {}
        """The status and the body of a path, in place of the right ones."""
        self.drip_s: float | None = None
        """How long it waits between two bytes of an answer; None: it sends all at once."""
        self.held = threading.Event()
        """While it is not set, token requests wait."""
        self.held.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients break off where tests have them do so."""

    @property
    def issued(self) -> int:
        """Requests for tokens."""
        return len(self.forms)


class _Handler(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        if self.path == KEYS:
            self._send(200, json.dumps(self.server.key_set).encode())
            return
        self.server.discoveries += 1
        document: dict[str, object] = {"issuer": self.server.url}
        document["token_endpoint"] = self.server.token_endpoint
        document["jwks_uri"] = f"{self.server.origin}{KEYS}"
        if self.server.methods is not None:
            document["token_endpoint_auth_methods_supported"] = self.server.methods
        self._send(200 if self.path == DISCOVERY else 404, json.dumps(document).encode())

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = {name: values[0] for name, values in parse_qs(text).items()}
        self.server.forms.append(form)
        self.server.headers.append(dict(self.headers))
        self.server.held.wait()
        known = (form.get("client_id"), form.get("client_secret"))
        header = self.headers.get("Authorization", "")
        if header.startswith("Basic "):
            both = base64.b64decode(header.removeprefix("Basic ")).decode()
            user, _, password = both.partition(":")
            known = (unquote(user), unquote(password))
        if known != (CLIENT_ID, self.server.secret):
            refusal = {"error": "invalid_client", "error_description": "no such client"}
            self._send(401, json.dumps(refusal).encode())
            return
        answer = {"access_token": self.server.make_token(), "token_type": "Bearer"}
        if self.server.lifetime_s is not None:
            answer["expires_in"] = self.server.lifetime_s  # type: ignore[assignment]
        self._send(200, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes) -> None:
        status, body = self.server.raw.get(self.path, (status, body))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status in (302, 307):
            self.send_header("Location", self.server.url)
        self.end_headers()
        if self.server.drip_s is None:
            self.wfile.write(body)
            return
        with suppress(OSError):
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(self.server.drip_s)

    def log_message(self, *_args: object) -> None:
        """Nobody reads it."""


@contextmanager
def issuing(certificate: Certificate | None = None) -> Iterator[Issuer]:
    """An issuer that listens, by HTTPS if it has a certificate."""
    with Issuer(certificate) as issuer:
        thread = threading.Thread(target=issuer.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield issuer
        finally:
            issuer.held.set()
            issuer.shutdown()
            thread.join()


def key_file(directory: Path, **changed: object) -> Path:
    """Pulsar's key file of the client; a value of None leaves its field out."""
    fields = {"type": "client_credentials", "client_id": CLIENT_ID, "client_secret": SECRET}
    given = {name: value for name, value in {**fields, **changed}.items() if value is not None}
    file = directory / "key.json"
    file.write_text(json.dumps(given), "utf-8")
    return file
