"""How to talk with bookies."""

import ssl
from dataclasses import dataclass

from config.bounds import BOOKIE_CONNECT_TIMEOUT_S, BOOKIE_FRAME_BYTES
from storage.ledger.bookkeeper.auth import NewAuthProvider


@dataclass(frozen=True, slots=True)
class BookieOptions:
    """How to talk with bookies.

    `max_frame_bytes` is nettyMaxFrameSizeBytes of the bookies; `tls` asks every bookie for TLS;
    `auth` makes one side of each connection's authentication.
    """

    request_timeout_s: float = 30.0
    connect_timeout_s: float = BOOKIE_CONNECT_TIMEOUT_S
    max_frame_bytes: int = BOOKIE_FRAME_BYTES
    tls: ssl.SSLContext | None = None
    auth: NewAuthProvider | None = None
