"""Keys of the REST application: the broker, its metrics and its channels."""

from aiohttp import web
from prometheus_client import CollectorRegistry

from broker.app.service import Broker
from broker.placement.channel_server import ChannelServer

BROKER: web.AppKey[Broker] = web.AppKey("broker")
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry")
CHANNEL_SERVER: web.AppKey[ChannelServer] = web.AppKey("channel_server")
