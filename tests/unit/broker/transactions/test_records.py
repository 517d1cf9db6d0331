"""`/admin/v3/transactions/headers` and `/records`: everything that is stored, a line for each."""

import json
from collections.abc import Sequence

import aiohttp
import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from tests.unit.broker.transactions.test_operations import BASE, TOPIC, Site, site
from txn.group import Batch, Group, GroupCommit, SegmentCount
from txn.records import Header, KeyEpoch, TxnState

__all__ = ["site"]


async def lines(site: Site, path: str) -> Sequence[dict[str, object]]:
    """What is told, without the last line, which must be there."""
    async with aiohttp.ClientSession() as session, session.get(site.url + path) as answer:
        assert answer.status == 200, await answer.text()
        *told, last = [json.loads(line) for line in (await answer.text()).splitlines()]
        assert last == {"end": True}
        return told


async def test_headers_by_state(site: Site) -> None:
    first, second, third = [await site.client.begin() for _ in range(3)]
    await site.client.end(second)
    await site.client.end(third, pb.ABORT)
    for state, txn in (("open", first), ("COMMITTED", second), ("aborted", third)):
        (told,) = await lines(site, f"{BASE}/headers/{state}")
        assert told["txnId"] == f"{txn[0]}_{txn[1]}"
        assert told["status"] == state.upper()
        ended, kept = told["finalizedMs"], told["keptUntilMs"]
        assert (ended is None, kept is None) == (state == "open", state == "open")
        if isinstance(ended, int):
            assert kept == ended + 900_000
        assert "group" not in told


async def test_header_listing_shows_what_a_group_committed(site: Site) -> None:
    counts = {"segment://a": SegmentCount(3, 2**63 + 5)}
    group = Group("n", 64, GroupCommit(Batch("q", 4), "[]", {2: counts}))
    header = Header(TxnState.COMMITTED, 1000, 5, 6, "me", KeyEpoch("k", 3), group)
    await site.broker.transactions.store.create_header(TxnId(1, 4000), header)
    (told,) = await lines(site, f"{BASE}/headers/committed")
    assert (told["transactionKey"], told["transactionKeyEpoch"], told["owner"]) == ("k", 3, "me")
    assert told["group"] == {
        "nonce": "n",
        "reserved": 64,
        "commit": {
            "query": "q",
            "batch": 4,
            "positions": "[]",
            "winners": {"2": {"segment://a": [3, str(2**63 + 5)]}},
        },
    }


async def test_claims_and_the_aborted_set(site: Site) -> None:
    stays, goes = await site.client.begin(), await site.client.begin()
    await site.send(goes)
    await site.client.end(goes, pb.ABORT)
    await site.send(stays)
    path = f"{BASE}/records/{TOPIC.replace('://', '/')}"
    (told,) = await lines(site, path)
    assert told["segment"] == TOPIC
    claims = told["claims"]
    assert isinstance(claims, list)
    assert f"{stays[0]}_{stays[1]}" in {claim["txnId"] for claim in claims}
    aborted = f"{goes[0]}_{goes[1]}"
    assert aborted in told["aborted"] or aborted in {c["txnId"] for c in claims}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("headers/done", 412, "must be one of"),
        ("records/persistent/public/default/nothing", 404, "does not exist"),
    ],
)
async def test_refusals(site: Site, path: str, status: int, words: str) -> None:
    assert words in await site.rest.refused(status, "GET", f"{BASE}/{path}")


async def test_ledgers_of_a_segment(site: Site) -> None:
    await site.rest.done("PUT", "/admin/v2/scalable/public/default/s?numInitialSegments=1")
    told = await site.rest.get("/admin/v2/segments/public/default/s/0000-ffff-0/internalStats")
    assert isinstance(told, dict)
    assert (told["numberOfEntries"], told["ledgers"]) == (0, [])  # made with the first entry
