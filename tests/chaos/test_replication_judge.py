"""The judge of replicated topics finds each thing that can be wrong, and nothing else."""

from collections.abc import Callable, Sequence

import pytest

from tests.chaos.replication_judge import Held, Outcome, Sent, problems

Clusters = dict[str, list[Held]]
FREE = frozenset({"free"})
SENT = {
    Sent("east", "k", 0): Outcome.STORED,
    Sent("east", "k", 1): Outcome.UNKNOWN,
    Sent("east", "k", 2): Outcome.STORED,
    Sent("east", "k", 3): Outcome.ABORTED,
    Sent("east", "k", 4): Outcome.UNKNOWN,
    Sent("west", "free", 0): Outcome.STORED,
    Sent("west", "free", 1): Outcome.STORED,
}


def held(cluster: str, messages: Sequence[Sent]) -> list[Held]:
    return [Held(each, "" if each.origin == cluster else each.origin) for each in messages]


def right() -> Clusters:
    """What both may have: one message whose outcome is unknown is stored, the other one is not."""
    keyed = [Sent("east", "k", 0), Sent("east", "k", 1), Sent("east", "k", 2)]
    free = [Sent("west", "free", 1), Sent("west", "free", 0)]
    return {"east": held("east", keyed + free), "west": held("west", free + keyed)}


def test_the_judge_finds_nothing_where_all_is_well() -> None:
    assert problems(SENT, right(), FREE) == []


def lose(clusters: Clusters) -> None:
    clusters["west"].remove(Held(Sent("east", "k", 2), "east"))


def lose_last_of_all(clusters: Clusters) -> None:
    for name in clusters:
        clusters[name] = [each for each in clusters[name] if each.message.number != 2]


def lose_unknown(clusters: Clusters) -> None:
    clusters["west"].remove(Held(Sent("east", "k", 1), "east"))


def lose_at_home(clusters: Clusters) -> None:
    clusters["east"].remove(Held(Sent("east", "k", 0), ""))


def repeat(clusters: Clusters) -> None:
    clusters["west"].append(Held(Sent("east", "k", 2), "east"))


def repeat_without_key(clusters: Clusters) -> None:
    clusters["east"].append(Held(Sent("west", "free", 0), "west"))


def exchange(clusters: Clusters) -> None:
    west = clusters["west"]
    west[-1], west[-2] = west[-2], west[-1]


def let_aborted_through(clusters: Clusters) -> None:
    clusters["west"].append(Held(Sent("east", "k", 3), "east"))


def invent(clusters: Clusters) -> None:
    clusters["west"].append(Held(Sent("east", "k", 9), "east"))


def hide_origin(clusters: Clusters) -> None:
    clusters["west"][-1] = Held(Sent("east", "k", 2), "")


def test_the_judge_finds_what_a_cluster_is_not_to_have() -> None:
    clusters, free = right(), Sent("west", "free", 0)
    assert problems(SENT, clusters, FREE, {"east": {free}}) == [
        "east has messages that were not for it: west:free:0"
    ]
    clusters["east"].remove(Held(free, "west"))
    assert problems(SENT, clusters, FREE, {"east": {free}}) == []
    assert problems(SENT, clusters, FREE) == ["east lacks messages: west:free:0"]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lose, "west lacks messages: east:k:2"),
        (lose_last_of_all, "east lacks messages: east:k:2"),
        (lose_unknown, "is in east only"),
        (lose_at_home, "east lacks messages: east:k:0"),
        (repeat, "west has messages more than once: east:k:2"),
        (repeat_without_key, "east has messages more than once: west:free:0"),
        (exchange, "west has messages of a key in another order: east:k:1"),
        (let_aborted_through, "west has aborted messages: east:k:3"),
        (invent, "west has messages that nobody sent: east:k:9"),
        (hide_origin, "west does not say where messages come from: east:k:2"),
    ],
)
def test_the_judge_finds(spoil: Callable[[Clusters], None], found: str) -> None:
    clusters = right()
    spoil(clusters)
    assert found in " / ".join(problems(SENT, clusters, FREE))
