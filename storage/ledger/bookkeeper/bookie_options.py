"""Options of the connections to bookies."""

import ssl
from dataclasses import dataclass

from config.bounds import BOOKIE_CONNECT_TIMEOUT_S, BOOKIE_FRAME_BYTES
from storage.ledger.bookkeeper.auth import NewAuthProvider


@dataclass(frozen=True, slots=True)
class BookieOptions:
    """Options of the connections to bookies.

    `max_frame_bytes` is nettyMaxFrameSizeBytes of the bookies; with `tls` every connection uses
    TLS; `auth` makes the client's side of each connection's authentication.
    """

    request_timeout_s: float = 30.0
    connect_timeout_s: float = BOOKIE_CONNECT_TIMEOUT_S
    max_frame_bytes: int = BOOKIE_FRAME_BYTES
    tls: ssl.SSLContext | None = None
    auth: NewAuthProvider | None = None
