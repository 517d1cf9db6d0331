"""Raw copies of segments: requests to brokers, over REST, and their progress."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast
from urllib.parse import urlencode

from magnetar.layout import Segment
from magnetar.spark.admin import AdminRest, topic_path
from magnetar.spark.errors import PipelineError
from magnetar.spark.offload.manifest import LedgerCopy

__all__ = ["OffloadFailed", "await_copies", "drop_hot"]

POLL_S: Final = 0.5
STALLED_S: Final = 3600
"""The longest time without another ledger copied."""
OffloadStatus = Mapping[str, object]
"""The state of a segment's offload, as the broker returns it in JSON."""


class OffloadFailed(PipelineError):
    """A segment could not be offloaded; nothing of it was dropped."""


def await_copies(
    rest: AdminRest,
    segments: Sequence[Segment],
    url: str | None,
    progress: Callable[[str], None],
) -> dict[int, tuple[LedgerCopy, ...]]:
    """Have sealed segments copied, and wait for it; their ledgers by segment id.

    Raises `OffloadFailed` for a copy that failed, or when no ledger was copied for STALLED_S, and
    `AdminFailed`.
    """
    for each in segments:
        if not _is_copied(_manifest(rest, each)):
            _begin(rest, each, url)
    waiting = {each.segment_id: each for each in segments}
    found: dict[int, tuple[LedgerCopy, ...]] = {}
    copied: dict[int, int] = {}
    known, since_s = -1, time.monotonic()
    while waiting:
        for segment_id, segment in list(waiting.items()):
            status = _manifest(rest, segment)
            copied[segment_id] = sum(bool(each["offloaded"]) for each in _ledgers(status))
            if _is_copied(status):
                found[segment_id] = tuple(map(_copy, _ledgers(status)))
                del waiting[segment_id]
            elif status["status"] == "ERROR":
                raise OffloadFailed(
                    f"The broker could not copy segment {segment_id}: {status['lastError']} "
                    "Correct that, and run the same command again."
                )
        now = sum(copied.values())
        if now != known:
            progress(f"Copied {now} ledgers; {len(found)} of {len(segments)} segments are whole")
            known, since_s = now, time.monotonic()
        if waiting:
            if time.monotonic() - since_s > STALLED_S:
                raise OffloadFailed(
                    f"No ledger of segments {sorted(waiting)} was copied for {STALLED_S} s; look "
                    "into the log of the broker (offload_failed), and run the same command again."
                )
            time.sleep(POLL_S)
    return found


def drop_hot(rest: AdminRest, segment: Segment, ledger_ids: Sequence[int]) -> list[int]:
    """Delete these ledgers, which have copies; returns those deleted.  Raises `AdminFailed`."""
    if not ledger_ids:
        return []
    return cast("list[int]", rest.call("POST", f"{_path(segment)}/dropHot", list(ledger_ids)))


def _begin(rest: AdminRest, segment: Segment, url: str | None) -> None:
    query = "" if url is None else "?" + urlencode({"url": url})
    rest.call("PUT", _path(segment) + query)


def _manifest(rest: AdminRest, segment: Segment) -> OffloadStatus:
    return cast("OffloadStatus", rest.get(f"{_path(segment)}/manifest"))


def _path(segment: Segment) -> str:
    domain, _, path = topic_path(segment.topic).partition("/")
    return f"/admin/v2/{'segments' if domain == 'segment' else domain}/{path}/offload"


def _ledgers(status: OffloadStatus) -> list[OffloadStatus]:
    """The ledgers that have entries."""
    return [each for each in cast("list[OffloadStatus]", status["ledgers"]) if each["entries"]]


def _is_copied(status: OffloadStatus) -> bool:
    return bool(status["sealed"]) and all(each["offloaded"] for each in _ledgers(status))


def _copy(status: OffloadStatus) -> LedgerCopy:
    if status.get("entriesSha256") is None:
        raise OffloadFailed(
            f"The copy of ledger {status['ledgerId']} has no hash to be held against: another "
            "program made it. Offload the topic where Magnetar made the copies."
        )
    return LedgerCopy(
        cast("int", status["ledgerId"]),
        cast("int", status["entries"]),
        cast("str", status["entriesSha256"]),
        cast("str", status["url"]),
        tuple(cast("list[str]", status["objects"])),
    )
