"""The files of `magnetar standalone --secure`: a key, a token and a certificate, made once.

A file that is there stays as it is, so that each of them can be replaced, or removed to be made
anew at the next start.  One exception: a certificate that an earlier start made is made anew if it
lacks the host that the broker now advertises.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from security.errors import InvalidSecret
from security.first_start_files import ADMIN, SecurityFiles
from security.new_keys import new_secret
from security.secret_files import read_secret, write_secret
from security.token_keys import signing_secret
from security.tokens import create_token

TOKEN_LIFE_D: Final = 365
CERTIFICATE_LIFE_D: Final = 5 * 365
_BEFORE: Final = datetime.timedelta(hours=1)
"""A certificate is valid from a little earlier on, as clocks differ."""
_SUBJECT: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Magnetar")])
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def security_files(data_dir: Path, host: str, *, now: datetime.datetime) -> SecurityFiles:
    """Return the files, after making those that are not there.

    `host` is the name that clients connect to; the certificate is for it and for this machine's own
    names.  Raises `InvalidSecret` and `OSError`.
    """
    files = SecurityFiles.of(data_dir)
    directory = files.secret_key.parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(directory)
    if not files.secret_key.exists():
        write_secret(files.secret_key, new_secret("HS256"))
        # A token of another key is worth nothing.
        files.admin_token.unlink(missing_ok=True)
    if not files.admin_token.exists():
        write_secret(files.admin_token, _admin_token(files.secret_key, now).encode())
    _make_certificate(files, host, now)
    return files


def _require_own(directory: Path) -> None:
    """Raise `InvalidSecret` if another user may have made the files of an earlier start."""
    # As root the broker could read a key of anybody who may write into the data directory.
    owners = (os.geteuid(), 0, directory.parent.stat().st_uid)
    if directory.lstat().st_uid not in owners or directory.stat().st_uid not in owners:
        raise InvalidSecret(
            f"{directory} belongs to another user, who may know the keys in it: remove it, or make "
            "it your own if you know how they were made."
        )


def _make_certificate(files: SecurityFiles, host: str, now: datetime.datetime) -> None:
    hosts, key = [host, *_LOCAL], None
    if files.certificate.exists() and files.certificate_key.exists():
        known = _own_names(files.certificate)
        if known is None or _name_of(host) in known:
            return
        # The same key, and the names that clients may still use.
        key = _own_key(files.certificate_key)
        hosts += [str(each.value) for each in known]
    for each in (files.certificate, files.certificate_key):
        each.unlink(missing_ok=True)
    made, certificate = self_signed(hosts, now=now, key=key)
    write_secret(files.certificate_key, made)
    write_secret(files.certificate, certificate)


def _own_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = load_pem_private_key(read_secret(path), password=None)
    except ValueError:
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _own_names(path: Path) -> list[x509.GeneralName] | None:
    """The names in a certificate that an earlier start made; None if it is the operator's."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return None
    made_here = certificate.subject == certificate.issuer == _SUBJECT
    return list(names) if made_here else None


def _admin_token(secret_key: Path, now: datetime.datetime) -> str:
    expiry = now + datetime.timedelta(days=TOKEN_LIFE_D)
    claims: dict[str, object] = {"sub": ADMIN, "exp": int(expiry.timestamp())}
    return create_token(signing_secret(read_secret(secret_key), "the secret key"), claims)


def self_signed(
    hosts: Sequence[str],
    *,
    now: datetime.datetime,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> tuple[bytes, bytes]:
    """Return a key, a new one by default, and a certificate for these names; both are PEM."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_SUBJECT)
        .issuer_name(_SUBJECT)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_LIFE_D))
        .add_extension(
            x509.SubjectAlternativeName([_name_of(host) for host in dict.fromkeys(hosts)]),
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


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
