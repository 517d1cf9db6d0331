"""Each role leaves as many things to others as it has itself."""

from txn.owner_shares import OwnerShares

MOST = 4


def test_a_role_that_is_alone_has_half() -> None:
    shares, in_use = OwnerShares(), 0
    while not shares.is_used_up("alice", MOST - in_use):
        shares.add("alice")
        in_use += 1
    assert (in_use, shares.count("alice")) == (MOST // 2, MOST // 2)
    assert not shares.is_used_up("bob", MOST - in_use)


def test_what_has_no_owner_has_no_bound_but_that_of_all() -> None:
    shares = OwnerShares()
    for owner in (None, ""):
        for _ in range(MOST):
            shares.add(owner)
        assert not shares.is_used_up(owner, 1)
        shares.remove(owner)
        assert shares.count(owner) == 0


def test_what_is_removed_counts_no_more() -> None:
    shares = OwnerShares()
    shares.add("alice")
    shares.add("alice")
    shares.remove("alice")
    assert shares.count("alice") == 1
    shares.remove("alice")
    shares.remove("alice")
    assert shares.count("alice") == 0
