"""`magnetar ledgers orphans` and what it asks of REST."""

from dataclasses import replace
from pathlib import Path

import pytest

from broker.admin.app import AdminServer
from broker.app.service import Broker
from magnetar.cli.main import build_app
from storage.metadata.instance import instance_of
from tests.support.bounds import set_bound
from tests.support.commands import run_command
from tests.support.embedded_broker import running

TOPIC = "public/default/persistent/t"


async def said(admin: AdminServer, *words: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{admin.port}"
    arguments = ["ledgers", "orphans", *words, "--admin-url", url]
    result = await run_command(build_app("ledgers"), arguments)
    return result.exit_code, result.output


async def leave(broker: Broker, **more: bytes) -> int:
    """A ledger as a broker leaves it that dies before it has named it."""
    custom = {
        "component": b"managed-ledger",
        "pulsar/managed-ledger": TOPIC.encode(),
        "magnetar/instance": await instance_of(broker.metadata),
    }
    ledgers = broker.managed_ledgers._stores.ledgers
    return (await ledgers.create(custom={**custom, **more})).ledger_id


async def test_an_operator_sees_orphaned_ledgers_and_deletes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ORPHANED_LEDGER_AGE_MS", 0)
    async with running(tmp_path) as broker:
        admin = AdminServer(broker)
        await admin.start()
        try:
            code, output = await said(admin)
            assert code == 1
            assert "restart it" in output
            stores = broker.managed_ledgers._stores
            monkeypatch.setattr(stores, "limits", replace(stores.limits, claim_on_open=True))
            plain, positions = await leave(broker), await leave(broker, **{"pulsar/cursor": b"s"})
            health = await leave(broker, component=b"health", **{"pulsar/managed-ledger": b""})
            _, output = await said(admin)
            lines = output.splitlines()
            assert [line.split()[0] for line in lines] == [
                *map(str, (plain, positions, health)),
                "3",
            ]
            assert lines[0].endswith(TOPIC)
            assert lines[1].endswith(f"{TOPIC}  subscription s")
            assert lines[2].endswith("health check")
            assert (await said(admin, "--delete"))[1].endswith("3 ledger(s) deleted.\n")
            assert await said(admin) == (0, "0 ledger(s).\n")
            assert not {plain, positions, health} & set(await stores.ledgers.list_ledgers())
        finally:
            await admin.stop()
