"""Shares the process's file descriptors out to files, clients and HTTP.

Without a share of its own each of them could take what the others need: a thousand half-sent HTTP
requests would leave no descriptor for a client, or for the next file of the ledger log.
"""

from dataclasses import dataclass

import structlog

from config.bounds import DESCRIPTORS_FOR_FILES
from config.settings import Settings

try:
    import resource
except ImportError:  # Windows has no such limit.
    resource = None  # type: ignore[assignment]

log = structlog.get_logger(__name__)

_HTTP_PART = 8
"""HTTP gets at least one of this many descriptors that files leave, as probes need some."""


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """How many connections of each kind the descriptors allow."""

    limit: int | None
    """Descriptors that the process may have; None without limit."""
    needed: int
    """Descriptors that the settings ask for."""
    binary: int
    """Connections of the binary protocol."""
    http: int
    """HTTP connections."""

    @property
    def sufficient(self) -> bool:
        """Whether the process may have as many descriptors as the settings ask for."""
        return self.limit is None or self.limit >= self.needed

    def warn_if_short(self) -> None:
        """Log one warning if the limit is too low for the settings."""
        if not self.sufficient:
            log.warning(
                "file_descriptors_too_few",
                limit=self.limit,
                needed=self.needed,
                connections_accepted=self.binary,
                http_connections_accepted=self.http,
                next="raise the limit (ulimit -n, or LimitNOFILE= of systemd), or lower "
                "max_connections and max_http_connections",
            )


def share_descriptors(limit: int | None, settings: Settings) -> DescriptorShares:
    """Share `limit` descriptors; None means that there is no limit.

    If they do not suffice, files get up to a quarter, HTTP an eighth of the rest or what
    `max_connections` leaves, and clients what is left then.
    """
    binary, http = settings.max_connections, settings.max_http_connections
    needed = DESCRIPTORS_FOR_FILES + binary + http
    if limit is None or limit >= needed:
        return DescriptorShares(limit, needed, binary, http)
    left = limit - min(DESCRIPTORS_FOR_FILES, limit // 4)
    http = max(1, min(http, max(left - binary, left // _HTTP_PART)))
    return DescriptorShares(limit, needed, max(1, min(binary, left - http)), http)


def descriptor_limit() -> int | None:
    """The descriptors that this process may have at present; None without limit."""
    if resource is None:
        return None
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit(needed: int) -> None:
    """Raise the soft limit of this process to the hard one, or to `needed` if that is refused."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    # macOS shows an infinite hard limit, and refuses it.
    for wanted in (hard, needed):
        infinite = wanted == resource.RLIM_INFINITY
        if not infinite and wanted <= soft:
            continue
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            continue
        return
