"""Keys of the REST application under which handlers find the broker and its metrics."""

from aiohttp import web
from prometheus_client import CollectorRegistry

from broker.app.service import Broker

BROKER: web.AppKey[Broker] = web.AppKey("broker")
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry")
