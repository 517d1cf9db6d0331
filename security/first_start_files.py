"""The files of `magnetar standalone --secure`: where they are, and the settings that name them.

Apart from `first_start`, which makes them: commands find them without the library `cryptography`.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from config.settings import Settings

ADMIN: Final = "admin"
"""The role of the token; a superuser."""
DIRECTORY: Final = "security"
"""The directory of the files, in the data directory."""
PORT_TLS: Final = 6651
HTTP_PORT_TLS: Final = 8443
"""The ports, unless they are set otherwise."""


@dataclass(frozen=True, slots=True)
class SecurityFiles:
    """The files, by absolute path: in `security/` of the data directory, with mode 0600."""

    secret_key: Path
    admin_token: Path
    certificate: Path
    certificate_key: Path

    @classmethod
    def of(cls, data_dir: Path) -> Self:
        """The files of a data directory, whether they are there or not."""
        directory = data_dir.absolute() / DIRECTORY
        return cls(
            directory / "secret.key",
            directory / "admin.token",
            directory / "certificate.pem",
            directory / "certificate.key",
        )

    @property
    def settings(self) -> dict[str, object]:
        """Settings of a broker that uses them; those that the operator sets are stronger."""
        return {
            "authentication_providers": ["token"],
            "token_secret_keys": [self.secret_key.as_uri()],
            "authorization": "on",
            "superuser_roles": [ADMIN],
            "plaintext_ports": False,
            "port_tls": PORT_TLS,
            "http_port_tls": HTTP_PORT_TLS,
            "tls_certificate_file": str(self.certificate),
            "tls_key_file": str(self.certificate_key),
            "tls_trust_certs_file": str(self.certificate),
        }

    def hints(self, settings: Settings) -> tuple[str, ...]:
        """Commands of a shell that set the broker's addresses and the token for `magnetar`."""
        host = settings.advertised_host
        host = f"[{host}]" if ":" in host else host
        # Which authorities signed the operator's own certificate is not known here.
        own = settings.tls_certificate_file != self.certificate
        trust = f"export MAGNETAR_TLS_TRUST_FILE={shlex.quote(str(self.certificate))}"
        return (
            f"export MAGNETAR_URL=pulsar+ssl://{host}:{settings.port_tls}",
            f"export MAGNETAR_ADMIN_URL=https://{host}:{settings.http_port_tls}",
            *(() if own else (trust,)),
            f"export MAGNETAR_TOKEN_FILE={shlex.quote(str(self.admin_token))}",
        )
