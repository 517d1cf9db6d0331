"""Secrets among the options stay out of plans, logs and checkpoints."""

import asyncio
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import magnetar
import magnetar.spark
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.spark.options import Connection
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import spark_session
from tests.pipeline.conftest import MakeTopic
from tests.pipeline.rows import pairs, publish
from tests.support.oauth2_issuer import CLIENT_ID, issuing

PATIENCE_S = 90
MARK = "marked-secret"


@pytest.fixture
def talkative(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, which logs more than usual."""
    magnetar.spark.register(spark)
    spark.sparkContext.setLogLevel("INFO")
    yield spark
    spark.sparkContext.setLogLevel("WARN")


def explained(frame: DataFrame) -> str:
    with redirect_stdout(io.StringIO()) as shown:
        for mode in ("extended", "formatted", "cost"):
            frame.explain(mode=mode)
    return shown.getvalue()


def connections(url: str, issuer_url: str) -> dict[str, Connection]:
    """One of each kind of credentials; the broker asks for none of them."""
    oauth2 = OAuth2Credentials(issuer_url, CLIENT_ID, MARK, require_https=False)
    return {
        "token": Connection(url, token=MARK),
        "basic": Connection(url, basic=BasicCredentials("ann", MARK)),
        "oauth2": Connection(url, oauth2=oauth2),
    }


async def test_secrets_of_options_are_shown_nowhere(
    talkative: SparkSession,
    service: BrokerUnderTest,
    client: magnetar.Client,
    topic: MakeTopic,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, target = await topic(), await topic()
    await publish(client, source.name, pairs(20))
    shown: list[str] = []
    spark = talkative
    with issuing() as issuer:
        issuer.secret = MARK
        for name, connection in connections(service.url, issuer.url).items():
            options = {**connection.options(), "topic": source.name}
            table = spark.read.format("pulsar5").options(**options).load()
            shown.append(explained(table.where("key is not null")))
            assert await asyncio.to_thread(table.count) == 20
            stream = spark.readStream.format("pulsar5").options(**options).load()
            shown.append(explained(stream))
            query = (
                stream.writeStream.format("pulsar5")
                .options(**{**options, "topic": target.name, "delivery": "at-least-once"})
                .option("checkpointLocation", str(tmp_path / name))
                .trigger(availableNow=True)
                .start()
            )
            assert await asyncio.to_thread(query.awaitTermination, PATIENCE_S)
            with redirect_stdout(io.StringIO()) as plan:
                query.explain(extended=True)
            shown += [plan.getvalue(), str(query.lastProgress)]
        assert issuer.issued > 0
    for file in tmp_path.rglob("*"):
        if file.is_file():
            shown.append(file.read_bytes().decode("latin-1"))
    for log in tmp_path_factory.getbasetemp().glob(f"spark*/{spark_session.LOG}"):
        shown.append(log.read_text("utf-8", "replace"))
    captured = capfd.readouterr()
    shown += [captured.out, captured.err]
    assert any("pulsar5" in text for text in shown)
    assert [text for text in shown if MARK in text] == []
