"""Pure: the key under which connections and failed logins of an address are counted."""

import ipaddress
from typing import Final

_OTHER_ADDRESS_CHARACTERS: Final = 64


def address_key(address: str) -> str:
    """Return the key under which an address is counted: of IPv6 its network of 64 bits.

    IPv4 in IPv6 counts as IPv4.  A text that is no IP address counts as itself.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:_OTHER_ADDRESS_CHARACTERS]
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
