"""The WebSocket over which other brokers send typed requests: see `broker.placement.channel`.

Loaded only where there may be other brokers.
"""

from aiohttp import web

from broker.admin.access import PRINCIPAL
from broker.admin.transaction_leaders import leader_request_handlers
from broker.app.service import Broker
from broker.placement.channel import CHANNEL_PATH
from broker.placement.channel_server import ChannelServer


def add_channel(app: web.Application, broker: Broker, stop_timeout_s: float) -> None:
    """Serve every request that other brokers send, until the REST server stops.

    Requests in progress then have `stop_timeout_s` to end.
    """
    handlers = {
        **broker.topics.cluster.request_handlers(),
        **broker.scalable.request_handlers(),
        **leader_request_handlers(broker),
    }
    server = ChannelServer(lambda: broker.broker_id, handlers)

    async def stop(_: web.Application) -> None:
        await server.stop(stop_timeout_s)

    async def serve(request: web.Request) -> web.StreamResponse:
        principal = request.get(PRINCIPAL)
        expires_at_s = None if principal is None else principal.expires_at_s
        left_s = None if expires_at_s is None else expires_at_s - broker.clock.now_ms() / 1000
        return await server.serve(request, for_s=left_s)

    app.router.add_get(CHANNEL_PATH, serve)
    app.on_shutdown.append(stop)
