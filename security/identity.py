"""The roles of users, and the identities of peers.  Pure.

A role is compared byte for byte: there is no normalisation, no folding of case, and no
pattern.  So everything that could look like another role on a screen, in a record's path or in a
list is refused where the role comes in.
"""

import enum
from dataclasses import dataclass
from typing import Final, NewType

from config.bounds import ROLE_BYTES

Role = NewType("Role", str)
"""The name of a user, as `role_of` let it through."""


class InvalidRole(ValueError):
    """The text is no role.  The message says why, and has nothing of the text."""


class Method(enum.StrEnum):
    """How a peer proved its role.  The values are the names of Pulsar's wire and settings."""

    TOKEN = "token"
    BASIC = "basic"
    TLS = "tls"
    NONE = "none"
    """It proved nothing: it has the anonymous role."""


def role_of(text: str) -> Role:
    """Return the text as a role.

    A role has 1 to ROLE_BYTES bytes of UTF-8, printable characters alone, no blank at either end
    and no `*`, which means every role in grants.  Raises `InvalidRole`.
    """
    if not text:
        raise InvalidRole("A role may not be empty.")
    # The length in characters first: encoding a text of megabytes would cost more than the answer.
    if len(text) > ROLE_BYTES or len(text.encode("utf-8", "surrogatepass")) > ROLE_BYTES:
        raise InvalidRole(f"A role may not be longer than {ROLE_BYTES} bytes.")
    if not text.isprintable():
        raise InvalidRole("A role may only have printable characters.")
    if text != text.strip():
        raise InvalidRole("A role may not begin or end with a blank.")
    if "*" in text:
        raise InvalidRole("A role may not have a '*': in grants it means every role.")
    return Role(text)


@dataclass(frozen=True, slots=True)
class Identity:
    """A role, the method that proved it, and when that proof expires.

    `expires_at_s` is a time of the wall clock in seconds since 1970; None means never.
    """

    role: Role
    method: Method
    expires_at_s: float | None = None

    def expired(self, now_s: float) -> bool:
        """Whether the proof no longer holds at a time of the wall clock, in seconds."""
        return self.expires_at_s is not None and now_s >= self.expires_at_s


@dataclass(frozen=True, slots=True)
class Principal:
    """A connection or request acts for this one.

    `identity` is that of the client.  Behind a proxy, `proxy` is the proxy's own, and an operation
    must be allowed to both.
    """

    identity: Identity
    proxy: Identity | None = None

    @property
    def role(self) -> Role:
        """The role of the client: it owns what is made here, such as transactions."""
        return self.identity.role

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Every identity that must be allowed to do an operation."""
        return (self.identity,) if self.proxy is None else (self.identity, self.proxy)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of every identity: of the client, and then of its proxy if there is one."""
        return tuple(each.role for each in self.identities)

    @property
    def by_certificate(self) -> bool:
        """Whether the client, or the proxy that names it, has shown a certificate."""
        return self.identity.method is Method.TLS

    @property
    def expires_at_s(self) -> float | None:
        """When the first of the proofs expires, in seconds since 1970; None means never."""
        times = [each.expires_at_s for each in self.identities if each.expires_at_s is not None]
        return min(times, default=None)


ANONYMOUS_METHODS: Final = frozenset({"", Method.NONE})
"""The names of methods by which a peer says that it has no credentials."""
