"""The property by which a broker recognises v5 clients, which follow a topic's layout.  Pure.

A v5 client that attaches to an ordinary topic, or to a legacy segment, sets this property in
PRODUCER and SUBSCRIBE (protocol-v5.md, 3.2).  It follows when the topic becomes scalable.
"""

from collections.abc import Mapping
from typing import Final

MANAGED_PROPERTY: Final = "__pulsar.v5.managed"


def is_managed(properties: Mapping[str, str]) -> bool:
    """Whether the properties of a PRODUCER or SUBSCRIBE are those of a v5 client."""
    return properties.get(MANAGED_PROPERTY) == "true"
