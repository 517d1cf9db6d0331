"""Attacks on a broker beside the probe, some of them small; `make attack` runs all in full."""

from pathlib import Path
from typing import Final

from tests.attack.__main__ import undergo
from tests.attack.attacks import ATTACKS, attack_named

SHARE: Final = 0.01
"""Of each attack on a broker with everything on."""


async def test_partial_frames_before_connect_leave_no_memory_behind(tmp_path: Path) -> None:
    outcome = await undergo("partial-frames", ATTACKS["partial-frames"], tmp_path)
    assert outcome.lasting() == []


async def test_attacks_on_a_secured_broker_harm_nobody(tmp_path: Path) -> None:
    names = ",".join(name for name, attack in ATTACKS.items() if attack.secured)
    outcome = await undergo(names, attack_named(names), tmp_path, SHARE)
    assert outcome.lasting() == []
