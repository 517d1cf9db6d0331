"""A real broker process that kills itself (SIGKILL) at a chosen write of a layout change.

`python -m tests.support.dying_broker` is the `magnetar` command with one addition: each write to
the metadata store may be the process's last.  The test names the write in a file, at any time, by
patterns that writes match one after the other: the process dies after the write that matches the
last one.  That write is durable, but neither the rest of the broker nor a client learns so.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from broker.app import shared_stores, stores
from magnetar.cli.main import main as run_command
from storage.metadata.open import open_metadata_store
from storage.metadata.store import IndexEntry, MetadataStore, PutResult, Session, Version
from storage.metadata.store_wrapper import MetadataStoreWrapper
from tests.support.broker_process import BrokerProcess, Code
from tests.support.security import Security
from tests.support.waiting import until

T = TypeVar("T")

VARIABLE: Final = "DYING_BROKER_DIRECTORY"
"""Names the directory of the two files in the environment of the process."""
PLAN: Final = "dies-at.json"
WRITES: Final = "writes.txt"
"""The writes that matched, one a line; the last one is where the process died."""
WITH: Final = " WITH "


class DyingStore(MetadataStoreWrapper):
    """Kills its process after the write that the plan names."""

    def __init__(self, store: MetadataStore, directory: Path) -> None:
        super().__init__(store)
        self._directory = directory

    def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> Coroutine[object, object, PutResult]:
        put = super().put(
            key,
            value,
            partition=partition,
            expect=expect,
            session=session,
            sequence=sequence,
            indexes=indexes,
        )
        return self._finish_write("put", key, put, value)

    def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> Coroutine[object, object, bool]:
        delete = super().delete(key, partition=partition, expect=expect)
        return self._finish_write("delete", key, delete)

    async def _finish_write(
        self, verb: str, key: str, write: Coroutine[object, object, T], value: bytes = b""
    ) -> T:
        result = await write
        plan = self._directory / PLAN
        if plan.exists():
            self._die_if_planned(f"{verb} {key}", value, json.loads(plan.read_text("utf-8")))
        return result

    def _die_if_planned(self, write: str, value: bytes, patterns: Sequence[str]) -> None:
        matched = _lines(self._directory / WRITES)
        key_pattern, _, part = patterns[len(matched)].partition(WITH)
        if re.search(key_pattern, write) is None or part.encode() not in value:
            return
        with (self._directory / WRITES).open("a", encoding="utf-8") as writes:
            writes.write(f"{write}\n")
        if len(matched) + 1 == len(patterns):
            os.kill(os.getpid(), signal.SIGKILL)


class DyingBroker(BrokerProcess):
    """A broker process that dies where `die_at` says."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        security: Security | None = None,
    ) -> None:
        code = Code(variables={VARIABLE: str(directory)}, main=__name__)
        super().__init__(directory, settings, code, security)

    def die_at(self, patterns: Sequence[str]) -> None:
        """Die at a write that the last pattern matches, after writes that the others match.

        A write is `put KEY` or `delete KEY`; the patterns are regular expressions.  What follows
        WITH in a pattern has to be in the written value.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / WRITES).unlink(missing_ok=True)
        draft = self.directory / f"{PLAN}.draft"
        draft.write_text(json.dumps(patterns), "utf-8")
        draft.rename(self.directory / PLAN)

    def live_on(self) -> None:
        """Die at no write from now on."""
        (self.directory / PLAN).unlink(missing_ok=True)

    @property
    def writes(self) -> Sequence[str]:
        """The writes that matched so far, as `put KEY` and `delete KEY`."""
        return _lines(self.directory / WRITES)


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines() if path.exists() else []


async def until_one_dies(brokers: Sequence[DyingBroker], timeout_s: float) -> int:
    """Wait until one of the brokers has killed itself, and return its index.

    From then on none of them does.
    """
    (dead,) = await until_some_die(brokers, timeout_s)
    return dead


async def until_some_die(brokers: Sequence[DyingBroker], timeout_s: float) -> list[int]:
    """Wait until at least one of the brokers has killed itself, and return their indexes."""
    await until(lambda: not all(each.running for each in brokers), timeout_s, poll_s=0.02)
    for each in brokers:
        each.live_on()
    dead = [index for index, each in enumerate(brokers) if not each.running]
    for index in dead:
        brokers[index].kill()
    return dead


def _dying(
    open_store: Callable[..., Coroutine[object, object, MetadataStore]], directory: Path
) -> Callable[..., Coroutine[object, object, MetadataStore]]:
    async def opened(*arguments: object, **named: object) -> MetadataStore:
        return DyingStore(await open_store(*arguments, **named), directory)

    return opened


def main() -> None:
    """Run the `magnetar` command over a store that may kill the process."""
    opened = _dying(open_metadata_store, Path(os.environ[VARIABLE]))
    for module in (stores, shared_stores):
        module.open_metadata_store = opened  # type: ignore[attr-defined]
    run_command()


if __name__ == "__main__":
    main()
