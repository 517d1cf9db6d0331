"""What a run does: drawn from its seed, so that runs differ in kind and not only in timing.

Each fault is left out of about half of the runs: a run in which everything fails at once hardly
gets anywhere, and some faults hide others.
"""

import random
from dataclasses import dataclass, field

from tests.simulation.disk import DiskFaults
from tests.simulation.metadata import MetadataFaults
from tests.simulation.network import NetworkFaults


@dataclass
class Plan:
    """See the module's docstring.  Times in virtual seconds."""

    seconds: float = 20.0
    topics: int = 1
    producers: int = 2
    burst_producers: int = 1
    queue_consumers: int = 2
    stream_consumers: int = 1
    transactors: int = 0
    pause_s: float = 0.05
    crash_every_s: float = 0.0
    """Mean time between crashes of the broker; 0: none."""
    break_every_s: float = 0.0
    stall_every_s: float = 0.0
    reshape_every_s: float = 0.0
    replace_every_s: float = 0.0
    """Takeovers: the broker goes on for a while, beside its successor."""
    pause_every_s: float = 0.0
    """Clients that stand still and go on (zombies)."""
    network: NetworkFaults = field(default_factory=NetworkFaults)
    disk: DiskFaults = field(default_factory=DiskFaults)
    metadata: MetadataFaults = field(default_factory=MetadataFaults)


def plan_of(rng: random.Random, *, transactions: bool) -> Plan:
    """A plan by luck."""

    def maybe(low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else 0.0

    many = rng.random() < 0.3
    return Plan(
        seconds=rng.uniform(5, 40),
        topics=rng.choice((1, 1, 2)),
        producers=rng.choice((1, 2, 3)),
        burst_producers=rng.choice((0, 1)),
        queue_consumers=rng.choice((1, 2)),
        stream_consumers=rng.choice((1, 1, 2)),
        transactors=rng.choice((1, 2, 3)) if transactions else 0,
        pause_s=rng.choice((0.02, 0.1, 0.4)),
        crash_every_s=maybe(1.5, 15),
        break_every_s=maybe(1, 10),
        stall_every_s=maybe(1, 10),
        reshape_every_s=maybe(1, 10),
        replace_every_s=maybe(3, 15) if transactions and many else 0.0,
        pause_every_s=maybe(2, 10),
        network=NetworkFaults(slow=maybe(0.001, 0.02)),
        disk=DiskFaults(stall=maybe(0.001, 0.03), failure=maybe(0.0005, 0.01)),
        metadata=MetadataFaults(
            slow=maybe(0.001, 0.03),
            refused=maybe(0.001, 0.01),
            lost_answer=maybe(0.001, 0.01),
            watch_slow=maybe(0.01, 0.2),
            resync=maybe(0.01, 0.2),
            session_expiry=maybe(0.2, 0.8),
        ),
    )


def calm(plan: Plan) -> None:
    """No more faults."""
    plan.crash_every_s = plan.break_every_s = plan.stall_every_s = 0
    plan.reshape_every_s = plan.pause_every_s = 0
