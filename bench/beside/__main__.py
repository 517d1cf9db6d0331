"""`python -m bench.beside`: the broker of a commit beside the broker of this work tree.

With `--security`: the broker of this work tree without security beside the same with it.

Rules: both run the same way, each its own code.  Each broker that ends by itself tells what it ran;
those of `start` are killed, and run in the same environment.  Pairs alternate (A B, B A, ...), each
broker on an empty directory; a ratio is of two brokers that ran one right after the other, work
tree by commit.  The result is a table, and JSON in `build/bench/beside.json`.  There is no pass
mark.
"""

import argparse
import asyncio
import fcntl
import json
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.__main__ import OUTPUT as BENCH_OUTPUT
from bench.__main__ import machine, peer, running, say
from bench.beside.checkouts import (
    REVISIONS,
    Checkout,
    CheckoutFailed,
    code_digest,
    commit_of,
    packages,
    put_commit,
    put_work_tree,
)
from bench.beside.comparison import Figures, lines, ratio, table_of
from bench.beside.environments import (
    TOLD,
    Environment,
    WrongCode,
    environment_of,
    must_have_run,
    told,
)
from bench.beside.measuring import (
    DEFAULT,
    FAILURES,
    MEASURES,
    QUICK,
    ROWS,
    Side,
    Taken,
    expected_minutes,
    load_warning,
    take_rounds,
)
from bench.measures import create_topic, first_served
from bench.secured import SECURITY_KINDS, SecuredProcess, SecurityKind, TlsPeer
from tests.java import stock_driver
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.peer_process import resolve_jars
from tests.support.broker_process import ROOT

OUTPUT: Final = BENCH_OUTPUT.with_name("beside.json")
ENVIRONMENTS: Final = OUTPUT.with_name("environments")
RUN_PREFIX: Final = "beside-"
THIS: Final = "this"
PLAIN: Final = "plain"
PEER: Final = "peer"
PEER_TLS: Final = "peer with TLS"
PAIRS: Final = 5
QUICK_PAIRS: Final = 2
COLD: Final = (
    "The peer is as new as the others in each measurement, so its virtual machine is still warming "
    "up: `make bench` measures one that has run for longer."
)
WIDTH_OF_SIDE: Final = 52
WIDTH: Final = 56
"""Width of the table without the columns of its sides."""
INTERRUPTED: Final = 130


def chosen_measures(text: str) -> list[str]:
    """Read names with blanks or commas between them; `transactions` stands for both forms."""
    wanted = set(re.split(r"[\s,]+", text.strip())) - {""}
    known = {name: name for name in MEASURES}
    chosen = [name for name in known if name in wanted or name.partition("-")[0] in wanted]
    unknown = wanted - set(known) - {name.partition("-")[0] for name in known}
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}: not one of {', '.join(MEASURES)}, transactions"
        )
    return chosen or list(MEASURES)


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    everything = list(MEASURES)
    two, three = (expected_minutes(everything, PAIRS, peers=each) for each in (0, 1))
    made = argparse.ArgumentParser(
        prog="python -m bench.beside",
        description=__doc__,
        epilog=f"All of it takes some {two} minutes on two processors, {three} with the peer.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--rev", default="HEAD~1", help="the commit beside this tree, or HEAD~1")
    made.add_argument(
        "--security",
        choices=SECURITY_KINDS,
        help="this tree with TLS, or with tokens and authorization, beside itself without",
    )
    made.add_argument("--pairs", type=int, help=f"{PAIRS} unless told, {QUICK_PAIRS} when quick")
    made.add_argument(
        "--peer",
        action="store_true",
        help="Apache Pulsar in each round, too; with `--security tls` without TLS and with it",
    )
    made.add_argument(
        "--measure",
        type=chosen_measures,
        default=list(MEASURES),
        metavar="NAMES",
        help=f"only these of {', '.join(MEASURES)}; `transactions` are both",
    )
    made.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    made.add_argument("--output", type=Path, default=OUTPUT, help="JSON")
    return made


