"""The WebSocket over which other brokers send typed requests: see `broker.placement.channel`."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from broker.admin.keys import CHANNEL_SERVER
from broker.app.service import Broker
from broker.placement.channel import CHANNEL_PATH
from broker.placement.channel_server import ChannelServer


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(CHANNEL_PATH, channel)]


def make_server(broker: Broker) -> ChannelServer:
    """Return the server of every request that other brokers send."""
    return ChannelServer(lambda: broker.broker_id, broker.scalable.request_handlers())


async def channel(request: web.Request) -> web.StreamResponse:
    """GET: a WebSocket."""
    return await request.app[CHANNEL_SERVER].serve(request)


def end_channels(timeout_s: float) -> Callable[[web.Application], Awaitable[None]]:
    """Return what ends the channels when the REST server stops."""

    async def end(app: web.Application) -> None:
        await app[CHANNEL_SERVER].stop(timeout_s)

    return end
