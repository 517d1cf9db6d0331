"""`python -m tests.simulation`: one seed, a series of them, or a search for broken rules.

A series runs seeds for as long as it is given.  A search runs them with one rule broken on purpose
(`mutants.py`) until the checker notices, in the kind of trouble in which it shows unless a profile
is named; `--break all` does so for each rule in turn, and prints a table.
"""

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from tests.simulation.injection import ASSERTING
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.plan import BY_NAME
from tests.simulation.world import Outcome, simulate

ALL = "all"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--from", dest="first", type=int, default=1, help="first seed")
    parser.add_argument("--minutes", type=float, default=10, help="wall time; of each search")
    parser.add_argument("--plain", action="store_true", help="without transactions")
    parser.add_argument("--profile", choices=list(BY_NAME), help="one kind of trouble only")
    parser.add_argument("--late", action="store_true", help="requests of dead brokers arrive")
    rules = [ALL, *dict.fromkeys(rule for each in MUTANTS for rule in (each.rule, each.name))]
    parser.add_argument("--break", dest="broken", choices=rules, help="a rule to be broken")
    given = parser.parse_args()
    # Of brokers that died in the midst of a start; they are cleared away at the exit.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    asked = [each for each in MUTANTS if given.broken in (ALL, each.rule, each.name)]
    mutants = [each for each in asked if each.profile or given.profile]
    if asked and not mutants:
        parser.error(f"luck does not find {given.broken}; its story does: name a --profile to look")
    if given.seed is not None:
        return _one(given, mutants)
    if mutants:
        return _searches(given, mutants)
    return _series(given)


def _one(given: argparse.Namespace, mutants: Sequence[Mutant]) -> int:
    outcome = _run(given, given.seed, mutants[0] if mutants else None, trace=given.trace)
    print(_line(outcome))
    _print_violations(given, outcome, mutants[0] if mutants else None)
    return 1 if outcome.violations else 0


def _run(
    given: argparse.Namespace,
    seed: int,
    mutant: Mutant | None,
    *,
    profile: str | None = None,
    trace: bool = False,
) -> Outcome:
    return simulate(
        seed,
        transactions=not given.plain,
        profile=profile or given.profile,
        late=given.late,
        trace=print if trace else None,
        parts=ASSERTING if mutant is None else mutant.parts,
    )


def _series(given: argparse.Namespace) -> int:
    began, simulated, messages, ended, failed = time.monotonic(), 0.0, 0, 0, []
    seed = first = given.first
    while time.monotonic() - began < given.minutes * 60:
        try:
            outcome = _run(given, seed, None)
        except Exception:  # noqa: BLE001 - the next seed has nothing to do with it
            traceback.print_exc()
            failed.append(seed)
        else:
            simulated += outcome.seconds
            messages += outcome.messages
            ended += outcome.transactions
            if outcome.violations:
                failed.append(seed)
            print(_line(outcome), flush=True)
            _print_violations(given, outcome, None)
        seed += 1
    print(
        f"{seed - first} seeds from {first}, {simulated / 3600:.1f} simulated hours in "
        f"{(time.monotonic() - began) / 60:.1f} minutes, {messages} messages, "
        f"{ended} transactions, failed: {failed or 'none'}"
    )
    return 1 if failed else 0


def _searches(given: argparse.Namespace, mutants: Sequence[Mutant]) -> int:
    """Each of them, and a table.  It is a failure if one is not found."""
    print("broken     seeds  seconds  replay, and what the checker said")
    missed = 0
    for mutant in mutants:
        began, seed, outcome = time.monotonic(), given.first - 1, None
        while time.monotonic() - began < given.minutes * 60:
            seed += 1
            outcome = _run(given, seed, mutant, profile=given.profile or mutant.profile)
            if outcome.violations:
                break
        found = bool(outcome and outcome.violations)
        missed += not found
        print(
            f"{mutant.name:10} {seed - given.first + 1:5} {time.monotonic() - began:8.1f}  "
            f"{_replay(given, outcome, mutant) if found and outcome else 'not found'}",
            flush=True,
        )
        if found and outcome is not None:
            print(f"{'':26}{outcome.violations[0][:200]}", flush=True)
    return 1 if missed else 0


def _line(outcome: Outcome) -> str:
    return (
        f"seed {outcome.seed} ({outcome.profile}): {outcome.seconds:.0f} s, {outcome.steps} steps, "
        f"{outcome.messages} messages, {outcome.deliveries} deliveries, "
        f"{outcome.transactions} transactions, {outcome.crashes} crashes, "
        f"digest {outcome.digest:08x}"
    )


def _print_violations(given: argparse.Namespace, outcome: Outcome, mutant: Mutant | None) -> None:
    if outcome.violations:
        for each in outcome.violations[:20]:
            print(f"  {each}")
        print(f"  replay: {_replay(given, outcome, mutant)}", flush=True)


def _replay(given: argparse.Namespace, outcome: Outcome, mutant: Mutant | None) -> str:
    words = [f"make simulate SEED={outcome.seed}"]
    # A profile that luck chose is chosen again; a search has its own.
    words += [f"PROFILE={outcome.profile}"] if given.profile or mutant is not None else []
    words += ["LATE=1"] if given.late else []
    words += ["PLAIN=1"] if given.plain else []
    words += [f"BREAK={mutant.name}"] if mutant is not None else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
