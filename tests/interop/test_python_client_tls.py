"""Programs of `pulsar-client` (Python over the C++ client) over TLS and mutual TLS."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pulsar
import pytest

from tests.support.authority import HOST, Authority
from tests.support.secured_broker import Served, serving

PATIENCE_MS = 30_000
TOPIC = "persistent://public/default/secured"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    authority = Authority(tmp_path / "authority")
    async with serving(
        tmp_path,
        authority,
        plaintext_ports=False,
        tls_client_certificates="required",
        tls_trust_certs_file=authority.chain,
    ) as served:
        yield served


def open_client(served: Served, url: str, *, trusted: Path | None = None) -> pulsar.Client:
    own = served.authority.issue("alice")
    return pulsar.Client(
        url,
        operation_timeout_seconds=10,
        authentication=pulsar.AuthenticationTLS(str(own.chain), str(own.key)),
        tls_trust_certs_file_path=str(trusted or served.authority.chain),
        tls_validate_hostname=True,
    )


@pytest.mark.parametrize("scheme", ["pulsar+ssl", "https"])
async def test_messages_are_produced_and_consumed(served: Served, scheme: str) -> None:
    port = served.broker.port_tls if scheme == "pulsar+ssl" else served.admin.port_tls

    def program() -> list[bytes]:
        client = open_client(served, f"{scheme}://{HOST}:{port}")
        consumer = client.subscribe(TOPIC, "sub")
        producer = client.create_producer(TOPIC)
        for number in range(10):
            producer.send(f"{number}".encode())
        received = []
        for _ in range(10):
            message = consumer.receive(PATIENCE_MS)
            received.append(message.data())
            consumer.acknowledge(message)
        client.close()
        return received

    assert await asyncio.to_thread(program) == [f"{number}".encode() for number in range(10)]
    assert served.broker.topics.loaded().keys() == {TOPIC}


async def test_broker_of_an_unknown_authority_is_refused(served: Served, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")

    def program() -> None:
        client = open_client(
            served, f"pulsar+ssl://{HOST}:{served.broker.port_tls}", trusted=other.chain
        )
        try:
            with pytest.raises(pulsar.PulsarException):
                client.create_producer(TOPIC)
        finally:
            client.close()

    await asyncio.to_thread(program)
    assert not served.broker.connections
