"""Where REST handlers find the broker, and its metrics, in their application."""

from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from broker.service import Broker

BROKER: "web.AppKey[Broker]" = web.AppKey("broker")
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry")
