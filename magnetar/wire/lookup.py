"""The command LOOKUP, which finds the broker of a topic, and its answer.  Pure."""

from typing import NamedTuple

from magnetar.errors import BrokerFailed, NotSupported
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandLookupTopic, CommandLookupTopicResponse

__all__ = ["Owner", "lookup_command", "owner_in"]


class Owner(NamedTuple):
    """The broker that serves a topic, or that can be asked for it."""

    url: str
    proxied: bool
    """Whether it is reached through the service URL."""


def lookup_command(topic: str, *, authoritative: bool, listener_name: str | None) -> BaseCommand:
    """The command LOOKUP; `authoritative` is as in the redirect to the broker, if there was one."""
    command = CommandLookupTopic(topic=topic, request_id=0, authoritative=authoritative)
    if listener_name is not None:
        command.advertised_listener_name = listener_name
    return BaseCommand(type=BaseCommand.LOOKUP, lookup=command)


def owner_in(answer: CommandLookupTopicResponse, topic: str, *, tls: bool) -> Owner:
    """The broker in an answer.  With `tls` it needs a TLS address.

    Raises `BrokerFailed`, and `NotSupported` if there is no such address.
    """
    if answer.response == CommandLookupTopicResponse.Failed:
        raise BrokerFailed(
            f"The broker could not look up {topic!r} and gave no reason; read its log."
        )
    url = answer.broker_service_url_tls if tls else answer.broker_service_url
    proxied = answer.proxy_through_service_url
    if not url and proxied:
        url = answer.broker_service_url  # It names the broker; the proxy has the TLS.
    if not url:
        kind = "TLS " if tls else ""
        raise NotSupported(
            f"The broker of {topic!r} announces no {kind}address; let it announce one, "
            "or connect to it by the scheme that it serves."
        )
    return Owner(url, proxied)
