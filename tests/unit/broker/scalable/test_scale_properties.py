"""No merge undoes a young split or takes what consumers need, and no split is in vain."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.scalable.auto_scale_policy import AutoScalePolicy, Rates
from broker.scalable.consumer_groups import need_buckets, need_segments
from broker.scalable.layout import Layout, verify
from broker.scalable.scale_decision import Action, Cause, Rule
from tests.support.effort import by_effort
from tests.unit.broker.scalable.scaling_world import Done, Keys, ScalingWorld, even_keys

HOUR_S = 3600
SHARE_LEFT_MOST = 0.97
"""A split in vain would leave a part with more.  A sample may be off by so much from 0.9."""

Load = Callable[[int], Keys]


def _shape(kind: str, period_s: int, duty: float) -> Callable[[int], float]:
    """A load from 0 to 1 by the time."""
    return {
        "flat": lambda at_s: 1.0,
        "bursts": lambda at_s: float(at_s % period_s < duty * period_s),
        "sawtooth": lambda at_s: at_s % period_s / period_s,
        "diurnal": lambda at_s: (1 - math.cos(2 * math.pi * at_s / period_s)) / 2,
        "step": lambda at_s: float(at_s > period_s),
    }[kind]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """A shape, from a low to a high rate, of many keys and perhaps some hot ones."""
    kind = draw(st.sampled_from(["flat", "bursts", "sawtooth", "diurnal", "step"]))
    period_s = draw(st.sampled_from([60, 300, 600, 1800, 7200]))
    shape = _shape(kind, period_s, draw(st.sampled_from([0.05, 0.2, 0.5, 0.9])))
    low = draw(st.sampled_from([0, 10, 500, 5_000]))
    high = draw(st.sampled_from([900, 8_000, 12_000, 40_000, 200_000]))
    keys = draw(st.sampled_from([1, 2, 5, 100]))
    hot = draw(st.lists(st.sampled_from([3_000, 15_000, 60_000]), max_size=2))

    def load(at_s: int) -> Keys:
        level = shape(at_s)
        hottest = {f"hot-{number}": rate * level for number, rate in enumerate(hot)}
        return {**even_keys(keys, low + (high - low) * level), **hottest}

    return load


@st.composite
def policies(draw: st.DrawFn) -> AutoScalePolicy:
    """Any policy that is valid, with the default limits or lower ones."""
    lowest = draw(st.integers(1, 4))
    share = draw(st.sampled_from([0.05, 0.1, 0.5, 0.9]))
    split = Rates(10_000, 50_000_000, 50_000, 250_000_000)
    policy = AutoScalePolicy(
        min_segments=lowest,
        max_segments=lowest + draw(st.integers(0, 20)),
        max_dag_depth=draw(st.sampled_from([0, 1, 3, 10])),
        split_cooldown_s=draw(st.sampled_from([0, 10, 60, 600])),
        merge_cooldown_s=draw(st.sampled_from([0, 30, 300])),
        merge_window_s=draw(st.sampled_from([0, 60, 300, 900])),
        split=split,
        merge=Rates(*(rate * share for rate in split)),
    )
    assert policy.problem() is None
    return policy


def check_merges(policy: AutoScalePolicy, done: list[Done]) -> None:
    """No merge closes a border that a split opened within split cooldown and merge window."""
    for number, merge in enumerate(done):
        if merge.decision.action is not Action.MERGE:
            continue
        gone = [merge.before.segments[each] for each in merge.decision.segment_ids]
        closed = {segment.hash_start for segment in gone} - {min(s.hash_start for s in gone)}
        for split in done[:number]:
            if split.decision.action is Action.SPLIT:
                opened = {s.hash_start for s in split.after.active}
                opened -= {s.hash_start for s in split.before.active}
                if merge.at_s - split.at_s < policy.keep_split_s:
                    assert not closed & opened, f"{merge} undoes {split}"


def buckets(layout: Layout) -> int:
    return sum(segment.entry_buckets for segment in layout.active)


def check_splits(policy: AutoScalePolicy, done: list[Done]) -> None:
    """Each split moves load away, and comes after the cooldown of the one before."""
    splits = [each for each in done if each.decision.action is Action.SPLIT]
    for split in splits:
        assert not split.shares or max(split.shares) <= SHARE_LEFT_MOST, f"{split} is in vain"
    for before, after in pairwise(splits):
        assert after.at_s - before.at_s >= policy.split_cooldown_s


@pytest.mark.timeout(600)
@settings(max_examples=by_effort(quick=15, whole=50, nightly=500), deadline=None)
@given(
    policies(),
    loads(),
    loads(),
    st.integers(0, 9),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 1024]),
    st.integers(0, 2**16),
)
def test_no_merge_undoes_a_split_or_takes_a_segment_needed_and_no_split_is_in_vain(
    policy: AutoScalePolicy,
    first: Load,
    second: Load,
    consumers: int,
    checkpoint_consumers: int,
    sharing: bool,
    m1_clients: bool,
    max_buckets: int,
    seed: int,
) -> None:
    world = ScalingWorld(
        policy, seed=seed, sharing=sharing, m1_clients=m1_clients, max_buckets=max_buckets
    )
    world.sizes["hot-1"] = 20_000
    world.use_load(first)
    world.run(HOUR_S)
    world.consumers, world.checkpoint_consumers = consumers, checkpoint_consumers
    world.use_load(second)
    world.run(HOUR_S)
    check_merges(policy, world.done)
    check_splits(policy, world.done)
    for each in world.done:
        verify(each.after)
        assert len(each.after.active) <= policy.max_segments
        if each.decision.action is Action.MERGE:
            assert len(each.after.active) >= policy.min_segments
            assert len(each.after.active) >= need_segments(each.groups)
            assert buckets(each.after) >= min(need_buckets(each.groups), buckets(each.before))
        assert each.decision.why.endswith(".")
    assert world.verdict is not None
    assert world.verdict.decision is not None or world.verdict.refusals


@pytest.mark.timeout(600)
@settings(max_examples=by_effort(quick=5, whole=20, nightly=100), deadline=None)
@given(policies(), st.integers(0, 100_000), st.sampled_from([2, 5, 100]), st.integers(0, 2**16))
def test_under_a_constant_load_nothing_changes_after_a_while(
    policy: AutoScalePolicy, rate: int, keys: int, seed: int
) -> None:
    world = ScalingWorld(policy, segments=policy.min_segments, seed=seed)
    world.use_load(lambda _: even_keys(keys, rate))
    world.run(4 * HOUR_S)
    assert [each for each in world.done if each.at_s > 3 * HOUR_S] == []


@pytest.mark.parametrize("others", [0, 1, 10, 200])
def test_one_hot_key_ends_in_a_segment_that_is_not_split_again(others: int) -> None:
    world = ScalingWorld(AutoScalePolicy())
    world.use_load(lambda _: {"hot": 30_000.0, **even_keys(others, 300.0 * others)})
    world.run(2 * HOUR_S)
    check_splits(world.policy, world.done)
    splits = [each for each in world.done if each.decision.action is Action.SPLIT]
    assert len(splits) <= (0 if others <= 1 else 12)


@pytest.mark.parametrize("others", [1, 10, 200])
def test_one_key_that_is_hot_by_bytes_is_not_split_in_vain(others: int) -> None:
    world = ScalingWorld(AutoScalePolicy())
    world.sizes["hot"] = 100_000
    world.use_load(lambda _: {"hot": 1_000.0, **even_keys(others, 4_000.0)})
    world.run(HOUR_S)
    assert world.done == []
    assert world.verdict is not None
    (refusal,) = [each for each in world.verdict.refusals if each.rule is Rule.RATE]
    assert refusal.cause is Cause.HOT_KEY
    assert "one key has" in refusal.why
    assert "% of the bytes of segment 0" in refusal.why


def test_many_keys_with_many_bytes_are_split_though_one_key_has_most_messages() -> None:
    world = ScalingWorld(AutoScalePolicy())
    large = even_keys(100, 700.0)
    world.sizes.update(dict.fromkeys(large, 100_000))
    world.use_load(lambda _: {"often": 9_000.0, **large})
    world.run(HOUR_S)
    assert world.done
    check_splits(world.policy, world.done)


def test_reports_cost_nothing_while_nothing_changes() -> None:
    world = ScalingWorld(AutoScalePolicy(enabled=False), segments=4)
    world.use_load(lambda _: even_keys(100, 800))
    world.run(60)
    before = world.writes
    world.run(HOUR_S)
    assert world.writes == before == 4
