"""The abort of a batch that has failed, when the brokers cannot be asked for it."""

import logging

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from magnetar.spark.sink import Sink
from magnetar.spark.sink_options import SinkOptions
from tests.support.child_process import HOST, free_port


def test_failed_abort_does_not_hide_the_cause_of_the_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Spark shows `Writing job failed`, and no cause, when the abort raises."""
    options = {
        "serviceUrl": f"pulsar://{HOST}:{free_port()}",
        "topic": "bills",
        "txnKey": "orders-to-bills",
        "txnEpoch": "3",
        "operationTimeoutMs": "100",
    }
    schema = StructType([StructField("value", BinaryType())])
    sink = Sink(SinkOptions.of(options, streaming=False), schema)
    with caplog.at_level(logging.WARNING):
        assert not sink.abort()
    assert "opening of the key orders-to-bills aborts them" in caplog.text
