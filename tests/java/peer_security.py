"""A broker with TLS, authentication and authorization, Apache Pulsar or Magnetar.

One directory holds all that it needs, made anew for each run: an authority, the broker's
certificate, a secret key that signs tokens, a file of passwords.  The role `admin` may do
everything, every other one what it was granted.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.certificates import Certificate, make_authority, make_certificate, sign
from tests.support.child_process import free_port
from tests.support.roles import bearer, token_of

TEMPLATE = Path(__file__).resolve().parent / "peer" / "security.conf"
ADMIN = "admin"
DAY_S: Final = 24 * 3600
PASSWORD: Final = "secret"
"""Of every user."""
PASSWORD_HASH: Final = "$apr1$0123456x$bLId3n8oGDkN9kbkLuZDc1"
USERS: Final = (ADMIN, "alice", "reader", "stranger")


@dataclass(frozen=True)
class PeerSecurity:
    """The files of one broker, and credentials for its clients.  Use `make`."""

    directory: Path
    tls_port: int
    authority: Certificate
    """It has signed the broker's certificate, and signs those of clients."""
    secret: bytes
    http_port_tls: int

    @staticmethod
    def make(directory: Path, tls_port: int, address: str) -> PeerSecurity:
        """Write the files of a broker at that address."""
        authority = make_authority(directory / "authority")
        sign(authority, directory / "broker", "broker", address)
        secret = secrets.token_bytes(32)
        (directory / "secret.key").write_bytes(secret)
        users = directory / "users.htpasswd"
        users.touch(mode=0o600)
        users.write_text("".join(f"{user}:{PASSWORD_HASH}\n" for user in USERS))
        return PeerSecurity(directory, tls_port, authority, secret, free_port())

    def configuration(self) -> str:
        """The lines to add to the peer's configuration."""
        text = TEMPLATE.read_text()
        for mark, value in (
            ("@TLS_PORT@", str(self.tls_port)),
            ("@HTTP_TLS_PORT@", str(self.http_port_tls)),
            ("@DIRECTORY@", str(self.directory)),
            ("@ADMIN_TOKEN@", self.token(ADMIN)),
        ):
            text = text.replace(mark, value)
        return text

    def settings(self) -> Mapping[str, object]:
        """The settings of a Magnetar that are the same."""
        key = base64.b64encode(self.secret).decode()
        return {
            "port_tls": self.tls_port,
            "http_port_tls": self.http_port_tls,
            "tls_certificate_file": self.directory / "broker" / "certificate.pem",
            "tls_key_file": self.directory / "broker" / "key.pem",
            "tls_trust_certs_file": self.authority.chain,
            "tls_client_certificates": "wanted",
            "authentication_providers": "token,basic,tls",
            "token_secret_keys": f"data:;base64,{key}",
            "basic_auth_file": self.directory / "users.htpasswd",
            "authentication_refresh_check_s": 1,
            "authorization": "on",
            "superuser_roles": ADMIN,
        }

    @property
    def admin_headers(self) -> Mapping[str, str]:
        """Of REST requests that may do everything."""
        return bearer(self.token(ADMIN))

    def token(self, role: str, expires_s: float = DAY_S, secret: bytes | None = None) -> str:
        """A JWT for a role; `expires_s` from now; `secret`: instead of the one that is trusted."""
        return token_of(role, life_s=expires_s, secret=secret or self.secret)

    def certificate(self, role: str) -> Certificate:
        """One that the broker trusts, of a client with this role."""
        return sign(self.authority, self.directory / f"client-{role}", role)

    def foreign_certificate(self, role: str) -> Certificate:
        """One that signed itself, of somebody who says that this is its role."""
        directory = self.directory / f"foreign-{role}"
        directory.mkdir(exist_ok=True)
        return make_certificate(directory, "127.0.0.1", common_name=role)
