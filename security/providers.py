"""Providers: each checks the credentials of one method.

Several providers may serve the same method.  They are asked in the order of the settings.  Each is
in a module of its own (`token_provider.py`), as each needs libraries that a broker without it does
not load.
"""

from dataclasses import dataclass, field
from typing import Protocol

from security.identity import Identity, Method


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a peer sent to prove its role.

    `method` is the name that the peer gave to the method; it need not be one of `Method`.  `data`
    are the bytes that go with it: a token, or `user:password`.  `certificate` is the peer's client
    certificate (DER), whose chain TLS has verified; None without one.  `address` is the address of
    the peer, by which failures are counted; the `Authenticator` sets it.
    """

    method: str
    data: bytes = field(default=b"", repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    address: str = ""


class Provider(Protocol):
    """Checks the credentials of one method.

    `name` is the name of the provider in the setting `authentication_providers`; `method` is the
    method that peers name.
    """

    @property
    def name(self) -> str:
        """Its name in the settings, metrics and logs."""
        ...

    @property
    def method(self) -> Method:
        """The method that it serves."""
        ...

    async def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity that the credentials prove.  Raises `CredentialsRefused` alone."""
        ...
