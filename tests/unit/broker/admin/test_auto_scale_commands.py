"""`magnetar topics`: policies of automatic splits, and why a topic is scaled or not."""

from magnetar.cli.main import build_app
from tests.support.commands import run_command
from tests.unit.broker.admin.conftest import Rest

SCALABLE = "/admin/v2/scalable/public/default"


async def run(rest: Rest, *words: str) -> str:
    arguments = ["topics", *words, "--admin-url", rest.base]
    result = await run_command(build_app("topics"), arguments, {"COLUMNS": "200"})
    return result.output


async def test_commands_set_show_and_remove_a_policy(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/orders")
    assert "sets nothing" in await run(rest, "get-auto-scale", "orders")
    await run(rest, "set-auto-scale", "orders", "maxSegments=8", "enabled=false")
    assert await rest.get(f"{SCALABLE}/orders/autoScalePolicy") == {
        "maxSegments": 8,
        "enabled": False,
    }
    shown = await run(rest, "get-auto-scale", "orders")
    assert shown.splitlines() == ["maxSegments = 8", "enabled = false"]
    await run(rest, "remove-auto-scale", "orders")
    assert "sets nothing" in await run(rest, "get-auto-scale", "orders")
    await run(rest, "set-auto-scale", "--namespace", "public/default", "minSegments=2")
    of_namespace = await run(rest, "get-auto-scale", "--namespace", "public/default")
    assert of_namespace == "minSegments = 2\n"


async def test_a_wrong_policy_is_refused_with_a_reason(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/orders")
    assert "maxSegments=8" in await run(rest, "set-auto-scale", "orders", "maxSegments")
    assert "minSegments = 65" in await run(rest, "set-auto-scale", "orders", "minSegments=65")
    assert "tenant/namespace" in await run(rest, "get-auto-scale", "--namespace", "default")


async def test_why_scale_explains_each_rule(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/orders?numInitialSegments=2")
    await run(rest, "set-auto-scale", "orders", "enabled=true")
    shown = await run(rest, "why-scale", "orders")
    for text in (
        "orders  2 active segment(s), 0 ordered consumer(s)",
        "now: nothing",
        "  consumer-count: A subscription has 0 ordered consumers at most",
        "  rate: No rate is above its limit",
        "  merge: Segment 0 has no load report yet.",
        "no report yet",
        "last split never, last merge never",
    ):
        assert text in shown, shown
    await run(rest, "set-auto-scale", "orders", "enabled=false")
    assert "switched off by the policy" in await run(rest, "why-scale", "orders")
