"""`RemotePool`: the connections to another cluster, which is reached by one attempt for all."""

import asyncio
import random
from collections.abc import Callable
from ssl import SSLContext

from config.bounds import REACH_RETRY_MAX_S, REMOTE_FRAME_BYTES, REPLICATION_RETRY_MIN_S
from magnetar.errors import AlreadyClosed, MagnetarError
from magnetar.identity import Identities
from magnetar.protocol.backoff import Backoff
from magnetar.settings import ClientSettings
from magnetar.wire.connection import Connection
from magnetar.wire.pool import ConnectionPool


class RemotePool(ConnectionPool):
    """The pool of a client, for the replicators of thousands of topics.

    While another cluster is away, each topic asks for a connection again and again.  After an
    attempt that failed all of them get its error, until a pause is over that grows up to
    REACH_RETRY_MAX_S.
    """

    def __init__(
        self,
        service_url: str,
        settings: ClientSettings,
        ids: Identities,
        rng: random.Random,
        renewed_tls: Callable[[], SSLContext],
    ) -> None:
        """See `ConnectionPool`."""
        super().__init__(
            service_url,
            settings,
            ids,
            rng,
            renewed_tls=renewed_tls,
            max_frame_bytes=REMOTE_FRAME_BYTES,
        )
        self._pauses = Backoff(REPLICATION_RETRY_MIN_S, REACH_RETRY_MAX_S)
        self._failure: MagnetarError | None = None
        """The error of the last attempt; None after one that succeeded."""
        self._retry_s = 0.0
        """When the next attempt is made, by the loop's time."""

    async def any(self) -> Connection:
        """See `ConnectionPool`."""
        loop, known = asyncio.get_running_loop(), self._failure
        if known is not None and loop.time() < self._retry_s:
            raise type(known)(*known.args) from known.__cause__
        try:
            connection = await super().any()
        except AlreadyClosed:
            raise
        except MagnetarError as error:
            # Those that waited for the same attempt count it once.
            if self._failure is known:
                self._note(error)
            raise
        self._failure = None
        self._pauses.reset()
        return connection

    def _note(self, error: MagnetarError) -> None:
        # Without tracebacks, whose frames have what waits for the connection.
        noted = type(error)(*error.args)
        if (cause := error.__cause__) is not None:
            noted.__cause__ = type(cause)(*cause.args)
        self._failure = noted
        self._retry_s = asyncio.get_running_loop().time() + self._pauses.pause_s()
