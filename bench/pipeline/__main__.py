"""`python -m bench.pipeline`: what Spark, our client, source and sink do with the same rows.

Rules: `shapes` are the ways of `bench.pipeline.shapes`, by size of rows and number of segments;
`catch-up`, `visible` and `audit` are the others.  All need a machine that does nothing else.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench.__main__ import OUTPUT, machine, running, say
from bench.__main__ import magnetar as magnetar_process
from bench.pipeline import audit_scan, streams
from bench.pipeline.figures import print_audits, print_catch_up, print_shapes, print_visible
from bench.pipeline.ground import Ground, session
from bench.pipeline.shapes import SHAPES, Rows, measured

MEASURES: Final = ("shapes", "catch-up", "visible", "audit")
QUICK_ROWS: Final = 20_000
Results = dict[str, object]


def options() -> argparse.Namespace:
    """As `--help` tells them."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows: shows that it works")
    parser.add_argument("--measure", choices=MEASURES, action="append", help="only this")
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bytes", type=int, action="append", help="100 and 1024 by default")
    parser.add_argument("--segments", type=int, action="append", help="2 and 8 by default")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="measure only this")
    parser.add_argument("--generations", type=int, default=50, help="of catch-up")
    parser.add_argument("--rows-per-s", type=int, default=1000, help="of visible")
    parser.add_argument("--seconds", type=float, default=60.0, help="of visible")
    parser.add_argument(
        "--audit-rows", type=int, action="append", help="10^6 and 10^7 by default; 10^8 takes long"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("magnetar.spark.json"))
    given = parser.parse_args()
    if given.quick:
        given.rows, given.runs, given.generations = QUICK_ROWS, 1, 4
        given.seconds = 2.0
        given.bytes, given.segments = given.bytes or [100], given.segments or [2]
        given.audit_rows = given.audit_rows or [QUICK_ROWS]
    return given


def measure_shapes(ground: Ground, given: argparse.Namespace) -> Results:
    """Every size of rows with every number of segments."""
    results: Results = {}
    for size in given.bytes or (100, 1024):
        for segments in given.segments or (2, 8):
            title = f"{given.rows:,} rows of {size} B, {segments} segments"
            say(title)
            rows = Rows(ground, given.rows, size, segments)
            figures = measured(rows, given.shape or [*SHAPES], given.runs)
            print_shapes(title, figures)
            results[title] = figures
    return results


def measure_catch_up(ground: Ground, given: argparse.Namespace) -> Results:
    """Over many generations."""
    each = given.rows // 3 // given.generations
    rows = each * given.generations
    title = f"catch-up: {rows:,} rows of 100 B in {given.generations} generations"
    say(title)
    topic = streams.generations(ground, given.generations, rows)
    figures = streams.catch_up(ground, topic, rows, given.runs)
    print_catch_up(title, figures)
    return {title: figures}


def measure_visible(ground: Ground, given: argparse.Namespace) -> Results:
    """From publishing to having it."""
    title = f"publish to visible, {given.rows_per_s:,} rows/s for {given.seconds:.0f} s"
    say(title)
    figures = streams.visible(ground, given.rows_per_s, given.seconds)
    print_visible(title, figures)
    return {title: figures}


def measure_audit(ground: Ground, given: argparse.Namespace) -> Results:
    """By number of rows."""
    sizes = given.audit_rows or (1_000_000, 10_000_000)
    say(f"audits of {', '.join(f'{rows:,}' for rows in sizes)} rows")
    figures = audit_scan.measured(ground, sizes, given.runs)
    print_audits(figures)
    return {"audit": figures}


def main() -> int:
    """Measure, print, and keep as JSON."""
    given = options()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="magnetar-", dir=OUTPUT.parent))
    asked = given.measure or MEASURES
    results: Results = {}
    try:
        with running(magnetar_process(directory)) as broker:
            ground = Ground(session(directory / "spark"), broker)
            if "shapes" in asked:
                results |= measure_shapes(ground, given)
            if "catch-up" in asked:
                results |= measure_catch_up(ground, given)
            if "visible" in asked:
                results |= measure_visible(ground, given)
            if "audit" in asked:
                results |= measure_audit(ground, given)
            ground.spark.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    document = {"machine": machine(), "results": results}
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"as JSON: {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
