"""Damage to the data of an embedded broker: what a start found, and the operator's choice.

The report is filled when the stores are opened, and later by checks in the background.  Each
finding is one sentence for the operator.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar

import structlog

from magnetar.protocol.server_error import OperatorError, ServerError

_log = structlog.get_logger(__name__)

EntryRange = tuple[int, int]
"""First and last entry id."""

MAX_LINES = 20
"""Log lines of one process, and sentences of a health answer."""
MAX_SENTENCES = 1000
"""Sentences kept; more are counted."""

ADVICE = (
    "Restore the data directory from a backup; or delete the topics that lost messages; or set "
    'damaged_data = "serve_what_is_left" to go on without them.'
)


class DamagePolicy(StrEnum):
    """What the broker does about damaged data: the setting `damaged_data`."""

    REFUSE_TOPIC = "refuse_topic"
    REFUSE_START = "refuse_start"
    SERVE_WHAT_IS_LEFT = "serve_what_is_left"


class DamageKind(StrEnum):
    """The part of the data that is damaged."""

    LOG = "log"
    INDEX = "index"
    LEDGER = "ledger"
    METADATA = "metadata"


class DamagedData(OperatorError):
    """Data was lost, and the operator's setting refuses to start then."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class LedgerDamage:
    """The entries that a ledger lost.

    `stream` is the ledger path of its topic.  `end_unknown`: its newest entries may be lost too, as
    nothing says how many it had.
    """

    __slots__ = ("end_unknown", "ledger_id", "missing", "stream")

    def __init__(self, ledger_id: int, stream: str) -> None:
        self.ledger_id = ledger_id
        self.stream = stream
        self.missing: tuple[EntryRange, ...] = ()
        self.end_unknown = False

    @property
    def entries(self) -> int:
        """Number of entries that are known to be lost."""
        return sum(last - first + 1 for first, last in self.missing)

    def add(self, ranges: Iterable[EntryRange]) -> None:
        """Add lost entries, which may be known already."""
        merged: list[EntryRange] = []
        for first, last in sorted([*self.missing, *ranges]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(merged[-1][1], last)
            else:
                merged.append((first, last))
        self.missing = tuple(merged)

    @property
    def sentence(self) -> str:
        """The loss as a sentence."""
        whose = f" of {self.stream}" if self.stream else ""
        parts = []
        if self.missing:
            shown = ", ".join(
                f"{first}" if first == last else f"{first} to {last}"
                for first, last in self.missing[:3]
            )
            more = ", ..." if len(self.missing) > 3 else ""
            parts.append(f"has lost {self.entries} entries ({shown}{more})")
        if self.end_unknown:
            parts.append("may have lost its newest entries")
        return f"Ledger {self.ledger_id}{whose} {' and '.join(parts)}."


class DamageReport:
    """The damage that one process found in its data, and the operator's choice.

    Use it on the loop only.
    """

    def __init__(self, policy: DamagePolicy = DamagePolicy.REFUSE_TOPIC) -> None:
        self.policy = policy
        self.streams: frozenset[str] = frozenset()
        """Ledger paths of topics with records in damaged pages of the metadata file."""
        self.metadata_is_behind = False
        """Commits of the metadata store were lost, so records may be missing."""
        self._ledgers: dict[int, LedgerDamage] = {}
        self._sentences: list[str] = []
        self._counts: Counter[DamageKind] = Counter()
        self._losses = 0
        self._logged = 0
        self._on_loss: Callable[[str], None] | None = None

    @property
    def ledgers(self) -> Mapping[int, LedgerDamage]:
        """The damaged ledgers, by id."""
        return self._ledgers

    @property
    def counts(self) -> Mapping[DamageKind, int]:
        """Number of damaged things of each kind."""
        return {**self._counts, DamageKind.LEDGER: len(self._ledgers)}

    @property
    def entries_missing(self) -> int:
        """Number of entries that are known to be lost."""
        return sum(damage.entries for damage in self._ledgers.values())

    @property
    def has_loss(self) -> bool:
        """Whether data was lost.  False if everything that was found could be rebuilt."""
        return bool(self._ledgers) or self._losses > 0

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing may be deleted to give space back."""
        # What looks superfluous may be what is left of the lost data.
        return self.has_loss and self.policy is not DamagePolicy.SERVE_WHAT_IS_LEFT

    def on_loss(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the ledger path of a topic when a ledger of it turns out damaged."""
        self._on_loss = listener

    def note(self, kind: DamageKind, sentence: str, *, lost: bool = True) -> None:
        """Add a finding about a file; `lost` is False if it was rebuilt from other data.

        One that an earlier start kept, and this one finds again, counts once.
        """
        if sentence in self._sentences:
            return
        self._counts[kind] += 1
        self._losses += lost
        if len(self._sentences) < MAX_SENTENCES:
            self._sentences.append(sentence)
        self._log("data_damaged", kind=str(kind), lost=lost, reason=sentence)

    def note_ledger(
        self,
        ledger_id: int,
        stream: str,
        missing: Sequence[EntryRange],
        *,
        end_unknown: bool = False,
    ) -> None:
        """Add lost entries of a ledger."""
        damage = self._ledgers.get(ledger_id)
        is_new = damage is None
        if damage is None:
            damage = self._ledgers[ledger_id] = LedgerDamage(ledger_id, stream)
        before = damage.missing, damage.end_unknown
        damage.add(missing)
        damage.end_unknown |= end_unknown
        if (damage.missing, damage.end_unknown) != before:
            reason = damage.sentence
            self._log("data_damaged", kind=str(DamageKind.LEDGER), lost=True, reason=reason)
        if is_new and self._on_loss is not None:
            self._on_loss(stream)

    def forget_ledger(self, ledger_id: int) -> None:
        """Forget the losses of a ledger that was deleted."""
        self._ledgers.pop(ledger_id, None)

    def _log(self, event: str, **fields: object) -> None:
        # A disk that fails has a finding for each of its blocks.
        self._logged += 1
        if self._logged <= MAX_LINES:
            _log.error(event, **fields)
        elif self._logged == MAX_LINES + 1:
            _log.error("data_damaged_more", action="see /admin/v2/brokers/health and /metrics")

    def sentences(self, limit: int = MAX_LINES) -> list[str]:
        """The findings, the first `limit` of them, and one sentence that counts the others."""
        ledgers = (damage.sentence for damage in self._ledgers.values())
        found = [*self._sentences, *ledgers]
        more = sum(self._counts.values()) + len(self._ledgers) - min(len(found), limit)
        return found[:limit] + ([f"{more} more are damaged."] if more else [])

    def summarize(self) -> None:
        """Log one line with the sums, if anything is damaged.  For the end of a start."""
        if self._counts or self._ledgers:
            _log.error(
                "data_damage_found",
                counts={str(kind): count for kind, count in self.counts.items()},
                entries_missing=self.entries_missing,
                policy=str(self.policy),
                lost=self.has_loss,
            )

    def require_start(self) -> None:
        """Raise `DamagedData` if data was lost and the operator wants no start then."""
        if self.has_loss and self.policy is DamagePolicy.REFUSE_START:
            found = " ".join(self.sentences())
            raise DamagedData(
                f'Data was lost, and damaged_data is "refuse_start": {found} Nothing was deleted. '
                f"{ADVICE}"
            )

    def refusal_of(self, stream: str, ledger_ids: Iterable[int]) -> str | None:
        """The reason to refuse a stream of these ledgers; None if it may be served."""
        if self.policy is DamagePolicy.SERVE_WHAT_IS_LEFT:
            return None
        if stream in self.streams:
            return (
                f"{stream} is not served, as its records are in a damaged page of the metadata "
                f"file and may be wrong. {ADVICE}"
            )
        found = [self._ledgers[each] for each in ledger_ids if each in self._ledgers]
        if not found:
            return None
        more = f" {len(found) - 3} more are damaged." if len(found) > 3 else ""
        return (
            f"{stream} is not served, as messages of it were lost: "
            f"{' '.join(damage.sentence for damage in found[:3])}{more} {ADVICE}"
        )

    def missing_entries(self, ledger_id: int) -> Sequence[EntryRange]:
        """The lost entries to step over; none if the topic of the ledger is not to be served."""
        damage = self._ledgers.get(ledger_id)
        if damage is None or self.policy is not DamagePolicy.SERVE_WHAT_IS_LEFT:
            return ()
        return damage.missing
