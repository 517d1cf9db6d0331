"""Keys of the REST application under which handlers find the broker and its metrics."""

from aiohttp import web

from broker.app.service import Broker
from broker.metrics.page import MetricsPage

BROKER: web.AppKey[Broker] = web.AppKey("broker")
METRICS: web.AppKey[MetricsPage] = web.AppKey("metrics")
