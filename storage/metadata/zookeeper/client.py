"""One session with a ZooKeeper: the client library on its threads, answers on the loop."""

import asyncio
import enum
import select
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Final, TypeVar

import structlog
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Watch as WatchEvent
from kazoo.protocol.states import KazooState

from config import bounds
from magnetar.protocol.backoff import Backoff
from storage.metadata.access import StoreAccess
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.requests import Answer, Done, Failure, Request, Value

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Connection(enum.Enum):
    """The state of the connection, as its owner gets it."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """Broken; the session may go on."""
    LOST = "lost"
    """The session is over, with its ephemeral nodes; the client makes another one by itself."""


class ChangeKind(enum.IntEnum):
    """The kind of change of a watched node (the numbers of ZooKeeper)."""

    CREATED = 1
    DELETED = 2
    CHANGED = 3
    CHILDREN = 4


@dataclass(frozen=True, slots=True)
class NodeChange:
    """An event of a persistent watch."""

    kind: ChangeKind
    path: str


class RequestFailed(Exception):
    """A request failed.  `lost` is True if an earlier attempt of the same call had no answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.name)
        self.failure = failure
        self.lost = False


_STATES: Final = {
    KazooState.CONNECTED: Connection.CONNECTED,
    KazooState.SUSPENDED: Connection.SUSPENDED,
    KazooState.LOST: Connection.LOST,
}


