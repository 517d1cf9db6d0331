"""What a consumer refuses to acknowledge in a transaction.

Rule: who catches the refusal cannot commit all the same, as the message comes again.
"""

import asyncio
from contextlib import suppress

from magnetar.consume.segment_consumer import AckTransaction
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError

__all__ = ["cannot_commit"]


def cannot_commit(
    context: ClientContext, transaction: AckTransaction, error: MagnetarError
) -> None:
    """See the module's rule; nothing to do if the transaction has ended."""
    failed: asyncio.Future[object] = context.loop.create_future()
    failed.set_exception(error)
    failed.exception()  # seen
    with suppress(MagnetarError):
        transaction.track(failed)
