"""The files of `magnetar standalone --secure`: a key, a token and a certificate, made once.

They are in `security/` of the data directory, with mode 0600.  What is there stays as it is, so
that each of them can be replaced, or removed to be made anew at the next start.
"""

import datetime
import ipaddress
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from config.settings import Settings
from security.new_keys import new_secret
from security.secret_files import read_secret, write_secret
from security.token_keys import signing_secret
from security.tokens import create_token

ADMIN: Final = "admin"
"""The role of the token; a superuser."""
TOKEN_LIFE_D: Final = 365
CERTIFICATE_LIFE_D: Final = 5 * 365
_BEFORE: Final = datetime.timedelta(hours=1)
"""A certificate is valid from a little earlier on, as clocks differ."""
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class SecurityFiles:
    """The files, by absolute path."""

    secret_key: Path
    admin_token: Path
    certificate: Path
    certificate_key: Path

    @property
    def settings(self) -> dict[str, object]:
        """Settings of a broker that uses them; those that the operator sets are stronger."""
        return {
            "authentication_providers": ["token"],
            "token_secret_keys": [self.secret_key.as_uri()],
            "authorization": "on",
            "superuser_roles": [ADMIN],
            "plaintext_ports": False,
            "port_tls": 6651,
            "http_port_tls": 8443,
            "tls_certificate_file": str(self.certificate),
            "tls_key_file": str(self.certificate_key),
            "tls_trust_certs_file": str(self.certificate),
        }

    def hints(self, settings: Settings) -> tuple[str, ...]:
        """Commands by which a shell tells `magnetar` where the broker is, and who asks."""
        host = settings.advertised_host
        host = f"[{host}]" if ":" in host else host
        return (
            f"export MAGNETAR_URL=pulsar+ssl://{host}:{settings.port_tls}",
            f"export MAGNETAR_ADMIN_URL=https://{host}:{settings.http_port_tls}",
            f"export MAGNETAR_TLS_TRUST_FILE={shlex.quote(str(self.certificate))}",
            f"export MAGNETAR_TOKEN_FILE={shlex.quote(str(self.admin_token))}",
        )


def security_files(data_dir: Path, host: str, *, now: datetime.datetime) -> SecurityFiles:
    """Return the files, after making those that are not there.

    `host` is the name that clients connect to; the certificate is for it and for this machine's own
    names.  Raises `InvalidSecret` and `OSError`.
    """
    directory = data_dir.absolute() / "security"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = SecurityFiles(
        directory / "secret.key",
        directory / "admin.token",
        directory / "certificate.pem",
        directory / "certificate.key",
    )
    if not files.secret_key.exists():
        write_secret(files.secret_key, new_secret("HS256"))
        # A token of another key is worth nothing.
        files.admin_token.unlink(missing_ok=True)
    if not files.admin_token.exists():
        write_secret(files.admin_token, _admin_token(files.secret_key, now).encode())
    if not files.certificate.exists() or not files.certificate_key.exists():
        for each in (files.certificate, files.certificate_key):
            each.unlink(missing_ok=True)
        key, certificate = self_signed([host, *_LOCAL], now=now)
        write_secret(files.certificate_key, key)
        write_secret(files.certificate, certificate)
    return files


def _admin_token(secret_key: Path, now: datetime.datetime) -> str:
    expiry = now + datetime.timedelta(days=TOKEN_LIFE_D)
    claims: dict[str, object] = {"sub": ADMIN, "exp": int(expiry.timestamp())}
    return create_token(signing_secret(read_secret(secret_key), "the secret key"), claims)


def self_signed(hosts: Sequence[str], *, now: datetime.datetime) -> tuple[bytes, bytes]:
    """Return a new key and a certificate for these names and addresses, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Magnetar")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_LIFE_D))
        .add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
