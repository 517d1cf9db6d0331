"""Tokens of an OAuth 2.0 issuer, by client credentials (RFC 6749, 4.4).

The token endpoint is that of the issuer's discovery document (OpenID Connect Discovery 1.0, 4;
RFC 8414).  Redirects are not followed, and proxies of the environment are not used.
"""

import base64
import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, cast
from urllib.parse import quote, urlencode, urlsplit

from magnetar.bounds import OAUTH2_ANSWER_BYTES, OAUTH2_FETCH_S
from magnetar.credentials.kinds import (
    IssuedToken,
    OAuth2Credentials,
    check_issuer_url,
    is_text,
)
from magnetar.credentials.secrets import file_of, read_secret
from magnetar.errors import AuthenticationFailed, InvalidArgument

__all__ = ["fetch_token", "without_key_file"]

_DISCOVERY: Final = "/.well-known/openid-configuration"
_CUT_S: Final = 0.1
_SHOWN: Final = 200
"""Characters of an issuer's own words that an error shows."""

Json = Mapping[str, object]


class _Deadline(NamedTuple):
    """When a fetch must have ended, by the monotonic clock, and how long that was at first."""

    at: float
    limit_s: float

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()


@dataclass(frozen=True, slots=True)
class _Client:
    """The issuer, and the id and the secret of its client."""

    issuer_url: str
    client_id: str
    client_secret: str = field(repr=False)


def fetch_token(credentials: OAuth2Credentials, *, limit_s: float = OAUTH2_FETCH_S) -> IssuedToken:
    """Ask the issuer for a new token; blocks for `limit_s` at most.

    Raises `AuthenticationFailed`, with the issuer's reason and without any secret.
    """
    deadline = _Deadline(time.monotonic() + limit_s, limit_s)
    client = _client_of(credentials)
    tls = _tls_context(credentials)
    discovery = client.issuer_url.rstrip("/") + _DISCOVERY
    status, text = _exchange(discovery, "GET", {}, None, tls, deadline)
    document = _object_in(text)
    if status != http.client.OK or document is None:
        raise _refused(discovery, status, None, client)
    url = _endpoint_in(document, discovery, require_https=credentials.require_https)
    headers, form = _request(credentials, client, basic=_wants_basic(document))
    status, text = _exchange(url, "POST", headers, form, tls, deadline)
    answer = _object_in(text)
    if status != http.client.OK or answer is None:
        raise _refused(url, status, answer, client)
    return _token_in(answer, url)


def _endpoint_in(document: Json, discovery: str, *, require_https: bool) -> str:
    """The token endpoint in a discovery document.  Raises `AuthenticationFailed`."""
    found = document.get("token_endpoint")
    url = found if isinstance(found, str) else ""
    try:
        check_issuer_url(url, require_https=require_https, name="token_endpoint")
    except InvalidArgument as error:
        raise AuthenticationFailed(f"In {discovery}, {error}") from None
    return url


