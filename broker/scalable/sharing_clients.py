"""Pure: the clients that can share a segment by its entry buckets (PIP-486).

Nothing is negotiated: a client that cannot ignores the buckets of its assignment and subscribes
Exclusive (M1), or fails (C++).  The version in CONNECT is the only sign of its generation.
"""

import re

from broker.scalable.relay_exchange import RELAY_CLIENT

_JAVA = re.compile(r"Pulsar-Java-v(\d+)\.(\d+)")
_MILESTONE_1 = re.compile(r"Pulsar-Java-v5\.0\.0-M1(?!\d)")
_PYTHON = "Magnetar-Python-"


def can_share_segments(client_version: str) -> bool:
    """Whether the client of a stream consumer can share segments, by its version in CONNECT.

    The official Java client can after 5.0.0-M1, this project's Python client can, and no other one
    is known to.  A relaying broker puts RELAY_CLIENT before the version of its client.
    """
    version = client_version.removeprefix(RELAY_CLIENT)
    if version.startswith(_PYTHON):
        return True
    java = _JAVA.match(version)
    return java is not None and int(java[1]) >= 5 and _MILESTONE_1.match(version) is None
