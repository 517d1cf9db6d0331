"""Options of the source, bounds of reading, and filters: what they choose, what they refuse."""

import datetime
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
)

from magnetar.credentials.kinds import BasicCredentials
from magnetar.errors import AuthenticationFailed
from magnetar.layout import Segment
from magnetar.protocol.key_hash import key_hash
from magnetar.settings import ClientSettings
from magnetar.spark.cut import BEGINNING, Cut, Place
from magnetar.spark.cut_json import text_of
from magnetar.spark.errors import InvalidOption
from magnetar.spark.filters import push_filters
from magnetar.spark.options import CONNECTION_OPTIONS, Connection, Options
from magnetar.spark.range_planning import Budget, Ordering
from magnetar.spark.source_options import SourceOptions
from magnetar.spark.starting import bound_of, end_cut, start_cut
from magnetar.spark.tasks import ranges_between
from magnetar.wire.authentication import authentication_of
from tests.unit.magnetar.spark.fake_topic import FakeTopic

GIVEN = {"serviceUrl": "pulsar://h:6650", "topic": "orders"}
NOWHERE = Cut("topic://public/default/orders", "")
EVERY = [0, 33_000, 65_535]


def options(**given: str) -> SourceOptions:
    return SourceOptions.of(Options(GIVEN | given))


def test_options_have_defaults_and_full_topic_names() -> None:
    found = options()
    assert found.topic == "topic://public/default/orders"
    assert options(topic="a/b/c").topic == "topic://a/b/c"
    assert options(topic="persistent://a/b/c").topic == "persistent://a/b/c"
    assert (found.start, found.ordering, found.budget) == (None, None, Budget())
    assert found.connection.operation_timeout_ms == 30_000
    assert options(MAXROWSPERTRIGGER="5").budget == Budget(rows=5)
    assert options(alignBy="publish_time").window_ms == 60_000
    options(txnKey="k", txnEpoch="1", checkpointLocation="/tmp")  # of the sink


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"maxRowPerTrigger": "5"}, "do you mean maxRowsPerTrigger"),
        ({"subscribe": "t"}, "no option subscribe; do you mean topic"),
        ({"startingOffsets": "latest"}, "no option startingoffsets; do you mean start"),
        ({"somethingElse": "5"}, "no option somethingelse; leave it out"),
        ({"maxRowsPerTrigger": "0"}, "1 or more"),
        ({"maxRowsPerTrigger": "many"}, "1 or more"),
        ({"chain": "yes"}, "true or false"),
        ({"ordering": "total"}, "key, none"),
        ({"start": "yesterday"}, "earliest, latest"),
        ({"start": "2026-01-01T00:00:00"}, "earliest, latest"),
        ({"topic": "x://y"}, "The option topic"),
        ({"topic": ""}, "missing"),
        ({"onCorrupt": "column"}, "give decode"),
    ],
)
def test_invalid_option_is_refused_with_its_reason(given: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        options(**given)


def test_option_of_streams_is_refused_for_batches_and_vice_versa() -> None:
    with pytest.raises(InvalidOption, match="has no end"):
        options(end="5").check_stream()
    for given in ({"ordering": "key"}, {"chain": "true"}):
        with pytest.raises(InvalidOption, match="order_key"):
            options(**given).check_batch()
    for given in ({"alignBy": "publish_time"}, {"maxBytesPerTrigger": "5"}):
        with pytest.raises(InvalidOption, match="read at once"):
            options(**given).check_batch()
    options(ordering="none").check_batch()
    assert options(ordering="none").ordering is Ordering.NONE


def topic_of_three() -> tuple[FakeTopic, list[int]]:
    """One segment, split, and the lower child split again; and when each generation began."""
    topic, times = FakeTopic(), []
    for _ in range(3):
        times.append(topic.now_ms + 10)
        topic.send(EVERY)
        topic.send(EVERY)
        topic.split(topic.active[0])
    topic.send(EVERY)
    return topic, times


def test_earliest_and_latest_name_the_ends_of_the_topic() -> None:
    topic, _ = topic_of_three()
    layout = topic.layout()
    earliest = start_cut(bound_of("start", "earliest"), topic, layout, NOWHERE)
    assert earliest.pos == {0: Place(11, 0)}
    topic.segments[0].trimmed = 1
    assert start_cut(bound_of("start", "earliest"), topic, layout, NOWHERE).pos == {0: Place(11, 1)}
    topic.segments[0].trimmed = 0
    latest = start_cut(bound_of("start", "LATEST"), topic, layout, NOWHERE)
    assert latest.pos.keys() == {each.segment_id for each in layout.active}
    whole = end_cut(bound_of("end", "latest"), topic, layout, earliest)
    assert whole.pos.keys() == latest.pos.keys()
    assert all(place in (latest.pos[i], BEGINNING) for i, place in whole.pos.items())
    assert end_cut(bound_of("end", "latest"), topic, layout, latest) is latest


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_start_time_cuts_every_path_of_segments(generation: int) -> None:
    topic, times = topic_of_three()
    layout = topic.layout()
    at = bound_of("start", str(times[generation]))
    cut = start_cut(at, topic, layout, NOWHERE)
    earliest = start_cut(bound_of("start", "earliest"), topic, layout, NOWHERE)
    before = sum(
        len(topic.rows(each.topic, each.start.position, each.end.position))
        for each in ranges_between(earliest, cut, layout)
    )
    assert before == generation * 2 * len(EVERY)
    assert end_cut(at, topic, layout, earliest) == cut
    far = start_cut(bound_of("start", "2100-01-01T00:00:00+02:00"), topic, layout, NOWHERE)
    assert far.pos == {s.segment_id: Place.at(s.at(len(s.entries))) for s in topic.active}


def test_start_accepts_a_time_a_cut_and_positions() -> None:
    assert bound_of("start", "2026-01-01T00:00:00Z").time_ms == 1_767_225_600_000
    assert bound_of("start", "5").time_ms == 5
    topic, _ = topic_of_three()
    cut = replace(NOWHERE, pos={0: Place(11, 1)})
    layout = topic.layout()
    assert start_cut(bound_of("start", text_of(cut)), topic, layout, NOWHERE) == cut
    positions = f"[{text_of(replace(cut, name='other'))},{text_of(cut)}]"
    assert start_cut(bound_of("start", positions), topic, layout, NOWHERE) == cut


def segment(segment_id: int, start: int, end: int, *, legacy: bool = False) -> Segment:
    return Segment(segment_id, start, end, True, (), (), "s", legacy)


ALL = [segment(0, 0, 0x7FFF), segment(1, 0x8000, 0xBFFF), segment(2, 0xC000, 0xFFFF)]


def chosen(*filters: Filter) -> list[int]:
    pushed, _ = push_filters(filters)
    return [each.segment_id for each in ALL if pushed.wants(each)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (EqualTo(("segment_id",), 1), [1]),
        (GreaterThan(("segment_id",), 1), [2]),
        (GreaterThanOrEqual(("segment_id",), 1), [1, 2]),
        (LessThan(("segment_id",), 1), [0]),
        (LessThanOrEqual(("segment_id",), 1), [0, 1]),
        (In(("segment_id",), (0, 2, 9)), [0, 2]),
    ],
)
def test_filter_on_segments_chooses_them_and_is_done(given: Filter, expected: list[int]) -> None:
    assert chosen(given) == expected
    assert push_filters([given])[1] == []


