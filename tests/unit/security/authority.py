"""A certificate authority of tests, and the certificates that it signs."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def subject(*common_names: str) -> x509.Name:
    """A subject with these common names."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names]
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "tests"), *attributes])


class Authority:
    """Signs certificates for two days, with keys of P-256."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = subject(name)
        self.certificate = self._sign(self._name, self._key, [], authority=True)

    def sign(
        self, name: x509.Name, alternative_names: Sequence[x509.GeneralName] = ()
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """A certificate of a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._sign(name, key, alternative_names), key

    def write(self, directory: Path, name: x509.Name, host: str) -> tuple[Path, Path, Path]:
        """Files (PEM) for a server: its certificate, its key, the authority."""
        certificate, key = self.sign(name, [x509.DNSName(host)])
        files = directory / "certificate.pem", directory / "key.pem", directory / "authority.pem"
        files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        files[1].write_bytes(pem)
        files[1].chmod(0o600)
        files[2].write_bytes(self.certificate.public_bytes(Encoding.PEM))
        return files

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        alternative_names: Sequence[x509.GeneralName],
        *,
        authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - DAY,
            not_valid_after=now + DAY,
        ).add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        if alternative_names:
            names = x509.SubjectAlternativeName(alternative_names)
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def der(certificate: x509.Certificate) -> bytes:
    """The bytes of the certificate, as TLS connections have them."""
    return certificate.public_bytes(Encoding.DER)
