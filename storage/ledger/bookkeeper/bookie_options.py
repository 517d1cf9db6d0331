"""Options of the connections to bookies."""

import ssl
from dataclasses import dataclass

from config.bounds import (
    BOOKIE_BACKOFF_MAX_S,
    BOOKIE_BACKOFF_MIN_S,
    BOOKIE_CONNECT_TIMEOUT_S,
    BOOKIE_FRAME_BYTES,
    BOOKIE_INFLIGHT_BYTES,
    BOOKIE_INFLIGHT_REQUESTS,
    BOOKIE_WAITING_BYTES,
    BOOKIE_WAITING_REQUESTS,
)
from storage.ledger.bookkeeper.auth import NewAuthProvider


@dataclass(frozen=True, slots=True)
class BookieOptions:
    """Options of the connections to bookies.

    `max_frame_bytes` is nettyMaxFrameSizeBytes of the bookies; with `tls` every connection uses
    TLS; `auth` makes the client's side of each connection's authentication.  The rest are bounds of
    a connection (`Window`), and of the pauses after one could not be opened.
    """

    request_timeout_s: float = 30.0
    connect_timeout_s: float = BOOKIE_CONNECT_TIMEOUT_S
    max_frame_bytes: int = BOOKIE_FRAME_BYTES
    tls: ssl.SSLContext | None = None
    auth: NewAuthProvider | None = None
    inflight_requests: int = BOOKIE_INFLIGHT_REQUESTS
    inflight_bytes: int = BOOKIE_INFLIGHT_BYTES
    waiting_requests: int = BOOKIE_WAITING_REQUESTS
    waiting_bytes: int = BOOKIE_WAITING_BYTES
    backoff_min_s: float = BOOKIE_BACKOFF_MIN_S
    backoff_max_s: float = BOOKIE_BACKOFF_MAX_S
