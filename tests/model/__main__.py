"""`python -m tests.model [NAME ...]`: each plan and each rule taken out, with its shortest run."""

import sys

from tests.model.plans import LONG, MUTANTS, SHORT, explored, without


def _main(names: list[str]) -> None:
    for name, (plan, _) in (SHORT | LONG).items():
        if name in names or (not names and name in SHORT):
            print(f"{name}: {explored(plan)}", flush=True)
    for mutant in MUTANTS:
        if not names or mutant.rule in names:
            print(f"without {mutant.rule}: {without(mutant)}", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
