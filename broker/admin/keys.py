"""Where REST handlers find the broker in their application."""

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from broker.service import Broker

BROKER: "web.AppKey[Broker]" = web.AppKey("broker")
