"""LOOKUP: the question which broker serves a topic, and what its answer names.  Pure."""

from typing import NamedTuple

from magnetar.errors import BrokerFailed, NotSupported
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandLookupTopic, CommandLookupTopicResponse

__all__ = ["Owner", "lookup_command", "owner_in"]


class Owner(NamedTuple):
    """Of a topic."""

    url: str
    proxied: bool
    """Whether it is reached through the service URL."""


def lookup_command(topic: str, *, authoritative: bool, listener_name: str | None) -> BaseCommand:
    """The question.  `authoritative` as the redirect to the broker that is asked said."""
    command = CommandLookupTopic(topic=topic, request_id=0, authoritative=authoritative)
    if listener_name is not None:
        command.advertised_listener_name = listener_name
    return BaseCommand(type=BaseCommand.LOOKUP, lookup=command)


def owner_in(answer: CommandLookupTopicResponse, topic: str, *, tls: bool) -> Owner:
    """The broker that it names, to connect to or to ask.  With `tls` only a TLS address is taken.

    Raises `BrokerFailed`, `NotSupported`.
    """
    if answer.response == CommandLookupTopicResponse.Failed:
        raise BrokerFailed(
            f"The broker could not look up {topic!r} and gave no reason; look into its log."
        )
    url = answer.broker_service_url_tls if tls else answer.broker_service_url
    proxied = answer.proxy_through_service_url
    if not url and proxied:
        url = answer.broker_service_url  # names the broker; TLS is the proxy's
    if not url:
        kind = "TLS " if tls else ""
        raise NotSupported(
            f"The broker of {topic!r} tells no {kind}address; let it announce one, "
            "or connect to it by the scheme that it serves."
        )
    return Owner(url, proxied)
