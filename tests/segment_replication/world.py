"""Two clusters, of which one is replicated to the other, in a world that a seed decides."""

import random
from collections.abc import Callable

from tests.segment_replication.rules import Rules
from tests.segment_replication.source import NO_KEY, Link, Message, Sender, SourceCluster
from tests.segment_replication.target import TargetCluster, TargetSegment, Violation

STEPS = 300
"""Events of a run, before everything is let come to its end."""
ROUNDS_MAX = 400
"""Rounds in which everything has to come to its end."""
STALE_MAX = 3
"""Senders that go on beside their successors."""


class World:
    """One run.  `run` raises `Violation`."""

    def __init__(self, seed: int, broken: str = "", *, halves: bool = False) -> None:
        """With `halves` most runs send the rest of entries that are stored in part."""
        self.rng = random.Random(seed)
        self.rules = Rules(broken)
        self.halves = halves
        batches = (8,) if halves else (0, 0, 2, 4)
        self.source = SourceCluster(self.rng, self.rules, batches)
        self.target = TargetCluster(self.rng, self.rules)
        self.senders: dict[int, Sender] = {}
        """By source segment: the sender of its owner."""
        self.stale: list[Sender] = []
        self.links: list[Link] = []
        self._slow = self.rng.choice((0.02, 0.1, 0.5))
        """How often a stale sender comes, so that some wake up when much has changed."""
        self._late = self.rng.choice((0.05, 1))
        """How often a frame comes that was sent over a connection whose sender is gone."""
        self._events = self._weighted()

    def _weighted(self) -> tuple[list[Callable[[], None]], list[float]]:
        """The events, and how often each one comes; each run has other frequencies."""
        rng = self.rng
        weights: list[tuple[Callable[[], None], float]] = [
            (self.source.produce, 8),
            (self.step, 24),
            (self.deliver, 30),
            (self.answer, 24),
            (self.store, 16),
            (self.start_senders, 6),
            (self.learn, 6),
            (self.source.terminate, 4),
            (self.target.terminate, 4),
            (self.inherit, 6),
            (self.source.persist, 4),
            (self.save, rng.choice((0.5, 3))),
            (self.source.reshape, rng.choice((0, 1.5, 3))),
            (self.target.reshape, rng.choice((0, 1.5, 3))),
            (self.source.prune, rng.choice((1, 6))),
            (self.crash_source, rng.choice((0, 1, 4))),
            (self.crash_target, rng.choice((0, 1, 4))),
            (self.lose, rng.choice((0, 0.5, 1))),
            (self.cut, rng.choice((0, 1, 3))),
            (self.leave, rng.choice((0, 1, 3))),
            (self.expire, rng.choice((0, 0, 0.5, 2))),
            (self.recreate, rng.choice((0, 0, 0, 0.4))),
            (self.end_transaction, 2 if self.source.transactional else 0),
            (self.source.settle, 4 if self.source.transactional else 0),
        ]
        restores = rng.choice((0, 0, 0, 0.4))
        weights += [
            (self.source.back_up, 2 * restores),
            (self.restore, restores),
            # Ledgers that a backup does not have: their ids are given again.
            (self.crash_source, 6 * restores),
            # Segments that are sealed in a backup, and not terminated.
            (self.source.reshape, 8 * restores),
        ]
        if self.halves:
            # The target changes its layout all the time, and entries are for many segments of it.
            often = {self.target.reshape: 4.0, self.target.terminate: 8, self.inherit: 14}
            often |= {self.learn: 14, self.store: 12, self.source.reshape: 0.7}
            weights = [(event, often.get(event, weight)) for event, weight in weights]
        return [event for event, _ in weights], [weight for _, weight in weights]

    def run(self) -> None:
        """All of it.  Raises `Violation`."""
        events, weights = self._events
        for event in self.rng.choices(events, weights, k=STEPS):
            event()
        self.finish()

    # Events of the source

    def start_senders(self) -> None:
        """Start the senders of the segments that may be sent, and end those of others."""
        wanted = self.source.to_send()
        for segment_id, sender in list(self.senders.items()):
            if sender.stale or segment_id not in wanted:
                del self.senders[segment_id]
                self._retire(sender)
        for segment_id in wanted:
            if segment_id not in self.senders:
                self.source.open_cursor(segment_id)
                sender = Sender(self.source, segment_id, self.target.seen())
                self.senders[segment_id] = sender

    def _retire(self, sender: Sender) -> None:
        """A sender without its segment ends, or goes on for a while as it does not know that."""
        if sender.epoch != sender.log.owner_epoch and len(self.stale) < STALE_MAX:
            self.stale.append(sender)
        else:
            self._stop(sender)

    def _stop(self, sender: Sender) -> None:
        for link in list(sender.links.values()):
            sender.leave(link)

    def _sender(self) -> Sender | None:
        late = self.stale and self.rng.random() < self._slow
        senders = self.stale if late else list(self.senders.values())
        return self.rng.choice(senders) if senders else None

    def step(self) -> None:
        """Let a sender send."""
        sender = self._sender()
        if sender is not None:
            self._step(sender)

    def _step(self, sender: Sender) -> None:
        opened = sender.step()
        if opened is not None:
            self.links.append(opened)
            self.target.segments[opened.segment_id].connect(opened)

    def learn(self) -> None:
        """Let a sender hear of a layout: of the other cluster's, or of its own."""
        sender = self._sender()
        if sender is None:
            return
        if self.rng.random() < 0.6:
            sender.learn(self.target.seen())
        elif sender.incarnation == self.source.incarnation:
            if sender.segment_id in self.source.layout.segments:
                sender.layout = self.source.layout
            elif sender in self.stale:
                self.stale.remove(sender)
                self._stop(sender)

    def crash_source(self) -> None:
        """A segment of the source gets another owner; the former one may go on."""
        self.source.crash()
        if len(self.stale) == STALE_MAX:
            self._stop(self.stale.pop(0))

    def expire(self) -> None:
        """Entries of a segment are older than their time to live."""
        late = self._sender()
        if late is not None and self.rng.random() < 0.3:
            self._pass_expired(late)
            return
        segment_id, expired = self.source.expire()
        sender = self.senders.get(segment_id)
        for entry in expired:
            self.target.judge.expired.update(entry.messages)
            if sender is not None and sender.log is self.source.logs[segment_id]:
                sender.acked.add(entry.position)

    def _pass_expired(self, sender: Sender) -> None:
        """The next entry of a sender is expired, which it sees itself."""
        entry = sender.next_entry()
        if entry is not None and entry.chunk is None:
            self.target.judge.expired.update(entry.messages)
            if self.rules.breaks("R9-expired"):
                sender.core.skip(entry.position)
            else:
                sender.pass_over(entry)

    def recreate(self) -> None:
        """Delete the topic in the source, and create it anew."""
        self.source.recreate()

    def end_transaction(self) -> None:
        """Commit or abort a transaction."""
        self.target.judge.excluded |= self.source.end_transaction()

    def restore(self) -> None:
        """Restore the source from its backup: all its processes end."""
        if self.source.saved is None:
            return
        for sender in [*self.senders.values(), *self.stale]:
            self._stop(sender)
        self.senders, self.stale = {}, []
        gone, left = self.source.restore()
        self.target.judge.expired |= gone
        self.target.judge.again |= left
        for _ in range(self.rng.choice((0, 0, 5, 30))):
            self.source.produce()  # before any sender has attached

    def renew(self) -> None:
        """Give the topic a new incarnation, which ends all sessions."""
        for sender in [*self.senders.values(), *self.stale]:
            self._stop(sender)
        self.senders, self.stale = {}, []
        passed, excluded = self.source.renew()
        self.target.judge.expired |= passed
        self.target.judge.excluded |= excluded

    # The network

    def _link(self) -> Link | None:
        return self.rng.choice(self.links) if self.links else None

    def deliver(self) -> None:
        """A frame arrives at the target."""
        link = self._link()
        if link is not None and (not link.left or self.rng.random() < self._late):
            self.target.segments[link.segment_id].receive(link)
            self._collect(link)

    def answer(self) -> None:
        """An answer arrives at a sender."""
        link = self._link()
        if link is not None and not link.left:
            self._hear(link)

    def _hear(self, link: Link) -> None:
        sender = link.sender
        sender.hear(link)
        if sender.went_back and sender.incarnation == self.source.incarnation:
            self.renew()
        self._collect(link)

    def _collect(self, link: Link) -> None:
        if link.left and (link.cut or not link.to_remote):
            self.target.segments[link.segment_id].cut(link)
            self.links.remove(link)

    def cut(self) -> None:
        """The target's end of a connection is gone; some of its answers arrive."""
        link = self._link()
        if link is not None:
            for _ in range(self.rng.randrange(len(link.to_sender) + 1)):
                link.to_sender.pop()
            self.target.segments[link.segment_id].cut(link)

    def leave(self) -> None:
        """The sender's end of a connection is gone; some of what it sent arrives, later."""
        link = self._link()
        if link is not None and not link.left:
            for _ in range(self.rng.randrange(len(link.to_remote) + 1)):
                link.to_remote.pop()
            link.sender.leave(link)
            self._collect(link)

    # Events of the target

    def _busy(self) -> TargetSegment | None:
        busy = [each for each in self.target.segments.values() if each.on_its_way]
        return self.rng.choice(busy) if busy else None

    def store(self) -> None:
        """An entry becomes durable."""
        segment = self._busy()
        if segment is not None:
            segment.store()

    def save(self) -> None:
        """A segment of the target writes its snapshot."""
        self.target.any().save()

    def inherit(self) -> None:
        """A segment of the target takes over what its parents have."""
        self.target.any().inherit()

    def crash_target(self) -> None:
        """A segment of the target gets another owner."""
        segment = self._busy() or self.target.any()
        while segment.on_its_way and self.rng.random() < 0.5:
            segment.store()
        segment.crash()

    def lose(self) -> None:
        """The target's ledger fails."""
        segment = self._busy()
        if segment is not None:
            if self.rng.random() < 0.5:
                segment.store()
            if segment.on_its_way:
                segment.lose()

    # The end

    def finish(self) -> None:
        """No more faults: all that was written arrives.  Raises `Violation`."""
        for sender in self.stale:
            self._stop(sender)
        self.stale = []
        while self.source.transactions:
            self.end_transaction()
        for _ in range(ROUNDS_MAX):
            self._round()
            if self._complete() is None:
                return
        raise Violation(f"it does not end: {self._complete()}")

    def _round(self) -> None:
        self.source.terminate()
        self.source.settle()
        self.target.terminate()
        self.start_senders()
        for segment in self.target.segments.values():
            segment.inherit()
        for sender in self.senders.values():
            sender.learn(self.target.seen())
            sender.layout = self.source.layout
            self._step(sender)
        for link in list(self.links):
            self.target.segments[link.segment_id].receive(link)
        for segment in self.target.segments.values():
            while segment.on_its_way:
                segment.store()
        for link in list(self.links):
            if link in self.links and not link.left:
                self._hear(link)
            elif link in self.links:
                self._collect(link)

    def _complete(self) -> str | None:
        """What is missing."""
        life = self.source.life
        for key, written in enumerate(self.source.written):
            if key == NO_KEY:
                sent = {Message(life, key, number) for number in range(written)}
                missing = {each for each in sent if not self.target.judge.may_miss(each)}
                if missing:
                    return f"{len(missing)} messages without key have not arrived"
                continue
            stored = self.target.judge.expected(life, key, written)
            if stored != written:
                return f"{stored} of {written} messages of key {key} have arrived"
        return None


def problem_of(seed: int, broken: str = "", *, halves: bool = False) -> str | None:
    """What goes wrong in a run."""
    try:
        World(seed, broken, halves=halves).run()
    except Violation as violation:
        return str(violation)
    return None


def first_seed(broken: str, seeds: range) -> tuple[int, str] | None:
    """The first run that shows that a rule is broken, and what goes wrong."""
    for seed in seeds:
        problem = problem_of(seed, broken)
        if problem is not None:
            return seed, problem
    return None
