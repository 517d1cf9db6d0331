"""One attack on a broker beside the probe; `make attack` runs all."""

from pathlib import Path

from tests.attack.__main__ import undergo
from tests.attack.attacks import ATTACKS


async def test_partial_frames_before_connect_leave_no_memory_behind(tmp_path: Path) -> None:
    outcome = await undergo("partial-frames", ATTACKS["partial-frames"], tmp_path)
    assert outcome.lasting() == []
