"""Cores of the jobs: what they are asked, how rows are reduced, how fast they go, what they say."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from magnetar.cli.connecting import Where
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.spark.cli import connection_of
from magnetar.spark.compact.combine import combine
from magnetar.spark.compact.request import generation_topic, job_id, key_name, milliseconds
from magnetar.spark.errors import InvalidOption
from magnetar.spark.options import Connection, Options
from magnetar.spark.pace import Pace
from magnetar.spark.progress import Progress
from magnetar.spark.replay.checkpoint import ReplayCheckpoint
from magnetar.spark.replay.request import Job, Replay, chosen_columns, job_of_text, text_of_job
from magnetar.spark.spark_failure import sentence_in
from tests.support.oauth2_issuer import CLIENT_ID, SECRET, key_file

ASKED = Replay("topic://a/b/c", "topic://a/b/d", where="key > 'x'", select=("upper(key) AS key",))
JOB = Job(ASKED, '{"v":1}', '{"v":2}', "replay-1")
KEYS = st.lists(st.one_of(st.none(), st.sampled_from("abcdef")), max_size=60)


def test_job_survives_serialization() -> None:
    assert job_of_text(text_of_job(JOB)) == JOB
    JOB.check(ASKED)


@pytest.mark.parametrize(
    "change",
    [{"where": None}, {"target": "topic://a/b/e"}, {"end": "12"}, {"select": ()}, {"start": "1"}],
)
def test_a_checkpoint_of_another_replay_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(change))):
        JOB.check(replace(ASKED, **change))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"v":2}', '{"v":1,"asked":{}}'])
def test_invalid_job_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        job_of_text(text)


def test_checkpoint_is_begun_once_and_never_over_another_query(tmp_path: Path) -> None:
    place = ReplayCheckpoint(str(tmp_path / "new"))
    assert place.job() is None
    place.begin(JOB)
    assert ReplayCheckpoint(f"file:{tmp_path}/new").job() == JOB
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metadata").write_text("{}")
    with pytest.raises(InvalidOption, match="another query"):
        ReplayCheckpoint(str(tmp_path / "other")).begin(JOB)
    with pytest.raises(InvalidOption, match="cannot be used"):
        ReplayCheckpoint("nowhere://x/y")


def test_unselected_columns_are_copied() -> None:
    found = chosen_columns([("f(key) AS KEY", ["KEY"])])
    assert found == {
        "key": "f(key) AS KEY",
        "value": None,
        "properties": None,
        "event_time": None,
    }
    with pytest.raises(InvalidOption, match="both make value"):
        chosen_columns([("1 AS value", ["value"]), ("2 AS value", ["value"])])
    for names in (["upper(key)"], ["key", "value"]):
        with pytest.raises(InvalidOption, match="name what it makes"):
            chosen_columns([("x", names)])


def batch(first: int, keys: list[str | None]) -> pa.RecordBatch:
    return pa.record_batch(
        {"key": pa.array(keys, pa.string()), "n": pa.array(range(first, first + len(keys)))}
    )


@settings(deadline=None)  # The first call makes Arrow load what it needs.
@given(parts=st.lists(KEYS, max_size=8), most=st.sampled_from([1, 200, 1 << 20]))
def test_compaction_keeps_the_last_row_of_each_key(
    parts: list[list[str | None]], most: int
) -> None:
    batches: list[pa.RecordBatch] = []
    rows: list[tuple[str | None, int]] = []
    for keys in parts:
        batches.append(batch(len(rows), keys))
        rows += [(key, len(rows) + i) for i, key in enumerate(keys)]
    found = [
        pair
        for each in combine(batches, most)
        for pair in zip(each["key"].to_pylist(), each["n"].to_pylist(), strict=True)
    ]
    assert [n for _, n in found] == sorted({n for _, n in found})
    assert [pair for pair in found if pair[0] is None] == [p for p in rows if p[0] is None]
    assert dict(p for p in found if p[0]) == dict(p for p in rows if p[0])
    if most > 200:
        named = [key for key, _ in found if key]
        assert len(named) == len(set(named))


def test_a_range_of_many_rows_is_reduced_in_bounded_memory() -> None:
    """Of a thousand keys a thousand rows come out, however many go in."""
    keys: list[str | None] = [f"k{i}" for i in range(1000)]
    most = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for part in range(300):
            most = max(most, pa.total_allocated_bytes())
            yield batch(part * 1000, keys)

    before = pa.total_allocated_bytes()
    found = list(combine(source()))
    assert sum(each.num_rows for each in found) == 1000
    assert most - before < 16 * 1024 * 1024


def test_job_parses_durations_and_names_generations() -> None:
    assert [milliseconds(text) for text in ("90s", "2 m", "1h", "7d", "1w")] == [
        90_000,
        120_000,
        3_600_000,
        7 * 86_400_000,
        7 * 86_400_000,
    ]
    for text in ("", "7", "d", "-1d", "1.5h"):
        with pytest.raises(InvalidOption):
            milliseconds(text)
    assert generation_topic("topic://a/b/c", None) == "topic://a/b/c"
    assert generation_topic("topic://a/b/c", "2026-11-22") == "topic://a/b/c-2026-11-22"
    with pytest.raises(InvalidOption):
        generation_topic("topic://a/b/c", "x/y")
    assert key_name("t") != key_name("u")
    assert len(key_name("ü" * 500)) < 256
    assert job_id("t", "one") != job_id("t", "other")
    assert len(job_id("t" * 1000, "x")) < 250


@given(counts=st.lists(st.integers(0, 500), max_size=50))
def test_rate_bounds_the_rows_of_a_batch(counts: list[int]) -> None:
    pace, now, taken = Pace(100), 1000.0, 0
    for count in counts:
        wait = pace.wait_s(now)
        now += wait
        assert taken <= (now - 1000.0) * 100 + 1e-3
        pace.took(count, now)
        taken += count


def test_rate_allows_no_burst_after_a_pause() -> None:
    pace = Pace(10)
    pace.took(10, 0.0)
    assert pace.wait_s(100.0) == 0
    pace.took(10, 100.0)
    assert pace.wait_s(100.0) == pytest.approx(1.0)


def test_connection_survives_its_options() -> None:
    for known in (
        Connection("pulsar://h:1"),
        Connection("pulsar+ssl://h:1", 5, "t", "a", "b", "c", False, False, "l"),
    ):
        assert Connection.of(Options(known.options())) == known


def test_jobs_read_files_with_secrets_where_they_are_started(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("let-me-in\n")
    key = key_file(tmp_path, issuer_url="https://issuer")
    token = connection_of(Where(token_file=secret))
    basic = connection_of(Where(basic_user="ann", basic_password_file=secret))
    oauth2 = connection_of(Where(oauth2_key_file=key, oauth2_trust_file=Path("issuer.pem")))
    assert token.token == "let-me-in"
    assert basic.basic == BasicCredentials("ann", "let-me-in")
    assert oauth2.oauth2 == OAuth2Credentials(
        "https://issuer", CLIENT_ID, SECRET, trust_file=str(Path("issuer.pem").absolute())
    )
    for made in (token, basic, oauth2):
        assert Connection.of(Options(made.options())) == made


def test_jobs_leave_a_token_file_of_each_machine_to_the_tasks() -> None:
    assert connection_of(Where(token="file:///run/token")).token == "file:///run/token"


def test_our_sentence_is_found_in_sparks_report() -> None:
    text = (
        "[STREAM_FAILED] Query terminated: Traceback (most recent call last):\n"
        '  File "/x/y.py", line 1, in z\n'
        "magnetar.spark.errors.DataLost: The batch is gone. Keep data.\n\n\tat org.apache...\n"
    )
    assert sentence_in(text) == "The batch is gone. Keep data."
    assert sentence_in("no traces here\nplans") == "no traces here"
    theirs = "The user's function failed.\nprotocol.errors.Broken: not ours\n"
    assert sentence_in(theirs) == "The user's function failed."


@pytest.mark.parametrize(
    ("told", "lacking"),
    [
        ("\nModuleNotFoundError: No module named 'pyarrow'\n", "has no pyarrow. Set PYSPARK"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has", "another version"),
        ("SparkException: Python worker failed to connect back.", "no firewall blocks"),
        ("Timed out while waiting for the Python worker to connect back", "is not overloaded"),
    ],
)
def test_failure_of_a_python_process_is_one_sentence_with_its_causes(
    told: str, lacking: str
) -> None:
    assert lacking in sentence_in(f"Job aborted\n  at org.apache.spark\n{told}\n  at x")


def test_progress_in_a_file_is_plain_lines() -> None:
    out = io.StringIO()
    with Progress("Replay", Console(file=out)) as progress:
        progress.show(10, 100, "10 of 100 rows [x]")
        progress.show(20, 100, "20")
        progress.show(100, 100, "100 of 100")
    assert out.getvalue().splitlines() == [
        "Replay (10 %): 10 of 100 rows [x]",
        "Replay (100 %): 100 of 100",
    ]


def test_progress_in_a_terminal_is_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Progress("Compaction", console) as progress:
        progress.show(5, 10, "half of it")
    assert "Compaction" in out.getvalue()
    assert "half of it" in out.getvalue()
