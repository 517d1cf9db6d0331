"""`Exposure`: a warning, once, that a secret goes to a broker without encryption."""

import ipaddress
import logging

__all__ = ["Exposure", "is_loopback"]

_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether bytes to this host do not leave the machine, as far as its name says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


class Exposure:
    """Warns once of a secret that others on the network can read."""

    def __init__(self) -> None:
        self._logged = False

    def warn(self, host: str, address: object, method: str) -> None:
        """Log the first address to which credentials go without TLS, unless it is this machine."""
        if self._logged or is_loopback(host):
            return
        self._logged = True
        _log.warning(
            "credentials_sent_unencrypted broker=%s method=%s hint=%r",
            address,
            method,
            "others on the network can read them: connect by TLS",
        )
