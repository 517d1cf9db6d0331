"""Wall clocks of tests: time passes when the test says so."""

NOW_MS = 1_700_000_000_000


class FakeClock:
    """Shows the time `ms`, which a test may assign."""

    def __init__(self, ms: int = NOW_MS) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms


class TickingClock(FakeClock):
    """Goes ten milliseconds on at each reading."""

    def now_ms(self) -> int:
        self.ms += 10
        return self.ms
