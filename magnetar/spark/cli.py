"""The sub-commands `magnetar pipeline ...`: jobs of Spark on topics.

`deploy/spark/jobs.py audit ...` (for spark-submit) and `python -m magnetar.spark` take the same
options.  The exit status is 0 on success and 1 on failure; `VIOLATIONS_FOUND`, `NOT_FINISHED` and
`magnetar.spark.ending` have the others.
"""

# PySpark and its libraries are imported when a job runs: the other commands work without them, and
# a job says what to install.
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from magnetar.cli.common import TopicArgument, topic_named
from magnetar.cli.connecting import Where, connecting
from magnetar.spark.ending import ending_on_signals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
    from magnetar.spark.admin import AdminRest
    from magnetar.spark.options import Connection

__all__ = ["app", "register"]

VIOLATIONS_FOUND: Final = 2
"""The exit status of an audit that found violations."""
NOT_FINISHED: Final = 3
"""The exit status of a replay that has not reached its end; the same command continues it."""
EXTRA: Final = ("numpy", "obstore", "pandas", "pyarrow", "pyspark", "xxhash")
"""Libraries of the extra `magnetar[spark]`: the names that they are installed and imported by."""
AGAIN: Final = "Run the same command again: it starts from the beginning."
GO_ON: Final = "Finished work is kept; run the same command again to go on."
app: Final = typer.Typer(help="Jobs of Spark on topics.", no_args_is_help=True)
AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin-url", envvar="MAGNETAR_ADMIN_URL", show_envvar=True, help="REST of any broker"
    ),
]
Master = Annotated[
    str | None,
    typer.Option("--master", help="Master of Spark [local[*], or the one of spark-submit]"),
]


def register(to: typer.Typer) -> None:
    """Add the commands."""
    to.add_typer(app, name="pipeline")


@app.callback()
def _of_all_jobs() -> None:
    """Jobs of Spark on topics."""


@app.command()
@connecting
def audit(
    topic: TopicArgument,
    admin_url: AdminUrl = "http://127.0.0.1:8080",
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a page with a picture of the DAG")
    ] = None,
    readers: Annotated[
        bool, typer.Option("--readers", help="Also read the topic as consumers do, and compare")
    ] = False,
    table: Annotated[
        str | None, typer.Option("--table", help="Compare the table that an offload wrote there")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="File of audited segments, which are not read again"),
    ] = None,
    master: Master = None,
    *,
    where: Where,
) -> None:
    """Compare a topic's entries with its transactions, producers and queries (rules V1 to V7)."""
    name = topic_named(topic)
    with ending_on_signals("audit", AGAIN):
        from magnetar.spark.audit.audited import load, store

        with _explain_missing_library():
            from magnetar.spark.offload.place import place_of

        # Mistakes that the command line alone shows are reported before Spark starts.
        connection, rest = connection_of(where), rest_of(admin_url, where)
        place = None if table is None else place_of(table)
        kept = None if state is None else load(state)
        if report is not None:
            report.open("a").close()  # Fails now if it cannot be written: an audit may take hours.
        with _spark(master, f"audit of {topic}") as spark:
            from magnetar.spark.audit.console import show
            from magnetar.spark.audit.job import audit as run
            from magnetar.spark.audit.report import page

            found = run(spark, connection, rest, name, readers_view=readers, table=place, kept=kept)
            show(found)
            if state is not None and found.audited is not None:
                store(state, found.audited)
            if report is not None:
                report.write_text(page(found), "utf-8")
                typer.echo(f"The report is in {report}.")
    if not found.findings.is_clean:
        raise typer.Exit(VIOLATIONS_FOUND)


@app.command()
@connecting
def replay(
    source: TopicArgument,
    target: TopicArgument,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="A directory or URI of this replay's own")
    ],
    start: Annotated[
        str, typer.Option("--start", help="earliest, latest, a time, or a cut")
    ] = "earliest",
    end: Annotated[str, typer.Option("--end", help="The end, given as --start")] = "latest",
    row_filter: Annotated[
        str | None, typer.Option("--where", help="SQL condition on the source's columns")
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", help="SQL that makes a column: 'upper(key) AS key'; repeatable"),
    ] = None,
    decode: Annotated[
        str, typer.Option("--decode", help="avro or json: values as the column data")
    ] = "none",
    rows_per_batch: Annotated[
        int | None, typer.Option("--max-rows-per-trigger", min=1, help="Rows of one batch")
    ] = None,
    rows_per_second: Annotated[
        int | None, typer.Option("--rows-per-second", min=1, help="The most rows read per second")
    ] = None,
    master: Master = None,
    *,
    where: Where,
) -> None:
    """Write a range of a topic into another one, exactly once; the same command continues it."""
    names = topic_named(source), topic_named(target)
    with ending_on_signals("replay", GO_ON):
        from magnetar.spark.replay.request import Replay

        connection = connection_of(where)
        asked = Replay(*names, start, end, row_filter, tuple(select or ()), decode)
        with _spark(master, f"replay of {source}") as spark:
            from magnetar.spark.progress import Progress
            from magnetar.spark.replay.job import Speed
            from magnetar.spark.replay.job import replay as run

            speed = Speed(rows_per_batch, rows_per_second)
            with Progress("Replay") as progress:
                outcome = run(spark, connection, asked, checkpoint, speed, progress)
            typer.echo(outcome.sentence())
    if not outcome.finished:
        raise typer.Exit(NOT_FINISHED)


