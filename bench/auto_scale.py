"""`python -m bench.auto_scale`: a topic that grows and shrinks with its load, as a plot.

One broker, a topic with one segment, this project's client: a load that rises tenfold and falls
again, read by a stream, a queue and a checkpoint consumer.  Cooldowns are seconds.  Prints segments
and rates over time, and writes `build/bench/auto-scale.svg` and `auto-scale.md`.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Final

from bench.auto_scale_plot import Point, markdown, svg_plot, text_plot
from tests.client.scaling_load import LOW, SETTINGS, ScalingLoad, watch
from tests.support.broker_process import ROOT, running

OUTPUT: Final = ROOT / "build" / "bench" / "auto-scale.svg"
HIGH: Final = 10 * LOW
PHASES_S: Final = ((LOW, 8), (HIGH, 30), (LOW, 30))
"""Messages by the second, and for how many seconds."""


async def measure() -> tuple[list[Point], list[tuple[str, str]]]:
    """The topic each second, and each change with its reason."""
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as directory:
        async with running(Path(directory), SETTINGS) as broker, ScalingLoad.on(broker) as load:

            def take(at_s: float, segments: int, sent: float, read: float) -> None:
                points.append(Point(at_s, segments, sent, read))

            watching = asyncio.create_task(watch(load, take))
            for rate, seconds in PHASES_S:
                load.rate = rate
                await asyncio.sleep(seconds)
            await load.stop()
            watching.cancel()
            load.check()
            return points, list(await load.changes())


def main() -> int:
    """Measure, print, write the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.auto_scale", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"SVG, {OUTPUT} by default")
    output: Path = parser.parse_args().output
    points, changes = asyncio.run(measure())
    print(text_plot(points))
    for kind, cause in changes:
        print(f"{kind}: {cause}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(svg_plot(points), "utf-8")
    output.with_suffix(".md").write_text(markdown(points, changes), "utf-8")
    print(f"The plot is in {output}, and with its text in {output.with_suffix('.md')}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