def magnetar_side(
    checkout: Checkout,
    environment: Environment,
    name: str | None = None,
    security: SecurityKind | None = None,
) -> Side:
    """Make the side whose brokers run a checkout, and must have run its code."""
    project = packages(checkout.directory) | packages(ROOT)

    def make(directory: Path) -> BrokerUnderTest:
        code = environment.code_telling(directory)
        if security is not None:
            return SecuredProcess(directory, security, code)
        return MagnetarProcess(directory, code=code)

    def check(directory: Path) -> None:
        must_have_run(checkout.directory, directory / TOLD, project)

    return Side(name or checkout.name, make, check)


def first_run(side: Side, directory: Path) -> set[str]:
    """Run a broker that is not measured.  Return which of the project's packages it ran."""
    place = Path(tempfile.mkdtemp(prefix="first-", dir=directory))
    broker = side.make(place)
    with running(broker):
        asyncio.run(first_served(broker))
        create_topic(broker, "first")
    side.check(place)
    return {name.partition(".")[0] for name in told(place / TOLD)} & packages(ROOT)


@dataclass
class Ground:
    """The sides that are compared, and the lines that describe them."""

    sides: dict[str, Side]
    header: list[str]
    notes: list[str]
    commits: dict[str, dict[str, object]]


def prepared(revision: str, directory: Path, *, with_peer: bool) -> Ground:
    """Put both checkouts in place, compile them, and run each once."""
    commit_of(revision)
    for old in (REVISIONS, ENVIRONMENTS):
        shutil.rmtree(old, ignore_errors=True)
    ground = Ground({}, [], [], {})
    digests = []
    for checkout in (put_commit(revision), put_work_tree()):
        say(f"preparing {checkout.name}")
        environment = environment_of(checkout.directory, ENVIRONMENTS / checkout.name)
        side = magnetar_side(checkout, environment)
        ran = first_run(side, directory)
        digests.append(code_digest(checkout.directory, ran))
        ground.sides[side.name] = side
        ground.header.append(f"{checkout.described}; code {digests[-1][:8]}")
        if environment.own_dependencies:
            different = ", ".join(environment.own_dependencies)
            ground.notes.append(f"{checkout.name} has other dependencies: {different}.")
        ground.commits[side.name] = {
            "commit": checkout.commit,
            "title": checkout.title,
            "uncommitted": checkout.changed,
            "code": digests[-1],
            "packages": sorted(ran),
            "other_dependencies": environment.own_dependencies,
        }
    if digests[0] == digests[1]:
        ground.notes.append("Both brokers are the same code: whatever differs is noise.")
    if with_peer:
        add_peer(ground)
    return ground


def add_peer(ground: Ground) -> None:
    """Add Apache Pulsar without security."""
    ground.sides[PEER] = Side(PEER, peer)
    ground.header.append(f"{PEER}: Apache Pulsar 5.0.0-M1")
    ground.notes.append(COLD)


def tls_peer(directory: Path) -> BrokerUnderTest:
    """Make a peer with TLS and without data."""
    process = TlsPeer(directory)
    process.wipe()
    return process


def prepared_with_security(security: SecurityKind, directory: Path, *, with_peer: bool) -> Ground:
    """Put the work tree in place, and run it once in each form."""
    shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    checkout = put_work_tree()
    say(f"preparing {checkout.name}")
    environment = environment_of(checkout.directory, ENVIRONMENTS / checkout.name)
    ground = Ground({}, [f"{THIS}: {checkout.described}, with {security}"], [], {})
    for side in (
        magnetar_side(checkout, environment, PLAIN),
        magnetar_side(checkout, environment, THIS, security),
    ):
        first_run(side, directory)
        ground.sides[side.name] = side
        ground.commits[side.name] = {
            "commit": checkout.commit,
            "title": checkout.title,
            "uncommitted": checkout.changed,
            "security": security if side.name == THIS else None,
        }
    if with_peer:
        add_peer(ground)
        ground.sides[PEER_TLS] = Side(PEER_TLS, tls_peer)
    return ground


