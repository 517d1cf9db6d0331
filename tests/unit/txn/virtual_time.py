"""Virtual time for tests of timers: when nothing is ready, time jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TypeVar

T = TypeVar("T")

START_MS = 1_700_000_000_000


class _Jump(selectors.BaseSelector):
    """Nothing is ever ready; waiting passes at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits and no timer is set")
        self.now_s += max(timeout, 0.0)
        return []

    def register(self, fileobj: object, events: int, data: object = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)  # type: ignore[arg-type]

    def unregister(self, fileobj: object) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)  # type: ignore[arg-type]

    def get_map(self) -> Mapping[object, selectors.SelectorKey]:  # type: ignore[override]
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is the selector's."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


class VirtualClock:
    """The wall clock over the running loop's time; it can be put forward and back."""

    def __init__(self) -> None:
        self.shift_ms = 0

    def now_ms(self) -> int:
        return START_MS + self.shift_ms + round(asyncio.get_running_loop().time() * 1000)


class ClockSetBack(VirtualClock):
    """One that is set back after so many looks at it; 0: never."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def now_ms(self) -> int:
        now_ms = super().now_ms()
        self.looks -= 1
        if self.looks == 0:
            self.shift_ms -= 5_000
        return now_ms


def now_s() -> float:
    return asyncio.get_running_loop().time()


def run(scenario: Coroutine[None, None, T]) -> T:
    """Run a coroutine on a loop of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


def in_virtual_time(test: Callable[[], Awaitable[T]]) -> Callable[[], T]:
    """A test that runs on a loop of virtual time."""

    async def whole() -> T:
        return await test()

    def run_test() -> T:
        return run(whole())

    run_test.__name__ = getattr(test, "__name__", "test")
    run_test.__doc__ = test.__doc__
    return run_test
