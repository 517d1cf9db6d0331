"""A broker with TLS, or with tokens and authorization, and how clients of a benchmark connect.

The clients' role is no superuser: a grant on the namespace decides on each request.
"""

import json
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from magnetar.protocol.pulsar_pb2 import CommandConnect
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.peer_process import PeerProcess
from tests.support.authority import Authority, server_settings
from tests.support.broker_process import Code
from tests.support.child_process import HOST, free_port
from tests.support.roles import SECRET_KEY, bearer, connect_as, java_arguments, token_of

SecurityKind = Literal["tls", "authorization"]
SECURITY_KINDS: Final[tuple[SecurityKind, ...]] = ("tls", "authorization")
ROLE: Final = "bench"
ADMIN: Final = "admin"
REQUEST_TIMEOUT_S: Final = 30


@dataclass(frozen=True)
class ClientAccess:
    """How clients connect: the authorities that they trust, and whether they show tokens."""

    trust: Path | None = None
    tokens: bool = False

    def java_arguments(self) -> Mapping[str, str]:
        """Arguments of the official client's cases."""
        trust = {} if self.trust is None else {"trust": str(self.trust)}
        if not self.tokens:
            return trust
        return {**trust, **java_arguments(token_of(ROLE), token_of(ADMIN))}

    @property
    def token(self) -> str:
        """The token that clients show; empty without tokens."""
        return token_of(ROLE) if self.tokens else ""

    def headers(self) -> dict[str, str]:
        """Headers of an operator's REST requests."""
        return bearer(token_of(ADMIN)) if self.tokens else {}

    def connect_command(self) -> CommandConnect | None:
        """CONNECT with a token; None without tokens."""
        return connect_as(ROLE) if self.tokens else None

    def context(self) -> ssl.SSLContext | None:
        """The TLS context of a client in Python."""
        return None if self.trust is None else ssl.create_default_context(cafile=str(self.trust))


class SecuredProcess(MagnetarProcess):
    """`magnetar standalone` with one kind of security."""

    def __init__(self, directory: Path, security: SecurityKind, code: Code | None = None) -> None:
        self._port_tls: int | None = None
        if security == "tls":
            authority = Authority(directory / "authority")
            self._port_tls = free_port()
            self.access = ClientAccess(trust=authority.chain)
            settings = {
                # The Java client looks an address up backwards, and checks the name that it finds.
                **server_settings(authority.issue("broker", hosts=("localhost",))),
                "port_tls": self._port_tls,
                "http_port_tls": free_port(),
            }
        else:
            self.access = ClientAccess(tokens=True)
            settings = {
                "authentication_providers": "token",
                "token_secret_keys": SECRET_KEY,
                "authorization": "on",
                "superuser_roles": ADMIN,
            }
        super().__init__(directory, settings, code)

    @property
    def url(self) -> str:
        return super().url if self._port_tls is None else f"pulsar+ssl://{HOST}:{self._port_tls}"

    def start(self) -> None:
        super().start()
        if self.access.tokens:
            rest(
                self,
                "POST",
                f"/admin/v2/namespaces/public/default/permissions/{ROLE}",
                ["produce", "consume"],
            )


class TlsPeer(PeerProcess):
    """Apache Pulsar with TLS on the port of its clients; its REST port has none."""

    def __init__(self, directory: Path) -> None:
        super().__init__(free_port(), free_port())
        self._port_tls = free_port()
        authority = Authority(directory / "authority")
        self._certificate = authority.issue("broker", hosts=("localhost",))
        self.access = ClientAccess(trust=authority.chain)

    @property
    def url(self) -> str:
        return f"pulsar+ssl://{HOST}:{self._port_tls}"

    def configuration(self) -> str:
        return super().configuration() + (
            f"\nbrokerServicePortTls={self._port_tls}"
            f"\ntlsCertificateFilePath={self._certificate.chain}"
            f"\ntlsKeyFilePath={self._certificate.key}\n"
        )


def access_to(broker: BrokerUnderTest) -> ClientAccess:
    """How clients connect to a broker; nothing is needed for one without security."""
    return broker.access if isinstance(broker, SecuredProcess | TlsPeer) else ClientAccess()


def rest(broker: BrokerUnderTest, method: str, path: str, body: object) -> None:
    """Send a REST request as an operator.  Raises `OSError` if it is refused."""
    request = urllib.request.Request(
        f"{broker.admin_url}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **access_to(broker).headers()},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S):
        pass