def test_several_filters_on_segments_are_combined() -> None:
    assert chosen(In(("segment_id",), (0, 2)), GreaterThan(("segment_id",), 0)) == [2]
    assert chosen(In(("segment_id",), (0, 2)), In(("segment_id",), (1, 2))) == [2]


@pytest.mark.parametrize("key", ["k1", "k2", "k3", "aGVsbG8="])
def test_filter_on_a_key_chooses_the_segments_of_both_generations(key: str) -> None:
    found = chosen(EqualTo(("key",), key))
    texts = [key.encode()] + ([b"hello"] if key == "aGVsbG8=" else [])
    places = {half for text in texts for half in (key_hash(text) >> 16, key_hash(text) & 0xFFFF)}
    assert found == [
        each.segment_id
        for each in ALL
        if any(each.hash_start <= place <= each.hash_end for place in places)
    ]
    pushed, left = push_filters([EqualTo(("key",), key)])
    assert len(left) == 1, "Spark has to filter the rows"
    assert pushed.wants(segment(9, 0, 0, legacy=True))


NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
NOON_MS = int(NOON.timestamp() * 1000)
TIME = ("publish_time",)
BIT = datetime.timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("filters", "from_ms", "before_ms"),
    [
        ([GreaterThan(TIME, NOON)], NOON_MS, None),
        ([GreaterThanOrEqual(TIME, NOON + BIT)], NOON_MS, None),
        ([LessThan(TIME, NOON)], None, NOON_MS + 1),
        ([LessThanOrEqual(TIME, NOON + BIT)], None, NOON_MS + 1),
        ([EqualTo(TIME, NOON)], NOON_MS, NOON_MS + 1),
        ([GreaterThan(TIME, NOON), GreaterThan(TIME, NOON - BIT)], NOON_MS, None),
        ([Not(GreaterThan(TIME, NOON))], None, None),
        ([GreaterThan(TIME, NOON.replace(tzinfo=None))], None, None),
        ([GreaterThan(("event_time",), NOON)], None, None),
    ],
)
def test_filter_on_times_bounds_the_range_and_is_left_to_spark(
    filters: list[Filter], from_ms: int | None, before_ms: int | None
) -> None:
    pushed, left = push_filters(filters)
    assert (pushed.from_ms, pushed.before_ms) == (from_ms, before_ms)
    assert left == filters


