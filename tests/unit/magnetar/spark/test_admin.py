"""The REST interface: what its refusals say, and TLS, as something in front of a broker has it."""

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from magnetar.cli.connecting import Where
from magnetar.spark.admin import AdminFailed, AdminRest
from magnetar.spark.cli import rest_of
from tests.support.certificates import Certificate, make_certificate
from tests.support.child_process import HOST


class Answers(http.server.BaseHTTPRequestHandler):
    """`[1]`, except for `/refused/CODE`, `/trace`, and HTML for `/missing` and `/page`.

    `/who` has the header Authorization, and `/away/URL` redirects.
    """

    def do_GET(self) -> None:
        if self.path.startswith("/away/"):
            self.send_response(307)
            self.send_header("Location", self.path.removeprefix("/away/"))
            self.end_headers()
            return
        if self.path == "/who":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(self.headers["Authorization"]).encode())
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path in ("/trace", "/page"):
            self.send_response(500 if self.path == "/trace" else 200)
            self.end_headers()
            self.wfile.write(
                b"Not now.\n\tat a.B.c(B.java:1)"
                if self.path == "/trace"
                else b"<html>Hello</html>"
            )
            return
        _, _, code = self.path.rpartition("/refused/")
        self.send_response(int(code) if code.isdecimal() else 200)
        self.end_headers()
        self.wfile.write(b'{"reason": "Not so."}' if code.isdecimal() else b"[1]")

    def log_message(self, *_args: object) -> None:
        """Nothing."""


@contextmanager
def serving(server: http.server.HTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("code", "step"),
    [(401, "Give a token or other"), (403, "of a role"), (404, "the name"), (500, "later")],
)
def test_refusal_has_a_reason_and_a_next_step(code: int, step: str) -> None:
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server, serving(server):
        rest = AdminRest(f"http://{HOST}:{server.server_port}")
        assert rest.get("/x") == [1]
        with pytest.raises(AdminFailed, match=rf"refused \({code}\): Not so\. .*{step}"):
            rest.get(f"/refused/{code}")


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, HOST)


@pytest.fixture
def https_url(certificate: Certificate) -> Iterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.chain, certificate.key)
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with serving(server):
            yield f"https://{HOST}:{server.server_port}"


def test_rest_client_trusts_the_certificates_of_the_broker_options(
    https_url: str, certificate: Certificate
) -> None:
    assert rest_of(https_url, Where(tls_trust_file=certificate.chain)).get("/x") == [1]
    assert rest_of(https_url, Where(tls_check_certificate=False)).get("/x") == [1]
    with pytest.raises(AdminFailed, match="CERTIFICATE_VERIFY_FAILED"):
        rest_of(https_url, Where()).get("/x")


def test_broker_without_audit_records_is_reported_in_a_sentence() -> None:
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server, serving(server):
        rest = AdminRest(f"http://{HOST}:{server.server_port}")
        with pytest.raises(AdminFailed, match="only brokers of Magnetar have it"):
            list(rest.lines("/missing"))
        with pytest.raises(AdminFailed, match=r"/missing refused \(404\): Not Found"):
            rest.get("/missing")
        assert rest.find("/missing") is None


def test_stack_trace_of_another_server_is_left_out() -> None:
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server, serving(server):
        rest = AdminRest(f"http://{HOST}:{server.server_port}")
        with pytest.raises(AdminFailed, match=r"/trace refused \(500\): Not now\. Ask again"):
            rest.get("/trace")


def test_page_of_another_server_is_refused() -> None:
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server, serving(server):
        rest = AdminRest(f"http://{HOST}:{server.server_port}")
        with pytest.raises(AdminFailed, match="something else than JSON"):
            rest.get("/page")
        with pytest.raises(AdminFailed, match="something else than JSON"):
            list(rest.lines("/page"))


def test_credentials_of_the_options_are_sent_and_go_along_with_redirects(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("e.y.J\n")
    with (
        http.server.ThreadingHTTPServer((HOST, 0), Answers) as server,
        http.server.ThreadingHTTPServer((HOST, 0), Answers) as other,
        serving(server),
        serving(other),
    ):
        url = f"http://{HOST}:{server.server_port}"
        away = f"/away/http://{HOST}:{other.server_port}/who"
        assert rest_of(url, Where()).get("/who") is None
        for where in (Where(token="e.y.J"), Where(token_file=file)):
            assert rest_of(url, where).get("/who") == "Bearer e.y.J"
            assert rest_of(url, where).get(away) == "Bearer e.y.J"
        basic = Where(basic_user="ann", basic_password="x")
        assert rest_of(url, basic).get("/who") == "Basic YW5uOng="


def test_redirect_to_another_scheme_is_not_followed(
    https_url: str, certificate: Certificate
) -> None:
    with http.server.ThreadingHTTPServer((HOST, 0), Answers) as server, serving(server):
        plain = f"http://{HOST}:{server.server_port}"
        where = Where(token="marked", tls_trust_file=certificate.chain)
        for url, to in ((https_url, plain), (plain, https_url), (plain, "file:///etc/passwd")):
            with pytest.raises(AdminFailed, match="not followed") as caught:
                rest_of(url, where).get(f"/away/{to}/who")
            assert "marked" not in str(caught.value)
