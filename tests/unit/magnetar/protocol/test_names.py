"""Names: what is taken, what is refused with which code, and the paths made of them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magnetar.protocol.names import (
    InvalidNamespaceName,
    InvalidTopicName,
    NamespaceName,
    NonPersistentTopicRefused,
    SegmentName,
    TopicDomain,
    TopicName,
    decode_name,
    encode_name,
    parse_ledger_path,
    parse_namespace_name,
    parse_topic_name,
    require_creatable,
    require_persistent,
    segment_name,
)
from magnetar.protocol.server_error import MagnetarError, ServerError

DOTS = (".", "..")
entity = st.from_regex(r"[-=:.A-Za-z0-9_]{1,12}", fullmatch=True).filter(
    lambda text: text not in DOTS
)
local = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda text: text not in DOTS
)


@st.composite
def topic_names(draw: st.DrawFn) -> TopicName:
    domain = draw(st.sampled_from(TopicDomain))
    name = draw(local)
    if domain in (TopicDomain.PERSISTENT, TopicDomain.NON_PERSISTENT):
        name = name.replace("/", "_")
    parent = TopicName(TopicDomain.TOPIC, draw(entity), draw(entity), name)
    if domain is TopicDomain.SEGMENT:
        start = draw(st.integers(0, 65535))
        end = draw(st.integers(start, 65535))
        return SegmentName(parent, start, end, draw(st.integers(0, 2**63 - 1))).topic_name
    return TopicName(domain, parent.tenant, parent.namespace, name)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("x", "persistent://public/default/x"),
        ("t/n/x", "persistent://t/n/x"),
        ("topic://t/n/a/b", "topic://t/n/a/b"),
        ("topic://t/n/a%20b", "topic://t/n/a%20b"),
        ("topic://t/n//", "topic://t/n//"),
        ("non-persistent://t/n/x", "non-persistent://t/n/x"),
        ("segment://t/n/x/4000-7fff-3", "segment://t/n/x/4000-7fff-3"),
        ("segment://t/n/x/00000-7FFF-03", "segment://t/n/x/0000-7fff-3"),
        ("segment://t/n/a/b-1-2/0000-ffff-0", "segment://t/n/a/b-1-2/0000-ffff-0"),
    ],
)
def test_names_and_their_full_form(text: str, full: str) -> None:
    assert str(parse_topic_name(text)) == full


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t/x",
        "a/b/c/d",
        "/n/x",
        "kafka://t/n/x",
        "://t/n/x",
        "PERSISTENT://t/n/x",
        "persistent://",
        "persistent://t/n",
        "persistent://t/n/",
        "persistent://t//x",
        "persistent://t/n/x/y",
        "persistent://../n/x",
        "persistent://t/./x",
        "topic://t/../x",
        "../../x",
        "persistent://t/n/..",
        "topic://t/n/.",
        "segment://t/n/../0000-ffff-0",
        "persistent://t\n/n/x",
        "persistent://té/n/x",
        "persistent://t/n%20/x",
        "topic://t/n/",
        "segment://t/n/x",
        "segment://t/n/0000-ffff-0",
        "segment://t/n//0000-ffff-0",
        "segment://t/n/x/0000-ffff",
        "segment://t/n/x/0000-ffff-0-1",
        "segment://t/n/x/0000-1ffff-0",
        "segment://t/n/x/8000-7fff-0",
        "segment://t/n/x/-1-7fff-0",
        "segment://t/n/x/0000-ffff-",
        "segment://t/n/x/0000-ffff-9223372036854775808",
        "segment://t/n/x/0000-ffff-0\n",
        "segment://t/n/x/0000-ffff-٣",
        "persistent://t/n/" + "x" * 5000,
    ],
)
def test_invalid_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidTopicName) as caught:
        parse_topic_name(text)
    assert caught.value.code is ServerError.INVALID_TOPIC_NAME
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 400


@given(topic_names())
def test_names_survive_text_and_ledger_paths(name: TopicName) -> None:
    assert parse_topic_name(str(name)) == name
    assert parse_ledger_path(name.ledger_path) == name


@given(st.text(max_size=40) | st.from_regex(r"[a-z]*://[a-z/0-9-]*"))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    for parse in (parse_topic_name, parse_ledger_path, parse_namespace_name):
        try:
            value = parse(text)
        except MagnetarError:
            continue
        if parse is parse_topic_name:
            assert parse_topic_name(str(value)) == value


@given(topic_names(), topic_names())
def test_different_topics_have_different_ledger_paths(one: TopicName, other: TopicName) -> None:
    assume(one != other)
    assert one.ledger_path != other.ledger_path


def test_paths() -> None:
    name = parse_topic_name("persistent://t/n/a b+c~*é")
    assert name.ledger_path == "t/n/persistent/a+b%2Bc%7E*%C3%A9"
    assert name.schema_id == "t/n/a+b%2Bc%7E*%C3%A9"
    segment = parse_topic_name("segment://t/n/a/b c/4000-7fff-3")
    assert segment.ledger_path == "t/n/segment/a%2Fb+c/4000-7fff-3"
    assert segment.schema_id == "t/n/a%2Fb+c"


def test_a_topic_its_partitions_and_its_segments_share_one_schema_history() -> None:
    names = ["t/n/x", "t/n/x-partition-4", "topic://t/n/x", "segment://t/n/x/0000-ffff-7"]
    assert {parse_topic_name(name).schema_id for name in names} == {"t/n/x"}


def test_segments_come_apart() -> None:
    name = parse_topic_name("segment://t/n/a/b/4000-7fff-12")
    segment = segment_name(name)
    assert segment == SegmentName(parse_topic_name("topic://t/n/a/b"), 0x4000, 0x7FFF, 12)
    assert segment.topic_name == name
    assert str(segment) == str(name)
    with pytest.raises(InvalidTopicName):
        segment_name(segment.parent)


@pytest.mark.parametrize(
    ("text", "index", "whole"),
    [
        ("x-partition-0", 0, "x"),
        ("x-partition-12", 12, "x"),
        ("x-partition-1-partition-2", 2, "x-partition-1"),
        ("x-partition-01", None, "x-partition-01"),
        ("x-partition--1", None, "x-partition--1"),
        ("x-partition-", None, "x-partition-"),
        ("x-partition-2147483648", None, "x-partition-2147483648"),
        ("x-partition-1\n", None, "x-partition-1\n"),
        ("x", None, "x"),
    ],
)
def test_partitions(text: str, index: int | None, whole: str) -> None:
    name = parse_topic_name(text)
    assert name.partition_index == index
    assert name.partitioned.local_name == whole
    if index is not None:
        assert name.partitioned.partition(index) == name


def test_segments_are_no_partitions() -> None:
    name = parse_topic_name("segment://t/n/x-partition-3/0000-ffff-0")
    assert name.partition_index is None


def test_twins_in_other_domains() -> None:
    name = parse_topic_name("x")
    assert str(name.in_domain(TopicDomain.TOPIC)) == "topic://public/default/x"
    slashed = parse_topic_name("topic://t/n/a/b")
    with pytest.raises(InvalidTopicName):
        slashed.in_domain(TopicDomain.PERSISTENT)


def test_non_persistent_names_are_refused_at_use() -> None:
    require_persistent(parse_topic_name("topic://t/n/x"))
    with pytest.raises(NonPersistentTopicRefused) as caught:
        require_persistent(parse_topic_name("non-persistent://t/n/x"))
    assert caught.value.code is ServerError.NOT_ALLOWED_ERROR


@pytest.mark.parametrize("local_name", [" x", "x ", "\tx", "x\u3000", "x\x1f", "x\x00", " "])
def test_blanks_at_the_ends_are_refused_at_creation(local_name: str) -> None:
    name = parse_topic_name(f"topic://t/n/{local_name}")
    with pytest.raises(InvalidTopicName):
        require_creatable(name)


def test_blanks_inside_are_fine() -> None:
    require_creatable(parse_topic_name("topic://t/n/a b"))


@pytest.mark.parametrize("text", ["t", "t/", "/n", "t/n/x", "t/n m", "", "t/n\n", "../n", "t/."])
def test_bad_namespaces(text: str) -> None:
    with pytest.raises(InvalidNamespaceName):
        parse_namespace_name(text)


def test_namespaces() -> None:
    namespace = parse_namespace_name("t-=:._1/N")
    assert namespace == NamespaceName("t-=:._1", "N")
    assert str(namespace) == "t-=:._1/N"
    assert parse_topic_name("topic://a/b/c").namespace_name == NamespaceName("a", "b")
    with pytest.raises(InvalidNamespaceName):
        NamespaceName("a/b", "c")


@given(local)
def test_encoded_names_survive_and_need_no_escape_in_a_path(text: str) -> None:
    encoded = encode_name(text)
    assert decode_name(encoded) == text
    assert encoded.isascii()
    assert not set("/?#%20 ~") - set("%20") & set(encoded)


@pytest.mark.parametrize("text", ["%", "a%2", "%zz", "%ff", "%C3"])
def test_broken_escapes_are_refused(text: str) -> None:
    with pytest.raises(InvalidTopicName):
        decode_name(text)
