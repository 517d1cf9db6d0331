"""How a sample of keys shows what a split would move."""

import pytest

from broker.scalable.key_sample import KeySample, MalformedSample
from broker.scalable.layout import Segment, initial

WHOLE = initial(1, now_ms=0).active[0]
HALF = initial(2, now_ms=0).active[0]


def sample(*hashes: int, keyless: int = 0) -> KeySample:
    """A sample of one entry for each hash, which is that of the high and the low half alike."""
    return KeySample({each << 16 | each: 10 for each in hashes}, keyless, entries=100)


@pytest.mark.parametrize(
    ("keys", "segment", "parts"),
    [
        (sample(0x1000), WHOLE, None),
        (sample(0x1000, 0x9000), WHOLE, 2),
        (sample(0x1000, 0x7000), WHOLE, 3),
        (sample(0x1000, 0x1001), WHOLE, None),
        (sample(0x1000, 0x5000), HALF, 2),
        (sample(0x1000, keyless=1), WHOLE, None),
        (sample(0x1000, keyless=10), WHOLE, 2),
        (sample(keyless=10), WHOLE, 2),
        (KeySample({0x10001000: 15}, entries=15), WHOLE, 2),
    ],
)
def test_a_split_has_to_move_a_tenth_of_the_load(
    keys: KeySample, segment: Segment, parts: int | None
) -> None:
    assert keys.helpful_parts(segment, 2, 8) == parts


def test_the_generation_of_clients_shows_in_where_their_keys_lie() -> None:
    # By their high halves the keys lie in the lower half of the key space, by their low ones only
    # one does.
    keys = KeySample({0x1000_1000: 10, 0x2000_F000: 10, 0x7000_F000: 10}, entries=30)
    assert keys.largest_share(HALF, 2) == 2 / 3


def test_of_two_generations_that_fit_the_worse_one_counts() -> None:
    keys = KeySample({0x1000_1000: 10, 0x9000_2000: 10}, entries=20)
    assert keys.largest_share(WHOLE, 2) == 1


def test_a_sample_survives_the_way_from_its_owner() -> None:
    keys = KeySample({5: 1, 2**32 - 1: 3}, 2, 6, {5: 900, 2**32 - 1: 30}, 70)
    assert KeySample.from_json(keys.to_json()) == keys
    assert keys.top_share == 0.5
    assert keys.by_bytes.top_share == 0.9
    earlier = {"keyed": {"5": 1}, "keyless": 2, "entries": 3}
    assert KeySample.from_json(earlier).by_bytes == KeySample({5: 1}, 2, 3)
    with pytest.raises(MalformedSample):
        KeySample.from_json({"keyed": {"5": "many"}, "keyless": 0, "entries": 1})
