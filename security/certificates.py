"""The role of a client certificate, and the provider of the method `tls`.  Pure.

TLS has verified the chain and the time of the certificate before it gets here.  The role is
either the common name (CN) of the subject, as in Pulsar, or the first of the names in the extension
subjectAltName (SAN) that is a DNS name, a URI or an email address.

A subject must have exactly one CN: of two, Java's clients and servers see the first and Python's
libraries both.  A CN with a character that the text form of a subject (RFC 2253) escapes is refused
too, because Pulsar splits that text at commas and so reads another role from the same certificate.
"""

from collections.abc import Callable
from datetime import UTC
from typing import Final, Literal

from cryptography import x509
from cryptography.x509.oid import NameOID

from config.bounds import CERTIFICATE_BYTES
from security.errors import CredentialsRefused, Refusal
from security.identity import Identity, InvalidRole, Method, Role, role_of
from security.providers import Credentials

PrincipalName = Literal["cn", "san"]
"""The values of the setting `tls_principal`."""
_ESCAPED: Final = frozenset(',+"\\<>;')
"""RFC 2253 escapes these in a name, and `#` at its beginning."""
_NOT_PARSED: Final = (
    TypeError,
    ValueError,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""The errors of the library for certificates that it cannot parse."""


class TlsProvider:
    """Takes the role from the client certificate of the TLS connection.

    `now_s` is the wall clock, in seconds since 1970.  The identity expires with the certificate:
    TLS looks at its time only when the connection is made.
    """

    name: Final = "tls"
    method: Final = Method.TLS

    def __init__(self, principal: PrincipalName, *, now_s: Callable[[], float]) -> None:
        self._principal = principal
        self._now_s = now_s

    async def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity of the certificate.  Raises `CredentialsRefused`.

        The bytes of the credentials are not used; clients send none.
        """
        if credentials.certificate is None:
            raise CredentialsRefused(
                Refusal.INVALID_CERTS, "The connection has no client certificate."
            )
        identity = identity_of(credentials.certificate, self._principal)
        if identity.expired(self._now_s()):
            raise CredentialsRefused(
                Refusal.INVALID_CERTS, "The client certificate has expired.", expired=True
            )
        return identity


def identity_of(certificate: bytes, principal: PrincipalName) -> Identity:
    """Return the identity of a certificate (DER) that TLS has verified.

    Raises `CredentialsRefused`.
    """
    if len(certificate) > CERTIFICATE_BYTES:
        raise CredentialsRefused(
            Refusal.INVALID_CERTS,
            f"The client certificate has more than {CERTIFICATE_BYTES} bytes.",
        )
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        expires_at_s = parsed.not_valid_after_utc.astimezone(UTC).timestamp()
        text = _common_name(parsed) if principal == "cn" else _alternative_name(parsed)
    except _NOT_PARSED as error:
        raise CredentialsRefused(
            Refusal.INVALID_CERTS, "The client certificate cannot be parsed."
        ) from error
    return Identity(_role(text), Method.TLS, expires_at_s)


def _role(text: str) -> Role:
    try:
        return role_of(text)
    except InvalidRole as error:
        raise CredentialsRefused(
            Refusal.INVALID_ROLE, f"The name in the client certificate is no role. {error}"
        ) from error


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise CredentialsRefused(
            Refusal.INVALID_CN,
            f"The subject of the client certificate has {len(names)} common names, not one.",
        )
    name = names[0].value
    alone = any(len(part) == 1 and names[0] in part for part in certificate.subject.rdns)
    if not isinstance(name, str) or not alone or _ESCAPED & {*name} or name.startswith("#"):
        raise CredentialsRefused(
            Refusal.INVALID_CN,
            "The common name of the client certificate is joined with another attribute, or has "
            "a character that is escaped in subjects.",
        )
    return name


def _alternative_name(certificate: x509.Certificate) -> str:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        names: list[str] = []
    else:
        kinds = x509.DNSName | x509.UniformResourceIdentifier | x509.RFC822Name
        names = [each.value for each in extension.value if isinstance(each, kinds)]
    if not names:
        raise CredentialsRefused(
            Refusal.INVALID_CN,
            "The client certificate has no DNS name, URI or email address as alternative name.",
        )
    return names[0]
