"""A broker whose ports speak TLS: its clients, its addresses, and changes of its certificates."""

import asyncio
import ssl
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

import magnetar
from broker.wire.listening import PortSetting
from magnetar.errors import ConnectionLost
from magnetar.protocol import pulsar_pb2 as pb
from security.tls import UnusableCertificate
from tests.support.authority import HOST, Authority, server_settings
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.secured_broker import serving
from tests.support.waiting import TIMEOUT_S, until

TOPIC = "topic://public/default/orders"
REGULAR = "persistent://public/default/orders"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def mutual(authority: Authority, kind: str = "required") -> dict[str, object]:
    return {"tls_client_certificates": kind, "tls_trust_certs_file": authority.chain}


async def produce_and_consume(client: magnetar.Client, topic: str) -> None:
    async with (
        client.producer(topic, schema=str) as producer,
        client.queue_consumer(topic, "sub", schema=str) as consumer,
    ):
        await producer.send("hello")
        message = await consumer.receive(TIMEOUT_S)
        assert message.value == "hello"
        await consumer.ack(message)


# Clients


@pytest.mark.parametrize("plaintext", [True, False])
@pytest.mark.parametrize("topic", [TOPIC, REGULAR])
async def test_client_uses_both_kinds_of_topics(
    tmp_path: Path, authority: Authority, topic: str, plaintext: bool
) -> None:
    async with (
        serving(tmp_path, authority, plaintext_ports=plaintext) as served,
        magnetar.connect(served.url, tls_trust_file=authority.chain) as client,
    ):
        await produce_and_consume(client, topic)
        assert all(each.tls for each in served.broker.connections)


async def test_client_uses_transactions_and_ordered_consumers(
    tmp_path: Path, authority: Authority
) -> None:
    async with (
        serving(tmp_path, authority, plaintext_ports=False) as served,
        magnetar.connect(served.url, tls_trust_file=authority.chain) as client,
        client.producer(TOPIC, schema=str) as producer,
        client.stream_consumer(TOPIC, "sub", schema=str) as consumer,
    ):
        async with client.transaction() as transaction:
            await producer.send("hello", transaction=transaction)
        assert (await consumer.receive(TIMEOUT_S)).value == "hello"


async def test_client_certificate_reaches_the_connection(
    tmp_path: Path, authority: Authority
) -> None:
    alice = authority.issue("alice")
    async with serving(tmp_path, authority, **mutual(authority)) as served:
        async with magnetar.connect(
            served.url,
            tls_trust_file=authority.chain,
            tls_certificate_file=alice.chain,
            tls_key_file=alice.key,
        ) as client:
            await produce_and_consume(client, TOPIC)
            (connection,) = served.broker.connections
            shown = connection.peer_certificate()
            assert shown == ssl.PEM_cert_to_DER_cert(alice.chain.read_text())
        async with serving(tmp_path / "other", authority) as plain:
            client_of_plain = await RawClient.open(HOST, plain.broker.port)
            (connection,) = plain.broker.connections
            assert not connection.tls
            assert connection.peer_certificate() is None
            await client_of_plain.close()


# Refusals


