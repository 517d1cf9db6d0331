"""The persistence policy: its JSON, its levels, what it means on bookies and without."""

from collections.abc import Mapping

import pytest

from broker.policies.persistence import (
    CopiesNotServed,
    is_persistence,
    persistence_in,
    persistence_of_broker,
    require_one_copy,
)
from config.settings import load_settings
from storage.ledger.store import ONE_COPY, Copies
from storage.managed_ledger.types import Persistence

SIZES = ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
RATE, STORAGE_CLASS = "managedLedgerMaxMarkDeleteRate", "managedLedgerStorageClassName"
CLUSTER = {"metadata_store_url": "zk:a:2181", "bookkeeper_metadata_service_uri": "zk:a:2181"}


def value_of(*sizes: object, **more: object) -> dict[str, object]:
    return {**dict(zip(SIZES, sizes, strict=True)), **more}


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (value_of(3, 2, 1), Persistence(Copies(3, 2, 1))),
        (value_of(5, 5, 5, **{RATE: 0.0}), Persistence(Copies(5, 5, 5))),
        (value_of(1, 1, 1, **{RATE: 2}), Persistence(ONE_COPY, 2)),
        (value_of(2, 2, 2, **{RATE: 0.5, STORAGE_CLASS: None}), Persistence(Copies(), 0.5)),
    ],
)
def test_a_policy_is_read(value: dict[str, object], meaning: Persistence) -> None:
    assert is_persistence(value)
    assert persistence_in(value) == meaning


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {},
        value_of(2, 3, 2),
        value_of(3, 2, 3),
        value_of(2, 2, 0),
        value_of(0, 0, 0),
        value_of(6, 2, 2),
        value_of(2, 2, None),
        value_of(2.0, 2, 2),
        value_of(True, True, True),
        value_of("2", "2", "2"),
        value_of(2, 2, 2, **{RATE: -1}),
        value_of(2, 2, 2, **{RATE: True}),
        value_of(2, 2, 2, **{RATE: float("nan")}),
        value_of(2, 2, 2, **{RATE: float("inf")}),
        value_of(2, 2, 2, **{STORAGE_CLASS: "bookkeeper"}),
        value_of(2, 2, 2, other=1),
    ],
)
def test_a_policy_with_impossible_members_is_none(value: object) -> None:
    assert not is_persistence(value)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 1, 1)),
        ({"ledger_ensemble_size": 3}, (1, 1, 1)),
        (CLUSTER, (2, 2, 2)),
        (CLUSTER | {"ledger_ensemble_size": 3, "ledger_ack_quorum": 1}, (3, 2, 1)),
    ],
)
def test_the_broker_shows_the_copies_that_its_store_makes(
    settings: Mapping[str, object], sizes: tuple[int, ...]
) -> None:
    loaded = load_settings(overrides={**settings, "cursor_flush_ms": 250})
    assert persistence_of_broker(loaded) == value_of(*sizes, **{RATE: 4.0})


def test_more_than_one_copy_needs_bookies() -> None:
    require_one_copy(value_of(1, 1, 1))
    for sizes in ((2, 1, 1), (2, 2, 2)):
        with pytest.raises(CopiesNotServed, match="data directory"):
            require_one_copy(value_of(*sizes))
