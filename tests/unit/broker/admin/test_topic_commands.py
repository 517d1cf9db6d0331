"""`magnetar topics`: grace periods of ordered consumers, and the history."""

from tests.unit.broker.admin.conftest import Rest
from tests.unit.broker.admin.test_auto_scale_commands import run

SCALABLE = "/admin/v2/scalable/public/default"


async def test_commands_set_show_and_remove_a_grace_period(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/orders")
    of_namespace = ("public/default", "--namespace")
    for name in (("orders",), of_namespace):
        assert "sets none" in await run(rest, "get-grace-period", *name)
        assert await run(rest, "get-grace-period", *name, "--applied") == "60 s\n"
    await run(rest, "set-grace-period", *of_namespace, "5")
    assert await run(rest, "get-grace-period", *of_namespace) == "5 s\n"
    assert await run(rest, "get-grace-period", "orders", "--applied") == "5 s\n"
    await run(rest, "set-grace-period", "orders", "0")
    assert await run(rest, "get-grace-period", "orders") == "0 s\n"
    assert await run(rest, "get-grace-period", "orders", "--applied") == "0 s\n"
    for name in (("orders",), of_namespace):
        await run(rest, "remove-grace-period", *name)
        assert "sets none" in await run(rest, "get-grace-period", *name)
    assert await run(rest, "get-grace-period", "orders", "--applied") == "60 s\n"


async def test_a_wrong_grace_period_is_refused_with_a_reason(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/orders")
    assert "2147483647" in await run(rest, "set-grace-period", "orders", str(2**31))
    assert "tenant/namespace" in await run(rest, "get-grace-period", "--namespace", "default")
    assert "topic://public/default/none" in await run(rest, "get-grace-period", "none", "--applied")
    missing = await run(rest, "get-grace-period", "--namespace", "public/none", "--applied")
    assert "public/none" in missing


async def test_kinds_of_all_changes_line_up_in_the_history(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/orders")
    await run(rest, "rebucket", "orders", "0", "2")
    await run(rest, "split", "orders", "1")
    lines = (await run(rest, "history", "orders")).splitlines()
    assert len({line.index("->") - len("1") for line in lines}) == 1, lines
