"""The check of every command against its access rule, before its handler.

A decision is made from records in memory.  If one has to be read first, the connection serves
nothing else meanwhile, so that commands keep their order.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog

from broker.policies.authorizer import (
    DENIALS_SHOWN,
    DENIED,
    DENIED_IN_DRY_RUN,
    Authorizer,
    access_denied,
    described,
)
from broker.transactions.own_transactions import OwnTransactions
from broker.wire.connection import Connection, Deferred, Handler
from broker.wire.handlers.access import CommandRule, Opened, Questions
from config.bounds import ACCESS_CHECKS_IN_ONE_GO, ACCESSES_OF_CONNECTION, ACCESSES_OF_ID
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from security.access import Access
from security.audit import AuditLog

log = structlog.get_logger(__name__)
WITHDRAWN: Final = "the role of this client may no longer have what it opened"


class _Request(NamedTuple):
    """A command with its rule, what that asks, and the handler that serves it if it may be sent."""

    rule: CommandRule
    handler: Handler
    connection: Connection
    command: BaseCommand
    entry: bytes | None
    questions: Questions


class AccessGuard:
    """Refuses commands that a role may not send, and ends what it may no longer have.

    With `dry_run` it logs what it would refuse, and refuses nothing.
    """

    def __init__(
        self,
        authorizer: Authorizer,
        rules: Mapping[int, CommandRule],
        audit: AuditLog,
        *,
        dry_run: bool,
    ) -> None:
        self.authorizer = authorizer
        self._rules = rules
        self._audit = audit
        self._dry_run = dry_run
        self._tasks = BackgroundTasks(log)
        self._opened: dict[Connection, dict[Opened, frozenset[Access]]] = {}
        self._changed: set[str] = set()
        self._checking: asyncio.Task[None] | None = None
        self.refused: Counter[BaseCommand.Type] = Counter()
        """Commands that were refused, or would have been, since the start, by type."""
        self.withdrawn = 0
        """Connections that were closed as an access was withdrawn, since the start."""

    def guarded(self, handlers: Mapping[int, Handler]) -> Mapping[int, Handler]:
        """The same handlers, each behind its rule.  Raises ValueError if one has no rule."""
        missing = handlers.keys() - self._rules.keys()
        if missing:
            raise ValueError(f"No access rule has the commands {sorted(missing)}: add them.")
        return {kind: self._guarded(self._rules[kind], each) for kind, each in handlers.items()}

    def _guarded(self, rule: CommandRule, handler: Handler) -> Handler:
        if rule.questions is not None:
            return partial(self._serve, rule, rule.questions, handler)
        if rule.closes is not None:
            return partial(self._serve_closing, rule, handler)
        return handler

    @property
    def checking(self) -> bool:
        """Whether connections are being checked again after a change."""
        return self._checking is not None and not self._checking.done()

    async def stop(self) -> None:
        """Check nothing more."""
        await self._tasks.stop()

    def policies_changed(self, name: str) -> None:
        """Check again what connections have open in a tenant, or `tenant/namespace`.

        What they have closed is not checked again, so no late acknowledgement of that is taken.
        """
        for connection in self._opened:
            connection.closed_consumers.clear()
        self._changed.add(name)
        if not self.checking:
            self._checking = self._tasks.start(self._check_changed(), "access_checks")

    def _serve(
        self,
        rule: CommandRule,
        questions_of: Callable[[BaseCommand], Questions],
        handler: Handler,
        connection: Connection,
        command: BaseCommand,
        entry: bytes | None,
    ) -> Awaitable[None] | None:
        try:
            questions = questions_of(command)
        except MagnetarError as error:
            rule.refuse(connection, command, error)
            return None
        request = _Request(rule, handler, connection, command, entry, questions)
        allowed = self.authorizer.decide_now(connection.roles, questions)
        if allowed is None:
            raise Deferred(partial(self._serve_later, request))
        return self._decided(request, allowed=allowed)

    def _serve_closing(
        self,
        rule: CommandRule,
        handler: Handler,
        connection: Connection,
        command: BaseCommand,
        entry: bytes | None,
    ) -> Awaitable[None] | None:
        closed, known = rule.closed(command), self._opened.get(connection)
        if closed is not None and known is not None:
            known.pop(closed, None)
        return handler(connection, command, entry)

    async def _serve_later(self, request: "_Request") -> Awaitable[None] | None:
        connection, questions = request.connection, request.questions
        try:
            allowed = await self.authorizer.decide(connection.roles, questions)
        except MagnetarError as error:
            request.rule.refuse(connection, request.command, error)
            return None
        # A grant may have been withdrawn while records for other questions were read.
        now = self.authorizer.decide_now(connection.roles, questions)
        if connection.closing:
            return None
        return self._decided(request, allowed=allowed if now is None else now)

    def _decided(self, request: "_Request", *, allowed: bool) -> Awaitable[None] | None:
        rule, handler, connection, command, entry, questions = request
        if not allowed:
            self._count_denial(connection, command, questions)
            if not self._dry_run:
                rule.refuse(connection, command, access_denied(questions))
                return None
        self._remember(connection, rule.opened(command), questions)
        return handler(connection, command, entry)

    def _count_denial(
        self, connection: Connection, command: BaseCommand, questions: Questions
    ) -> None:
        access = [described(each) for each in questions[:DENIALS_SHOWN]]
        self._count(connection, command.type, access)

    def _count(
        self, connection: Connection, operation: BaseCommand.Type, access: Sequence[str]
    ) -> None:
        self.refused[operation] += 1
        self._audit.denied(
            DENIED_IN_DRY_RUN if self._dry_run else DENIED,
            connection.roles,
            connection.remote,
            address=connection.address,
            dry_run=self._dry_run,
            operation=BaseCommand.Type.Name(operation),
            access=access,
        )

    def _remember(
        self, connection: Connection, opened: Opened | None, questions: Questions
    ) -> None:
        if opened is None:
            return
        known = self._opened.get(connection)
        if known is None:
            known = self._opened[connection] = {}
            connection.own_transactions = self._own_transactions(connection)
            connection.on_close(partial(self._forget, connection))
        # An id that is in use stays with what it was opened for, so both count.
        asked = known[opened] = known.get(opened, frozenset()).union(questions)
        if len(asked) > ACCESSES_OF_ID or len(known) > ACCESSES_OF_CONNECTION:
            connection.close("it opens more under its ids than is remembered")

    def _own_transactions(self, connection: Connection) -> OwnTransactions | None:
        """The transactions that a connection may use; None: it may use all."""
        if self.authorizer.is_superuser(connection.roles):
            return None
        transactions = connection.broker.transactions
        return OwnTransactions(
            connection.owner,
            transactions.coordinators,
            transactions.store,
            self._tasks,
            partial(self._report_foreign, connection),
        )

    def _report_foreign(
        self, connection: Connection, operation: BaseCommand.Type, txn: TxnId
    ) -> bool:
        """Count and audit a use of another role's transaction; True: serve it all the same."""
        self._count(connection, operation, [f"to use transaction {txn}"])
        return self._dry_run

    def _forget(self, connection: Connection) -> None:
        self._opened.pop(connection, None)

    async def _check_changed(self) -> None:
        while self._changed:
            changed, self._changed = self._changed, set()
            checked = 0
            for connection, opened in list(self._opened.items()):
                asked = {each for questions in opened.values() for each in questions}
                for access in _about(asked, changed):
                    checked += 1
                    if checked % ACCESS_CHECKS_IN_ONE_GO == 0:
                        await asyncio.sleep(0)
                    if not await self._still_has(connection, access):
                        self._withdraw(connection, access)
                        break

    async def _still_has(self, connection: Connection, access: Access) -> bool:
        if connection.closing or self._dry_run:
            return True
        allowed = self.authorizer.decide_now(connection.roles, (access,))
        if allowed is not None:
            return allowed
        try:
            return await self.authorizer.decide(connection.roles, (access,))
        except MagnetarError as error:
            # The client connects again, and is asked anew.
            log.warning("access_not_checked_again", remote=connection.remote, error=str(error))
            return False

    def _withdraw(self, connection: Connection, access: Access) -> None:
        """Close the connection: the client opens another one, and is refused what it may not have.

        It does get all else again.
        """
        self.withdrawn += 1
        self._audit.denied(
            "access_withdrawn",
            connection.roles,
            connection.remote,
            address=connection.address,
            access=[described(access)],
        )
        connection.close(WITHDRAWN)


def _about(asked: Iterable[Access], changed: set[str]) -> list[Access]:
    """Those of the questions that the policies of a changed tenant or namespace answer."""
    return [
        each
        for each in asked
        if each.asks_policies and (each.tenant in changed or str(each.namespace) in changed)
    ]
