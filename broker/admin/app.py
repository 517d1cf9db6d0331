"""The REST server: its resources, its start and its stop."""

from aiohttp import web

from broker.admin import (
    brokers,
    clusters,
    ledgers,
    lookup,
    namespaces,
    non_persistent,
    offload,
    partitioned,
    persistent,
    properties,
    scalable,
    schemas,
    segments,
    subscriptions,
    tenants,
    transaction_keys,
    transaction_records,
    transactions,
)
from broker.admin.keys import BROKER, REGISTRY
from broker.admin.rest import MAX_BODY_BYTES, errors_as_json
from broker.app.service import Broker
from broker.metrics.exposition import make_registry, metrics_text
from broker.wire.listening import (
    CannotListen,
    PortSetting,
    bind_port,
    explaining_listen_errors,
)

SHUTDOWN_TIMEOUT_S = 2
INDEX = "/admin/v2"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(broker: Broker) -> web.Application:
    """Build the application with every resource."""
    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
    app[BROKER] = broker
    app[REGISTRY] = make_registry(broker)
    for resource in (
        brokers,
        clusters,
        ledgers,
        lookup,
        namespaces,
        non_persistent,
        offload,
        partitioned,
        persistent,
        properties,
        scalable,
        schemas,
        segments,
        subscriptions,
        tenants,
        transaction_keys,
        transaction_records,
        transactions,
    ):
        app.add_routes(resource.routes())
    if broker.placement.shared:
        # No other broker asks one that is alone.
        from broker.admin.channel import add_channel  # noqa: PLC0415

        add_channel(app, broker, SHUTDOWN_TIMEOUT_S)
    app.router.add_get(INDEX, index)
    for path in ("/metrics", "/metrics/"):
        app.router.add_get(path, metrics)
    return app


async def index(request: web.Request) -> web.Response:
    """GET: all paths with their methods."""
    methods: dict[str, list[str]] = {}
    for route in request.app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            methods.setdefault(route.resource.canonical, []).append(route.method)
    return web.json_response({path: sorted(methods[path]) for path in sorted(methods)})


async def metrics(request: web.Request) -> web.Response:
    """GET: Prometheus text."""
    text = metrics_text(request.app[REGISTRY])
    return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})


class AdminServer:
    """REST and metrics of one broker on its HTTP port."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, and set `port` to the port in use.  Raises `CannotListen`."""
        settings, taken = self._broker.settings, self._broker.take_http_socket()
        runner = web.AppRunner(
            build_app(self._broker), access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        await runner.setup()
        self._runner = runner
        address = (settings.bind_host, settings.http_port, PortSetting.HTTP_PORT)
        bound = bind_port(*address) if taken is None else taken
        try:
            with explaining_listen_errors(*address):
                await web.SockSite(runner, bound).start()
        except CannotListen:
            bound.close()
            raise
        self.port = runner.addresses[0][1]
        self._broker.placement.listening(http_port=self.port)

    async def stop(self) -> None:
        """Stop listening, and end requests in progress."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
