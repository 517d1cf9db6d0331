"""Scans over shards: what this process wrote is in them, in its order."""

from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.oxia.scan_overlay import ScanOverlay
from tests.unit.storage.metadata.oxia.writes_of import found


def versions(overlay: ScanOverlay, *scanned: tuple[str, int]) -> dict[str, int]:
    records = overlay.apply(found(version, key=key) for key, version in scanned)
    return {each.record.key: each.version_id for each in records}


def test_own_writes_lie_over_what_was_scanned() -> None:
    overlay = ScanOverlay("/m/", "/m//")
    overlay.add("/m/a", found(5, key="/m/a"))
    overlay.add("/m/b", found(6, key="/m/b"))
    overlay.add("/m/c", None)
    assert versions(overlay, ("/m/a", 4), ("/m/c", 3), ("/m/d", 2)) == {
        "/m/a": 5,
        "/m/b": 6,
        "/m/d": 2,
    }


def test_somebody_elses_newer_record_stays() -> None:
    overlay = ScanOverlay("/m/", "/m//")
    overlay.add("/m/a", found(5, key="/m/a"))
    assert versions(overlay, ("/m/a", 9)) == {"/m/a": 9}


def test_only_writes_within_the_bounds_count() -> None:
    overlay = ScanOverlay("/m/b", "/m/d")
    for key in ("/m/a", "/m/b", "/m/c", "/m/d", "/m/b/below", "/n/c", "/m"):
        overlay.add(key, found(1, key=key))
    assert list(versions(overlay)) == ["/m/b", "/m/c"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 12)),
)
def test_a_scan_ends_with_the_state_after_every_write(
    writes: list[tuple[str, bool]], seen: dict[str, int]
) -> None:
    """Each key was scanned after some of its writes; the result is after all of them."""
    overlay = ScanOverlay("/m/", "/m//")
    history: dict[str, list[int | None]] = {key: [None] for key in "abc"}
    for version, (name, is_put) in enumerate(writes):
        key = f"/m/{name}"
        overlay.add(key, found(version, key=key) if is_put else None)
        history[name].append(version if is_put else None)
    scanned = []
    for name, states in history.items():
        state = states[min(seen.get(name, 0), len(states) - 1)]
        if state is not None:
            scanned.append((f"/m/{name}", state))
    wanted = {f"/m/{name}": states[-1] for name, states in history.items()}
    assert versions(overlay, *scanned) == {
        key: state for key, state in wanted.items() if state is not None
    }
