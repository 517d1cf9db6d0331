"""Certificates for two days, made by `openssl`: some sign themselves, some an authority signs."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Two PEM files."""

    chain: Path
    key: Path


def make_certificate(directory: Path, address: str, *, common_name: str = "bookie") -> Certificate:
    """A certificate of an IP address, which signs itself."""
    return _make(directory, common_name, "-addext", f"subjectAltName=IP:{address}")


def make_authority(directory: Path) -> Certificate:
    """What `sign` signs with."""
    directory.mkdir()
    return _make(directory, "authority")


def sign(
    authority: Certificate, directory: Path, common_name: str, address: str | None = None
) -> Certificate:
    """Sign a certificate, for `localhost` at an IP address if it is a server's.

    `directory` is made if it is missing.
    """
    directory.mkdir(exist_ok=True)
    # Java clients that connect to an address check the name that it resolves to.
    alternatives = f"subjectAltName=IP:{address},DNS:localhost"
    names = [] if address is None else ["-addext", alternatives]
    by = ["-CA", str(authority.chain), "-CAkey", str(authority.key)]
    return _make(directory, common_name, *names, *by)


def _make(directory: Path, common_name: str, *more: str) -> Certificate:
    openssl = shutil.which("openssl")
    assert openssl is not None, "install openssl"
    made = Certificate(directory / "certificate.pem", directory / "key.pem")
    options = [
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={common_name}",
    ]
    files = ["-out", str(made.chain), "-keyout", str(made.key)]
    command = [openssl, "req", *options, *more, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made
