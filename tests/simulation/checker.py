"""Judges a whole history.

Rules (letters as in `docs/transactions.md` where there is one):

- What was receipted is delivered to every subscription: if it was sent without a transaction, or in
  one that committed.
- Nothing is delivered that was never sent, or by a transaction that had not committed by then.
- Messages of one key that a producer awaited are delivered first in their order, to STREAM; to
  Key_Shared too, within a segment.
- A message goes to an ordered consumer only when no other one has an earlier message of its key
  (`hand_overs.py`).
- What was acknowledged durably, or by a transaction that committed, is not delivered again, unless
  a seek says so.
- No two transactions that commit have acknowledged a message of a queue.
- What only aborted transactions acknowledged is delivered again; what a seek went back to, too.
- What a named producer sent again is not there twice, on whatever segments; but for messages that
  a program sent to a partition before a migration, under an id that another partition did not reach
  (C4).
- An OPEN of a transaction key that was answered is the end of every older epoch: none commits
  after it, none has a transaction beside it, and its answer tells how the last one ended.
- A batch that groups commit is committed once, of the attempts that its driver named: the others
  are never delivered.  Who is told that it is committed, or which one was last, is told the truth.
- A header ends once, and does not come back once it was collected.  The same END again succeeds
  (L4).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from magnetar.protocol.txn_id import NUMBER_BITS
from tests.simulation.hand_overs import broken_hand_overs
from tests.simulation.history import Acked, Delivered, History, KeyOpened, Message, Place, Txn

COMMITTED = "COMMITTED"
QUEUE, SEEKER, STREAM = "q", "k", "s"
_ENDED = "InvalidTxnStatus"
JOB = "job"
"""The transaction key of drivers that commit groups."""


class Checker:
    """See the module's rules."""

    def __init__(
        self, history: History, subscriptions: dict[str, list[str]], ordered: Iterable[str]
    ) -> None:
        """`subscriptions` of each topic; those of them that are `ordered`."""
        self._history = history
        self._ordered = list(ordered)
        self._subscriptions = subscriptions
        self._topics = {message.name: message.topic for message in history.messages.values()}

    def committed_at(self, txn: Txn) -> float | None:
        """Of an attempt: when its group committed, if it is among the winners (G1)."""
        most, least = txn
        if least >> NUMBER_BITS:
            made = self._history.commits.get((most, least & (1 << NUMBER_BITS) - 1))
            won = made is not None and least >> NUMBER_BITS in made.winners
            return made.at if won and made is not None else None
        for change in self._history.headers.get(txn, ()):
            if change.state == COMMITTED:
                return change.at
        return None

    def must_be_seen(self, message: Message) -> bool:
        """Whether it has to come out of every subscription."""
        if message.receipt_at is None:
            return False
        return message.txn is None or self.committed_at(message.txn) is not None

    def settled(self) -> bool:
        """Whether everything that must be seen has been acknowledged for good everywhere."""
        return next(chain(self._unsettled(), self._not_sought()), None) is None

    def violations(self) -> list[str]:
        """One sentence for each thing that must not be."""
        found = list(self._history.violations)
        found += self.shown()
        found += self._unsettled()
        found += self._not_sought()
        for subscription in self._ordered:
            found += self._out_of_order(subscription)
        found += broken_hand_overs(self._history, STREAM, self.committed_at)
        found += self._twice()
        found += self._acknowledged_twice()
        found += self._headers()
        found += self._keys()
        found += self._groups()
        return found

    def shown(self) -> list[str]:
        """Deliveries that must not have been: nothing that comes later makes them good."""
        return [*self._unknown_or_hidden(), *self._delivered_again()]

    # The rules

    def _unsettled(self) -> Iterator[str]:
        seen = {(each.subscription, each.message) for each in self._history.deliveries}
        # An acknowledgement that is late and not answered shares its transaction's outcome (A1).
        settled = {
            (ack.subscription, ack.message)
            for ack in self._history.acks
            if ack.txn is None or self.committed_at(ack.txn) is not None
        }
        for message in self._history.messages.values():
            if not self.must_be_seen(message):
                continue
            for subscription in self._subscriptions.get(message.topic, ()):
                if (subscription, message.name) not in seen:
                    yield f"lost: {message.name} was never delivered to {subscription!r}"
                elif subscription != SEEKER and (subscription, message.name) not in settled:
                    yield (
                        f"stuck: {message.name} was delivered to {subscription!r}, never "
                        "acknowledged for good, and not delivered again"
                    )

    def _is_final(self, ack: Acked) -> bool:
        if ack.answered_at is None:
            return False
        return ack.txn is None or self.committed_at(ack.txn) is not None

    def _unknown_or_hidden(self) -> Iterator[str]:
        for each in self._history.deliveries:
            message = self._history.messages.get(each.message)
            if message is None:
                yield f"unknown: {each.message} at {each.segment} {each.position} was never sent"
            elif message.txn is not None:
                committed_at = self.committed_at(message.txn)
                if committed_at is None or committed_at > each.written_at:
                    yield (
                        f"hidden: {message.name} of transaction {message.txn} was delivered to "
                        f"{each.subscription!r} at {each.written_at:.6f} s; its header: "
                        f"{self._history.headers.get(message.txn)}"
                    )

    def _not_sought(self) -> Iterator[str]:
        """Where a seek went back, and nobody has acknowledged for good since."""
        seeks = self._history.seeks
        acked_at: defaultdict[Place, float] = defaultdict(lambda: -1.0)
        for ack in self._history.acks:
            if ack.subscription == SEEKER:
                at = ack.at if ack.txn is None else self.committed_at(ack.txn) or -1.0
                acked_at[ack.position] = max(at, acked_at[ack.position])
        places = {
            each.position: each.message
            for each in self._history.deliveries
            if each.subscription == SEEKER
        }
        for position, name in places.items():
            back = on = 0.0
            for each in seeks:
                if position < each.target:
                    on = each.at
                elif each.answered_at is not None:
                    back = each.at
            if on <= back and acked_at[position] < back:
                yield f"not sought: {name} at {position} after the seek at {back:.6f} s"

    def _out_of_order(self, subscription: str) -> Iterator[str]:
        first: dict[str, tuple[float, int, str]] = {}
        shown: dict[str, tuple[float, int, str]] = {}
        """The first one of all: what a broker showed before it was replaced may be held since."""
        for place, each in enumerate(self._history.deliveries):
            if each.subscription == subscription:
                order = (each.written_at, place, each.segment)
                shown[each.message] = min(shown.get(each.message, order), order)
                if not each.stale:
                    first[each.message] = min(first.get(each.message, order), order)
        by_key: defaultdict[tuple[str, str, str, str], list[Message]] = defaultdict(list)
        for message in self._history.messages.values():
            if message.awaited and self.must_be_seen(message) and message.name in first:
                # A queue has all segments of a topic beside each other.
                segment = first[message.name][2] if subscription == QUEUE else ""
                by_key[message.topic, segment, message.producer, message.key].append(message)
        for (_, _, _, key), messages in by_key.items():
            messages.sort(key=lambda each: each.number)
            for before, after in pairwise(messages):
                if first[after.name] < shown[before.name]:
                    yield f"order: {subscription} {after.name} before {before.name}, key {key}"

    def _twice(self) -> Iterator[str]:
        """Messages that are stored twice and must not be.

        No range of keys says which partition of a migrated topic has a message.  So the segments
        that follow compare ids up to the lowest last one of the partitions (C4): a message above it
        may be once on a partition and once on a segment.
        """
        stored: defaultdict[str, set[tuple[str, Place]]] = defaultdict(set)
        last: defaultdict[tuple[str, str], int] = defaultdict(lambda: -1)
        for each in self._history.deliveries:
            message = self._history.messages.get(each.message)
            if message is None:
                continue
            on = message.producer, each.segment
            last[on] = max(last[on], message.number)
            if message.once:
                stored[each.message].add((each.segment, each.position))
        for name, places in stored.items():
            message = self._history.messages[name]
            partitions = self._history.partitions.get(message.topic, ())
            compared = min((last[message.producer, each] for each in partitions), default=None)
            times = len(places)
            if compared is not None and message.number > compared:
                before = sum(segment in partitions for segment, _ in places)
                times = max(before, times - before)
            if times > 1:
                yield f"twice: {name} at {sorted(places)}"

    def _acknowledged_twice(self) -> Iterator[str]:
        holders: dict[tuple[str, str, Place], Txn] = {}
        for ack in self._history.acks:
            # Others acknowledge cumulatively, and so what is acknowledged already, too.
            if ack.txn is None or ack.subscription != QUEUE or not self._is_final(ack):
                continue
            place = ack.subscription, ack.segment, ack.position
            first = holders.setdefault(place, ack.txn)
            if first != ack.txn:
                yield f"acknowledged twice: {ack.message} by {first} and by {ack.txn}"

    def _delivered_again(self) -> Iterator[str]:
        settled: defaultdict[tuple[str, str, Place], list[Acked]] = defaultdict(list)
        for ack in self._history.acks:
            if self._is_final(ack):
                settled[ack.subscription, ack.segment, ack.position].append(ack)
        for each in self._history.deliveries:
            for final in settled.get((each.subscription, each.segment, each.position), ()):
                late = each.written_at > (final.answered_at or 0)
                if late and not each.stale and not self._went_back(each, final):
                    yield (
                        f"again: {each.message} at {each.position} was delivered to "
                        f"{each.subscription!r} at {each.written_at:.6f} s, after its "
                        f"acknowledgement was durable at {final.answered_at:.6f} s "
                        f"(txn {final.txn})"
                    )
                    break

    def _went_back(self, delivery: Delivered, ack: Acked) -> bool:
        return any(
            sought.subscription == ack.subscription
            and sought.at < delivery.written_at
            and sought.undoes(ack.position, ack.at)
            for sought in self._history.seeks
        )

    def _keys(self) -> Iterator[str]:
        """K1 to K3."""
        holders: dict[tuple[str, int], str] = {}
        for opened in self._history.openings:
            holder = holders.setdefault((opened.key, opened.epoch), opened.who)
            if holder != opened.who:
                yield f"key: {opened.who} and {holder} have epoch {opened.epoch}"
            yield from self._told(opened)
        begun = [each for each in self._history.transactions.values() if each.key is not None]
        for each in begun:
            ended_at = self._ended_at(each.txn)
            key, epoch = each.key or ("", 0)
            for opened in self._history.openings:
                if opened.key == key and opened.epoch > epoch and ended_at > opened.at:
                    yield f"key: {each.txn} of epoch {epoch} outlived the answer {opened}"
        begun.sort(key=lambda each: (each.key or ("", 0), each.begun_at))
        for before, after in pairwise(begun):
            is_of_one = (before.key or "")[:1] == (after.key or "")[:1]
            if is_of_one and self._ended_at(before.txn) > after.begun_at:
                yield f"key: {before.txn} and {after.txn} of {after.key} were open at once"

    def _groups(self) -> Iterator[str]:
        """G2 to G6: each batch once, with what its driver named; whoever is told, rightly."""
        by_batch: dict[tuple[str, tuple[str, int]], Txn] = {}
        commits = self._history.commits
        for group, made in commits.items():
            first = by_batch.setdefault((made.key, made.batch), group)
            if first != group:
                yield f"group: {made.batch} was committed by {first} and by {group}"
        for who, batch, at in self._history.told_done:
            if not any(made.batch == batch and made.at <= at for made in commits.values()):
                yield f"group: {who} was told at {at:.6f} s that {batch} is committed"
        nonces: dict[str, Txn] = {}
        given: set[Txn] = set()
        for asked in self._history.groups:
            if nonces.setdefault(asked.nonce, asked.group) != asked.group:
                yield f"group: nonce {asked.nonce} has {nonces[asked.nonce]} and {asked.group}"
            for attempt in asked.attempts:
                if attempt in given:
                    yield f"group: attempt {attempt} was given twice"
                given.add(attempt)
            found = commits.get(asked.group)
            if found is not None and found.winners != asked.winners:
                yield f"group: {found} committed, and its driver named {asked.winners}"
        for opened in self._history.openings:
            if opened.key == JOB:
                yield from self._told_batch(opened)

    def _told_batch(self, opened: KeyOpened) -> Iterator[str]:
        """What the answer said of the last group: all older epochs have ended by then."""
        before = [
            made
            for made in self._history.commits.values()
            if made.key == opened.key and made.epoch < opened.epoch
        ]
        last = max(before, key=lambda made: made.at).batch if before else None
        if opened.told != last:
            yield f"group: {opened} tells another batch than the last one, {last}"

    def _told(self, opened: KeyOpened) -> Iterator[str]:
        """What the answer said of the last transaction."""
        if opened.last is None or opened.last_committed is None:
            return
        if opened.last_committed != (self.committed_at(opened.last) is not None):
            yield f"key: {opened} tells the wrong end of {opened.last}"

    def _ended_at(self, txn: Txn) -> float:
        for change in self._history.headers.get(txn, ()):
            if change.state != "OPEN":
                return change.at
        return float("inf")

    def _headers(self) -> Iterator[str]:
        for txn, changes in self._history.headers.items():
            ends = [each.state for each in changes if each.state not in ("OPEN", None)]
            states = [each.state for each in changes]
            if len(set(ends)) > 1:
                yield f"header: transaction {txn} ended twice: {states}"
            # One that no client heard of may: its coordinator makes sure that it is ended.
            known = txn in self._history.transactions
            if known and None in states and states.index(None) != len(states) - 1:
                yield f"header: transaction {txn} came back: {states}"
        for record in self._history.transactions.values():
            state = next(
                (each.state for each in self._history.headers.get(record.txn, ()) if each.state
                 not in ("OPEN", None)), None,
            )  # fmt: skip
            for action, error in record.answers:
                if not error and state != action:
                    yield f"answer: {record.txn} was answered {action}, and its header says {state}"
                again = error.startswith(_ENDED) and state == action and record.key is None
                if again:
                    yield f"answer: {record.txn} is {state}, and an END of it was answered {error}"


def visible(deliveries: Iterable[Delivered], subscription: str) -> list[str]:
    """Names of what a subscription got, in order."""
    return [each.message for each in deliveries if each.subscription == subscription]
