"""Histograms of durations in the form that Prometheus reads."""

from collections.abc import Sequence


class Histogram:
    """Counts of durations for each upper bound, in the same unit, and above all bounds."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, duration: float) -> None:
        """Count one duration."""
        self.total += duration
        for place, bound in enumerate(self._bounds):
            if duration <= bound:
                self.counts[place] += 1
                return
        self.counts[-1] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds in Prometheus' notation, each with the count up to it."""
        found, so_far = [], 0
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            so_far += count
            found.append((name, float(so_far)))
        return found
