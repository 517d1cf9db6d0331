"""`python -m tests.support.leftover_time PROGRAM ...`: run a program on time that others leave.

It has the lowest priority.  Linux may share processors out among sessions first
(`sched_autogroup`): start it in a session of its own, which gets the lowest priority as a whole.  A
session that the program starts has the usual one.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

LOWEST: Final = 19


def main() -> None:
    os.nice(LOWEST)
    with suppress(OSError):  # a kernel without it shares out by the priority of each process
        Path("/proc/self/autogroup").write_text(str(LOWEST), "ascii")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
