"""`/admin/v3/transactions/headers|records`: all stored records, a line of JSON for each.

The answer is sent as it is read (`application/x-ndjson`); one that breaks off lacks its last line,
`{"end": true}`.  While transactions are off, all requests get 503.
"""

import json
from collections.abc import AsyncIterator

from aiohttp import hdrs, web

from broker.admin.keys import BROKER
from broker.admin.rest import refused, topic_of
from broker.admin.transaction_listing import Json, TransactionRecords
from broker.admin.transactions import BASE, require_enabled
from txn.records import TxnState

CONTENT_TYPE = "application/x-ndjson"
_STATES = {state.value: state for state in TxnState}


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE + "/headers/{state}", headers),
        web.get(BASE + "/records/{domain}/{tenant}/{namespace}/{topic:.+}", records),
    ]


async def headers(request: web.Request) -> web.StreamResponse:
    """GET: all headers in the state OPEN, COMMITTED or ABORTED."""
    state = _STATES.get(request.match_info["state"].upper())
    if state is None:
        raise refused(f"The state must be one of {', '.join(_STATES)}.")
    require_enabled(request)
    return await _lines(request, TransactionRecords(request.app[BROKER]).headers(state))


async def records(request: web.Request) -> web.StreamResponse:
    """GET: each segment of a topic, with its claims, its aborted set and its owner's epoch."""
    name = topic_of(request, request.match_info["domain"])
    require_enabled(request)
    return await _lines(request, TransactionRecords(request.app[BROKER]).segments(name))


async def _lines(request: web.Request, records: AsyncIterator[Json]) -> web.StreamResponse:
    """Stream records, a line for each."""
    # Read before the answer begins, so that a failure still gets a status of its own.
    first = await anext(records, None)
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        # A body would be taken for the beginning of the next answer.
        await response.write_eof()
        return response
    if first is not None:
        await response.write(_line(first))
        async for each in records:
            await response.write(_line(each))
    await response.write(_line({"end": True}))
    await response.write_eof()
    return response


def _line(members: Json) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode() + b"\n"
