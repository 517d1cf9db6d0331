"""Access modes as decisions."""

import pytest

from broker.topics.producer_access import (
    AccessMode,
    Admission,
    ProducerAccess,
    ProducerBusy,
    ProducerFenced,
)

SHARED, EXCLUSIVE = AccessMode.SHARED, AccessMode.EXCLUSIVE
WAIT, FENCE = AccessMode.WAIT_FOR_EXCLUSIVE, AccessMode.EXCLUSIVE_WITH_FENCING


def test_shared_producers_share() -> None:
    access = ProducerAccess(None)
    assert access.admit("a", SHARED, None) is Admission.ADMITTED
    assert access.admit("b", SHARED, None) is Admission.ADMITTED
    assert access.epoch is None


def test_exclusive_access_refuses_others_and_raises_the_epoch() -> None:
    access = ProducerAccess(3)
    assert access.admit("a", EXCLUSIVE, None) is Admission.ADMITTED
    assert access.epoch == 4
    with pytest.raises(ProducerBusy, match=r"^ProducerBusy: Producer"):
        access.admit("b", SHARED, None)
    with pytest.raises(ProducerFenced, match=r"^ProducerFenced: The topic"):
        access.admit("b", EXCLUSIVE, None)
    access.leave("a")
    assert access.admit("b", SHARED, None) is Admission.ADMITTED
    with pytest.raises(ProducerFenced, match=r"^ProducerFenced: The topic"):
        access.admit("c", EXCLUSIVE, None)


def test_waiting_producers_are_promoted_in_order() -> None:
    access = ProducerAccess(None)
    access.admit("a", SHARED, None)
    assert access.admit("b", WAIT, None) is Admission.QUEUED
    assert access.admit("c", WAIT, None) is Admission.QUEUED
    with pytest.raises(ProducerBusy, match=r"^ProducerBusy: Producer"):
        access.admit("d", SHARED, None)
    assert access.promote() is None
    access.leave("a")
    assert access.promote() == "b"
    access.take("b")
    assert access.exclusive == "b"
    assert access.promote() is None
    access.leave("b")
    assert access.promote() == "c"


def test_exclusive_producer_does_not_overtake_waiting_ones() -> None:
    access = ProducerAccess(None)
    access.admit("a", EXCLUSIVE, None)
    access.admit("b", WAIT, None)
    access.leave("a")
    with pytest.raises(ProducerFenced, match=r"^ProducerFenced: The topic"):
        access.admit("c", EXCLUSIVE, None)
    assert access.admit("d", WAIT, None) is Admission.QUEUED


def test_waiting_alone_is_not_waiting() -> None:
    access = ProducerAccess(None)
    assert access.admit("a", WAIT, None) is Admission.ADMITTED
    assert access.epoch == 0


def test_exclusive_with_fencing_closes_all_other_producers() -> None:
    access = ProducerAccess(None)
    access.admit("a", EXCLUSIVE, None)
    access.admit("b", WAIT, None)
    assert access.admit("c", FENCE, None) is Admission.ADMITTED_ALONE
    assert access.clear_queue() == ["b"]
    access.leave("a")
    assert access.exclusive == "c"
    assert access.epoch == 1


@pytest.mark.parametrize("mode", [EXCLUSIVE, FENCE, WAIT])
def test_an_outdated_epoch_is_fenced_and_changes_nothing(mode: AccessMode) -> None:
    access = ProducerAccess(5)
    with pytest.raises(ProducerFenced, match=r"^ProducerFenced: The topic"):
        access.admit("a", mode, 4)
    assert access.epoch == 5
    assert access.admit("b", SHARED, None) is Admission.ADMITTED


def test_waiting_with_an_outdated_epoch_is_fenced_beside_the_producer_that_fenced_it() -> None:
    access = ProducerAccess(None)
    access.admit("a", WAIT, None)
    access.admit("b", FENCE, None)
    access.leave("a")
    with pytest.raises(ProducerFenced, match=r"had 0: another exclusive producer came since"):
        access.admit("a", WAIT, 0)
    assert not access.waiting
    assert access.exclusive == "b"


def test_reconnecting_exclusive_producer_keeps_its_epoch() -> None:
    access = ProducerAccess(5)
    assert access.admit("a", EXCLUSIVE, 5) is Admission.ADMITTED
    assert access.epoch == 5