async def refused(opening: Awaitable[RawClient]) -> None:
    """A connection that TLS ends: at once, or when its first answer is awaited (TLS 1.3)."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await opening


async def test_broker_of_an_unknown_authority_gets_no_bytes(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path / "other")
    async with serving(tmp_path, authority) as served:
        with pytest.raises(ConnectionLost):
            await magnetar.connect(served.url, tls_trust_file=other.chain, operation_timeout_s=1)
        assert not served.broker.connections
        await until(lambda: served.broker.handshakes[PortSetting.PORT_TLS].failed >= 1)


async def test_client_without_certificate_is_refused_where_one_is_required(
    tmp_path: Path, authority: Authority
) -> None:
    stranger = Authority(tmp_path / "stranger").issue("alice")
    expired = authority.issue("bob", valid_s=-10)
    async with serving(tmp_path, authority, **mutual(authority)) as served:
        for shown in (None, stranger, expired):
            await refused(served.raw(shown))
        assert served.broker.handshakes[PortSetting.PORT_TLS].failed == 3
        assert not served.broker.connections
        client = await served.raw(authority.issue("carol"))
        await client.close()


async def test_wanted_certificate_may_be_left_out(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority, **mutual(authority, "wanted")) as served:
        client = await served.raw()
        (connection,) = served.broker.connections
        assert connection.tls
        assert connection.peer_certificate() is None
        await client.close()
        stranger = Authority(tmp_path / "stranger").issue("alice")
        await refused(served.raw(stranger))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_version_of_tls_is_refused(tmp_path: Path, authority: Authority) -> None:
    tls = authority.client_context()
    tls.minimum_version = tls.maximum_version = ssl.TLSVersion.TLSv1_1
    tls.set_ciphers("ALL:@SECLEVEL=0")
    async with serving(tmp_path, authority) as served:
        assert served.broker.port_tls is not None
        await refused(RawClient.open(HOST, served.broker.port_tls, tls=tls))


async def test_ports_refuse_each_others_bytes(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority) as served:
        broker = served.broker
        assert broker.port_tls is not None
        await refused(RawClient.open(HOST, broker.port_tls))
        await refused(RawClient.open(HOST, broker.port, tls=authority.client_context()))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{HOST}:{served.admin.port_tls}/metrics")
            with pytest.raises(aiohttp.ClientError):
                await session.get(
                    f"https://{HOST}:{served.admin.port}/metrics", ssl=authority.client_context()
                )
        await until(lambda: not broker.connections)


async def test_without_plaintext_only_tls_is_listened_for(
    tmp_path: Path, authority: Authority
) -> None:
    async with serving(tmp_path, authority, plaintext_ports=False) as served:
        assert (served.broker.port, served.admin.port) == (0, 0)
        me = served.broker.placement.me
        assert (me.url, me.web_url) == ("", "")
        assert me.broker_id == f"{HOST}:{served.admin.port_tls}"


async def test_start_is_refused_for_a_key_that_others_may_read(
    tmp_path: Path, authority: Authority
) -> None:
    made = authority.issue("broker")
    made.key.chmod(0o644)
    with pytest.raises(UnusableCertificate, match="chmod 600"):
        async with running(tmp_path / "data", **server_settings(made)):
            pass


# Half-open connections


async def test_silent_peers_do_not_lock_out_a_client(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority, max_connections=20) as served:
        handshakes = served.broker.handshakes[PortSetting.PORT_TLS]
        silent = [await asyncio.open_connection(HOST, served.broker.port_tls) for _ in range(60)]
        await until(lambda: handshakes.failed >= 40)
        assert len(handshakes) <= 20
        over_tls = await served.raw()
        plain = await RawClient.open(HOST, served.broker.port)
        for client in (over_tls, plain):
            await client.ping()
            await client.close()
        for _, writer in silent:
            writer.close()


async def test_silent_peers_do_not_lock_out_rest(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority, max_http_connections=10) as served:
        silent = [await asyncio.open_connection(HOST, served.admin.port_tls) for _ in range(40)]
        assert (await served.get("/admin/v2/brokers/health")).status == 200
        handshakes = served.broker.handshakes[PortSetting.HTTP_PORT_TLS]
        assert len(handshakes) + len(served.admin.connections) <= 10
        for _, writer in silent:
            writer.close()


async def test_client_that_reads_nothing_is_given_up(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority, keep_alive_interval_s=0.2) as served:
        client = await served.raw()
        producer = await client.create_producer(REGULAR)
        await asyncio.gather(*(producer.send(b"x" * 4_000_000) for _ in range(6)))
        reader = await served.raw()
        consumer = await reader.subscribe(
            REGULAR,
            "s",
            pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest),
            permits=0,
        )
        assert reader.transport is not None
        reader.transport.pause_reading()
        consumer.flow(100)
        held = served.broker.peer_memory
        await until(lambda: held.refresh() > 4_000_000)
        await until(lambda: len(served.broker.connections) == 1)
        assert held.refresh() == 0
        await client.ping()
        for each in (client, reader):
            await each.close()


# New files


async def test_new_certificate_serves_new_connections_and_leaves_present_ones(
    tmp_path: Path, authority: Authority
) -> None:
    async with serving(tmp_path, authority, security_reload_interval_s=0.02) as served:
        present = await served.raw()
        tls = served.broker.server_tls
        assert tls is not None
        before = tls.current
        # The certificate is there before its key is: the pair is refused until both are.
        half = served.certificate.key.read_bytes()
        served.authority.issue("broker", valid_s=3600)
        whole = served.certificate.key.read_bytes()
        served.certificate.key.write_bytes(half)
        await until(lambda: served.broker.reloader.failures["tls"] > 0)
        await (await served.raw()).close()
        served.certificate.key.write_bytes(whole)
        await until(lambda: tls.current is not before)
        fresh = await served.raw()
        for client in (present, fresh):
            await client.ping()
        shown = certificate_of(fresh)
        assert shown == ssl.PEM_cert_to_DER_cert(served.certificate.chain.read_text())
        assert certificate_of(present) != shown
        for client in (present, fresh):
            await client.close()


def certificate_of(client: RawClient) -> bytes | None:
    """The certificate that the broker showed to a client."""
    assert client.transport is not None
    found = client.transport.get_extra_info("ssl_object").getpeercert(True)
    assert found is None or isinstance(found, bytes)
    return found


async def test_certificates_are_replaced_under_load(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority, security_reload_interval_s=0.01) as served:
        tls, client = served.broker.server_tls, await served.raw()
        assert tls is not None
        producer, replaced = await client.create_producer(REGULAR), 0
        receipts: list[asyncio.Future[object]] = []
        while replaced < 10:
            before = tls.current
            authority.issue("broker")
            while tls.current is before:
                receipts += [asyncio.ensure_future(producer.send(b"x" * 1000)) for _ in range(20)]
                await asyncio.sleep(0.005)
            replaced += 1
            await (await served.raw()).close()
        await asyncio.gather(*receipts)
        assert len(served.broker.connections) == 1
        await client.close()


async def test_new_authorities_hold_for_new_connections(
    tmp_path: Path, authority: Authority
) -> None:
    trusted, other = tmp_path / "trusted.pem", Authority(tmp_path / "other")
    trusted.write_bytes(authority.chain.read_bytes())
    alice, bob = authority.issue("alice"), other.issue("bob")
    async with serving(
        tmp_path,
        authority,
        security_reload_interval_s=3600,
        tls_client_certificates="required",
        tls_trust_certs_file=trusted,
    ) as served:
        present = await served.raw(alice)
        await refused(served.raw(bob))
        trusted.write_bytes(other.chain.read_bytes())
        served.broker.reloader.check_soon()
        tls = served.broker.server_tls
        assert tls is not None
        before = tls.current
        await until(lambda: tls.current is not before)
        await refused(served.raw(alice))
        client = await served.raw(bob)
        await client.close()
        await present.ping()
        await present.close()


# Addresses


async def test_lookups_name_both_addresses(tmp_path: Path, authority: Authority) -> None:
    async with serving(tmp_path, authority) as served:
        me, client = served.broker.placement.me, await served.raw()
        answer = (
            await client.request(
                pb.BaseCommand.LOOKUP, pb.CommandLookupTopic(topic=REGULAR, request_id=0)
            )
        ).lookup_response
        assert answer.broker_service_url == me.url
        assert answer.broker_service_url_tls == me.url_tls
        await client.close()
        found = await (await served.get("/lookup/v2/topic/persistent/public/default/x")).json()
        assert found["brokerUrl"] == found["nativeUrl"] == me.url
        assert found["brokerUrlTls"] == found["brokerUrlSsl"] == me.url_tls
        assert (found["httpUrl"], found["httpUrlTls"]) == (me.web_url, me.web_url_tls)
        cluster = await (await served.get("/admin/v2/clusters/standalone")).json()
        assert cluster == {
            "serviceUrl": me.web_url,
            "serviceUrlTls": me.web_url_tls,
            "brokerServiceUrl": me.url,
            "brokerServiceUrlTls": me.url_tls,
        }


async def test_plain_addresses_are_absent_without_plain_ports(
    tmp_path: Path, authority: Authority
) -> None:
    async with serving(tmp_path, authority, plaintext_ports=False) as served:
        me, client = served.broker.placement.me, await served.raw()
        answer = (
            await client.request(
                pb.BaseCommand.LOOKUP, pb.CommandLookupTopic(topic=REGULAR, request_id=0)
            )
        ).lookup_response
        assert not answer.HasField("broker_service_url")
        assert answer.broker_service_url_tls == me.url_tls
        await client.close()
        found = await (await served.get("/lookup/v2/topic/persistent/public/default/x")).json()
        assert [found[name] for name in ("brokerUrl", "nativeUrl", "httpUrl")] == [None] * 3
        report = await (await served.get("/admin/v2/broker-stats/load-report")).json()
        assert report == {
            "webServiceUrl": None,
            "webServiceUrlTls": me.web_url_tls,
            "pulsarServiceUrl": None,
            "pulsarServiceUrlTls": me.url_tls,
        }


@pytest.mark.parametrize("over_tls", [True, False])
async def test_layouts_and_coordinators_name_the_address_of_the_connection(
    tmp_path: Path, authority: Authority, over_tls: bool
) -> None:
    """Pulsar's v5 clients read the plain fields alone, and speak TLS there if they are to."""
    async with serving(tmp_path, authority) as served:
        me = served.broker.placement.me
        if over_tls:
            client = await served.raw()
        else:
            client = await RawClient.open(HOST, served.broker.port)
        own = me.url_tls if over_tls else me.url
        async with magnetar.connect(served.url, tls_trust_file=authority.chain) as other:
            await produce_and_consume(other, TOPIC)
        for topic in (TOPIC, "persistent://public/default/regular"):
            client.send(
                pb.BaseCommand.SCALABLE_TOPIC_LOOKUP,
                pb.CommandScalableTopicLookup(session_id=1, topic=topic, create_if_missing=False),
            )
            dag = (await next_event(client)).scalable_topic_update.dag
            assert dag.controller_broker_url == own
            assert dag.controller_broker_url_tls == me.url_tls
            assert {each.broker_url for each in dag.segment_brokers} <= {own}
            assert {each.broker_url_tls for each in dag.segment_brokers} <= {me.url_tls}
        client.send(pb.BaseCommand.WATCH_TC_ASSIGNMENTS, pb.CommandWatchTcAssignments(watch_id=1))
        snapshot = (await next_event(client)).watch_tc_assignments_update.snapshot
        assert {each.broker_service_url for each in snapshot.assignments} == {own}
        assert {each.broker_service_url_tls for each in snapshot.assignments} == {me.url_tls}
        await client.close()


