"""The REST interface behind TLS, as something in front of a broker serves it."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.cli.connecting import Where
from pipeline.admin import AdminFailed
from pipeline.cli import rest_of
from tests.support.certificates import Certificate, make_certificate
from tests.support.child_process import HOST


class Answers(http.server.BaseHTTPRequestHandler):
    """`[1]` for everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[1]")

    def log_message(self, *_args: object) -> None:
        """Nothing."""


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, HOST)


@pytest.fixture
def https_url(certificate: Certificate) -> Iterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.chain, certificate.key)
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"https://{HOST}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_who_is_trusted_is_said_as_for_brokers(https_url: str, certificate: Certificate) -> None:
    assert rest_of(https_url, Where(tls_trust_file=certificate.chain)).get("/x") == [1]
    assert rest_of(https_url, Where(tls_check_certificate=False)).get("/x") == [1]
    with pytest.raises(AdminFailed, match="CERTIFICATE_VERIFY_FAILED"):
        rest_of(https_url, Where()).get("/x")
