"""The files and settings of brokers with everything on, and the credentials of their clients.

Everything on: ports with TLS only, tokens, passwords, client certificates, and authorization.
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import bcrypt

from magnetar.protocol import pulsar_pb2 as pb
from security.secret_files import write_secret
from tests.support.authority import Authority, server_settings
from tests.support.certificates import Certificate
from tests.support.roles import SECRET_KEY, bearer, connect_as, java_arguments, token_of

ROOT_ROLE: Final = "root"
APP_ROLE: Final = "app"
BROKER_ROLE: Final = "broker"
PASSWORD: Final = "marked p4ssword"
"""The password of every user; no other text has it, so that logs can be searched for it."""
HASH_COST: Final = 10
"""Of bcrypt, as `htpasswd -B -C 10` makes it: a check takes some 60 ms."""
USERS: Final = 300


def user(number: int) -> str:
    """The name of one of USERS users with the PASSWORD."""
    return f"user-{number}"


@dataclass(frozen=True)
class Security:
    """The authority of a test's brokers and clients, with all files in one directory.

    The roles `root` and `broker`, that of the brokers, are superusers; others have what is granted
    to them.  Brokers trust a second authority, whose certificate has expired.
    """

    directory: Path
    users: Sequence[str] = (ROOT_ROLE, APP_ROLE, *map(user, range(USERS)))
    """The roles with a password."""
    hash_cost: int = HASH_COST

    @cached_property
    def authority(self) -> Authority:
        """It signs for brokers, stores and clients."""
        return Authority(self.directory)

    @cached_property
    def expired_authority(self) -> Authority:
        """Brokers trusted it, and still have its certificate in their files."""
        return Authority(self.directory, "expired-authority", valid_s=-60)

    @cached_property
    def broker_certificate(self) -> Certificate:
        """The certificate of all brokers."""
        # Java's client looks an address up backwards, and checks the name that it finds.
        return self.authority.issue(BROKER_ROLE, hosts=("localhost",))

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """Settings of a broker, all but its ports."""
        self.directory.mkdir(parents=True, exist_ok=True)
        token = self.directory / "broker.token"
        write_secret(token, token_of(BROKER_ROLE).encode())
        users = self.directory / "users.htpasswd"
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(self.hash_cost))
        write_secret(users, b"".join(b"%s:%s\n" % (name.encode(), hashed) for name in self.users))
        trusted = self.directory / "trusted.pem"
        authorities = (self.authority, self.expired_authority)
        trusted.write_bytes(b"".join(each.chain.read_bytes() for each in authorities))
        return {
            **server_settings(self.broker_certificate),
            "plaintext_ports": False,
            "tls_client_certificates": "wanted",
            "tls_trust_certs_file": trusted,
            "authentication_providers": "token,basic,tls",
            "token_secret_keys": SECRET_KEY,
            "basic_auth_file": users,
            "authorization": "on",
            "superuser_roles": f"{ROOT_ROLE},{BROKER_ROLE}",
            "broker_client_token_file": token,
        }

    @cached_property
    def context(self) -> ssl.SSLContext:
        """The TLS context of clients."""
        return self.authority.client_context()

    def connect(self, role: str = ROOT_ROLE) -> pb.CommandConnect:
        """CONNECT with a token of the role."""
        return connect_as(role)

    def headers(self, role: str = ROOT_ROLE) -> Mapping[str, str]:
        """The headers of a REST request by a role."""
        return bearer(token_of(role))

    @property
    def java_arguments(self) -> Mapping[str, str]:
        """The arguments with which a case of the Java client connects as `app`."""
        shown = java_arguments(token_of(APP_ROLE), token_of(ROOT_ROLE))
        return {"trust": str(self.authority.chain), **shown}
