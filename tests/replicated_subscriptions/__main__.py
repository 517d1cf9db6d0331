"""`python -m tests.replicated_subscriptions [RULE ...] [--seeds N]`: runs, and each rule broken."""

import sys
import time

from tests.replicated_subscriptions.late import LateWorld
from tests.replicated_subscriptions.rules import BROKEN, LATE
from tests.replicated_subscriptions.world import SubscriptionWorld, first_seed


def _main(arguments: list[str]) -> None:
    count = 500
    if "--seeds" in arguments:
        at = arguments.index("--seeds")
        count = int(arguments[at + 1])
        del arguments[at : at + 2]
    runs = [("", SubscriptionWorld), *((rule, SubscriptionWorld) for rule in BROKEN)]
    runs += [("", LateWorld), *((rule, LateWorld) for rule in LATE)]
    for rule, world in runs:
        if arguments and rule not in arguments:
            continue
        began = time.perf_counter()
        found = first_seed(rule, range(count), world)
        took_s = time.perf_counter() - began
        what = f"{count} runs are clean" if found is None else f"seed {found[0]}: {found[1]}"
        print(f"{rule or world.__name__}: {what} ({took_s:.1f} s)", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
