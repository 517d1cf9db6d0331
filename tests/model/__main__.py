"""`python -m tests.model [NAME ...]`: each scope and each rule taken out, with its shortest run."""

import sys

from tests.model import plans, rules

CLEAN = rules.QUICK | rules.LONG | rules.NIGHTLY
MISSED = rules.MUTANTS | rules.ORDER_MUTANTS | rules.LONG_MUTANTS | rules.TRIED_STUCK


def _main(names: list[str]) -> None:
    for name, clean in CLEAN.items():
        if name in names or (not names and name in rules.QUICK):
            print(f"{name}: {rules.explored(clean.scope)}", flush=True)
    for name, missed in MISSED.items():
        if not names or name in names:
            print(f"without {name}: {rules.explored(missed.scope)}", flush=True)
    for name, (plan, _) in (plans.SHORT | plans.LONG).items():
        if name in names or (not names and name in plans.SHORT):
            print(f"{name}: {plans.explored(plan)}", flush=True)
    for mutant in plans.MUTANTS:
        if not names or mutant.rule in names:
            print(f"without {mutant.rule}: {plans.without(mutant)}", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
