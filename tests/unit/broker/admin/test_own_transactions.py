"""Transactions and transaction keys over REST, as roles see them that own some, or none."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from broker.app.service import Broker
from magnetar.cli.main import build_app
from magnetar.protocol.names import NamespaceName, parse_topic_name
from magnetar.protocol.txn_id import TxnId
from security.secret_files import write_secret
from tests.support.commands import run_command
from tests.support.embedded_broker import running
from tests.support.roles import TOKENS, token_of
from tests.unit.broker.admin.conftest import Rest, asking_broker
from txn.records import KeyEpoch, TxnState
from txn.transaction_key import NO_EPOCH

BASE = "/admin/v3/transactions"
KEYS = "/admin/v2/transactions/transaction-keys"
TOPIC = "persistent/acme/orders/t"


class World:
    """A broker with a transaction and a key of alice, of bob, and without an owner."""

    def __init__(self, broker: Broker, rest: Rest) -> None:
        self.broker = broker
        self.rest = rest
        self.txns: dict[str | None, TxnId] = {}

    async def begin(self) -> None:
        """Begin them, and have each pin the topic."""
        await self.rest.done("PUT", f"/admin/v2/{TOPIC}")
        topic = await self.broker.topics.get(
            parse_topic_name("persistent://acme/orders/t"), create=False
        )
        coordinators = self.broker.transactions.coordinators
        for owner in ("alice", "bob", None):
            coordinator = coordinators.coordinator_of("k")
            keys, name = coordinators.keys_of(coordinator, owner, "k")
            epoch = (await keys.open(name, NO_EPOCH, "")).epoch
            txn = await coordinators.begin(coordinator, 60_000, owner, KeyEpoch("k", epoch))
            await topic.buffer.join(txn)
            self.txns[owner] = txn

    def path(self, owner: str | None) -> str:
        """`most/least` of the transaction of a role."""
        return "{}/{}".format(*self.txns[owner])

    async def state(self, owner: str | None) -> TxnState:
        """The state of the transaction of a role."""
        stored = await self.broker.transactions.store.read_header(self.txns[owner])
        assert stored is not None
        return stored.header.state

    async def get(self, path: str) -> Mapping[str, object]:
        """The answer to a request that is served."""
        return cast("Mapping[str, object]", await self.rest.get(path))


@pytest.fixture(params=["on"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    settings = {**TOKENS, "authorization": request.param, "superuser_roles": ("root",)}
    async with running(tmp_path, **settings) as broker, asking_broker(broker) as rest:
        rest.role = "root"
        tenant = {"adminRoles": ["acme-admin"], "allowedClusters": ["standalone"]}
        await rest.done("PUT", "/admin/v2/tenants/acme", tenant)
        await rest.done("PUT", "/admin/v2/namespaces/acme/orders")
        granted = {"bob": ["consume"], "carol": ["produce"]}
        await broker.namespaces.change(
            NamespaceName("acme", "orders"),
            lambda record: record.update(auth_policies={"namespace_auth": granted}),
        )
        world = World(broker, rest)
        await world.begin()
        yield world


def rows(listed: Mapping[str, object], name: str = "transactions") -> list[Mapping[str, object]]:
    return cast("list[Mapping[str, object]]", listed[name])


async def test_each_role_lists_its_own_transactions_and_keys(world: World) -> None:
    everybody = {"alice": {"alice"}, "bob": {"bob"}, "acme-admin": set(), "root": set(world.txns)}
    for role, owners in everybody.items():
        world.rest.role = role
        listed = await world.get(f"{BASE}/open")
        assert {each["owner"] for each in rows(listed)} == owners
        assert listed["open"] == len(owners)
        slow = await world.get(f"{BASE}/slowTransactions/0")
        assert len(slow) == len(owners)
        keys = await world.get(f"{KEYS}?limit=1000")
        assert {each["owner"] or None for each in rows(keys, "keys")} == owners


async def test_transaction_of_another_role_is_answered_as_one_that_does_not_exist(
    world: World,
) -> None:
    unknown = TxnId(world.txns["bob"].most, 999_999)
    world.rest.role = "alice"
    answers: dict[str, set[tuple[int, str]]] = {}
    for txn in (world.txns["bob"], world.txns[None], unknown):
        path = f"{txn.most}/{txn.least}"
        for method, request in (
            ("GET", f"transaction/{path}"),
            ("GET", f"transactionMetadata/{path}"),
            ("POST", f"abortTransaction/{path}"),
            ("POST", f"end/{path}?action=commit"),
        ):
            status, answer = await world.rest.call(method, f"{BASE}/{request}")
            words = str(answer).replace(str(txn), "TXN")
            answers.setdefault(request.partition("/")[0], set()).add((status, words))
    assert [len(each) for each in answers.values()] == [1] * 4
    assert {status for each in answers.values() for status, _ in each} == {404}
    assert await world.state("bob") is TxnState.OPEN
    assert await world.state(None) is TxnState.OPEN


async def test_role_shows_and_ends_its_own_transaction_and_a_superuser_any(world: World) -> None:
    for role, owner in (("alice", "alice"), ("root", "bob"), ("root", None)):
        world.rest.role = role
        shown = await world.get(f"{BASE}/transaction/{world.path(owner)}")
        assert (shown["owner"], len(rows(shown, "writes"))) == (owner, 1)
        assert (await world.get(f"{BASE}/transactionMetadata/{world.path(owner)}"))[
            "owner"
        ] == owner
        await world.rest.done("POST", f"{BASE}/end/{world.path(owner)}?action=commit")
        assert await world.state(owner) is TxnState.COMMITTED


async def test_role_shows_and_deletes_its_own_key(world: World) -> None:
    world.rest.role = "alice"
    for path in (f"{KEYS}/k", f"{KEYS}?key=k", f"{KEYS}/k?owner=alice"):
        assert (await world.get(path))["owner"] == "alice"
    for owner in ("bob", ""):
        words = set()
        for key in ("k", "k-unknown"):
            for method in ("GET", "DELETE"):
                refused = await world.rest.refused(404, method, f"{KEYS}?key={key}&owner={owner}")
                words.add(refused.replace("k-unknown", "k"))
        assert len(words) == 1
    await world.rest.done("DELETE", f"{KEYS}/k")
    await world.rest.refused(404, "GET", f"{KEYS}/k")
    assert await world.state("alice") is TxnState.ABORTED
    assert await world.state("bob") is TxnState.OPEN


async def test_page_of_keys_has_no_place_of_another_role(world: World) -> None:
    coordinators = world.broker.transactions.coordinators
    for key in ("a", "b", "c"):
        coordinator = coordinators.coordinator_of(key)
        keys, name = coordinators.keys_of(coordinator, "bob", key)
        await keys.open(name, NO_EPOCH, "")
    world.rest.role = "alice"
    page = await world.get(f"{KEYS}?limit=1")
    assert page["next"] in (None, f"{coordinators.coordinator_of('k')}:alice&k")


async def test_admins_of_the_tenant_see_what_pins_a_topic_and_others_their_own(
    world: World,
) -> None:
    for role, owners in (
        ("bob", {"bob"}),
        ("acme-admin", set(world.txns)),
        ("root", set(world.txns)),
    ):
        world.rest.role = role
        (segment,) = rows(await world.get(f"{BASE}/why/{TOPIC}"), "segments")
        assert {each["owner"] for each in rows(segment)} == owners
        assert segment["open"] == 3
    world.rest.role = "alice"
    await world.rest.refused(403, "GET", f"{BASE}/why/{TOPIC}")


async def test_commands_show_what_the_role_may_see(world: World, tmp_path: Path) -> None:
    async def printed(role: str, *arguments: str) -> str:
        token = tmp_path / f"{role}.token"
        if not token.exists():
            write_secret(token, token_of(role).encode())
        where = ("--admin-url", world.rest.base, "--token-file", str(token))
        result = await run_command(build_app(), ["txn", *arguments, *where])
        assert result.exit_code == 0, result.output
        return result.output

    topic = "persistent://acme/orders/t"
    listed = await printed("bob", "list")
    assert "1 open, 1 shown." in listed
    assert "3 transaction(s), 1 shown" in await printed("bob", "why", topic)
    hidden = await printed("carol", "why", topic)
    assert "3 transaction(s), 0 shown" in hidden
    txn = str(world.txns["bob"])
    assert "is aborted" in await printed("bob", "end", txn, "abort")


@pytest.mark.parametrize("world", ["dry_run"], indirect=True)
async def test_dry_run_shows_everything_and_logs_it(world: World) -> None:
    world.rest.role = "alice"
    with capture_logs() as logs:
        assert (await world.get(f"{BASE}/open"))["open"] == 3
        await world.rest.done("POST", f"{BASE}/end/{world.path('bob')}?action=abort")
    denied = [each["operation"] for each in logs if each["event"] == "access_would_be_denied"]
    assert denied == [f"GET {BASE}/open", f"POST {BASE}/end/{world.path('bob')}"]


@pytest.mark.parametrize("world", ["off"], indirect=True)
async def test_without_authorization_every_role_sees_everything(world: World) -> None:
    world.rest.role = "alice"
    assert (await world.get(f"{BASE}/open"))["open"] == 3
