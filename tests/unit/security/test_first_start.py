"""The files that `magnetar standalone --secure` makes at its first start."""

import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest

from config.settings import load_settings
from security.authentication import make_authenticator
from security.errors import InvalidSecret
from security.first_start import security_files
from security.first_start_files import ADMIN, SecurityFiles
from security.providers import Credentials
from tests.support.authority import Authority

NOW = datetime.datetime.now(datetime.UTC)


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    assert stat.S_IMODE(files.secret_key.parent.stat().st_mode) == 0o700
    for path in files.secret_key.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert len(list(files.secret_key.parent.iterdir())) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("linked", [False, True])
def test_keys_that_another_user_has_put_there_are_not_used(tmp_path: Path, linked: bool) -> None:
    """As root the broker could read them, and that user could make a superuser's token."""
    directory, theirs = tmp_path / "security", tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, -1)
    if linked:
        directory.symlink_to(theirs)
    else:
        theirs.rename(directory)
    with pytest.raises(InvalidSecret, match="belongs to another user"):
        security_files(tmp_path, "broker.example", now=NOW)
    # A data directory of that user is its own business.
    os.chown(tmp_path, 12345, -1)
    assert security_files(tmp_path, "broker.example", now=NOW)


def test_a_second_start_makes_nothing_anew(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    before = {path: path.read_bytes() for path in files.secret_key.parent.iterdir()}
    assert security_files(tmp_path, "broker.example", now=NOW) == files
    assert {path: path.read_bytes() for path in files.secret_key.parent.iterdir()} == before


def test_a_new_host_gets_into_the_certificate_beside_the_earlier_one(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    key = files.certificate_key.read_bytes()
    for host in ("other.example", "192.0.2.7"):
        security_files(tmp_path, host, now=NOW)
    assert files.certificate_key.read_bytes() == key
    assert stat.S_IMODE(files.certificate.stat().st_mode) == 0o600
    _serves(files, "broker.example", "other.example", "192.0.2.7", "localhost", "127.0.0.1")


def test_a_certificate_of_the_operator_stays(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    theirs = Authority(tmp_path / "authority").issue("theirs")
    files.certificate.write_bytes(theirs.chain.read_bytes())
    files.certificate_key.write_bytes(theirs.key.read_bytes())
    security_files(tmp_path, "other.example", now=NOW)
    assert files.certificate.read_bytes() == theirs.chain.read_bytes()


def test_hints_leave_the_authority_of_another_certificate_to_the_operator(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    own = load_settings(None, defaults=files.settings)
    assert any("MAGNETAR_TLS_TRUST_FILE" in hint for hint in files.hints(own))
    theirs = own.model_copy(update={"tls_certificate_file": Path("/etc/magnetar/tls.crt")})
    assert not any("MAGNETAR_TLS_TRUST_FILE" in hint for hint in files.hints(theirs))


def test_a_file_that_was_removed_is_made_anew_with_what_depends_on_it(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    token, certificate = files.admin_token.read_bytes(), files.certificate.read_bytes()
    files.secret_key.unlink()
    files.certificate_key.unlink()
    security_files(tmp_path, "broker.example", now=NOW)
    assert files.admin_token.read_bytes() != token
    assert files.certificate.read_bytes() != certificate


async def test_the_token_is_that_of_a_superuser(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    settings = load_settings(None, {"bind_host": "0.0.0.0"}, defaults=files.settings)
    assert settings.superuser_roles == (ADMIN,)
    assert settings.authorization == "on"
    assert not settings.plaintext_ports
    authenticator = make_authenticator(settings)
    credentials = Credentials("token", files.admin_token.read_bytes())
    assert (await authenticator.authenticate(credentials, address="192.0.2.1")).role == ADMIN
    await authenticator.close()


def test_the_certificate_is_trusted_for_the_host_and_this_machine(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    _serves(files, "broker.example", "localhost", "127.0.0.1", "::1")


def _serves(files: SecurityFiles, *hosts: str) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.certificate_key)
    client = ssl.create_default_context(cafile=str(files.certificate))
    for host in hosts:
        _shake_hands(client, server, host)


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=host)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (near, far, near, far):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert near.getpeercert()


def test_what_the_operator_sets_is_stronger(tmp_path: Path) -> None:
    files = security_files(tmp_path, "broker.example", now=NOW)
    settings = load_settings(
        None, {"authorization": "dry_run", "superuser_roles": "root"}, defaults=files.settings
    )
    assert settings.authorization == "dry_run"
    assert settings.superuser_roles == ("root",)
