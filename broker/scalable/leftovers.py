"""Steps, begun here or by an earlier leader, that are neither finished nor undone."""

import asyncio

from broker.scalable.steps import Step


class Leftovers:
    """Steps that housekeeping tries again until they are finished or undone.

    A step is added before it is tried, or when it fails.
    """

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._added = asyncio.Event()

    def add(self, step: Step) -> None:
        """Have a step tried again; it replaces an earlier step of the same key."""
        if self._steps.get(step.key) != step:
            self._steps[step.key] = step
            self._added.set()

    def discard(self, step: Step) -> None:
        """Forget a step that is done, or is another broker's; one that replaced it stays."""
        if self._steps.get(step.key) == step:
            del self._steps[step.key]

    def all(self) -> list[Step]:
        """All steps."""
        return list(self._steps.values())

    async def wait(self) -> None:
        """Return when there is at least one step."""
        while not self._steps:
            self._added.clear()
            await self._added.wait()

    async def added_within(self, seconds: float) -> bool:
        """Wait until another step is added, at most this long; whether one was.

        One that was added since the last wait, while others were tried, counts.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._added.wait()
        except TimeoutError:
            return False
        self._added.clear()
        return True
