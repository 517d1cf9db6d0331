"""One broker as one process, for `magnetar standalone` and `magnetar broker`."""

import asyncio
import gc
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from broker.app.descriptors import raise_descriptor_limit, share_descriptors
from broker.app.service import Broker
from broker.cli.local_broker import AddressNote
from broker.placement import BrokerAddress
from broker.wire.listening import CannotListen, bind_port, ports_of
from config.bounds import BROKER_STOP_S
from config.settings import ConfigurationError, Settings
from magnetar.protocol.server_error import MagnetarError
from storage.clock import SystemClock

try:
    import uvloop
except ImportError:  # There is none for PyPy.
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

if TYPE_CHECKING:
    # Imported in a thread, once clients are served.
    from broker.admin.app import AdminServer

log = structlog.get_logger(__name__)

ADMIN_MODULE = "broker.admin.app"

DEFAULT_HTTP_PORT = 8080
_CREDENTIALS: Final[Mapping[str, str]] = {
    "token": " --token-file FILE",
    "oidc": " --token-file FILE",
    "basic": " --basic-user USER --basic-password-file FILE",
    "tls": " --tls-certificate-file FILE --tls-key-file FILE",
}
"""The options of commands that log in by a provider of `authentication_providers`."""

GC_THRESHOLD = 50_000
"""Young allocations between garbage collections.

Messages in flight are no garbage, and the default of 700 has the collector scan them repeatedly.
"""


def serve(settings: Settings, hints: Sequence[str] = ()) -> int:
    """Serve until a signal; returns the exit status.  `hints` are lines for the banner.

    The process is ready when it prints the banner.  The first SIGTERM or SIGINT drains the broker
    (no new connections, everything acknowledged durable) and exits 0; a second one exits 1 at once.
    A start that fails prints one sentence and exits 1.
    """
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    raise_descriptor_limit(share_descriptors(None, settings).needed)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(settings, hints))
    except CannotListen as error:
        for each in (error, *other_listen_errors(settings, error)):
            print(f"magnetar: {each}", file=sys.stderr)
        return 1
    except (MagnetarError, ConfigurationError, OSError) as error:
        print(f"magnetar: {error}", file=sys.stderr)
        return 1


def other_listen_errors(settings: Settings, first: CannotListen) -> list[CannotListen]:
    """The errors of the ports that the broker did not try because of the first error."""
    errors = []
    for setting, port in ports_of(settings).items():
        if first.setting in (None, setting):
            continue
        try:
            bind_port(settings.bind_host, port, setting).close()
        except CannotListen as error:
            errors.append(error)
    return errors


async def _serve(settings: Settings, hints: Sequence[str]) -> int:
    started = time.monotonic()
    stop = asyncio.Event()
    _on_signals(stop)
    broker = Broker(settings, clock=SystemClock(), rng=random.Random())
    broker.descriptors.warn_if_short()
    admin: AdminServer | None = None
    note: AddressNote | None = None
    try:
        if settings.in_cluster:
            # Other brokers call this one from the moment it is registered.
            await asyncio.to_thread(importlib.import_module, ADMIN_MODULE)
        if not await started_before(stop, broker.start()):
            return 0
        admin = await _admin_server(broker)
        await admin.start()
        note = AddressNote(settings, broker.placement.me)
        note.write()
        gc.freeze()
        _check_files_at_hangup(broker)
        took_s = time.monotonic() - started
        print(banner(settings, broker.placement.me, took_s, hints), flush=True)
        await stop.wait()
        log.info("draining", timeout_s=settings.drain_timeout_s)
        try:
            async with asyncio.timeout(settings.drain_timeout_s):
                await broker.drain()
        except TimeoutError:
            log.warning("drain_timed_out", timeout_s=settings.drain_timeout_s)
    finally:
        if note is not None:
            note.remove()
        if admin is not None:
            await admin.stop()
        await stop_in_time(broker.stop())
    log.info("stopped")
    # The interpreter collects garbage once more when it ends: with thousands of topics that takes
    # longer than all of the drain, and the system gets the memory back anyway.
    gc.freeze()
    return 0


async def started_before(stop: asyncio.Event, start: Coroutine[object, object, None]) -> bool:
    """Await `start`; if `stop` is set first, cancel it and return False."""
    # A start may take minutes, if it verifies all data first.
    starting, stopping = asyncio.ensure_future(start), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        await starting
        return True
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def stop_in_time(stopping: Awaitable[None], timeout_s: float = BROKER_STOP_S) -> None:
    """Await `stopping`, for at most `timeout_s`."""
    # A store may not answer any more; a session that is left open there expires.
    try:
        async with asyncio.timeout(timeout_s):
            await stopping
    except TimeoutError:
        log.warning("stop_timed_out", timeout_s=timeout_s)


async def _admin_server(broker: Broker) -> "AdminServer":
    """Import and make the REST server."""
    # In a thread, because it is a third of all imports and clients are served already.
    module = await asyncio.to_thread(importlib.import_module, ADMIN_MODULE)
    server: AdminServer = module.AdminServer(broker)
    return server


def _on_signals(stop: asyncio.Event) -> None:
    def on_signal(name: str) -> None:
        if stop.is_set():
            log.warning("exited_on_second_signal", signal=name)
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, signal.Signals(number).name)


def _check_files_at_hangup(broker: Broker) -> None:
    """Have SIGHUP load changed certificates and keys; without any it ends the process, as ever."""
    if broker.reloader.parts:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, broker.reloader.check_soon)


def banner(settings: Settings, me: BrokerAddress, took_s: float, hints: Sequence[str] = ()) -> str:
    """The banner of a ready broker: its data, its addresses, and the next commands to try.

    `hints` are commands to type before those.
    """
    command = sys.argv[0] if sys.argv[0].endswith("magnetar") else "magnetar"
    where = "" if hints else _options(settings, me)
    return "\n".join(
        [
            "",
            f"  Magnetar is ready ({took_s * 1000:.0f} ms)",
            "",
            *_stores(settings),
            *_lines("clients", [me.url, me.url_tls]),
            *_lines("REST", [_rest_paths(me.web_url), _rest_paths(me.web_url_tls)]),
            "",
            *_lines("first", hints),
            f"  next      {command} topics create my-topic --segments 4{where}",
            f"            {command} topics get my-topic{where}",
            "            point a Pulsar v5 client at the address above",
            "",
            "  Ctrl-C or SIGTERM stops it cleanly.",
            "",
        ]
    )


def _options(settings: Settings, me: BrokerAddress) -> str:
    """The options by which commands of REST reach this broker, without values for the files."""
    rest = me.web_url_for(tls=False)
    options = "" if me.web_url.endswith(f":{DEFAULT_HTTP_PORT}") else f" --admin-url {rest}"
    if rest.startswith("https://"):
        options += " --tls-trust-file FILE"
    if settings.authentication_providers:
        options += _CREDENTIALS[settings.authentication_providers[0]]
    return options


def _rest_paths(url: str | None) -> str:
    return f"{url}/admin/v2   metrics at /metrics" if url else ""


def _lines(name: str, values: Iterable[str | None]) -> list[str]:
    """A line for each value, the first one with the name before it."""
    present = [value for value in values if value]
    return [f"  {name if not n else '':<9} {value}" for n, value in enumerate(present)]


def _stores(settings: Settings) -> list[str]:
    if not settings.in_cluster:
        return [f"  data      {settings.data_dir.resolve()}"]
    return [
        f"  metadata  {settings.metadata_store_url}",
        f"  ledgers   {settings.bookkeeper_metadata_service_uri}",
    ]
