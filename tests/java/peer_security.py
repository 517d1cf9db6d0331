"""A peer that asks who its clients are: TLS, tokens, certificates, permissions.

Rules: one directory holds all that it needs, made anew for each run; tokens are signed by a secret
key that only this directory has; the role `admin` may do everything, every other one what it was
granted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.certificates import Certificate, make_authority, make_certificate, sign

TEMPLATE = Path(__file__).resolve().parent / "peer" / "security.conf"
ADMIN = "admin"


@dataclass(frozen=True)
class PeerSecurity:
    """Made by `make`."""

    directory: Path
    tls_port: int
    authority: Certificate
    """Of the broker's certificate, and of those that the broker trusts."""
    secret: bytes

    @staticmethod
    def make(directory: Path, tls_port: int, address: str) -> PeerSecurity:
        """An authority, the broker's certificate of that address, and a secret key."""
        authority = make_authority(directory / "authority")
        sign(authority, directory / "broker", "broker", address)
        secret = secrets.token_bytes(32)
        (directory / "secret.key").write_bytes(secret)
        return PeerSecurity(directory, tls_port, authority, secret)

    def configuration(self) -> str:
        """The lines to add to the peer's."""
        text = TEMPLATE.read_text()
        for mark, value in (
            ("@TLS_PORT@", str(self.tls_port)),
            ("@DIRECTORY@", str(self.directory)),
            ("@ADMIN_TOKEN@", self.token(ADMIN)),
        ):
            text = text.replace(mark, value)
        return text

    @property
    def admin_headers(self) -> Mapping[str, str]:
        """Of REST requests that may do everything."""
        return {"Authorization": f"Bearer {self.token(ADMIN)}"}

    def token(self, role: str, expires_s: float | None = None, secret: bytes | None = None) -> str:
        """A JWT for a role; `expires_s` from now; `secret`: instead of the one that is trusted."""
        claims: dict[str, str | int] = {"sub": role}
        if expires_s is not None:
            claims["exp"] = int(time.time() + expires_s)
        signed = b".".join(
            _base64(json.dumps(part).encode()) for part in ({"alg": "HS256"}, claims)
        )
        signature = hmac.digest(secret or self.secret, signed, hashlib.sha256)
        return b".".join((signed, _base64(signature))).decode()

    def certificate(self, role: str) -> Certificate:
        """One that the broker trusts, of a client with this role."""
        return sign(self.authority, self.directory / f"client-{role}", role)

    def foreign_certificate(self, role: str) -> Certificate:
        """One that signed itself, of somebody who says that this is its role."""
        directory = self.directory / f"foreign-{role}"
        directory.mkdir(exist_ok=True)
        return make_certificate(directory, "127.0.0.1", common_name=role)


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
