"""A segment has a manifest only if all that was read again matches."""

from dataclasses import replace

import pytest

from magnetar.layout import Segment
from magnetar.protocol.ids import Position
from magnetar.spark.offload.copies import OffloadFailed
from magnetar.spark.offload.job import SegmentPart, verified_manifest
from magnetar.spark.offload.manifest import LedgerCopy, TableFile
from magnetar.spark.offload.table import SeenRaw
from magnetar.spark.range_facts import Tally

TOPIC = "topic://public/default/bills"
SEGMENT = Segment(3, 0, 99, False, (1,), (4,), "segment://public/default/bills/3", created_at_ms=7)
PART = SegmentPart(SEGMENT, Position(4, 0), Position(5, 6), ())
COPIES = (LedgerCopy(4, 9, "aa", "u", ()), LedgerCopy(5, 6, "bb", "u", ()))
RAW = SeenRaw(3, {4: "aa", 5: "bb"}, Tally(5, 1))
FIRST = TableFile("x", 1, "", 2, 2**64 - 1, "", "", None, None)
FILES = [("x", FIRST), ("y", replace(FIRST, name="y", rows=3, hash_sum=2))]


def test_matching_copy_has_a_manifest() -> None:
    manifest = verified_manifest(TOPIC, PART, COPIES, FILES, RAW)
    assert (manifest.rows, manifest.hash_sum) == (5, 1)
    assert [each.name for each in manifest.files] == ["x", "y"]
    assert (manifest.parent_ids, manifest.created_at_ms) == ((1,), 7)


@pytest.mark.parametrize(
    ("raw", "files", "why"),
    [
        (replace(RAW, entries_sha256={4: "aa", 5: "cc"}), FILES, "Ledger 5"),
        (replace(RAW, readable=Tally(6, 1)), FILES, "5 rows, and the raw entries 6"),
        (replace(RAW, readable=Tally(5, 2)), FILES, "or others"),
        (RAW, [FILES[0], ("y", None)], "y is damaged or gone"),
        (RAW, FILES[:1], "have 2 rows"),
    ],
)
def test_differing_copy_has_no_manifest(
    raw: SeenRaw, files: list[tuple[str, TableFile | None]], why: str
) -> None:
    with pytest.raises(OffloadFailed, match=why):
        verified_manifest(TOPIC, PART, COPIES, files, raw)
