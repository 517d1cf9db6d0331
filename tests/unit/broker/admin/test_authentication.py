"""Credentials of REST requests."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import bcrypt
import pytest

from tests.support.roles import TOKENS, token_of
from tests.unit.broker.admin.conftest import Rest, asking

PATH = "/admin/v2/clusters"


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[Rest]:
    users = tmp_path / "users.htpasswd"
    users.write_bytes(b"alice:" + bcrypt.hashpw(b"secret", bcrypt.gensalt(4)) + b"\n")
    users.chmod(0o600)
    settings = {
        **TOKENS,
        "authentication_providers": ("token", "basic"),
        "basic_auth_file": users,
        "proxy_roles": ("gate",),
    }
    async with asking(tmp_path / "data", **settings) as rest:
        yield rest


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {token_of('alice')}"}, 200),
        ({"Authorization": f"bearer  {token_of('alice')}"}, 200),
        ({"Authorization": basic("alice:secret")}, 200),
        ({"Authorization": basic("alice:secret").lower().replace("basic", "BASIC")}, 401),
        ({"Authorization": basic("alice:wrong")}, 401),
        ({"Authorization": basic("bob:secret")}, 401),
        ({"Authorization": f"Bearer {token_of('alice', life_s=-60)}"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic !"}, 401),
        ({"Authorization": f"Digest {token_of('alice')}"}, 401),
        ({"Authorization": "Bearer " + "x" * 30_000}, 400),
        ({}, 401),
        ({"X-Original-Principal": "alice"}, 401),
        ({"Authorization": f"Bearer {token_of('bob')}", "X-Original-Principal": "alice"}, 401),
        ({"Authorization": f"Bearer {token_of('gate')}", "X-Original-Principal": "alice"}, 200),
        ({"Authorization": f"Bearer {token_of('gate')}"}, 401),
    ],
)
async def test_a_request_needs_valid_credentials(
    rest: Rest, headers: dict[str, str], status: int
) -> None:
    assert (await rest.raw("GET", PATH, "", headers))[0] == status


async def test_a_client_does_not_name_itself_behind_a_proxy(rest: Rest) -> None:
    """A proxy may pass on the header that its client sent, ahead of its own: Pulsar's does."""
    headers = [
        ("Authorization", f"Bearer {token_of('gate')}"),
        ("X-Original-Principal", "root"),
        ("X-Original-Principal", "alice"),
    ]
    async with (
        aiohttp.ClientSession() as session,
        session.get(rest.base + PATH, headers=headers) as answer,
    ):
        assert answer.status == 401


async def test_a_refusal_names_the_schemes_and_gives_no_reason(rest: Rest) -> None:
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer x"}):
            async with session.get(rest.base + PATH, headers=headers) as answer:
                assert answer.status == 401
                challenges = answer.headers.getall("WWW-Authenticate")
                assert [each.partition(" ")[0] for each in challenges] == ["Bearer", "Basic"]
                assert "token" not in (await answer.json())["reason"]


async def test_a_body_is_not_read_before_the_credentials_are_checked(rest: Rest) -> None:
    status, _ = await rest.raw("PUT", "/admin/v2/tenants/x", "no json", {})
    assert status == 401


async def test_a_token_in_the_query_counts_for_nothing(rest: Rest) -> None:
    assert (await rest.raw("GET", f"{PATH}?token={token_of('alice')}", "", {}))[0] == 401


async def test_browsers_are_told_to_guess_show_and_keep_nothing(rest: Rest) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/metrics", PATH, "/none"):
            async with session.get(rest.base + path) as answer:
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["Cache-Control"] == "no-store"
