"""Who controls a topic: the one broker that holds its ephemeral record `.../controller`.

Rules: the claim hangs on this process's session with the store and is made anew when it is needed
and that session is another one; who does not hold it assigns nothing.
"""

import json
from typing import TYPE_CHECKING, ClassVar

from broker.scalable.records import controller_path
from protocol.names import TopicName
from protocol.server_error import PeerError, ServerError
from storage.metadata.store import ABSENT, VersionConflict

if TYPE_CHECKING:
    from broker.service import Broker
    from storage.metadata.store import Session


class NotController(PeerError):
    """Another broker assigns this topic's segments."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class Leadership:
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._held: dict[TopicName, Session] = {}

    async def claim(self, name: TopicName) -> None:
        """Lead the topic.  Raises `NotController`, `SessionLost`."""
        session, metadata = self._broker.session, self._broker.metadata
        if self._held.get(name) is session and not session.lost:
            return
        path = controller_path(name)
        value = json.dumps(self._broker.broker_id).encode()
        try:
            await metadata.put(path, value, expect=ABSENT, session=session)
        except VersionConflict:
            found = await metadata.get(path)
            if found is not None and found.value != value:
                raise NotController(
                    f"{name} is led by {found.value.decode(errors='replace')}: look its layout "
                    "up again and ask the controller named there."
                ) from None
            # Our own, of a session that has not expired yet: it hangs on this one now.
            await metadata.put(path, value, session=session)
        self._held[name] = session

    def forget(self, name: TopicName) -> None:
        """The topic is gone, and its record with it."""
        self._held.pop(name, None)