async def next_event(client: RawClient) -> pb.BaseCommand:
    async with asyncio.timeout(TIMEOUT_S):
        return await client.events.get()


# Metrics


async def test_metrics_have_the_expiry_and_the_handshakes(
    tmp_path: Path, authority: Authority
) -> None:
    async with serving(tmp_path, authority) as served:
        client = await served.raw()
        reader, writer = await asyncio.open_connection(HOST, served.broker.port_tls)
        writer.write(b"not TLS")
        with suppress(ConnectionError):
            await reader.read()
        page = await (await served.get("/metrics")).text()
        cluster = 'cluster="standalone"'
        assert f'magnetar_tls_handshakes_total{{{cluster},port="port_tls"}} 1.0' in page
        assert f'magnetar_tls_handshakes_failed_total{{{cluster},port="port_tls"}} 1.0' in page
        assert f'magnetar_tls_handshakes_in_progress{{{cluster},port="port_tls"}} 0.0' in page
        assert f'magnetar_tls_handshakes_total{{{cluster},port="http_port_tls"}} 1.0' in page
        assert f'magnetar_security_reload_failures_total{{{cluster},part="tls"}} 0.0' in page
        tls = served.broker.server_tls
        assert tls is not None
        (line,) = [
            each
            for each in page.splitlines()
            if each.startswith("magnetar_tls_certificate_expiry_timestamp_seconds{")
        ]
        assert float(line.rpartition(" ")[2]) == tls.expires_at_s
        writer.close()
        await client.close()
