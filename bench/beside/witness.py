"""Has a broker tell at its end which modules it ran: copied into the environment of each side.

Rules: it imports nothing that an interpreter has not loaded by itself, and does its work when the
broker's is over; without `BESIDE_WITNESS`, the name of the file to write, it does nothing.
"""

import atexit
import os
import sys

VARIABLE = "BESIDE_WITNESS"


def tell(path: str) -> None:
    """Write a line for each module that comes from a file: its name, a tab, the file."""
    with open(path + ".part", "w", encoding="utf-8") as out:
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(file, str):
                out.write(f"{name}\t{file}\n")
    os.replace(path + ".part", path)


if os.environ.get(VARIABLE):
    atexit.register(tell, os.environ[VARIABLE])
