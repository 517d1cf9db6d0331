"""What the kernel says about a process: memory and processor time."""

import os
from pathlib import Path
from typing import Final

MIB: Final = 1024 * 1024
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident set size."""
    return _status_kib(pid, "VmRSS") * 1024 / MIB


def peak_resident_mib(pid: int) -> float:
    """The largest resident set size so far."""
    return _status_kib(pid, "VmHWM") * 1024 / MIB


def processor_s(pid: int) -> float:
    """User and system time used so far."""
    # The second field is the command in parentheses, which may hold blanks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise ValueError(f"/proc/{pid}/status has no {name}")
