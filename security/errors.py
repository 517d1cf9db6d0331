"""The errors of this package, for peers, metrics and logs.

An error says no more to a peer than one fixed sentence.  Its reason is one of a short list, so that
metrics can have it as a label.  Its detail is for logs and audit events; it never has a secret, or
bytes that a peer sent.
"""

import enum
from typing import ClassVar


class Refusal(enum.StrEnum):
    """Why credentials were refused: the label `reason` of `pulsar_authentication_failures_total`.

    The names are those that Pulsar's providers count, as far as they have one.
    """

    # Before any provider, or in none of several
    AUTH_REQUIRED = "AUTH_REQUIRED"
    """No credentials were sent, and there is no anonymous role."""
    UNSUPPORTED_METHOD = "UNSUPPORTED_METHOD"
    """No provider serves the method."""
    INVALID_ROLE = "INVALID_ROLE"
    """The credentials are valid, but their role is none that may be used."""
    INVALID_ROLES = "INVALID_ROLES"
    """A proxy named no original principal, or one that it may not name; or another role did."""
    TOO_MANY_FAILURES = "TOO_MANY_FAILURES"
    """Too many logins failed from this address."""
    TIMED_OUT = "TIMED_OUT"
    """The check took too long."""

    # Tokens, and passwords
    EMPTY_AUTH_DATA = "EMPTY_AUTH_DATA"
    INVALID_HEADER = "INVALID_HEADER"
    INVALID_AUTH_DATA = "INVALID_AUTH_DATA"
    INVALID_TOKEN = "INVALID_TOKEN"
    """A token of no valid form or signature, or expired; or a wrong password."""
    INVALID_AUDIENCES = "INVALID_AUDIENCES"

    # Client certificates
    INVALID_CERTS = "INVALID_CERTS"
    INVALID_CN = "INVALID_CN"

    # OpenID Connect
    UNSUPPORTED_ISSUER = "UNSUPPORTED_ISSUER"
    UNSUPPORTED_ALGORITHM = "UNSUPPORTED_ALGORITHM"
    ISSUER_MISMATCH = "ISSUER_MISMATCH"
    ALGORITHM_MISMATCH = "ALGORITHM_MISMATCH"
    INVALID_PUBLIC_KEY = "INVALID_PUBLIC_KEY"
    ERROR_RETRIEVING_PUBLIC_KEY = "ERROR_RETRIEVING_PUBLIC_KEY"
    ERROR_DECODING_JWT = "ERROR_DECODING_JWT"
    ERROR_VERIFYING_JWT = "ERROR_VERIFYING_JWT"
    ERROR_VERIFYING_JWT_SIGNATURE = "ERROR_VERIFYING_JWT_SIGNATURE"
    INVALID_JWT_CLAIM = "INVALID_JWT_CLAIM"
    EXPIRED_JWT = "EXPIRED_JWT"


class SecurityError(Exception):
    """A peer may not get in, or not do what it asked for.

    `peer_message` is all that the peer gets.  `str` of the error is its detail, for logs.
    """

    peer_message: ClassVar[str] = "This is not allowed."


class CredentialsRefused(SecurityError):
    """The credentials of a peer prove no role.

    `reason` is for metrics.  `expired` is whether they would have been taken at an earlier time.
    """

    peer_message = "Authentication failed: check the credentials that the client sends."

    def __init__(self, reason: Refusal, detail: str, *, expired: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.expired = expired


class NotAllowed(SecurityError):
    """The role of a peer may not do what it asked for.

    The detail has the role, the action and the resource; whether the resource exists is not told to
    the peer.
    """

    peer_message = "The role of this client may not do this: ask an administrator for a grant."


class InvalidSecret(Exception):
    """A file or setting with a secret or key cannot be used: the message for the operator says how
    to mend it, and has nothing of the secret."""