@app.command()
@connecting
def compact(
    topic: TopicArgument,
    target: TopicArgument,
    generation: Annotated[
        str | None, typer.Option("--generation", help="Ends the name of the target: TARGET-NAME")
    ] = None,
    end: Annotated[
        str, typer.Option("--end", help="latest, a time, or a cut: later rows are not read")
    ] = "latest",
    tombstones: Annotated[
        str | None,
        typer.Option(
            "--drop-tombstones-older-than", help="As 7d or 12h; keys whose last value is null"
        ),
    ] = None,
    keyless: Annotated[
        bool, typer.Option("--keep-keyless/--drop-keyless", help="Rows without key")
    ] = True,
    master: Master = None,
    *,
    where: Where,
) -> None:
    """Make a new topic of the last row of each key; run again, it finds the topic."""
    names = topic_named(topic), topic_named(target)
    with ending_on_signals("compaction", AGAIN):
        from magnetar.spark.compact.request import Compaction, generation_topic, milliseconds

        connection = connection_of(where)
        asked = Compaction(
            names[0],
            generation_topic(names[1], generation),
            end,
            None if tombstones is None else milliseconds(tombstones),
            keyless,
        )
        with _spark(master, f"compaction of {topic}") as spark:
            from magnetar.spark.compact.job import compact as run
            from magnetar.spark.progress import Progress

            with Progress("Compaction") as progress:
                made = run(spark, connection, asked, progress)
            typer.echo(made.sentence())


@app.command()
@connecting
def offload(
    topic: TopicArgument,
    to: Annotated[str, typer.Option("--to", help="A path, or s3://BUCKET/PREFIX")],
    admin_url: AdminUrl = "http://127.0.0.1:8080",
    copies: Annotated[
        str | None,
        typer.Option("--copies", help="Where brokers put raw copies, below their offload_url"),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop-hot", help="Delete ledgers that were copied and read again")
    ] = False,
    master: Master = None,
    *,
    where: Where,
) -> None:
    """Copy sealed segments to an object store, and write their rows as a table of Parquet."""
    name = topic_named(topic)
    with ending_on_signals("offload", GO_ON):
        with _explain_missing_library():
            from magnetar.spark.offload.place import place_of

        connection, rest, place = connection_of(where), rest_of(admin_url, where), place_of(to)
        with _spark(master, f"offload of {topic}") as spark:
            from magnetar.spark.offload.job import offload as run

            done = run(
                spark,
                connection,
                rest,
                name,
                place,
                copies_url=copies,
                drop=drop,
                progress=typer.echo,
            )
    rows = sum(each.rows for each in done.now.values())
    typer.echo(
        f"Offloaded {len(done.now)} segments with {rows:,} rows; {len(done.before)} were before."
    )
    for segment_id, why in done.waiting.items():
        typer.echo(f"Segment {segment_id} {why}: run the same command again later.")
    if drop:
        typer.echo(f"Deleted {sum(map(len, done.dropped.values()))} ledgers, which have copies.")


def connection_of(where: Where) -> "Connection":
    """The connection for tasks on any machine; the files with secrets are read now.

    Raises `AuthenticationFailed` if one of them cannot be used.
    """
    from magnetar.spark.options import Connection

    def path(given: Path | None) -> str | None:
        return None if given is None else str(given)

    return Connection(
        where.url,
        operation_timeout_ms=int(where.operation_timeout_s * 1000),
        token=_token(where),
        basic=_basic(where),
        oauth2=_oauth2(where),
        tls_trust_file=path(where.tls_trust_file),
        tls_certificate_file=path(where.tls_certificate_file),
        tls_key_file=path(where.tls_key_file),
        tls_check_certificate=where.tls_check_certificate,
        tls_check_hostname=where.tls_check_hostname,
        listener_name=where.listener_name,
    )


def _token(where: Where) -> str | None:
    """The token as text, or `file:///PATH` if --token has that form."""
    # Machines of the tasks need not have the file of --token-file.
    from magnetar.credentials.rest import token_now

    return where.token if where.token_file is None else token_now(where.token_text or "")


def _basic(where: Where) -> "BasicCredentials | None":
    """The user and the password, of which no part is a file."""
    from magnetar.credentials.kinds import BasicCredentials
    from magnetar.credentials.rest import password_now

    basic = where.basic
    return None if basic is None else BasicCredentials(basic.user, password_now(basic))


def _oauth2(where: Where) -> "OAuth2Credentials | None":
    """The client of the issuer, without a key file."""
    if where.oauth2 is None:
        return None
    from magnetar.credentials.token_fetch import without_key_file

    trust = where.oauth2_trust_file
    return replace(
        without_key_file(where.oauth2), trust_file=None if trust is None else str(trust.absolute())
    )


def rest_of(admin_url: str, where: Where) -> "AdminRest":
    """The REST interface, with the same credentials and TLS settings as for brokers."""
    from magnetar.credentials.rest import RestCredentials
    from magnetar.settings import ClientSettings
    from magnetar.spark.admin import AdminRest
    from magnetar.wire.tls import tls_context

    credentials = RestCredentials(where.token_text, where.basic, where.oauth2)
    return AdminRest(admin_url, credentials, tls_context(ClientSettings(**where.options)))


@contextmanager
def _explain_missing_library() -> Iterator[None]:
    """Turn a missing library of the extra into a sentence with the next step."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        typer.echo(
            f"magnetar: {missing} is not installed; install the project with its extra "
            "(pip install '.[spark]' where its pyproject.toml is), and have Java 17 or newer.",
            err=True,
        )
        raise typer.Exit(1) from None


@contextmanager
def _spark(master: str | None, name: str) -> "Iterator[SparkSession]":
    """A session of Spark, which ends with the block if the block made it."""
    with _explain_missing_library():
        from magnetar.spark.spark_session import session
    from magnetar.spark.spark_failure import explain_spark_failure

    with explain_spark_failure(), session(master, name) as spark:
        yield spark
