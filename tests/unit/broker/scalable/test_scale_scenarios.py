"""Scenarios of automatic splits and merges, as text: `scaling/*.txt`.

Each block of a file has commands, `----`, and what happened.  Commands:

    policy NAME=VALUE ...        change members of the policy, under Pulsar's names
    topic segments=N             begin anew; `sharing` lets consumers share segments, with `m1`
                                 clients choose segments as those of 5.0.0-M1 do
    consumers N                  N ordered consumers are registered, which causes an evaluation
    backlog N                    consumers lack N entries of each segment
    load even KEYS RATE          KEYS keys share RATE messages/s; several loads add up, `load none`
    load key NAME RATE           one key gets RATE
    load wave KEYS LOW HIGH PERIOD      a sine between two rates, of PERIOD seconds
    load sawtooth KEYS LOW HIGH PERIOD  a rise that falls at once
    load bursts KEYS LOW HIGH PERIOD LENGTH   HIGH for LENGTH seconds of each PERIOD
    run SECONDS                  let time pass; shows each decision
    why                          show the last outcome
    layout                       show the active segments

`python -m tests.unit.broker.scalable.test_scale_scenarios` writes what happens now into the files.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.scalable.auto_scale_policy import AutoScalePolicy, checked_override, merged
from tests.unit.broker.scalable.scaling_world import Keys, ScalingWorld, even_keys

FILES = sorted((Path(__file__).parent / "scaling").glob("*.txt"))
SEPARATOR = "----"


class Scenario:
    """Carries out the commands of one file."""

    def __init__(self) -> None:
        self.policy = AutoScalePolicy()
        self.world = ScalingWorld(self.policy)
        self.loads: list[Callable[[int], Keys]] = []

    def carry_out(self, line: str) -> Iterator[str]:
        command, *words = line.split()
        yield from getattr(self, f"_{command}")(words)

    def _policy(self, words: list[str]) -> Iterator[str]:
        pairs = (word.split("=") for word in words)
        members = {
            name: value == "true" if name == "enabled" else int(value) for name, value in pairs
        }
        self.policy = self.world.policy = merged(self.policy, checked_override(members))
        yield from ()

    def _topic(self, words: list[str]) -> Iterator[str]:
        segments = next((int(w.split("=")[1]) for w in words if w.startswith("segments=")), 1)
        self.world = ScalingWorld(
            self.policy, segments=segments, sharing="sharing" in words, m1_clients="m1" in words
        )
        self.loads = []
        yield from ()

    def _consumers(self, words: list[str]) -> Iterator[str]:
        self.world.consumers = int(words[0])
        before = len(self.world.done)
        self.world.evaluate()
        yield from self._since(before)

    def _backlog(self, words: list[str]) -> Iterator[str]:
        self.world.backlog = int(words[0])
        yield from ()

    def _load(self, words: list[str]) -> Iterator[str]:
        kind, *rest = words
        begin_s = self.world.at_s
        if kind == "none":
            self.loads = []
        elif kind == "key":
            name, rate = rest[0], float(rest[1])
            self.loads.append(lambda _: {name: rate})
        else:
            keys, *numbers = (int(word) for word in rest)
            shape = SHAPES[kind]
            self.loads.append(lambda at_s: even_keys(keys, shape(at_s - begin_s, *numbers)))
        loads = list(self.loads)
        self.world.use_load(lambda at_s: {k: v for each in loads for k, v in each(at_s).items()})
        yield from ()

    def _run(self, words: list[str]) -> Iterator[str]:
        before = len(self.world.done)
        self.world.run(int(words[0]))
        yield from self._since(before)

    def _since(self, before: int) -> Iterator[str]:
        for done in self.world.done[before:]:
            decision = done.decision
            ids = ",".join(str(each) for each in decision.segment_ids)
            made = sorted(done.after.segments.keys() - done.before.segments.keys())
            children = ",".join(str(each) for each in made)
            yield f"{done.at_s} s: {decision.action.value} {ids} -> {children}. {decision.why}"

    def _why(self, _: list[str]) -> Iterator[str]:
        verdict = self.world.verdict
        if verdict is None:
            yield "no evaluation yet"
            return
        for refusal in verdict.refusals:
            wanted = ", but wanted" if refusal.wanted else ""
            yield f"{refusal.rule.value}: {refusal.cause.value}{wanted}. {refusal.why}"
        if verdict.decision is not None:
            yield f"{verdict.decision.rule.value}: {verdict.decision.why}"

    def _layout(self, _: list[str]) -> Iterator[str]:
        for segment in self.world.layout.active:
            yield (
                f"{segment.segment_id}: {segment.hash_start:04x}-{segment.hash_end:04x}, "
                f"{segment.entry_buckets} bucket(s)"
            )


SHAPES: dict[str, Callable[..., float]] = {
    "even": lambda at_s, rate: rate,
    "wave": lambda at_s, low, high, period: (
        low + (high - low) * (1 - math.cos(2 * math.pi * at_s / period)) / 2
    ),
    "sawtooth": lambda at_s, low, high, period: low + (high - low) * (at_s % period) / period,
    "bursts": lambda at_s, low, high, period, length: high if at_s % period < length else low,
}


def played(text: str) -> str:
    """The text of a file, with what happens now below each separator."""
    scenario = Scenario()
    blocks = []
    for block in text.strip().split("\n\n"):
        commands = block.split(f"\n{SEPARATOR}")[0].splitlines()
        lines = [*commands]
        if SEPARATOR in block:
            outcome = [
                shown
                for line in commands
                if not line.startswith("#")
                for shown in scenario.carry_out(line)
            ]
            lines += [SEPARATOR, *(outcome or ["nothing"])]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_happens_as_written(path: Path) -> None:
    text = path.read_text("utf-8")
    assert played(text) == text


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 6


if __name__ == "__main__":
    for each in FILES:
        each.write_text(played(each.read_text("utf-8")), "utf-8")
