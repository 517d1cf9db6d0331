"""The same world; the target's subscription is deleted, and made anew when copies are gone."""

from broker.topics.completeness import Completeness
from tests.replicated_subscriptions.segments import CopySegment
from tests.replicated_subscriptions.world import Question, SubscriptionWorld
from tests.segment_replication.target import Violation


class LateWorld(SubscriptionWorld):
    """One run.  `run` raises `Violation`.

    What the target drops while it has no subscription is consumed by nobody there.
    """

    def __init__(self, seed: int, broken: str = "") -> None:
        super().__init__(seed, broken)
        events, weights = self._events
        # Its segments go before home has consumed what they lacked.
        mine = [self.unsubscribe, self.target.reshape, self.prune_target]
        self._events = [*events, *mine], [*weights, self.rng.choice((0.3, 1)), 2, 20]
        self.known: set[int] = set()
        """Segments of the target whose parents were looked at."""

    def _there(self) -> dict[int, CopySegment]:
        segments = self.target.segments.keys() - self.pruned
        return {each: self._copy(each) for each in sorted(segments)}

    def unsubscribe(self) -> None:
        """Delete the target's subscription; some of what is stored goes, and whole segments do."""
        self._notice()
        # What was asked of the former one may move the new one: nothing is promised of that.
        self.questions.clear()
        for segment_id, place in self._there().items():
            place.has_cursor = place.complete = False
            gone = self.rng.choice((0, 0, self.rng.randrange(len(place.entries()) + 1)))
            # Consumers begin behind them.
            place.acked = {each.stored.position for each in place.entries()[:gone]}
            place.durable = set(place.acked)
            place.from_start = not gone or self.broken.breaks("F11-gone")
            place.crash()
            parents = place.segment.segment.parent_ids
            is_first = set(parents) <= self.pruned
            if place.terminated and is_first and self.rng.random() < 0.5:
                self.pruned.add(segment_id)
                place.dropped = True

    def _notice(self) -> None:
        """See the base class.  A child is complete if its parents are, when it is made."""
        children: dict[CopySegment, list[CopySegment]] = {}
        for segment_id, place in self._there().items():
            if segment_id not in self.known:
                self.known.add(segment_id)
                parents = [self._copy(each) for each in place.segment.segment.parent_ids]
                every = all(each.has_cursor and each.complete for each in parents)
                place.complete = every or self.broken.breaks("F11-child")
                children[place] = parents
        super()._notice()
        for place, parents in children.items():
            if parents:
                noted = (each.noted if each.has_cursor else None for each in parents)
                place.noted = Completeness.inherited(noted)

    def _go_on(self, question: Question) -> None:
        is_answered = question.to_tell is not None
        super()._go_on(question)
        if question.to_tell is not None and not is_answered:
            self._note_complete(question)

    def _answer(self, question: Question, segment_id: int) -> None:
        """See the base class.  A child is not loaded before it has what its parents received."""
        if not self._copy(segment_id).segment.parents:
            super()._answer(question, segment_id)

    def _note_complete(self, question: Question) -> None:
        """The target's leader has all answers: none of the copies that ever were is missing."""
        answered = [answers.keys() for answers in question.answers.values()]
        if not answered or any(each != question.segments for each in answered):
            return
        is_unpruned = question.segments == set(range(len(question.segments)))
        places = [self._copy(each) for each in question.segments]
        if not is_unpruned and not self.broken.breaks("F11-pruned"):
            return
        if all(each.complete or (each.has_cursor and each.from_start) for each in places):
            for each in places:
                each.complete = True

    # The end

    def _late_segments(self) -> list[int]:
        newest = self.source.incarnation
        return [each for each, place in self._there().items() if place.is_late(newest)]

    def _settle(self) -> None:
        for _ in self.target.segments:
            self.target.terminate()
            for segment in self.target.segments.values():
                segment.inherit()
        before: list[int] | None = None
        # What one answer has made complete tells more in the next one.
        while (late := self._late_segments()) != before:
            before = late
            super()._settle()

    def _compare(self) -> None:
        if not self._late_segments():
            super()._compare()

    def _consume_all(self, cluster: str) -> None:
        """All is consumed at home, if some of it is not in the target; then none is late."""
        super()._consume_all("S" if self._late_segments() else cluster)
        late = self._late_segments()
        if late:
            raise Violation(f"all is consumed, and the subscription stays late in {late}")
