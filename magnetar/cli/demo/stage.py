"""Where the demo is told: on a terminal with colours and a bar, else line by line."""

import asyncio
import shutil
import signal
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from magnetar.bounds import DEMO_ROOM_BYTES
from magnetar.cli.demo.processes import DemoFailed
from magnetar.cli.demo.story import Story

MIB: Final = 1024 * 1024


def perform(orders: int, keep: bool) -> bool:
    """Tell the story; whether all was whole.  Raises DemoFailed."""
    if not entry_points(group="magnetar.commands", name="standalone"):
        raise DemoFailed(
            "The demo starts a broker, which is not installed: install magnetar-broker beside "
            "magnetar."
        )
    place = tempfile.gettempdir()
    if (free := shutil.disk_usage(place).free) < DEMO_ROOM_BYTES:
        raise DemoFailed(
            f"Only {free // MIB} MiB are free in {place}, and the demo wants "
            f"{DEMO_ROOM_BYTES // MIB}: make room, or name another directory by TMPDIR."
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
            return asyncio.run(_told(directory, orders, progress))
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


async def _told(directory: Path, orders: int, progress: Progress) -> bool:
    bar = progress.add_task("", total=orders)
    steps = 0

    def say(step: str) -> None:
        nonlocal steps
        steps += 1
        progress.console.print(f"[bold cyan]{steps:>2}[/]  {escape(step)}")

    def billed(bills: int, of: int) -> None:
        progress.update(bar, completed=bills, total=of)

    telling = asyncio.ensure_future(Story(directory, orders, say, billed).tell())
    told_to_end = False

    def end() -> None:
        nonlocal told_to_end
        told_to_end = True
        telling.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        return await telling
    except asyncio.CancelledError:
        if told_to_end:
            raise DemoFailed("The demo was told to end before it came to its end.") from None
        raise
