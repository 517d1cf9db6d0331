"""`/admin/v2/ledgers/orphans`: ledgers on bookies that no record names, left by crashes."""

from collections.abc import Iterable

from aiohttp import web

from broker.admin.keys import BROKER
from storage.managed_ledger.orphans import OrphanedLedger

ORPHANS = "/admin/v2/ledgers/orphans"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(ORPHANS, orphans), web.delete(ORPHANS, delete_orphans)]


async def orphans(request: web.Request) -> web.Response:
    """GET: all orphaned ledgers, each with the stream or cursor that it was created for."""
    return _answer(await request.app[BROKER].managed_ledgers.orphaned_ledgers())


async def delete_orphans(request: web.Request) -> web.Response:
    """DELETE: delete all orphaned ledgers, and answer with them."""
    return _answer(await request.app[BROKER].managed_ledgers.delete_orphaned_ledgers())


def _answer(found: Iterable[OrphanedLedger]) -> web.Response:
    return web.json_response(
        [
            {
                "ledgerId": each.ledger_id,
                "managedLedger": each.stream,
                "cursor": each.cursor,
                "createdTimestamp": each.created_ms,
            }
            for each in found
        ]
    )
