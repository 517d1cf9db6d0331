"""Commands of the command line, run beside a broker of the same process."""

import asyncio
from collections.abc import Mapping, Sequence

from structlog.testing import capture_logs
from typer import Typer
from typer.testing import CliRunner, Result


async def run_command(
    app: Typer, words: Sequence[str], env: Mapping[str, str] | None = None
) -> Result:
    """Run a command in a thread; what the broker logs meanwhile is no part of its output."""
    with capture_logs():
        return await asyncio.to_thread(CliRunner().invoke, app, words, env=env)
