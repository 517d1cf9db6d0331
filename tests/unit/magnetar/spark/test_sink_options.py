"""What a sink is told, and what it says to who forgot something."""

from typing import cast

import pytest
from pyspark.sql.types import StringType, StructField, StructType

import magnetar
from magnetar import CompressionType
from magnetar.spark.errors import InvalidOption
from magnetar.spark.options import Options
from magnetar.spark.sink import Sink
from magnetar.spark.sink_options import Delivery, SinkOptions, TransactionKeyOption
from magnetar.spark.source_options import SourceOptions

URL = {"serviceurl": "pulsar://127.0.0.1:6650", "topic": "topic://public/default/t"}
KEY = {"txnkey": "a-key", "txnepoch": "3"}
TRACKED = {"trackpositions": "true", "checkpointlocation": "/c"}


def test_exactly_once_is_the_default_and_has_a_key() -> None:
    found = SinkOptions.of(URL | KEY | TRACKED | {"txnTimeoutMs": "1500"}, streaming=True)
    assert found.delivery is Delivery.EXACTLY_ONCE
    assert found.key == TransactionKeyOption("a-key", 3)
    assert (found.topic, found.timeout_s) == (URL["topic"], 1.5)
    assert (found.track_positions, found.checkpoint) == (True, "/c")
    assert found.connection.service_url == URL["serviceurl"]


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("orders", "topic://public/default/orders"),
        ("a/b/c", "topic://a/b/c"),
        ("persistent://a/b/c", "persistent://a/b/c"),
    ],
)
def test_a_short_name_is_the_topic_that_a_source_would_read(given: str, whole: str) -> None:
    named = {"serviceUrl": URL["serviceurl"], "topic": given}
    assert SinkOptions.of(named | KEY, streaming=True).topic == whole
    assert SourceOptions.of(Options(named)).topic == whole


class Producers:
    """A client, as far as a sink opens producers of it."""

    async def producer(self, topic: str, **settings: object) -> object:
        self.settings = settings
        return object()

    async def layout(self, topic: str) -> object:
        return object()


async def test_operation_timeout_is_the_send_timeout() -> None:
    client, given = Producers(), URL | KEY | {"operationTimeoutMs": "120000"}
    schema = StructType([StructField("value", StringType())])
    sink = Sink(SinkOptions.of(given, streaming=True), schema)
    await sink.open_sender(cast("magnetar.Client", client), None)
    assert client.settings["send_timeout_s"] == 120


def test_compression_and_chunking_are_options() -> None:
    plain = SinkOptions.of(URL | KEY, streaming=True)
    assert (plain.compression, plain.chunking) == (CompressionType.NONE, False)
    packed = SinkOptions.of(URL | KEY | {"compression": "ZSTD", "chunking": "true"}, streaming=True)
    assert (packed.compression, packed.chunking) == (CompressionType.ZSTD, True)
    with pytest.raises(InvalidOption, match="none, lz4, zlib, zstd, snappy"):
        SinkOptions.of(URL | KEY | {"compression": "rar"}, streaming=True)


def test_epoch_zero_is_accepted() -> None:
    found = SinkOptions.of(URL | {"txnKey": "a", "txnEpoch": "0"}, streaming=True)
    assert found.key == TransactionKeyOption("a", 0)


@pytest.mark.parametrize("missing", [{}, {"txnkey": "a"}, {"txnepoch": "1"}])
def test_exactly_once_without_a_key_is_refused_with_the_way_to_get_one(
    missing: dict[str, str],
) -> None:
    with pytest.raises(InvalidOption, match=r"magnetar\.spark\.open_key\(") as refused:
        SinkOptions.of(URL | missing, streaming=True)
    assert "delivery=at-least-once" in str(refused.value)


def test_at_least_once_ignores_the_key() -> None:
    found = SinkOptions.of(URL | KEY | {"delivery": "at-least-once"}, streaming=True)
    assert (found.delivery, found.key) == (Delivery.AT_LEAST_ONCE, None)
    with pytest.raises(InvalidOption, match="exactly-once, at-least-once"):
        SinkOptions.of(URL | {"delivery": "sometimes"}, streaming=True)


@pytest.mark.parametrize(
    ("given", "streaming"),
    [
        (URL | KEY | {"trackPositions": "true"}, True),
        (URL | KEY | TRACKED, False),
        (URL | TRACKED | {"delivery": "at-least-once"}, True),
    ],
)
def test_positions_need_a_checkpoint_and_a_transaction(
    given: dict[str, str], streaming: bool
) -> None:
    with pytest.raises(InvalidOption, match="option checkpointLocation of this query"):
        SinkOptions.of(given, streaming=streaming)


def test_job_id_is_refused_for_streams() -> None:
    assert SinkOptions.of(URL | KEY | {"jobId": "j"}, streaming=False).job == "j"
    with pytest.raises(InvalidOption, match="jobId is for batch writes"):
        SinkOptions.of(URL | KEY | {"jobId": "j"}, streaming=True)


def test_misspelt_option_is_refused() -> None:
    with pytest.raises(InvalidOption, match="do you mean txnEpoch"):
        SinkOptions.of(URL | {"txnKey": "a", "txnepok": "1"}, streaming=True)


def test_positions_need_an_exactly_once_batch_write() -> None:
    found = SinkOptions.of(URL | KEY | {"positions": "[1]"}, streaming=False)
    assert found.positions == "[1]"
    for given, streaming in ((URL | KEY, True), (URL | {"delivery": "at-least-once"}, False)):
        with pytest.raises(InvalidOption, match="positions"):
            SinkOptions.of(given | {"positions": "[1]"}, streaming=streaming)
