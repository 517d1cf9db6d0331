"""Steps that were begun here, or by an earlier leader, and are neither finished nor undone."""

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
        """It is to be tried again; it takes the place of an earlier step of the same key."""
        if self._steps.get(step.key) != step:
            self._steps[step.key] = step
            self._added.set()

    def discard(self, step: Step) -> None:
        """Nothing is left to do at it, or not by this broker; one that took its place stays."""
        if self._steps.get(step.key) == step:
            del self._steps[step.key]

    def all(self) -> list[Step]:
        """Every one."""
        return list(self._steps.values())

    async def wait(self) -> None:
        """Return when there is one."""
        while not self._steps:
            self._added.clear()
            await self._added.wait()

    async def added_within(self, seconds: float) -> bool:
        """Wait so long; True as soon as another one is added."""
        self._added.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._added.wait()
        except TimeoutError:
            return False
        return True
