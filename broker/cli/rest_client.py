"""REST client of the command line: one request, one answer, errors as sentences."""

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, cast

from magnetar.protocol.rest_reason import BODY_MAX, rest_reason
from magnetar.protocol.rest_redirect import RedirectRefused, redirect_target

TIMEOUT_S = 30
REDIRECTS_MAX = 5
"""Enough for a topic that moves meanwhile; it stops brokers that redirect in a circle."""

_SAME_METHOD = (HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""Reasons of OpenSSL where the other side did not answer in TLS."""
_NOT_ALLOWED = "{server} does not let this client do this"
_WHO = "--token-file, --basic-user or --oauth2-key-file"


class RestFailure(Exception):
    """The broker refused or did not answer; the message has the reason and what to do."""


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows 307 and 308 with the same method and body; the library does so for GET and HEAD only.

    `at` is the address of the last request, for errors.
    """

    max_redirections = max_repeats = REDIRECTS_MAX

    def __init__(self, base_url: str) -> None:
        self.at = base_url

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        with_credentials = req.has_header("Authorization")
        try:
            newurl = redirect_target(req.full_url, newurl, with_credentials=with_credentials)
        except RedirectRefused as error:
            raise RestFailure(str(error)) from None
        scheme, host, *_ = urllib.parse.urlsplit(newurl)
        self.at = f"{scheme}://{host}"
        if code not in _SAME_METHOD:
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        return urllib.request.Request(
            newurl, data=req.data, method=req.get_method(), headers=dict(req.headers)
        )


def client_context(
    trust_file: Path | None,
    certificate_file: Path | None,
    key_file: Path | None,
    pinned_file: Path | None = None,
) -> ssl.SSLContext:
    """Make a TLS context that verifies the broker, by the system's authorities without a file.

    With `pinned_file` only a broker that shows the first certificate of that file is trusted, by
    whatever name it is reached.  Raises `RestFailure` for files that cannot be used.
    """
    try:
        if pinned_file is None:
            context = ssl.create_default_context(cafile=trust_file)
        else:
            context = _pinning_context(pinned_file.read_text("ascii"))
    except (OSError, ssl.SSLError, ValueError) as error:
        raise RestFailure(
            f"{pinned_file or trust_file} cannot be used ({error}): name a PEM file with the "
            "certificates of authorities by --tls-trust-file."
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate_file is not None:
        try:
            context.load_cert_chain(certificate_file, key_file)
        except (OSError, ssl.SSLError) as error:
            files = certificate_file if key_file is None else f"{certificate_file} and {key_file}"
            raise RestFailure(
                f"{files} cannot be used ({error}): name the PEM files of a certificate and of its "
                "key by --tls-certificate-file and --tls-key-file."
            ) from error
    return context


def _pinning_context(chain: str) -> ssl.SSLContext:
    # Not its authorities: others have certificates of those as well.
    leaf, end, _ = chain.partition("-----END CERTIFICATE-----")
    context = ssl.create_default_context(cadata=leaf + end)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # The broker is reached by the loopback address, which its certificate need not have.
    context.check_hostname = False
    return context


def call(
    base_url: str,
    method: str,
    path: str,
    body: object | None = None,
    *,
    authorization: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> object:
    """Send one request; return the decoded JSON, or None for an empty body.

    `authorization` is the header of that name; `tls` is the context for https:// addresses.  Raises
    `RestFailure` with the broker's own reason.
    """
    if not base_url.startswith(("http://", "https://")):
        raise RestFailure(f"{base_url} is no REST address: write it as http://host:port.")
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if authorization is not None:
        headers["Authorization"] = authorization
    request = urllib.request.Request(
        base_url.rstrip("/") + path, data=data, method=method, headers=headers
    )
    redirects = _RedirectHandler(base_url)
    try:
        with _opened(request, redirects, TIMEOUT_S, tls) as response:
            return _decode(response.read(), redirects.at)
    except urllib.error.HTTPError as error:
        if error.code in _SAME_METHOD:
            raise RestFailure(
                f"The brokers redirected the request more than {REDIRECTS_MAX} times, last to "
                f"{redirects.at}: the owner of the topic is changing. Try again."
            ) from error
        with_credentials = authorization is not None
        text = refusal(error, redirects.at, with_credentials=with_credentials)
        raise RestFailure(text) from error
    except OSError as error:  # Of urllib, or of the connection or its TLS while it is read.
        raise RestFailure(no_answer(redirects.at, error)) from error
    except http.client.HTTPException as error:
        raise RestFailure(
            f"{redirects.at} is no REST interface: name the broker's REST port (8080 unless set "
            "otherwise), not its binary port."
        ) from error


def fetch(
    url: str,
    timeout_s: float,
    *,
    authorization: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """The body of a GET; see `call`.

    Raises `RestFailure` for a redirect that is not followed, and as urllib does.
    """
    headers = {} if authorization is None else {"Authorization": authorization}
    request = urllib.request.Request(url, headers=headers)
    with _opened(request, _RedirectHandler(url), timeout_s, tls) as answer:
        return answer.read()


def _opened(
    request: urllib.request.Request,
    redirects: _RedirectHandler,
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> http.client.HTTPResponse:
    https = [] if tls is None else [urllib.request.HTTPSHandler(context=tls)]
    opener = urllib.request.build_opener(redirects, *https)
    return cast("http.client.HTTPResponse", opener.open(request, timeout=timeout_s))


def no_answer(server: str, error: Exception) -> str:
    """The sentence for a server that sent no answer, with the next step."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return not_trusted(server, reason)
    tls_reason = reason.reason if isinstance(reason, ssl.SSLError) else None
    if tls_reason is not None and "CERTIFICATE_REQUIRED" in tls_reason:
        return (
            f"{server} wants a certificate of its clients: give one by --tls-certificate-file and "
            "--tls-key-file."
        )
    if tls_reason in _NO_TLS:
        return f"{server} does not speak TLS: write http://, or name the broker's port with TLS."
    if isinstance(reason, http.client.RemoteDisconnected) and server.startswith("http://"):
        return (
            f"{server} closed the connection without an answer: write https:// if that is a port "
            "with TLS, or name the broker's REST port."
        )
    return (
        f"No broker answers at {server} ({reason}): start one with `magnetar standalone`, or name "
        "another with --admin-url."
    )


def not_trusted(server: str, error: ssl.SSLCertVerificationError) -> str:
    """The sentence for a certificate that could not be verified."""
    return (
        f"The certificate of {server} is not trusted ({error.verify_message}): name its authority "
        "by --tls-trust-file, and the broker by a name that the certificate has."
    )


def refusal(error: urllib.error.HTTPError, server: str, *, with_credentials: bool = False) -> str:
    """The status, the reason and the next step of an HTTP error, as one line."""
    try:
        reason = rest_reason(error.read(BODY_MAX))
    except (OSError, http.client.HTTPException):  # The status is known; the rest is lost.
        reason = ""
    status = f"{error.code} {error.reason}".strip()
    own = reason not in ("", error.reason, f"HTTP {status}")
    if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        said = reason.rstrip(". ") if own else _NOT_ALLOWED.format(server=server)
        return f"{status}: {said}. {_next_step(error.code, with_credentials=with_credentials)}"
    if own:
        return f"{status}: {reason}"
    # Every error of a Magnetar broker has a reason.
    return (
        f"{status}: {server} gives no reason, so it may not be a Magnetar broker; Apache Pulsar "
        "lacks some of these commands. Name a Magnetar broker with --admin-url."
    )


def _next_step(code: int, *, with_credentials: bool) -> str:
    if code == HTTPStatus.FORBIDDEN:
        return f"Give the credentials of a role that may do this ({_WHO})."
    if with_credentials:
        return f"Give other credentials ({_WHO})."
    return f"Give credentials ({_WHO})."


def _decode(text: bytes, server: str) -> object:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise RestFailure(
            f"{server} answers with something else than JSON: name the REST address of a broker "
            "with --admin-url."
        ) from None
