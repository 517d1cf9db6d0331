"""Single messages over REST: of a backlog, by id, and counted from an end of the topic."""

import base64

import aiohttp
import pytest

from magnetar.compression import CompressionType, compress
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest

NAME = "persistent://public/default/t"
TOPIC = "/admin/v2/persistent/public/default/t"
BACKLOG = f"{TOPIC}/subscription/s/position"


@pytest.fixture
async def client(rest: Rest, client: RawClient) -> RawClient:
    await rest.done("PUT", TOPIC)
    await rest.done("PUT", f"{TOPIC}/subscription/s")
    return client


async def shown(rest: Rest, path: str) -> tuple[dict[str, str], bytes]:
    """The headers of an answer without their prefix, and its body."""
    async with aiohttp.ClientSession() as session, session.get(rest.base + path) as answer:
        body = await answer.read()
        assert answer.status == 200, body
        found = answer.headers.items()
    return {k.removeprefix("X-Pulsar-"): v for k, v in found if k.startswith("X-Pulsar-")}, body


async def test_messages_of_the_backlog_are_shown_in_order(rest: Rest, client: RawClient) -> None:
    producer = await client.create_producer(NAME)
    ids = [(await producer.send(b"%d" % number)).message_id for number in range(3)]
    consumer = await client.subscribe(NAME, "s")
    await consumer.ack_answered(ids[1])
    assert [(await shown(rest, f"{BACKLOG}/{count}"))[1] for count in (1, 2)] == [b"0", b"2"]
    assert "fewer than 3" in await rest.refused(404, "GET", f"{BACKLOG}/3")
    assert "fewer than" in await rest.refused(404, "GET", f"{BACKLOG}/{2**63 - 1}")
    for wrong in (0, -1):
        assert "out of bounds" in await rest.refused(412, "GET", f"{BACKLOG}/{wrong}")
    missing = f"{TOPIC}/subscription/none/position/1"
    assert "no subscription 'none'" in await rest.refused(404, "GET", missing)


async def test_metadata_are_headers_and_the_payload_is_unpacked(
    rest: Rest, client: RawClient
) -> None:
    metadata = pb.MessageMetadata(
        partition_key="k\u00e9y\r\n",
        ordering_key=b"\x00\x01",
        event_time=1_700_000_000_123,
        compression=pb.LZ4,
        uncompressed_size=5,
        properties=[pb.KeyValue(key="a b", value="\u00fc")],
        null_value=False,
    )
    producer = await client.create_producer(NAME, pb.CommandProducer(producer_name="p"))
    packed = compress(CompressionType.LZ4, b"hello")
    sent = (await producer.send(packed, metadata=metadata)).message_id
    headers, body = await shown(rest, f"{TOPIC}/ledger/{sent.ledger_id}/entry/{sent.entry_id}")
    assert body == b"hello"
    assert headers["Message-ID"] == f"{sent.ledger_id}:{sent.entry_id}"
    assert headers["producer-name"] == "p"
    assert headers["sequence-id"] == "0"
    assert headers["partition-key"] == "k%C3%A9y%0D%0A"
    assert headers["Base64-ordering-key"] == base64.b64encode(b"\x00\x01").decode()
    assert headers["event-time"] == "2023-11-14T22:13:20.123+00:00"
    assert headers["PROPERTY"] == '{"a b": "\\u00fc"}'
    assert headers["compression"] == "LZ4"
    assert headers["Is-Encrypted"] == headers["txn-aborted"] == "false"
    assert "num-batch-message" not in headers


async def test_an_encrypted_message_is_shown_encrypted_with_its_keys(
    rest: Rest, client: RawClient
) -> None:
    keys = [pb.EncryptionKeys(key=name, value=b"v") for name in ("k", "other")]
    metadata = pb.MessageMetadata(
        compression=pb.LZ4,
        uncompressed_size=5,
        encryption_keys=keys,
        encryption_param=b"nonce",
        encryption_algo="AES",
    )
    await (await client.create_producer(NAME)).send(b"secret", metadata=metadata)
    headers, body = await shown(rest, f"{BACKLOG}/1")
    assert (headers["Is-Encrypted"], body) == ("true", b"secret")
    assert (headers["compression"], headers["encryption-algo"]) == ("LZ4", "AES")
    assert base64.b64decode(headers["Base64-encryption-param"]) == b"nonce"
    url = f"{rest.base}{BACKLOG}/1"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        texts = answer.headers.getall("X-Pulsar-Base64-encryption-keys")
    assert [pb.EncryptionKeys.FromString(base64.b64decode(each)) for each in texts] == keys


async def test_a_chunk_is_shown_with_its_number_and_count(rest: Rest, client: RawClient) -> None:
    metadata = pb.MessageMetadata(
        uuid="u", chunk_id=1, num_chunks_from_msg=3, total_chunk_msg_size=9
    )
    await (await client.create_producer(NAME)).send(b"abc", metadata=metadata)
    headers, _ = await shown(rest, f"{BACKLOG}/1")
    assert (headers["uuid"], headers["chunk-id"], headers["num-chunks-from-msg"]) == ("u", "1", "3")
    assert headers["total-chunk-msg-size"] == "9"
    assert (headers["PROPERTY-TOTAL-CHUNKS"], headers["PROPERTY-CHUNK-ID"]) == ("3", "1")


