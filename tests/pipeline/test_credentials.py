"""Queries and jobs on a broker with authentication and authorization; secrets are shown nowhere.

Spark is called on the main thread: on another one it does not find the format.
"""

import asyncio
import io
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Final

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from typer.testing import CliRunner

import magnetar
import magnetar.spark
from magnetar.cli.main import build_app
from magnetar.spark.options import Connection
from tests.pipeline import spark_session
from tests.pipeline.rows import Pair, committed, pairs, publish
from tests.support.everything_on import Kind, SecuredBroker, serving_secured
from tests.support.oauth2_issuer import SECRET as CLIENT_SECRET
from tests.support.security import PASSWORD, ROOT_ROLE

PATIENCE_S: Final = 90
ROLE: Final = "alice"
LIFE_S: Final = 2
"""Of tokens that expire while a query runs; the broker checks every second."""
TOKEN: Final = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]+")
KEY: Final = "orders-to-bills"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with serving_secured(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.fixture
async def root(secured: SecuredBroker) -> AsyncIterator[magnetar.Client]:
    """A client that may do everything."""
    async with magnetar.connect(secured.url, **secured.options(Kind.TOKEN)) as client:
        yield client


@pytest.fixture
def talkative(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """The session, which logs more than usual, and has an event log."""
    magnetar.spark.register(spark)
    spark.sparkContext.setLogLevel("INFO")
    with event_log(spark, tmp_path / "events"):
        yield spark
    spark.sparkContext.setLogLevel("WARN")


@contextmanager
def event_log(spark: SparkSession, directory: Path) -> Iterator[None]:
    """Write everything that Spark's user interface and its history server show to a file."""
    directory.mkdir()
    context, jvm = spark.sparkContext._jsc.sc(), spark.sparkContext._jvm  # noqa: SLF001
    assert jvm is not None
    settings = context.conf().clone().set("spark.eventLog.compress", "false")
    listener = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "query",
        jvm.scala.Option.empty(),
        jvm.java.net.URI(directory.as_uri()),
        settings,
        context.hadoopConfiguration(),
    )
    listener.start()
    context.addSparkListener(listener)
    try:
        yield
    finally:
        context.removeSparkListener(listener)
        listener.stop()


def explained(frame: DataFrame) -> str:
    with redirect_stdout(io.StringIO()) as shown:
        for mode in ("extended", "formatted", "cost"):
            frame.explain(mode=mode)
    return shown.getvalue()


def text_of(setting: object) -> str | None:
    return None if setting is None else str(setting)


class SecuredQuery:
    """A query from topic to topic, exactly once, by ROLE, and the texts that it shows."""

    def __init__(
        self, spark: SparkSession, secured: SecuredBroker, source: str, target: str, directory: Path
    ) -> None:
        self.shown: list[str] = []
        self._spark = spark
        self._secured = secured
        self._source = source
        self._target = target
        self._checkpoint = directory / "checkpoint"

    def options(self, kind: Kind) -> dict[str, str]:
        """The connection as options of sources and sinks."""
        settings = self._secured.options(kind, ROLE)
        return Connection(
            self._secured.url,
            token=text_of(settings.get("token")),
            basic=settings.get("basic"),
            oauth2=settings.get("oauth2"),
            tls_trust_file=text_of(settings.get("tls_trust_file")),
            tls_certificate_file=text_of(settings.get("tls_certificate_file")),
            tls_key_file=text_of(settings.get("tls_key_file")),
        ).options()

    def count(self, kind: Kind) -> int:
        """The rows of the source, by a batch."""
        options = {**self.options(kind), "topic": self._source}
        table = self._spark.read.format("pulsar5").options(**options).load()
        self.shown.append(explained(table.where("key is not null")))
        return table.count()

    def count_by_sql(self, kind: Kind) -> int:
        """The same, with the options in the text of a statement."""
        options = {**self.options(kind), "topic": self._source}
        listed = ", ".join(f"{name} '{value}'" for name, value in options.items())
        statement = f"CREATE OR REPLACE TEMPORARY VIEW orders USING pulsar5 OPTIONS ({listed})"
        self._spark.sql(statement)
        counted = self._spark.sql("SELECT count(*) FROM orders")
        self.shown.append(explained(counted))
        return int(counted.collect()[0][0])

    def start(self, kind: Kind, *, ends: bool) -> StreamingQuery:
        """Open the key, and start the query, which continues where its last run ended."""
        options = self.options(kind)
        key = magnetar.spark.open_key(self._secured.url, KEY, **self._secured.options(kind, ROLE))
        stream = self._spark.readStream.format("pulsar5")
        rows = stream.options(**options, topic=self._source).load()
        self.shown.append(explained(rows))
        writer = (
            rows.writeStream.format("pulsar5")
            .options(**key.options, **options, topic=self._target, trackPositions="true")
            .option("checkpointLocation", str(self._checkpoint))
        )
        return (writer.trigger(availableNow=True) if ends else writer).start()

    def run(self, kind: Kind) -> None:
        """Do all that is there, and end."""
        query = self.start(kind, ends=True)
        assert query.awaitTermination(PATIENCE_S)
        with redirect_stdout(io.StringIO()) as plan:
            query.explain(extended=True)
        self.shown += [plan.getvalue(), str(query.lastProgress)]


def run_job(secured: SecuredBroker, *words: str) -> str:
    """Run `magnetar pipeline ...` in this process, and so in the session; its output."""
    where = ("--url", secured.url, "--tls-trust-file", str(secured.authority.chain))
    environment = {"MAGNETAR_ADMIN_URL": secured.admin_url}
    done = CliRunner().invoke(build_app(), ["pipeline", *words, *where], env=environment)
    assert done.exit_code == 0, done.output
    return done.output


@contextmanager
def renewing_token(secured: SecuredBroker) -> Iterator[None]:
    """Write the file with the token of ROLE again, before each one expires."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(LIFE_S / 4):
            secured.token_file(ROLE, life_s=LIFE_S)

    secured.token_file(ROLE, life_s=LIFE_S)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        # Workers live on, and try to log in again.
        secured.token_file(ROLE)


async def run_while_tokens_expire(
    query: SecuredQuery, secured: SecuredBroker, root: magnetar.Client, source: str
) -> list[Pair]:
    """Run the query for the lives of three tokens; the rows that were sent."""
    sent: list[Pair] = []
    with renewing_token(secured):
        running = query.start(Kind.TOKEN_FILE, ends=False)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + 3 * LIFE_S:
            rows = pairs(10, first=len(sent))
            await publish(root, source, rows)
            sent += rows
            running.processAllAvailable()
            await asyncio.sleep(LIFE_S / 4)
        query.shown.append(str(running.lastProgress))
        running.stop()
    return sent


async def test_query_runs_with_each_kind_of_credentials_and_shows_no_secret(
    talkative: SparkSession,
    secured: SecuredBroker,
    root: magnetar.Client,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, target = await secured.create_topic("orders", 2), await secured.create_topic("bills")
    await secured.grant(source, ROLE, "consume")
    await secured.grant(target, ROLE, "produce")
    query = SecuredQuery(talkative, secured, source, target, tmp_path)
    sent = await run_while_tokens_expire(query, secured, root, source)
    for kind in (Kind.TOKEN, Kind.BASIC, Kind.OAUTH2, Kind.CERTIFICATE):
        rows = pairs(20, first=len(sent))
        await publish(root, source, rows)
        sent += rows
        assert query.count(kind) == len(sent)
        query.run(kind)
    assert query.count_by_sql(Kind.BASIC) == len(sent)
    found = await committed(root, target)
    assert sorted((each.key, each.value) for each in found) == sorted(sent)

    copied = await secured.create_topic("copied")
    await secured.grant(copied, ROLE, "produce")
    replay = ("replay", source, copied, "--checkpoint", str(tmp_path / "replay"))
    query.shown.append(run_job(secured, *replay, "--token-file", str(secured.token_file(ROLE))))
    assert len(await committed(root, copied)) == len(sent)
    # An audit reads records of transactions, which only superusers may.
    password = tmp_path.with_suffix(".password")
    password.write_text(PASSWORD)
    login = ("--basic-user", ROOT_ROLE, "--basic-password-file", str(password))
    query.shown.append(run_job(secured, "audit", target, *login))

    shown = query.shown
    for file in tmp_path.rglob("*"):
        if file.is_file():
            shown.append(file.read_bytes().decode("latin-1"))
    for log in tmp_path_factory.getbasetemp().glob(f"spark*/{spark_session.LOG}"):
        shown.append(log.read_text("utf-8", "replace"))
    captured = capfd.readouterr()
    shown += [captured.out, captured.err]
    assert any("SparkListenerSQLExecutionStart" in text for text in shown)
    assert any("pulsar5" in text for text in shown)
    assert any("(redacted)" in text for text in shown)
    for secret in (PASSWORD, CLIENT_SECRET):
        assert [text for text in shown if secret in text] == []
    assert [found for text in shown for found in TOKEN.findall(text)] == []


async def test_refusals_of_a_query_are_sentences_without_secrets(
    spark: SparkSession, secured: SecuredBroker, root: magnetar.Client, tmp_path: Path
) -> None:
    magnetar.spark.register(spark)
    source, target = await secured.create_topic("read"), await secured.create_topic("written")
    await publish(root, source, pairs(10))
    query = SecuredQuery(spark, secured, source, target, tmp_path)
    with pytest.raises(PySparkException, match="Ask an administrator for a grant") as denied:
        query.count(Kind.BASIC)
    await secured.grant(source, ROLE, "consume")
    with pytest.raises(StreamingQueryException, match=r"consume on topic://.*/written") as written:
        query.run(Kind.BASIC)
    options = {**query.options(Kind.BASIC), "basicPassword": f"{PASSWORD} of another"}
    with pytest.raises(PySparkException, match="does not accept this client's basic") as wrong:
        spark.read.format("pulsar5").options(**options, topic=source).load().count()
    for each in (denied, written, wrong):
        assert PASSWORD not in str(each.value)
