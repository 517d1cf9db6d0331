"""Pure: the state that groups of attempts are modelled in, and how records follow from records.

Ended groups are kept as they are, with `gone` once collected, so that promises can speak of them.
"""

from typing import NamedTuple

NONE = -1
OPEN, COMMITTED, ABORTED = "O", "C", "A"


class Batch(NamedTuple):
    """What a group commits for."""

    query: int
    batch: int


class Commit(NamedTuple):
    """A committed batch: by that group, of these attempts."""

    batch: Batch
    group: int
    winners: tuple[int, ...]


class Fold(NamedTuple):
    """What a key remembers of groups whose headers may be collected."""

    last: Commit | None = None
    batches: tuple[Batch, ...] = ()
    """The last batch of each query."""

    def with_commit(self, commit: Commit, *, keep: int) -> "Fold":
        """Folded in; of earlier queries only `keep` are kept, the latest."""
        before = next((x for x in self.batches if x.query == commit.batch.query), commit.batch)
        others = [x for x in self.batches if x.query != commit.batch.query]
        kept = others[len(others) - keep :] if keep < len(others) else others
        return Fold(commit, (*kept, max(before, commit.batch)))

    def has(self, batch: Batch) -> bool:
        """Whether that batch, or a later one of its query, was committed."""
        return any(x.query == batch.query and x.batch >= batch.batch for x in self.batches)


class Named(NamedTuple):
    """A transaction that a key names; `told`: its end, as noted before its header went."""

    group: int
    told: str = ""


class Key(NamedTuple):
    """The record of the key; openers and nonces are numbers."""

    epoch: int
    opener: int
    transaction: Named | None = None
    nonce: int = NONE
    nonces: tuple[int, ...] = ()
    """Of the groups that its epoch had."""
    before: Named | None = None
    fold: Fold = Fold()

    @property
    def last(self) -> Named | None:
        """The only one that may be open."""
        return self.transaction or self.before


class Header(NamedTuple):
    """Of a group, or of a plain transaction (`nonce` NONE), under an epoch of the key."""

    state: str
    nonce: int
    epoch: int
    reserved: int
    deadline: int = 0
    commit: Commit | None = None
    gone: bool = False


class Request(NamedTuple):
    """A request that a leader works on: `step` is what it does next, the rest what it knows."""

    kind: str
    leader: int
    driver: int
    epoch: int
    nonce: int = NONE
    batch: Batch | None = None
    group: int = NONE
    winners: tuple[int, ...] = ()
    step: str = "key"
    key: Key | None = None
    header: Header | None = None
    made: int = NONE


class Answer(NamedTuple):
    """What a request is answered; `number` is the index of an attempt."""

    verdict: str
    group: int = NONE
    number: int = NONE
    epoch: int = NONE
    last: Commit | None = None


class Attempt(NamedTuple):
    """`number` is its index.

    `-` not begun, `?` asked for, `o` given, `w` has written, `x` failed, `d` told that the batch is
    done, `p` committed (of a plain transaction).
    """

    state: str = "-"
    group: int = NONE
    number: int = NONE


class Driver(NamedTuple):
    """`turn`: which of its nonces it is at; `told`: batches that it was told are committed."""

    phase: str
    epoch: int = NONE
    turn: int = 0
    batch: int = 0
    told: int = 0


class World(NamedTuple):
    """Everything.  `blocks`: of each leader, (group, next index, first index not reserved)."""

    key: Key
    headers: tuple[Header, ...]
    requests: tuple[Request | None, ...]
    drivers: tuple[Driver, ...]
    attempts: tuple[Attempt, ...]
    blocks: tuple[tuple[int, int, int], ...]
    rows: tuple[tuple[int, int, int], ...] = ()
    """Ghost: group, index and attempt of each row that was written."""
    commits: tuple[Commit, ...] = ()
    """Ghost: in the order in which they were made."""
    answered: int = 0
    """Ghost: the highest epoch that an OPEN was answered."""
    problem: str = ""
    """An answer that was wrong."""
    faults: int = 0
    copies: int = 0

    def read(self, group: int) -> Header | None:
        """The header, None if it is collected."""
        header = self.headers[group]
        return None if header.gone else header

    def with_header(self, group: int, header: Header) -> "World":
        """With that header in the place of what was there."""
        return self._replace(headers=put(self.headers, group, header))


def put(items: tuple, at: int, item: object) -> tuple:  # type: ignore[type-arg]
    """The tuple with another item there."""
    return (*items[:at], item, *items[at + 1 :])
