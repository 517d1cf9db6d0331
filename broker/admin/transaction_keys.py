"""`/admin/v2/transactions/transaction-keys`: list, show and delete transaction keys.

A request about one key is redirected (307) to the broker that leads its coordinator.  `owner` is
the role that the key belongs to, empty for an anonymous one.  Superusers see the keys of all roles;
others see their own, and need not give `owner`.  The key may be given as `?key=` too, because
clients normalise `.` and `..` in paths.  While transactions are off, all requests get 503.
"""

from aiohttp import web

from broker.admin.access import visible_owner
from broker.admin.keys import BROKER
from broker.admin.rest import no_content, number, refused
from broker.admin.transaction_key_inspection import TransactionKeyInspection
from broker.admin.transactions import DEFAULT_LIMIT, require_enabled, require_led
from config.bounds import TXN_KEYS_LISTED
from magnetar.protocol.txn_id import CoordinatorId
from txn.transaction_key import KeyName, key_not_found
from txn.transaction_keys import TransactionKeys

BASE = "/admin/v2/transactions/transaction-keys"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_keys),
        web.delete(BASE, delete),
        web.get(BASE + "/{key:.+}", show),
        web.delete(BASE + "/{key:.+}", delete),
    ]


async def _requested_key(request: web.Request) -> tuple[TransactionKeys, KeyName, CoordinatorId]:
    """The key of a request; it is redirected unless this broker leads the coordinator.

    Raises `TransactionKeyNotFound` if the role may not see keys of that owner.
    """
    coordinators = require_enabled(request).coordinators
    key = request.match_info.get("key", request.query.get("key", ""))
    role = await visible_owner(request)
    owner = request.query.get("owner", role or "")
    coordinator = coordinators.coordinator_of(key)
    require_led(request, coordinator)
    keys, name = coordinators.keys_of(coordinator, owner, key)
    if role not in (None, owner):
        raise key_not_found(name)
    return keys, name, coordinator


async def list_keys(request: web.Request) -> web.Response:
    """GET `?limit=&after=`: keys by coordinator and name; `next` is where the next page begins.

    With `?key=` it is `show`.
    """
    if "key" in request.query:
        return await show(request)
    limit = number(request, "limit", DEFAULT_LIMIT)
    if not 0 < limit <= TXN_KEYS_LISTED:
        raise refused(f"limit = {limit} is out of bounds: give 1 to {TXN_KEYS_LISTED}.")
    require_enabled(request)
    inspection = TransactionKeyInspection(request.app[BROKER])
    after, owner = request.query.get("after", ""), await visible_owner(request)
    return web.json_response(await inspection.keys(after, limit, owner=owner))


async def show(request: web.Request) -> web.Response:
    """GET `?owner=`: one key."""
    keys, name, coordinator = await _requested_key(request)
    stored = await keys.get(name)
    inspection = TransactionKeyInspection(request.app[BROKER])
    return web.json_response(await inspection.row(coordinator, stored, whole=True))


async def delete(request: web.Request) -> web.Response:
    """DELETE `?owner=`: delete a key, after its open transaction is aborted.

    Connections that use it are closed.
    """
    keys, name, _ = await _requested_key(request)
    await keys.delete(name)
    return no_content()
