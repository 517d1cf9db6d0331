"""`python -m tests.segment_replication [RULE ...] [--seeds N]`: runs, and each rule broken."""

import sys
import time

from tests.segment_replication.rules import BROKEN, SPARE
from tests.segment_replication.world import first_seed


def _main(arguments: list[str]) -> None:
    count = 2000
    if "--seeds" in arguments:
        at = arguments.index("--seeds")
        count = int(arguments[at + 1])
        del arguments[at : at + 2]
    for rule in arguments or ["", *SPARE, *BROKEN]:
        began = time.perf_counter()
        found = first_seed(rule, range(count))
        took_s = time.perf_counter() - began
        what = f"{count} runs are clean" if found is None else f"seed {found[0]}: {found[1]}"
        print(f"{rule or 'no rule broken'}: {what} ({took_s:.1f} s)", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
