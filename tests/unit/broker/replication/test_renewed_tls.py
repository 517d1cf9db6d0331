"""The TLS files of another cluster may be replaced while the broker runs."""

from pathlib import Path

import pytest

from broker.replication.renewed_tls import RenewedTls
from magnetar.errors import InvalidArgument
from magnetar.settings import ClientSettings
from tests.support.authority import Authority


def test_the_next_connection_uses_files_that_were_replaced(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    trust = tmp_path / "trust.pem"
    trust.write_bytes(first.chain.read_bytes())
    tls = RenewedTls(ClientSettings(tls_trust_file=trust))
    before = tls.context()
    assert tls.context() is before
    (tmp_path / "new.pem").write_bytes(second.chain.read_bytes())
    (tmp_path / "new.pem").rename(trust)
    assert tls.context() is not before
    assert tls.context().get_ca_certs() != before.get_ca_certs()


@pytest.mark.parametrize("content", [b"no certificate", None], ids=["unusable", "missing"])
def test_what_was_loaded_stays_while_a_file_cannot_be_used(
    tmp_path: Path, content: bytes | None
) -> None:
    trust = tmp_path / "trust.pem"
    trust.write_bytes(Authority(tmp_path / "authority").chain.read_bytes())
    tls = RenewedTls(ClientSettings(tls_trust_file=trust))
    before = tls.context()
    trust.unlink()
    if content is not None:
        trust.write_bytes(content)
    assert tls.context() is before


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(InvalidArgument, match=str(missing)):
        RenewedTls(ClientSettings(tls_trust_file=missing)).context()
