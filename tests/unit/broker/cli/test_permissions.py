"""`magnetar permissions`: its paths, and what it does to a broker with authorization."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from broker.cli.permissions import permissions_path
from magnetar.cli.main import build_app
from tests.support.commands import run_command
from tests.support.roles import TOKENS, token_of
from tests.unit.broker.admin.conftest import Rest, asking

TOPIC = "topic://public/default/orders"


@pytest.mark.parametrize(
    ("resource", "path"),
    [
        ("acme/orders", "namespaces/acme/orders"),
        ("orders", "scalable/public/default/orders"),
        ("acme/orders/a b", "scalable/acme/orders/a%20b"),
        ("topic://acme/orders/a/b", "scalable/acme/orders/a%2Fb"),
        ("persistent://acme/orders/x", "persistent/acme/orders/x"),
    ],
)
def test_resource_has_a_path(resource: str, path: str) -> None:
    assert permissions_path(resource) == f"/admin/v2/{path}/permissions"


@pytest.mark.parametrize(
    "resource", ["", "acme/", "/orders", "topic://a/b", "segment://a/b/c/d", "a//b"]
)
def test_text_that_is_no_namespace_and_no_topic_is_refused(resource: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no namespace and no topic"):
        permissions_path(resource)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Rest]:
    settings = {**TOKENS, "authorization": "on", "superuser_roles": ("root",)}
    async with asking(tmp_path, **settings) as rest:
        yield rest


async def run(rest: Rest, *words: str, role: str = "root") -> Result:
    given = ["permissions", *words, "--admin-url", rest.base, "--token", token_of(role)]
    return await run_command(build_app("permissions"), given)


async def shown(rest: Rest, resource: str) -> list[str]:
    done = await run(rest, "list", resource)
    assert done.exit_code == 0, done.output
    return [line for line in done.output.splitlines() if ": " in line and "credentials" not in line]


async def test_grants_are_made_listed_and_revoked(secured: Rest) -> None:
    for words in (
        ("grant", "public/default", "--role", "ann", "--actions", "consume"),
        ("grant", TOPIC, "-r", "bob", "-a", "produce, consume"),
        ("grant", TOPIC, "-r", "eve", "-a", "produce"),
    ):
        done = await run(secured, *words)
        assert done.exit_code == 0, done.output
        assert f"on {words[1]} to {words[3]}." in done.output
    assert await shown(secured, "public/default") == ["ann: consume"]
    assert await shown(secured, TOPIC) == ["ann: consume", "bob: consume, produce", "eve: produce"]
    assert (await run(secured, "grant", "orders", "-r", "bob", "-a", "consume")).exit_code == 0
    assert (await run(secured, "revoke", TOPIC, "--role", "eve")).exit_code == 0
    assert await shown(secured, TOPIC) == ["ann: consume", "bob: consume"]
    assert (await run(secured, "revoke", "public/default", "--role", "ann")).exit_code == 0
    assert await shown(secured, TOPIC) == ["bob: consume"]


@pytest.mark.parametrize(
    ("words", "role", "status", "reason"),
    [
        (["grant", TOPIC, "-r", "bob", "-a", "fly"], "root", 1, "Actions must be a list"),
        (["grant", TOPIC, "-r", "bob", "-a", "produce,"], "root", 2, "an empty action"),
        (["grant", TOPIC, "-r", "bob", "-a", "produce"], "bob", 1, "lacks a permission"),
        (["revoke", TOPIC, "-r", "nobody"], "root", 1, "has no grant on"),
        (["list", "missing/namespace"], "root", 1, "missing"),
        (["list", "segment://a/b/c/0"], "root", 2, "is no namespace and no topic"),
    ],
)
async def test_refusal_ends_with_its_reason(
    secured: Rest, words: list[str], role: str, status: int, reason: str
) -> None:
    done = await run(secured, *words, role=role)
    assert done.exit_code == status, done.output
    assert reason in " ".join(done.output.split())
    assert await shown(secured, "public/default") == []