async def test_examined_from_either_end(rest: Rest, client: RawClient) -> None:
    assert "is empty" in await rest.refused(412, "GET", f"{TOPIC}/examinemessage")
    producer = await client.create_producer(NAME)
    for number in range(4):
        await producer.send(b"%d" % number)
    wanted = {
        "": b"3",
        "?messagePosition=2": b"2",
        "?initialPosition=earliest": b"0",
        "?initialPosition=earliest&messagePosition=3": b"2",
        "?initialPosition=latest&messagePosition=100": b"0",
        "?initialPosition=earliest&messagePosition=100": b"3",
    }
    for query, payload in wanted.items():
        assert (await shown(rest, f"{TOPIC}/examinemessage{query}"))[1] == payload, query
    for query in ("initialPosition=middle", "messagePosition=0"):
        await rest.refused(412, "GET", f"{TOPIC}/examinemessage?{query}")


async def test_missing_messages_are_not_found(rest: Rest, client: RawClient) -> None:
    sent = (await (await client.create_producer(NAME)).send(b"x")).message_id
    for place in (f"{sent.ledger_id}/entry/1", f"{sent.ledger_id + 1}/entry/0", "0/entry/-1"):
        assert "deleted" in await rest.refused(404, "GET", f"{TOPIC}/ledger/{place}")
    await rest.done("PUT", "/admin/v2/persistent/public/default/p/partitions", 2)
    for path in ("ledger/0/entry/0", "examinemessage", "subscription/s/position/1"):
        partitioned = f"/admin/v2/persistent/public/default/p/{path}"
        assert "name the partition" in await rest.refused(405, "GET", partitioned)


async def test_id_of_the_first_message_since_a_time(rest: Rest, client: RawClient) -> None:
    producer = await client.create_producer(NAME)
    sent = []
    for ms in (1_000, 2_000, 3_000):
        metadata = pb.MessageMetadata(publish_time=ms)
        sent.append((await producer.send(b"x", metadata=metadata)).message_id)
    for since_ms, index in ((0, 0), (1_001, 1), (3_000, 2)):
        found = await rest.get(f"{TOPIC}/messageid/{since_ms}")
        wanted = {"ledgerId": sent[index].ledger_id, "entryId": sent[index].entry_id}
        assert found == {**wanted, "partitionIndex": -1}
    behind = {"ledgerId": sent[2].ledger_id, "entryId": sent[2].entry_id + 1}
    assert await rest.get(f"{TOPIC}/messageid/3001") == {**behind, "partitionIndex": -1}


async def test_bytes_from_a_message_on(rest: Rest, client: RawClient) -> None:
    producer = await client.create_producer(NAME)
    sent = [(await producer.send(bytes(100))).message_id for _ in range(3)]
    stats = await rest.get(f"{TOPIC}/stats")
    assert isinstance(stats, dict)
    sizes = []
    for each in sent:
        place = {"ledgerId": each.ledger_id, "entryId": each.entry_id}
        sizes.append((await rest.call("PUT", f"{TOPIC}/backlogSize", place))[1])
    assert sizes == [stats["storageSize"] // 3 * left for left in (3, 2, 1)]
    assert (await rest.call("PUT", f"{TOPIC}/backlogSize", "latest"))[1] == 0
    assert (await rest.call("PUT", f"{TOPIC}/backlogSize", "earliest"))[1] == sizes[0]
    assert "send its id" in await rest.refused(400, "PUT", f"{TOPIC}/backlogSize")
    assert "send its id" in await rest.refused(400, "PUT", f"{TOPIC}/backlogSize", {})
    excluded = {"ledgerId": -1, "entryId": -1, "excluded": True}
    assert "no excluded" in await rest.refused(400, "PUT", f"{TOPIC}/backlogSize", excluded)


async def test_all_partitions_are_sealed_and_tell_their_last_messages(
    rest: Rest, client: RawClient
) -> None:
    partitioned = "/admin/v2/persistent/public/default/p"
    assert "no partitions" in await rest.refused(405, "POST", f"{TOPIC}/terminate/partitions")
    await rest.done("PUT", f"{partitioned}/partitions", 2)
    name = "persistent://public/default/p-partition-1"
    sent = (await (await client.create_producer(name)).send(b"x")).message_id
    status, found = await rest.call("POST", f"{partitioned}/terminate/partitions")
    assert status == 200
    assert isinstance(found, dict)
    assert list(found) == ["0", "1"]
    last = {"ledgerId": sent.ledger_id, "entryId": sent.entry_id, "partitionIndex": 1}
    assert (found["0"]["entryId"], found["1"]) == (-1, last)
    with pytest.raises(BrokerError, match="TopicTerminated"):
        await client.create_producer(name)