def _request(
    credentials: OAuth2Credentials, client: _Client, *, basic: bool
) -> tuple[dict[str, str], bytes]:
    """The headers and the form that ask for a token (RFC 6749, 2.3.1 and 4.4.2)."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    form = {
        "grant_type": "client_credentials",
        "audience": credentials.audience,
        "scope": credentials.scope,
    }
    if basic:
        both = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
        headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"
    else:
        form |= {"client_id": client.client_id, "client_secret": client.client_secret}
    return headers, urlencode({name: value for name, value in form.items() if value}).encode()


def without_key_file(credentials: OAuth2Credentials) -> OAuth2Credentials:
    """The same with what the key file has now, for machines that do not have the file.

    Raises `AuthenticationFailed`.
    """
    client = _client_of(credentials)
    return replace(
        credentials,
        issuer_url=client.issuer_url,
        client_id=client.client_id,
        client_secret=client.client_secret,
        key_file=None,
    )


def _client_of(credentials: OAuth2Credentials) -> _Client:
    """The client, from the key file if there is one.  Raises `AuthenticationFailed`."""
    if credentials.key_file is None:
        # `OAuth2Credentials` has all three then.
        return _Client(
            credentials.issuer_url or "",
            credentials.client_id or "",
            credentials.client_secret or "",
        )
    try:
        file = file_of(credentials.key_file, "key_file")
    except InvalidArgument as error:
        raise AuthenticationFailed(str(error)) from None
    key = _object_in(read_secret(file, "OAuth2 key").encode())
    if key is None or key.get("type") != "client_credentials":
        raise AuthenticationFailed(
            f"The OAuth2 key file {str(file)!r} is not JSON of the type client_credentials; give "
            "the key file of the issuer."
        )
    texts = {
        name: value if isinstance(value := key.get(name), str) else ""
        for name in ("issuer_url", "client_id", "client_secret")
    }
    texts["issuer_url"] = credentials.issuer_url or texts["issuer_url"]
    for name, value in texts.items():
        if not is_text(value):
            raise AuthenticationFailed(
                f"The OAuth2 key file {str(file)!r} has no {name}; add it as text."
            )
    try:
        check_issuer_url(texts["issuer_url"], require_https=credentials.require_https)
    except InvalidArgument as error:
        raise AuthenticationFailed(f"In the OAuth2 key file {str(file)!r}, {error}") from None
    return _Client(**texts)


def _tls_context(credentials: OAuth2Credentials) -> ssl.SSLContext:
    trust = credentials.trust_file
    try:
        context = ssl.create_default_context(cafile=None if trust is None else str(trust))
    except (OSError, ssl.SSLError) as error:
        raise AuthenticationFailed(
            f"The trust file {str(trust)!r} of the OAuth2 issuer cannot be used ({error}); name a "
            "PEM file with the authorities' certificates."
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _exchange(
    url: str,
    method: str,
    headers: Mapping[str, str],
    body: bytes | None,
    tls: ssl.SSLContext,
    deadline: _Deadline,
) -> tuple[int, bytes]:
    """Send one request; its status and body.  Raises `AuthenticationFailed`."""
    parts = urlsplit(url)
    left_s = max(deadline.left_s, 0.001)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.netloc, timeout=left_s, context=tls)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=left_s)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with _cut_at(connection, deadline) as held:
            connection.connect()
            held.append(connection.sock)
            connection.request(method, target, body, {**headers, "Accept": "application/json"})
            answer = connection.getresponse()
            text = answer.read(OAUTH2_ANSWER_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _not_reached(url, error, deadline) from None
    finally:
        connection.close()
    if deadline.left_s <= 0:
        raise _not_reached(url, TimeoutError(), deadline)
    if len(text) > OAUTH2_ANSWER_BYTES:
        raise AuthenticationFailed(
            f"The OAuth2 issuer at {url} answers with more than {OAUTH2_ANSWER_BYTES} bytes; check "
            "issuer_url."
        )
    return answer.status, text


@contextmanager
def _cut_at(
    connection: http.client.HTTPConnection, deadline: _Deadline
) -> Iterator[list[socket.socket]]:
    """Cut the connection at the deadline: its own timeout begins anew with each byte.

    The caller adds the socket to the list, as the connection lets go of it when the answer begins.
    """
    done = threading.Event()
    held: list[socket.socket] = []

    def watch() -> None:
        done.wait(max(0.0, deadline.left_s))
        while not done.wait(_CUT_S):
            # During the TLS handshake it is not in the list yet.
            for each in held or [connection.sock]:
                with suppress(OSError, TypeError):
                    # Not `SSLSocket.shutdown`, which takes the TLS from under the reading thread.
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    watching = threading.Thread(target=watch, name="magnetar OAuth2 deadline", daemon=True)
    watching.start()
    try:
        yield held
    finally:
        done.set()
        watching.join()


def _not_reached(url: str, error: Exception, deadline: _Deadline) -> AuthenticationFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(
            f"The OAuth2 issuer at {url} has a certificate that is not trusted ({error}); name its "
            "authority in the trust file of the OAuth2 credentials, and use a host name of the "
            "certificate."
        )
    late = deadline.left_s <= 0 or isinstance(error, TimeoutError)
    why = f"within {deadline.limit_s:g} s" if late else ""
    # An error of another kind may have the request in it.
    said = str(error) if isinstance(error, OSError) else type(error).__name__
    return AuthenticationFailed(
        f"The OAuth2 issuer at {url} did not answer {why or f'({said})'}; check issuer_url, and "
        "whether the issuer is well."
    )


def _refused(url: str, status: int, answer: Json | None, client: _Client) -> AuthenticationFailed:
    """The error for an answer that has no token; it shows the issuer's reason."""
    words = [(answer or {}).get(name) for name in ("error", "error_description")]
    said = ": ".join(
        "".join(char for char in each[:_SHOWN] if char.isprintable())
        for each in words
        if isinstance(each, str) and client.client_secret not in each
    )
    step = (
        "check the client id and the secret, the audience and the scope."
        if answer is not None and "error" in answer
        else "check issuer_url."
    )
    if status == http.client.OK:
        return AuthenticationFailed(f"{url} is not JSON of an OAuth2 issuer; {step}")
    shown = f"{status}, {said}" if said else f"{status}"
    return AuthenticationFailed(f"The OAuth2 issuer at {url} refused ({shown}); {step}")


def _object_in(text: bytes) -> Json | None:
    """The JSON object in a text; None if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _wants_basic(document: Json) -> bool:
    """Whether the issuer takes the secret in a header alone.

    Pulsar's clients send it in the form, so that is the way if the issuer has both.
    """
    methods = document.get("token_endpoint_auth_methods_supported")
    if not isinstance(methods, list):
        return False
    return "client_secret_basic" in methods and "client_secret_post" not in methods


def _token_in(answer: Json, url: str) -> IssuedToken:
    token = answer.get("access_token")
    # A character beyond these would end the header or the line that the token is sent in.
    if not isinstance(token, str) or not token or not all("!" <= char <= "~" for char in token):
        raise AuthenticationFailed(
            f"The OAuth2 issuer at {url} gives no access_token that can be used; check issuer_url."
        )
    lifetime = answer.get("expires_in")
    try:
        # Some issuers write the number as text.
        lifetime_s = None if isinstance(lifetime, bool) else float(cast("float | str", lifetime))
    except (TypeError, ValueError, OverflowError):
        lifetime_s = None
    if lifetime_s is not None and not math.isfinite(lifetime_s):
        lifetime_s = None
    return IssuedToken(token, lifetime_s)
