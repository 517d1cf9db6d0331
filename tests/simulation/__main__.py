"""`python -m tests.simulation`: one seed, or as many as fit into a time."""

import argparse
import sys
import time
import traceback

from tests.simulation.plan import PROFILES
from tests.simulation.world import Outcome, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--from", dest="first", type=int, default=1, help="first seed")
    parser.add_argument("--minutes", type=float, default=10, help="wall time of a series")
    parser.add_argument("--plain", action="store_true", help="without transactions")
    parser.add_argument("--profile", choices=list(PROFILES), help="one kind of trouble only")
    parser.add_argument("--late", action="store_true", help="requests of dead brokers arrive")
    given = parser.parse_args()
    if given.seed is not None:
        return _one(given)
    return _series(given)


def _one(given: argparse.Namespace) -> int:
    outcome = simulate(
        given.seed,
        transactions=not given.plain,
        profile=given.profile,
        late=given.late,
        trace=print if given.trace else None,
    )
    print(_line(outcome))
    return 1 if outcome.violations else 0


def _series(given: argparse.Namespace) -> int:
    began, simulated, first, failed = time.monotonic(), 0.0, given.first, []
    seed = first
    while time.monotonic() - began < given.minutes * 60:
        try:
            outcome = simulate(
                seed, transactions=not given.plain, profile=given.profile, late=given.late
            )
        except Exception:  # noqa: BLE001 - the next seed has nothing to do with it
            traceback.print_exc()
            failed.append(seed)
            seed += 1
            continue
        simulated += outcome.seconds
        if outcome.violations:
            failed.append(seed)
        print(_line(outcome), flush=True)
        seed += 1
    print(
        f"{seed - first} seeds from {first}, {simulated / 3600:.1f} simulated hours in "
        f"{(time.monotonic() - began) / 60:.1f} minutes, failed: {failed or 'none'}"
    )
    return 1 if failed else 0


def _line(outcome: Outcome) -> str:
    lines = [
        f"seed {outcome.seed}: {outcome.seconds:.0f} s, {outcome.steps} steps, "
        f"{outcome.messages} messages, {outcome.deliveries} deliveries, "
        f"{outcome.transactions} transactions, {outcome.crashes} crashes, "
        f"digest {outcome.digest:08x}"
    ]
    lines += [f"  {each}" for each in outcome.violations[:20]]
    if outcome.violations:
        lines.append(f"  replay: make simulate SEED={outcome.seed}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
