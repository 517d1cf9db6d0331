"""Runs the demo and shows it: on a terminal with colours and a bar, else line by line."""

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from magnetar.bounds import DEMO_DISK_BYTES
from magnetar.cli.broker_commands import has_broker, install_advice
from magnetar.cli.demo.processes import DemoFailed
from magnetar.cli.demo.story import Story

MIB: Final = 1024 * 1024


def perform(orders: int, keep: bool) -> bool:
    """Run the demo; returns whether each order has one bill, in order.

    Raises `DemoFailed`, also without `magnetar-broker` or with too little free disk.
    """
    if not has_broker():
        raise DemoFailed(install_advice("demo"))
    place = tempfile.gettempdir()
    if (free := shutil.disk_usage(place).free) < DEMO_DISK_BYTES:
        raise DemoFailed(
            f"Only {free // MIB} MiB are free in {place}, and the demo needs "
            f"{DEMO_DISK_BYTES // MIB}: free some, or name another directory by TMPDIR."
        )
    directory = Path(tempfile.mkdtemp(prefix="magnetar-demo-"))
    console = Console(highlight=False, soft_wrap=True)
    if keep:
        console.print(f"Data and logs are in {directory}, and stay there.")
    try:
        with Progress(
            TextColumn("     bills"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as progress:
            return asyncio.run(_run_story(directory, orders, progress))
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


async def _run_story(directory: Path, orders: int, progress: Progress) -> bool:
    bar = progress.add_task("", total=orders)
    steps = 0

    def say(step: str) -> None:
        nonlocal steps
        steps += 1
        progress.console.print(f"[bold cyan]{steps:>2}[/]  {escape(step)}")

    def billed(bills: int, of: int) -> None:
        progress.update(bar, completed=bills, total=of)

    running = asyncio.ensure_future(Story(directory, orders, say, billed).run())
    terminated = False

    def end() -> None:
        nonlocal terminated
        terminated = True
        running.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        return await running
    except asyncio.CancelledError:
        if terminated:
            raise DemoFailed("A signal ended the demo before its last step.") from None
        raise
