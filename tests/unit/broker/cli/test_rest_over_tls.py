"""Commands that ask a broker over https."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from magnetar.cli.main import build_app
from tests.support.authority import Authority
from tests.support.commands import run_command
from tests.support.secured_broker import Served, serving


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    authority = Authority(tmp_path / "authority")
    async with serving(
        tmp_path,
        authority,
        plaintext_ports=False,
        tls_client_certificates="wanted",
        tls_trust_certs_file=authority.chain,
    ) as served:
        yield served


async def run(served: Served, *words: str, trust: bool = True) -> Result:
    url = served.broker.placement.me.web_url_tls
    assert url is not None
    more = ["--tls-trust-file", str(served.authority.chain)] if trust else []
    given = [*words, "--admin-url", url, *more]
    return await run_command(build_app(words[0]), given)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["health"], "ok"),
        (["topics", "create", "orders"], "Created orders"),
        (["topics", "list"], ""),
        (["txn", "list"], "0 open"),
    ],
)
async def test_command_is_answered(served: Served, words: list[str], shown: str) -> None:
    done = await run(served, *words)
    assert done.exit_code == 0, done.output
    assert shown in done.output


@pytest.mark.parametrize("words", [["health"], ["topics", "list"]])
async def test_broker_that_is_not_trusted_is_asked_nothing(
    served: Served, words: list[str]
) -> None:
    done = await run(served, *words, trust=False)
    assert done.exit_code == 1
    assert "is not trusted (" in done.output
    assert "--tls-trust-file" in done.output
    unchecked = await run(served, *words, "--no-tls-check-certificate", trust=False)
    assert unchecked.exit_code == 0, unchecked.output


async def test_certificate_is_shown(served: Served) -> None:
    own = served.authority.issue("operator")
    files = ["--tls-certificate-file", str(own.chain), "--tls-key-file", str(own.key)]
    assert (await run(served, "topics", "list", *files)).exit_code == 0


async def test_files_that_cannot_be_used_are_named(served: Served, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    done = await run(served, "topics", "list", "--tls-trust-file", str(empty), trust=False)
    assert done.exit_code == 1
    assert f"{empty} cannot be used" in done.output
    done = await run(served, "health", "--tls-certificate-file", str(empty))
    assert done.exit_code == 1
    assert f"{empty} cannot be used" in done.output


@pytest.mark.parametrize("words", [["health"], ["topics", "list"]])
async def test_a_certificate_that_the_broker_requires_is_asked_for(
    tmp_path: Path, words: list[str]
) -> None:
    authority = Authority(tmp_path / "authority")
    settings: dict[str, object] = {
        "plaintext_ports": False,
        "tls_client_certificates": "required",
        "tls_trust_certs_file": authority.chain,
    }
    async with serving(tmp_path, authority, **settings) as served:
        done = await run(served, *words)
    assert done.exit_code == 1
    assert "give one by --tls-certificate-file and --tls-key-file" in done.output


@pytest.mark.parametrize("words", [["health"], ["topics", "list"]])
@pytest.mark.parametrize(("with_tls", "step"), [(True, "write http://"), (False, "write https://")])
async def test_the_other_scheme_is_named(
    tmp_path: Path, words: list[str], with_tls: bool, step: str
) -> None:
    async with serving(tmp_path, Authority(tmp_path / "authority")) as served:
        me = served.broker.placement.me
        given = me.web_url.replace("http:", "https:")
        if not with_tls:
            assert me.web_url_tls is not None
            given = me.web_url_tls.replace("https:", "http:")
        words = [*words, "--admin-url", given]
        done = await run_command(build_app(words[0]), words)
    assert done.exit_code == 1
    assert step in done.output


@pytest.mark.parametrize("words", [["health"], ["topics", "list"]])
def test_a_port_that_nobody_listens_on_has_a_next_step(words: list[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = CliRunner().invoke(build_app(words[0]), [*words, "--admin-url", url])
    assert done.exit_code == 1
    assert f"No broker answers at {url}" in done.output
    assert "start one with `magnetar standalone`" in done.output
