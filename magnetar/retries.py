"""`retried`, which repeats a request until it succeeds or its time is up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, OperationTimedOut
from magnetar.wire.attachment import is_retriable

__all__ = ["retried"]

R = TypeVar("R")


async def retried(
    context: ClientContext,
    ask: Callable[[], Awaitable[R]],
    what: str,
    *,
    timeout_s: float | None = None,
    hopeless: Callable[[MagnetarError], bool] = lambda error: not is_retriable(error),
) -> R:
    """Call `ask` until it succeeds, after pauses that grow; returns its result.

    `what` names the request, as the beginning of a sentence.  `timeout_s` is the client's operation
    timeout unless given.  Errors for which `hopeless` is true, by default those that are not
    retriable, are raised at once.  After the timeout it raises the last error, or
    `OperationTimedOut` if there was none.
    """
    limit_s = context.settings.operation_timeout_s if timeout_s is None else timeout_s
    backoff = context.backoff()
    last: MagnetarError | None = None
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    return await ask()
                except MagnetarError as error:
                    if hopeless(error):
                        raise
                    last = error
                await asyncio.sleep(backoff.pause_s())
    except TimeoutError as error:
        if isinstance(error, MagnetarError):
            raise
        if last is not None:
            raise last from None
        raise OperationTimedOut(
            f"{what} did not succeed within {limit_s:g} s; check whether the brokers are well, "
            "or raise operation_timeout_s."
        ) from None
