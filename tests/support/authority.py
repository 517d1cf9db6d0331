"""Certificate authorities, and certificates that they sign, made while a test runs."""

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.certificates import Certificate

HOST = "127.0.0.1"


class Authority:
    """Signs certificates; everything is in files of its directory, keys with mode 0600."""

    def __init__(
        self, directory: Path, name: str = "authority", *, valid_s: float = 2 * 24 * 3600
    ) -> None:
        """Make a key and a certificate; with a negative `valid_s` it has expired."""
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name_of(name)
        directory.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder(self._name, self._name, self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(seconds=valid_s))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            # Authorities of the same name are told apart by it.
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        self.chain = directory / f"{name}.pem"
        """Its own certificate: the file that others trust."""
        self.chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        addresses: Sequence[str] = (HOST,),
        hosts: Sequence[str] = (),
        valid_s: float = 24 * 3600,
        password: bytes | None = None,
    ) -> Certificate:
        """Make a certificate with this common name, for these addresses and host names.

        A negative `valid_s` makes one that has expired; `password` protects its key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        end = now + datetime.timedelta(seconds=valid_s)
        names: list[x509.GeneralName] = [
            x509.IPAddress(ipaddress.ip_address(each)) for each in addresses
        ]
        names += [x509.DNSName(each) for each in hosts]
        certificate = (
            x509.CertificateBuilder(self._name, _name_of(name), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, end) - datetime.timedelta(hours=1))
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        made.chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        made.key.touch(mode=0o600)
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption()
                if password is None
                else serialization.BestAvailableEncryption(password),
            )
        )
        return made

    def client_context(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """The TLS context of a client that trusts this authority, and shows a certificate."""
        context = ssl.create_default_context(cafile=str(self.chain))
        if certificate is not None:
            context.load_cert_chain(certificate.chain, certificate.key)
        return context


def server_settings(certificate: Certificate) -> dict[str, object]:
    """The settings of a broker whose ports with TLS show this certificate."""
    return {
        "port_tls": 0,
        "http_port_tls": 0,
        "tls_certificate_file": certificate.chain,
        "tls_key_file": certificate.key,
    }


def _name_of(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
