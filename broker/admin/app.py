"""The REST server: its resources, its start and its stop."""

import asyncio
from collections.abc import Callable

from aiohttp import hdrs, web

from broker.admin import (
    auto_scale,
    backlog_quotas,
    brokers,
    clusters,
    compaction,
    ledgers,
    lookup,
    messages,
    namespace_backlog,
    namespace_properties,
    namespaces,
    non_persistent,
    not_served,
    offload,
    partitioned,
    permissions,
    persistent,
    properties,
    refused_policies,
    replication,
    scalable,
    schemas,
    segments,
    stored_ledgers,
    subscriptions,
    tenants,
    topic_policies,
    transaction_keys,
    transaction_records,
    transaction_stats,
    transactions,
)
from broker.admin.access import AccessCheck, require_rules
from broker.admin.authentication import authenticate
from broker.admin.http_connections import HttpConnections
from broker.admin.keys import BROKER, METRICS
from broker.admin.request_checks import add_safe_headers, check_requests, count_requests
from broker.admin.request_log import request_logger
from broker.admin.rest import MAX_BODY_BYTES, errors_as_json
from broker.app.service import Broker
from broker.metrics.page import MetricsPage
from broker.wire.listening import (
    CannotListen,
    PortSetting,
    bind_port,
    explaining_listen_errors,
    http_ports,
)
from broker.wire.tls_stream import TlsStream, new_read_buffer
from config.bounds import HTTP_BACKLOG, HTTP_IDLE_S, HTTP_LINGER_S, METRICS_WRITE_BYTES

SHUTDOWN_TIMEOUT_S = 2
_NAME_OF_PARTS = ".+"
"""Pattern of a path's last part that may have slashes."""
INDEX = "/admin/v2"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(broker: Broker) -> web.Application:
    """Build the application with every resource."""
    app = web.Application(
        middlewares=[
            count_requests,
            errors_as_json,
            authenticate,
            AccessCheck().check,
            check_requests,
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    app.on_response_prepare.append(add_safe_headers)
    app[BROKER] = broker
    app[METRICS] = MetricsPage(broker)
    for resource in (
        backlog_quotas,
        brokers,
        clusters,
        compaction,
        ledgers,
        lookup,
        messages,
        namespaces,
        namespace_backlog,
        namespace_properties,
        non_persistent,
        offload,
        partitioned,
        permissions,
        persistent,
        properties,
        scalable,
        auto_scale,
        topic_policies,
        refused_policies,
        replication,
        schemas,
        segments,
        stored_ledgers,
        subscriptions,
        tenants,
        transaction_keys,
        transaction_records,
        transaction_stats,
        transactions,
    ):
        app.add_routes(resource.routes())
    if broker.placement.shared:
        # No other broker asks one that is alone.
        from broker.admin.channel import add_channel  # noqa: PLC0415

        add_channel(app, broker, SHUTDOWN_TIMEOUT_S)
    app.router.add_get(INDEX, index)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/status.html", status)
    _serve_slash_at_end(app.router)
    app.add_routes(not_served.routes())
    require_rules(app.router)
    return app


def _serve_slash_at_end(router: web.UrlDispatcher) -> None:
    """Serve each path with a slash at its end too, as JAX-RS has it (3.7.2: the slash is ignored).

    Paths that end with a name of several parts are left out: there the slash belongs to the name.
    """
    for route in list(router.routes()):
        resource = route.resource
        if resource is None or _NAME_OF_PARTS in str(resource.get_info().get("pattern", "")):
            continue
        router.add_route(route.method, resource.canonical + "/", route.handler)


async def index(request: web.Request) -> web.Response:
    """GET: all paths that are served, with their methods."""
    methods: dict[str, list[str]] = {}
    for route in request.app.router.routes():
        if (
            route.resource is not None
            and route.method != "HEAD"
            and not_served.is_served(route)
            and not route.resource.canonical.endswith("/")
        ):
            methods.setdefault(route.resource.canonical, []).append(route.method)
    return web.json_response({path: sorted(methods[path]) for path in sorted(methods)})


async def status(request: web.Request) -> web.Response:
    """GET: `OK` while the broker's event loop answers, whatever its stores do."""
    return web.Response(text="OK")


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET: Prometheus text."""
    page = memoryview(await metrics_body(request))
    response = web.StreamResponse(headers={"Content-Type": METRICS_TYPE})
    response.content_length = len(page)
    await response.prepare(request)
    # HEAD gets no body: the client would take it for the beginning of the next answer.
    size = 0 if request.method == hdrs.METH_HEAD else len(page)
    # In parts, so that slow peers share one page, and none has a copy in its buffer.
    for first in range(0, size, METRICS_WRITE_BYTES):
        await response.write(page[first : first + METRICS_WRITE_BYTES])
    await response.write_eof()
    return response


async def metrics_body(request: web.Request) -> bytes:
    """The text for Prometheus."""
    return await request.app[METRICS].text()


class AdminServer:
    """REST and metrics of one broker on its HTTP ports, the plain one and the one with TLS."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self.connections = HttpConnections(broker.descriptors.http)
        self.port = 0
        """The plain port in use; 0 without."""
        self.port_tls: int | None = None
        """The port with TLS in use; None without."""

    async def start(self) -> None:
        """Listen, and set the ports to those in use.  Raises `CannotListen`."""
        runner = web.AppRunner(
            build_app(self._broker),
            access_log=None,
            logger=request_logger(),
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            keepalive_timeout=HTTP_IDLE_S,
            lingering_time=HTTP_LINGER_S,
        )
        await runner.setup()
        self._runner = runner
        assert runner.server is not None
        make = self.connections.protocol_factory(runner.server)
        for setting in http_ports(self._broker.settings):
            if setting is PortSetting.HTTP_PORT:
                self.port = await self._listen(setting, make)
            else:
                self.port_tls = await self._listen(setting, self._with_tls(make))
        self._broker.placement.listening(http_port=self.port)
        self._broker.placement.listening_tls(http_port=self.port_tls)

    async def _listen(self, setting: PortSetting, make: Callable[[], asyncio.BaseProtocol]) -> int:
        """Accept connections on a port, and return its number.  Raises `CannotListen`."""
        settings = self._broker.settings
        address = (settings.bind_host, http_ports(settings)[setting], setting)
        listening = self._broker.take_http_socket(setting) or bind_port(*address)
        try:
            with explaining_listen_errors(*address):
                self._servers.append(
                    await asyncio.get_running_loop().create_server(
                        make, sock=listening, backlog=HTTP_BACKLOG
                    )
                )
        except CannotListen:
            listening.close()
            raise
        port: int = listening.getsockname()[1]
        return port

    def _with_tls(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.BaseProtocol]:
        tls, handshakes = self._broker.server_tls, self.connections.handshakes
        memory, read_buffer = self._broker.peer_memory, new_read_buffer()
        self._broker.handshakes[PortSetting.HTTP_PORT_TLS] = handshakes
        assert tls is not None, "Settings has no port with TLS without a certificate."
        return lambda: TlsStream(tls.current, make, handshakes, memory, read_buffer)

    async def stop(self) -> None:
        """Stop listening, and end requests in progress."""
        while self._servers:
            self._servers.pop().close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.connections.close()
