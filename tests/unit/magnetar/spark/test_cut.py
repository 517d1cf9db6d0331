"""Cuts and their texts: what they refuse, and that equal ones are written alike."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ids import LONG_MAX
from magnetar.spark.cut import BEGINNING, END, Cut, Place, enter_children
from magnetar.spark.cut_json import cut_of, cut_of_text, object_of, text_of
from magnetar.spark.errors import InvalidCut
from tests.unit.magnetar.spark.fake_topic import FakeTopic

TOPIC = "topic://public/default/t"
PLACES = (
    st.just(END)
    | st.just(BEGINNING)
    | st.builds(
        Place, st.integers(0, LONG_MAX - 1), st.integers(0, LONG_MAX), st.integers(0, 10_000)
    )
)
CUTS = st.builds(
    Cut,
    st.just(TOPIC),
    st.text(max_size=5),
    st.dictionaries(st.integers(0, 2000), PLACES, min_size=1, max_size=8),
    st.lists(st.integers(0, 50), unique=True, max_size=3).map(lambda ids: tuple(sorted(ids))),
)


@given(cut=CUTS)
def test_cut_survives_serialization_with_one_text(cut: Cut) -> None:
    turned = Cut(cut.topic, cut.name, dict(reversed(list(cut.pos.items()))), cut.through)
    assert text_of(turned) == text_of(cut)
    spark = json.dumps(object_of(turned))  # as PySpark writes it
    assert spark == json.dumps(object_of(cut))
    assert spark == json.dumps(json.loads(spark), sort_keys=True)
    again = cut_of(json.loads(spark), cut.topic, cut.name)
    assert again == cut
    assert text_of(again) == text_of(cut)
    assert cut_of_text(text_of(cut), cut.topic, cut.name) == cut
    assert pickle.loads(pickle.dumps(cut)) == cut


def test_cut_has_a_stable_text() -> None:
    cut = Cut(TOPIC, "a", {10: END, 9: Place(17, 5, 2)}, (4,))
    assert text_of(cut) == (
        '{"name":"a","pos":{"10":"END","9":[17,5,2]},"through":[4],'
        '"topic":"topic://public/default/t","v":1}'
    )


GOOD = object_of(Cut(TOPIC, "", {1: Place(2, 3), 2: END}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"v": 2}, "version"),
        ({"v": None}, "version"),
        ({"topic": "topic://public/default/other"}, "another topic"),
        ({"name": "b"}, "another name"),
        ({"pos": {}}, "no positions"),
        ({"pos": []}, "no positions"),
        ({"pos": {"01": "END"}}, "segment"),
        ({"pos": {"x": "END"}}, "segment"),
        ({"pos": {"-1": "END"}}, "segment"),
        ({"pos": {"1": "end"}}, "position of segment 1"),
        ({"pos": {"1": [1, 2]}}, "position of segment 1"),
        ({"pos": {"1": [1, 2.0, 0]}}, "position of segment 1"),
        ({"pos": {"1": [1, True, 0]}}, "position of segment 1"),
        ({"pos": {"1": [1, 2**63, 0]}}, "position of segment 1"),
        ({"through": "1"}, "through"),
        ({"extra": 1}, "extra"),
    ],
)
def test_cut_of_another_format_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidCut, match=why):
        cut_of({**GOOD, **change}, TOPIC, "")


@pytest.mark.parametrize("found", [None, [], 5, "x", {}, {"v": 1}])
def test_cut_that_is_no_json_object_is_refused(found: object) -> None:
    with pytest.raises(InvalidCut, match="members"):
        cut_of(found, TOPIC, "")


def test_positions_name_the_cut_of_each_source() -> None:
    other = object_of(Cut(TOPIC, "other", {0: END}))
    text = json.dumps([GOOD, other])
    assert cut_of_text(text, TOPIC, "other").pos == {0: END}
    with pytest.raises(InvalidCut, match="0 cuts"):
        cut_of_text(text, TOPIC, "third")
    with pytest.raises(InvalidCut, match="no JSON"):
        cut_of_text("{", TOPIC, "")


def test_a_cut_with_a_segment_and_its_child_is_refused() -> None:
    topic = FakeTopic()
    topic.split(topic.active[0])
    cut = Cut(TOPIC, "", {0: Place(1, 1), 2: BEGINNING})
    with pytest.raises(InvalidCut, match=r"segments \[2\]"):
        enter_children(cut, topic.layout())


def test_cut_refuses_to_go_back() -> None:
    cut = Cut(TOPIC, "", {0: Place(5, 5)})
    with pytest.raises(AssertionError, match="goes back"):
        cut.moved(0, Place(5, 4))