def test_repr_of_a_connection_hides_the_token() -> None:
    found = Connection("pulsar://host:6650", token="let-me-in")
    assert found.token == "let-me-in"
    assert "let-me-in" not in repr(found)


async def test_token_file_is_read_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "a token"
    given = {"serviceUrl": "pulsar://host:6650", "token": file.as_uri()}
    found = pickle.loads(pickle.dumps(Connection.of(Options(given))))
    assert found.options()["token"] == file.as_uri()
    settings = ClientSettings(**found.client_options())
    authentication = authentication_of(settings)
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        assert await authentication.data() == token.encode()


@pytest.mark.parametrize("token", ["file:", "file:///", "file://host/path", "file:token"])
def test_token_file_of_another_machine_is_refused(token: str) -> None:
    given = {"serviceUrl": "pulsar://host:6650", "token": token}
    with pytest.raises(InvalidOption, match="file:///PATH"):
        Connection.of(Options(given))


async def test_missing_token_file_is_named(tmp_path: Path) -> None:
    given = {"serviceUrl": "pulsar://host:6650", "token": (tmp_path / "token").as_uri()}
    settings = ClientSettings(**Connection.of(Options(given)).client_options())
    with pytest.raises(AuthenticationFailed, match=r"/token', cannot be read \(No such"):
        await authentication_of(settings).data()


@pytest.mark.parametrize(
    "given",
    [
        {"token": "let-me-in"},
        {"token": "token:let-me-in"},
        {"tokenFile": "/run/a token"},
        {"basicUser": "ann", "basicPassword": " let-me-in "},
        {"basicUser": "ann", "basicPasswordFile": "/run/password"},
        {"oauth2KeyFile": "/run/key.json", "oauth2Audience": "urn:brokers"},
        {
            "oauth2IssuerUrl": "http://issuer",
            "oauth2ClientId": "id",
            "oauth2ClientSecret": "let-me-in",
            "oauth2Scope": "read write",
            "oauth2TrustFile": "/run/issuer.pem",
            "oauth2RequireHttps": "false",
        },
    ],
)
def test_credentials_survive_the_way_to_tasks_and_are_not_shown(given: dict[str, str]) -> None:
    made = Connection.of(Options({"serviceUrl": "pulsar://host:6650", **given}))
    assert Connection.of(Options(made.options())) == pickle.loads(pickle.dumps(made)) == made
    assert "let-me-in" not in repr(made)
    settings = ClientSettings(**made.client_options())
    assert authentication_of(settings).method in ("token", "basic")


def test_password_is_taken_as_it_is() -> None:
    given = {"serviceUrl": "pulsar://host", "basicUser": " ann ", "basicPassword": " a b "}
    assert Connection.of(Options(given)).basic == BasicCredentials("ann", " a b ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"token": "let-me-in", "tokenFile": "/run/token"}, "both given"),
        ({"token": "let-me-in", "basicUser": "a", "basicPassword": "b"}, "token, basic"),
        ({"tokenFile": "run/token"}, "whole path"),
        ({"basicPassword": "let-me-in"}, "give a name"),
        ({"basicUser": "ann"}, "need a password"),
        ({"oauth2ClientSecret": "let-me-in"}, "incomplete"),
        ({"oauth2KeyFile": "key.json"}, "whole path"),
        ({"oauth2RequireHttps": "maybe", "oauth2KeyFile": "/key.json"}, "true or false"),
    ],
)
def test_credentials_that_cannot_be_used_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOption, match=said) as caught:
        Connection.of(Options({"serviceUrl": "pulsar://host:6650", **given}))
    assert "let-me-in" not in repr(caught.value)


def test_names_of_options_with_secrets_are_those_whose_values_spark_hides() -> None:
    # The default of spark.redaction.regex.
    hidden = re.compile("(?i)secret|password|token|access[.]?key")
    for name in ("token", "basicPassword", "oauth2ClientSecret"):
        assert name in CONNECTION_OPTIONS
        assert hidden.search(name)