class ZooKeeperClient:
    """One session with ZooKeeper: the client library on its thread, answers on the loop.

    Made on the loop; `connect`, then use, then `close`.  Call everything public on the loop.
    Answers, changes and states of the connection come to the loop in the order in which they
    happened.

    Requests take effect in the order of `submit`, many of them in flight.  A request in flight when
    the connection broke is answered CONNECTION_LOSS.  A request submitted without a connection
    waits for the next one; the caller sets the deadline.  Open requests of a session that is over
    are answered SESSION_EXPIRED once the next session has begun.

    `on_change` gets the events of all persistent watches.  The owner adds its watches again after
    each reconnection.
    """

    def __init__(
        self,
        servers: str,
        *,
        session_timeout_ms: int,
        on_state: Callable[[Connection], None],
        on_change: Callable[[NodeChange], None],
        access: StoreAccess | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._servers = servers
        self._on_state = on_state
        self._on_change = on_change
        self._arrived: deque[Callable[[], None]] = deque()
        self._woken = False
        self._waiting: deque[tuple[Request, Done]] = deque()
        self._with_library: dict[_PendingAnswer, int] = {}
        """In the order in which it got them, each with the session in which it did so."""
        self._session = 0
        """How many sessions are over."""
        self._connected = asyncio.Event()
        self._connected_at = self._loop.time()
        self._closed = False
        self._starting = threading.Lock()
        self._restart: asyncio.TimerHandle | None = None
        self._restart_backoff = Backoff(
            bounds.ZOOKEEPER_RECONNECT_MIN_S, bounds.ZOOKEEPER_RECONNECT_MAX_S
        )
        self.negotiated_ms = session_timeout_ms
        """The session's timeout: what was asked for until the server has said otherwise."""
        # Half of a server's share of the timeout, so that all servers are tried before the session
        # is over.
        self._attempt_s = session_timeout_ms / 1000 / 2 / len(servers.split(","))
        """For a server to accept a connection, and again to answer the first request on it."""
        self._library = _make_library(servers, session_timeout_ms, self._attempt_s, access)
        self._library.add_listener(self._state_changed)
        connection = self._library._connection
        self._invoke = connection._invoke
        self._read_watch_event = connection._read_watch_event
        self._run_library = connection.zk_loop
        connection._invoke = self._note_timeout
        connection._read_watch_event = self._take_watch_event
        connection.zk_loop = self._run

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as the loop knows."""
        return self._connected.is_set()

    @property
    def session_id(self) -> int:
        """ZooKeeper's number of the session, which its ephemeral nodes name; 0 if there is none."""
        return int(self._library._session_id or 0)

    async def connect(self) -> None:
        """Connect and wait for the session.

        Raises `MetadataError` after `ZOOKEEPER_CONNECT_S`.
        """
        self._library.start_async()
        try:
            async with asyncio.timeout(bounds.ZOOKEEPER_CONNECT_S):
                await self._connected.wait()
        except BaseException as error:
            await asyncio.shield(self.close())
            if not isinstance(error, TimeoutError):
                raise
            raise MetadataError(
                f"No ZooKeeper of {self._servers} answered within {bounds.ZOOKEEPER_CONNECT_S} s: "
                "look whether they run and have a quorum."
            ) from None

    def submit(self, request: Request, done: Done) -> None:
        """Send; `done` is called later on the loop, exactly once.

        Above the bound of waiting requests (`METADATA_QUEUE_OPERATIONS`) it is answered OTHER.
        """
        if self._closed:
            self._loop.call_soon(done, Answer(None, Failure.SESSION_EXPIRED, 0))
            return
        try:
            # The body is made here, so that a request that cannot be sent ends no thread.
            ready = requests.EncodedRequest(request)
        except Exception as error:  # noqa: BLE001 - no answer would come, ever
            _log.error("zookeeper_request_not_made", exc_info=error)
            self._loop.call_soon(done, Answer(None, Failure.OTHER, 0))
            return
        # The library wakes its thread through a pipe, by one byte for each request: a full pipe
        # would block the loop.
        if len(self._with_library) < bounds.ZOOKEEPER_WINDOW:
            self._hand_over(ready, done)
        elif len(self._waiting) < bounds.METADATA_QUEUE_OPERATIONS:
            self._waiting.append((ready, done))
        else:
            self._loop.call_soon(done, Answer(None, Failure.OTHER, 0))

    async def call(self, request: Request) -> Value:
        """Send once and wait.  Raises `RequestFailed`; `MetadataError` as `call_again`."""
        async with self._deadline():
            return await self._call(request)

    async def call_again(self, request: Request) -> tuple[Value, bool]:
        """Send until there is an answer.

        Returns the answer, and whether one was lost before, whose request may have taken effect.
        Raises `RequestFailed`, with `lost` set likewise; `MetadataError` after
        `ZOOKEEPER_REQUEST_S`.
        """
        lost = False
        async with self._deadline():
            while True:
                await self._connected.wait()
                try:
                    return await self._call(request), lost
                except RequestFailed as error:
                    if not error.failure.uncertain or self._closed:
                        error.lost = lost
                        raise
                    lost = True
                    await asyncio.sleep(bounds.ZOOKEEPER_RECONNECT_MIN_S)

    async def _call(self, request: Request) -> Value:
        future: asyncio.Future[Answer] = self._loop.create_future()
        self.submit(request, bind(_resolve, future))
        answer = await future
        if answer.failure is not None:
            raise RequestFailed(answer.failure)
        return answer.value

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(bounds.ZOOKEEPER_REQUEST_S):
                yield
        except TimeoutError:
            raise MetadataError(
                f"ZooKeeper ({self._servers}) did not answer within {bounds.ZOOKEEPER_REQUEST_S} "
                "s, and whether the request took effect is unknown: look at its servers."
            ) from None

    async def close(self) -> None:
        """End the session, with its ephemeral nodes, and the threads.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        stopped: asyncio.Future[None] = self._loop.create_future()
        name = "zookeeper-stop"
        threading.Thread(target=self._stop, args=(stopped,), name=name, daemon=True).start()
        try:
            await asyncio.wait([stopped], timeout=bounds.ZOOKEEPER_CLOSE_S)
            if not stopped.done():
                _log.error("zookeeper_connection_not_closed", servers=self._servers)
        finally:
            self._deliver()
            self._answer_the_rest()

    def _answer_the_rest(self) -> None:
        left = [*(awaited.done for awaited in self._with_library)]
        left += [done for _, done in self._waiting]
        self._with_library.clear()
        self._waiting.clear()
        for done in left:
            self._loop.call_soon(done, Answer(None, Failure.SESSION_EXPIRED, 0))

    def _hand_over(self, request: Request, done: Done) -> None:
        awaited = _PendingAnswer(self, done)
        self._with_library[awaited] = self._session
        try:
            self._library._call(request, awaited)
        except Exception as error:  # noqa: BLE001 - no answer would come, ever
            _log.error("zookeeper_request_not_sent", exc_info=error)
            awaited.set_exception(error)

    def _answered(self, awaited: "_PendingAnswer", answer: Answer) -> None:
        if self._with_library.pop(awaited, None) is None:
            return  # it came after the end
        if self._waiting and not self._closed:
            self._hand_over(*self._waiting.popleft())
        awaited.done(answer)

    def _answer_what_was_dropped(self) -> None:
        # The library drops requests between two sessions, or by a defect of its thread: no other
        # answer comes to those of a session that is over.
        expired = Answer(None, Failure.SESSION_EXPIRED, 0)
        for awaited, session in self._with_library.items():
            if session < self._session:
                self._post(bind(self._answered, awaited, expired))

    def _stop(self, stopped: "asyncio.Future[None]") -> None:
        """Stop the library, on a thread of its own."""
        try:
            with self._starting:
                self._library.stop()
                self._library.close()
        finally:
            self._post(bind(_resolve, stopped, None))

    def _state_changed(self, state: str) -> None:
        """Take a state of the library, on its thread."""
        self._post(bind(self._take_state, _STATES[state]))

    def _take_state(self, state: Connection) -> None:
        if state is Connection.CONNECTED:
            self._connected.set()
            self._connected_at = self._loop.time()
            self._answer_what_was_dropped()
        else:
            self._note_disconnected()
        if state is Connection.LOST:
            self._session += 1
        if not self._closed:
            self._on_state(state)

    def _note_disconnected(self) -> None:
        if self._connected.is_set():
            self._connected.clear()
            if self._loop.time() - self._connected_at > bounds.ZOOKEEPER_RECONNECT_MAX_S:
                self._restart_backoff.reset()

    def _run(self) -> None:
        """Run the library's thread, and note its end."""
        # It ends by a defect, or when the server refuses the session's credentials.  The library
        # does not tell its listeners of the end of a thread that had no session.
        defect: Exception | None = None
        try:
            self._run_library()
        except Exception as error:  # noqa: BLE001 - it is logged on the loop
            defect = error
        finally:
            self._post(bind(self._library_ended, defect))

    def _library_ended(self, defect: Exception | None) -> None:
        """Start the library again; all answers that it gave have come."""
        if self._closed:
            return
        _log.error("zookeeper_client_ended", servers=self._servers, exc_info=defect)
        self._session += 1
        self._answer_what_was_dropped()
        self._start_later()

    def _start_later(self) -> None:
        if self._restart is None and not self._closed:
            pause_s = self._restart_backoff.pause_s()
            self._restart = self._loop.call_later(pause_s, self._start_again)

    def _start_again(self) -> None:
        self._restart = None
        threading.Thread(target=self._start, name="zookeeper-start", daemon=True).start()

    def _start(self) -> None:
        """Start the library, on a thread of its own that waits for the end of the library's."""
        with self._starting:
            if self._closed:
                return
            try:
                self._library.start_async()
            except Exception as error:  # noqa: BLE001 - nothing else would start it again
                _log.error("zookeeper_client_not_started", servers=self._servers, exc_info=error)
                self._post(self._start_later)

    def _note_timeout(self, timeout: float, request: Request, xid: int | None = None) -> object:
        """Note the session's timeout, on the library's thread: the first answer has it."""
        answer = self._invoke(min(timeout, self._attempt_s), request, xid)
        if isinstance(answer, tuple) and hasattr(answer[0], "time_out"):
            self.negotiated_ms = answer[0].time_out or self.negotiated_ms
        return answer

    def _take_watch_event(self, buffer: bytes, offset: int) -> None:
        """Take an event, on the library's thread: every watch here is a persistent one."""
        event, _ = WatchEvent.deserialize(buffer, offset)
        if event.path and event.type in ChangeKind.__members__.values():
            change = NodeChange(ChangeKind(event.type), event.path)
            self._post(bind(self._on_change, change))

    def _post(self, deliver: Callable[[], None]) -> None:
        """Call it on the loop; called on any thread."""
        self._arrived.append(deliver)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: no caller is left
                self._arrived.clear()

    def _deliver(self) -> None:
        self._woken = False
        arrived = self._arrived
        try:
            for _ in range(len(arrived)):
                arrived.popleft()()
        finally:
            if arrived and not self._woken:
                self._woken = True
                self._loop.call_soon(self._deliver)


class _PendingAnswer:
    """The future that the library resolves, on its thread; the first time counts."""

    __slots__ = ("_client", "_given", "done")

    def __init__(self, client: ZooKeeperClient, done: Done) -> None:
        self._client = client
        self.done = done
        self._given = False

    def set(self, value: object = None) -> None:
        """Take the answer; the library has just noted its zxid."""
        try:
            answer = Answer(requests.value_of(value), None, self._client._library.last_zxid)
        except Exception as error:  # noqa: BLE001 - the library's thread would end
            _log.error("zookeeper_answer_not_read", exc_info=error)
            answer = Answer(None, Failure.OTHER, 0)
        self._give(answer)

    def set_exception(self, error: BaseException) -> None:
        """Take the failure."""
        self._give(Answer(None, requests.failure_of(error), 0))

    def _give(self, answer: Answer) -> None:
        if not self._given:
            self._given = True
            self._client._post(bind(self._client._answered, self, answer))


def _make_library(
    servers: str, session_timeout_ms: int, attempt_s: float, access: StoreAccess | None
) -> KazooClient:
    access = access or StoreAccess()
    handler = SequentialThreadingHandler()
    handler.select = _select
    # By itself the library gives a host that takes no connection the whole timeout of the session.
    handler.create_connection = bind(_connect_within, handler.create_connection, attempt_s)
    return KazooClient(
        hosts=servers,
        handler=handler,
        timeout=session_timeout_ms / 1000,
        connection_retry={
            "max_tries": -1,
            "delay": bounds.ZOOKEEPER_RECONNECT_MIN_S,
            "max_delay": bounds.ZOOKEEPER_RECONNECT_MAX_S,
        },
        use_ssl=access.uses_tls,
        check_hostname=access.uses_tls,
        ca=_name(access.trust_certs_file),
        certfile=_name(access.cert_file),
        keyfile=_name(access.key_file),
    )


def _connect_within(
    connect: Callable[..., socket.socket], limit_s: float, *, timeout: float, **options: object
) -> socket.socket:
    """Make a connection by the library's own function, in at most `limit_s`."""
    return connect(timeout=min(timeout, limit_s), **options)


def _select(
    reading: Sequence[socket.socket],
    writing: Sequence[socket.socket],
    _failing: Sequence[socket.socket],
    timeout_s: float | None = None,
) -> tuple[list[socket.socket], list[socket.socket], list[socket.socket]]:
    """The sockets that can be read and written.

    The library asks several times for each request.  Its own function makes a selector each time,
    which costs more than the request itself.
    """
    poll = select.poll()
    for sockets, mask in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for each in sockets:
            poll.register(each, mask)
    ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
    return (
        [each for each in reading if each.fileno() in ready],
        [each for each in writing if each.fileno() in ready],
        [],
    )


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)
