"""TLS contexts: of the broker's ports, and towards other brokers.

A context is never changed.  New files make a fresh one, which each connection that comes after that
gets; present connections keep theirs.  So a certificate and its key are taken together or not at
all, and an authority that is no longer in the file is no longer trusted, although a context can
only ever gain authorities.
"""

import hashlib
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from config.bounds import TLS_RELOAD_FILE_BYTES
from config.settings import Settings
from magnetar.protocol.server_error import OperatorError
from security.errors import InvalidSecret
from security.secret_files import read_public, read_secret

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_VERIFY_MODES: Final = {
    "ignored": ssl.CERT_NONE,
    "wanted": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


class UnusableCertificate(OperatorError):
    """A file with certificates or a key cannot be used: the message names its setting."""


class ServerTls:
    """The TLS of both ports: the broker's certificate, and the authorities of its clients."""

    part: Final = "tls"

    def __init__(self, settings: Settings) -> None:
        """Load the files.  Raises `UnusableCertificate`."""
        self._settings = settings
        self._digest = b""
        self.current: ssl.SSLContext
        """The context of the next connection."""
        self._validity = _NEVER
        self.reload()

    def reload(self) -> bool:
        """See `Reloadable`.  Raises `UnusableCertificate`."""
        settings = self._settings
        certificate = _read("tls_certificate_file", settings.tls_certificate_file)
        key = _read("tls_key_file", settings.tls_key_file, secret=True)
        trusted = b""
        verifies = settings.tls_client_certificates != "ignored"
        if verifies:
            trusted = _read("tls_trust_certs_file", settings.tls_trust_certs_file)
        digest = _digest_of(certificate, key, trusted)
        if digest == self._digest:
            return False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[settings.tls_minimum_version]
        _set_ciphers(context, settings.tls_ciphers)
        # A resumed session would not see that its client's authority is no longer trusted.
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        _load_chain(
            context,
            ("tls_certificate_file", settings.tls_certificate_file),
            ("tls_key_file", settings.tls_key_file),
        )
        if verifies:
            _trust(context, "tls_trust_certs_file", settings.tls_trust_certs_file, trusted)
        context.verify_mode = _VERIFY_MODES[settings.tls_client_certificates]
        self._validity = _newer_validity(
            ("tls_certificate_file", settings.tls_certificate_file), certificate, self._validity
        )
        self.current, self._digest = context, digest
        return True

    @property
    def expires_at_s(self) -> float:
        """When the first certificate of the broker's chain expires, in seconds since 1970."""
        return self._validity.ends_s


class PeerTls:
    """The TLS of connections to other brokers: the chain and the name are always verified."""

    part: Final = "broker_client_tls"

    def __init__(self, settings: Settings) -> None:
        """Load the files.  Raises `UnusableCertificate`."""
        self._settings = settings
        self._digest = b""
        self._validity = _NEVER
        self._context: ssl.SSLContext | None = None
        own = settings.broker_client_trust_certs_file
        self._trust_file = own or settings.tls_trust_certs_file
        self._trust_setting = f"{'tls' if own is None else 'broker_client'}_trust_certs_file"
        self.reload()

    @property
    def preferred(self) -> bool:
        """Whether TLS is to be used with brokers that have plain ports too.

        So it is if a file says which authorities to trust; else the system's are.
        """
        return self._trust_file is not None

    @property
    def current(self) -> ssl.SSLContext:
        """The context of the next connection."""
        if self._context is None:
            # No file is given.  The system's authorities take a while to load, and a cluster
            # without TLS never asks for them.
            self._context = self._make_context(b"")
        return self._context

    def reload(self) -> bool:
        """See `Reloadable`.  Raises `UnusableCertificate`."""
        settings = self._settings
        contents = []
        if self._trust_file is not None:
            contents.append(_read(self._trust_setting, self._trust_file))
        if settings.broker_client_certificate_file is not None:
            contents += [
                _read("broker_client_certificate_file", settings.broker_client_certificate_file),
                _read("broker_client_key_file", settings.broker_client_key_file, secret=True),
            ]
        digest = _digest_of(*contents)
        if digest == self._digest:
            return False
        context = self._make_context(contents[0])
        if settings.broker_client_certificate_file is not None:
            named = "broker_client_certificate_file", settings.broker_client_certificate_file
            self._validity = _newer_validity(named, contents[-2], self._validity)
        self._context, self._digest = context, digest
        return True

    def _make_context(self, trusted: bytes) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # It verifies chains and names.
        context.minimum_version = _VERSIONS[settings.tls_minimum_version]
        if self._trust_file is not None:
            _trust(context, self._trust_setting, self._trust_file, trusted)
        else:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if settings.broker_client_certificate_file is not None:
            _load_chain(
                context,
                ("broker_client_certificate_file", settings.broker_client_certificate_file),
                ("broker_client_key_file", settings.broker_client_key_file),
            )
        return context


_Named = tuple[str, Path | None]
"""A setting and its value."""


def _read(setting: str, path: Path | None, *, secret: bool = False) -> bytes:
    if path is None:
        raise UnusableCertificate(f"The setting {setting} is missing: name a PEM file.")
    read = read_secret if secret else read_public
    try:
        return read(path, limit_bytes=TLS_RELOAD_FILE_BYTES)
    except InvalidSecret as error:
        raise UnusableCertificate(f"{setting}: {error}") from error


def _digest_of(*contents: bytes) -> bytes:
    return b"".join(hashlib.sha256(each).digest() for each in contents)


def _load_chain(context: ssl.SSLContext, certificate: _Named, key: _Named) -> None:
    def refuse_password() -> NoReturn:
        # Without it OpenSSL would ask for the password on the terminal.
        raise UnusableCertificate(
            f"{key[0]} {key[1]} is protected by a password: name a key without one, which only "
            "the broker may read."
        )

    try:
        context.load_cert_chain(str(certificate[1]), str(key[1]), password=refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise UnusableCertificate(
            f"{certificate[0]} {certificate[1]} and {key[0]} {key[1]} cannot be used "
            f"({_reason_of(error)}): name the PEM files of a certificate, with those that lead to "
            "its authority, and of its key."
        ) from error


def _trust(context: ssl.SSLContext, setting: str, path: Path | None, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ValueError, ssl.SSLError) as error:
        raise UnusableCertificate(
            f"{setting} {path} cannot be used ({_reason_of(error)}): name a PEM file with "
            "certificates of authorities."
        ) from error


def _set_ciphers(context: ssl.SSLContext, ciphers: str) -> None:
    try:
        context.set_ciphers(ciphers)
    except ssl.SSLError as error:
        raise UnusableCertificate(
            f"tls_ciphers {ciphers!r} names no cipher of OpenSSL: leave it out, or write it as "
            "`openssl ciphers` does."
        ) from error


class _Validity(NamedTuple):
    """The time in which all certificates of a chain are valid, in seconds since 1970."""

    begins_s: float
    ends_s: float

    @property
    def is_now(self) -> bool:
        return self.begins_s <= time.time() <= self.ends_s


_NEVER: Final = _Validity(0.0, 0.0)


def _newer_validity(named: "_Named", pem: bytes, before: _Validity) -> _Validity:
    """Return the validity of a new chain.

    Raises `UnusableCertificate` if the chain cannot be read, or is not valid now while the earlier
    one is.
    """
    # Only brokers with TLS load it.
    from cryptography import x509  # noqa: PLC0415

    setting, path = named
    try:
        chain: Sequence[x509.Certificate] = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise UnusableCertificate(
            f"{setting} {path} cannot be used ({error}): name a PEM file."
        ) from error
    begins = max(each.not_valid_before_utc for each in chain)
    ends = min(each.not_valid_after_utc for each in chain)
    validity = _Validity(begins.timestamp(), ends.timestamp())
    if before.is_now and not validity.is_now:
        raise UnusableCertificate(
            f"{setting} {path} is valid from {begins} to {ends} only, so the earlier certificate "
            "stays in use: replace it by one that is valid, or check the clock."
        )
    return validity


def _reason_of(error: Exception) -> str:
    """OpenSSL's reason, without its place in the source."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)