@contextmanager
def alone() -> Iterator[Path]:
    """Give a directory that is gone after the run.  Raises `CheckoutFailed` beside another run."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    with OUTPUT.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckoutFailed("another bench-beside runs here: wait until it is over.") from None
        for left in OUTPUT.parent.glob(f"{RUN_PREFIX}*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        directory = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=OUTPUT.parent))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def peer_ratios(rounds: Sequence[Figures]) -> list[str]:
    """Make a line for each figure that was taken of Apache Pulsar with TLS and without."""
    found = [(row, ratio(row, rounds, PEER_TLS, PEER)) for row in ROWS]
    return [
        f"{PEER_TLS} by {PEER}, {row.label.strip()}: {each.spread.text(3)}"
        for row, each in found
        if each is not None
    ]


def tell(ground: Ground, taken: Taken, where: dict[str, object], output: Path) -> None:
    """Print the table and its notes, and write all of it as JSON."""
    figures = [each.figures for each in taken.rounds]
    found = lines(ROWS, figures, list(ground.sides), THIS)
    title = f"Pairs: {len(taken.rounds)}; each broker on an empty directory"
    width = WIDTH + WIDTH_OF_SIDE * len(ground.sides)
    console = Console(width=max(Console().width, width))
    console.print(table_of(found, list(ground.sides), THIS, title))
    if PEER_TLS in ground.sides:
        ground.notes += peer_ratios(figures)
    for line in (*ground.header, *ground.notes, *taken.notes):
        console.print(line, markup=False, highlight=False)
    document = {
        "machine": where,
        "commits": ground.commits,
        "notes": [*ground.notes, *taken.notes],
        "rounds": [asdict(each) for each in taken.rounds],
        "summary": [asdict(each) for each in found],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"as JSON: {output}")


def compare(options: argparse.Namespace, where: dict[str, object]) -> int:
    """Prepare, measure and print.  An interrupted run prints the figures that it has."""
    pairs = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    with alone() as directory:
        if options.security is None:
            ground = prepared(options.rev, directory, with_peer=options.peer)
        else:
            ground = prepared_with_security(options.security, directory, with_peer=options.peer)
        warning = load_warning(float(str(where["load_before"])))
        ground.notes += [] if warning is None else [warning]
        peers = len(ground.sides) - 2
        minutes = expected_minutes(options.measure, pairs, peers=peers)
        for line in (*ground.header, *ground.notes):
            say(line)
        if not options.quick:
            say(f"this takes some {minutes} minutes on two processors with nothing else to do")
        taken = Taken()
        effort = QUICK if options.quick else DEFAULT
        status = 0
        try:
            take_rounds(taken, ground.sides, options.measure, pairs, effort, directory)
        except KeyboardInterrupt:
            taken.notes.append("It was interrupted: the last pair is not whole.")
            status = INTERRUPTED
    if not any(figures for each in taken.rounds for figures in each.figures.values()):
        raise CheckoutFailed("\n".join(["nothing was measured.", *taken.notes]))
    tell(ground, taken, where, options.output)
    return status


def main() -> int:
    options = parser().parse_args()
    if options.peer and options.security == "authorization":
        print("bench: --peer goes with --security tls, or without --security", file=sys.stderr)
        return 2
    java = options.peer or any(MEASURES[name].java for name in options.measure)
    missing = stock_driver.missing_tools() if java else None
    if missing:
        without = ",".join(name for name, measure in MEASURES.items() if not measure.java)
        print(
            f"bench: {missing}: install JDK 17 and Maven, or use --measure {without}",
            file=sys.stderr,
        )
        return 2
    where = machine()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        if java:
            stock_driver.build()
        if options.peer:
            resolve_jars()
        return compare(options, where)
    except (CheckoutFailed, WrongCode, *FAILURES) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
