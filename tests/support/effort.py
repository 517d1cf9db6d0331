"""How much a run of the tests tries: rounds, seeds, frames.

`make test` is quick, `make test-all` tries more, `make nightly` tries most.  The assertions are the
same in all of them.
"""

import os
import random
from enum import Enum
from typing import Final, TypeVar

VARIABLE: Final = "MAGNETAR_TEST_EFFORT"
SEED_VARIABLE: Final = "MAGNETAR_TEST_SEED"

T = TypeVar("T")


class Effort(Enum):
    """The values of `MAGNETAR_TEST_EFFORT`."""

    QUICK = "quick"
    WHOLE = "whole"
    NIGHTLY = "nightly"


def chosen_effort() -> Effort:
    """What the environment says; without the variable, the run is quick."""
    given = os.environ.get(VARIABLE, Effort.QUICK.value)
    try:
        return Effort(given)
    except ValueError:
        choice = ", ".join(each.value for each in Effort)
        raise ValueError(f"{VARIABLE} is {given!r}: give it one of {choice}.") from None


def by_effort(*, quick: T, whole: T, nightly: T) -> T:
    """The value for this run."""
    return {Effort.QUICK: quick, Effort.WHOLE: whole, Effort.NIGHTLY: nightly}[chosen_effort()]


def chosen_seed(default: int) -> int:
    """The seed that `MAGNETAR_TEST_SEED` names, which `make nightly` sets; else the default."""
    return int(os.environ.get(SEED_VARIABLE, default))


def draw_seed() -> int:
    """The seed of `MAGNETAR_TEST_SEED`, or a new one; a test that fails shows how to repeat it."""
    seed = chosen_seed(random.randrange(2**32))
    show_seed(seed)
    return seed


def show_seed(seed: int) -> None:
    """Print the command that runs this test again with this seed."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    print(f"again: {VARIABLE}={chosen_effort().value} {SEED_VARIABLE}={seed} pytest {test}")
