"""SASL with user and password, for bookies with `SASLBookieAuthProviderFactory`.  Pure.

The mechanism is DIGEST-MD5 (RFC 2831), the only one of that plugin without Kerberos.  It needs TLS:
the password itself is not sent, but a listener can find it from the MD5 digests.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from typing import Final

from storage.ledger.bookkeeper.auth import BookieAuthenticationFailed

PLUGIN_NAME: Final = "sasl"
SERVICE: Final = "bookkeeper/bookkeeper"
"""The digest-uri that all bookies expect."""

_COUNT: Final = "00000001"
_QOP: Final = "auth"
_DIRECTIVE: Final = re.compile(rb'\s*([A-Za-z0-9-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))\s*,?')


class DigestMd5:
    """The client's side of one authentication; an `AuthProvider`.

    The first message is empty.  The client answers the bookie's challenge, and the bookie proves in
    turn that it knows the password.
    """

    plugin_name = PLUGIN_NAME

    def __init__(
        self, user: str, password: str, new_nonce: Callable[[], str], service: str = SERVICE
    ) -> None:
        """`new_nonce` makes random text."""
        self._user = user
        self._password = password
        self._nonce = new_nonce()
        self._service = service
        self._proof: bytes | None = None

    def first(self) -> bytes:
        """See `AuthProvider`: an empty message, as the bookie sends the challenge."""
        return b""

    def answer(self, payload: bytes) -> bytes | None:
        """See `AuthProvider`.  Raises `BookieAuthenticationFailed`."""
        directives = _directives(payload)
        if self._proof is None:
            return self._response(directives)
        if not hmac.compare_digest(directives.get("rspauth", "").encode(), self._proof):
            raise BookieAuthenticationFailed(
                "A bookie did not prove that it knows the password: check which server answers at "
                "its address."
            )
        return None

    def _response(self, challenge: Mapping[str, str]) -> bytes:
        nonce, realm = challenge.get("nonce"), challenge.get("realm", "")
        offered = [each.strip() for each in challenge.get("qop", _QOP).split(",")]
        if nonce is None or _QOP not in offered or challenge.get("algorithm") != "md5-sess":
            raise BookieAuthenticationFailed(
                "A bookie's challenge is none of DIGEST-MD5: configure user and password there, "
                "or a plugin of your own here."
            )
        secret = _md5(b":".join(map(_bytes, (self._user, realm, self._password))))
        session = _md5(secret + f":{nonce}:{self._nonce}".encode()).hex()

        def proof(method: str) -> bytes:
            uri = _md5(f"{method}:{self._service}".encode()).hex()
            text = f"{session}:{nonce}:{_COUNT}:{self._nonce}:{_QOP}:{uri}"
            return _md5(text.encode()).hex().encode()

        self._proof = proof("")
        quoted = {
            "username": self._user,
            "realm": realm,
            "nonce": nonce,
            "cnonce": self._nonce,
            "digest-uri": self._service,
        }
        fields = [f"{name}={_quoted(value)}" for name, value in quoted.items()]
        fields += ["charset=utf-8", f"nc={_COUNT}", f"qop={_QOP}"]
        return ",".join(fields).encode() + b",response=" + proof("AUTHENTICATE")


def _directives(payload: bytes) -> dict[str, str]:
    """The directives of a message; of a repeated one the first."""
    found: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(payload):
        value = re.sub(rb"\\(.)", rb"\1", quoted) or plain
        found.setdefault(name.decode("ascii").lower(), value.decode("utf-8", "replace"))
    return found


def _quoted(text: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _bytes(text: str) -> bytes:
    """Encode in ISO 8859-1 if it has all characters (RFC 2831), else in UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
