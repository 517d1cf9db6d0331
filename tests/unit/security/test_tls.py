"""TLS contexts of files: the ports' and the one towards other brokers."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from config.settings import Settings
from security.tls import PeerTls, ServerTls, UnusableCertificate
from tests.support.authority import Authority, server_settings


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def settings_of(authority: Authority, **more: object) -> Settings:
    return Settings(**server_settings(authority.issue("broker")), **more)  # type: ignore[arg-type]


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "127.0.0.1") -> bytes:
    """Shake hands in memory, and return the client certificate that the server has (DER)."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(6):
        for each in (near, far):
            try:
                each.do_handshake()
                done.add(each)
            except ssl.SSLWantReadError:
                pass
    assert done == {near, far}
    return far.getpeercert(binary_form=True) or b""


def test_context_serves_clients_that_trust_the_authority(authority: Authority) -> None:
    tls = ServerTls(settings_of(authority))
    assert handshake(tls.current, authority.client_context(authority.issue("alice"))) == b""
    assert tls.expires_at_s == pytest.approx(time.time() + 24 * 3600, abs=60)


def test_wanted_certificate_is_verified_if_there_is_one(
    authority: Authority, tmp_path: Path
) -> None:
    tls = ServerTls(
        settings_of(
            authority, tls_client_certificates="wanted", tls_trust_certs_file=authority.chain
        )
    )
    assert handshake(tls.current, authority.client_context()) == b""
    assert handshake(tls.current, authority.client_context(authority.issue("alice")))
    stranger = Authority(tmp_path / "stranger").issue("alice")
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        handshake(tls.current, authority.client_context(stranger))


def test_required_certificate_must_be_shown(authority: Authority) -> None:
    tls = ServerTls(
        settings_of(
            authority, tls_client_certificates="required", tls_trust_certs_file=authority.chain
        )
    )
    assert handshake(tls.current, authority.client_context(authority.issue("alice")))
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        handshake(tls.current, authority.client_context())


def test_expired_client_certificate_is_refused(authority: Authority) -> None:
    tls = ServerTls(
        settings_of(
            authority, tls_client_certificates="required", tls_trust_certs_file=authority.chain
        )
    )
    with pytest.raises(ssl.SSLError, match="certificate has expired"):
        handshake(tls.current, authority.client_context(authority.issue("alice", valid_s=-10)))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_are_refused(authority: Authority, version: ssl.TLSVersion) -> None:
    client = authority.client_context()
    client.minimum_version = client.maximum_version = version
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError, match=r"unsupported protocol|version"):
        handshake(ServerTls(settings_of(authority)).current, client)


def test_minimum_version_may_be_raised(authority: Authority) -> None:
    client = authority.client_context()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    handshake(ServerTls(settings_of(authority)).current, client)
    with pytest.raises(ssl.SSLError, match=r"unsupported protocol|version"):
        handshake(ServerTls(settings_of(authority, tls_minimum_version="1.3")).current, client)


def test_ciphers_have_forward_secrecy_and_authenticate(authority: Authority) -> None:
    client = authority.client_context()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-ECDSA-AES256-SHA384:AES256-GCM-SHA384")
    with pytest.raises(ssl.SSLError, match="no shared cipher"):
        handshake(ServerTls(settings_of(authority)).current, client)


def test_unknown_ciphers_are_refused(authority: Authority) -> None:
    with pytest.raises(UnusableCertificate, match="tls_ciphers 'none such' names no cipher"):
        ServerTls(settings_of(authority, tls_ciphers="none such"))


def test_expired_certificate_does_not_replace_a_valid_one(authority: Authority) -> None:
    own = authority.issue("peer")
    tls = ServerTls(settings_of(authority))
    peer = PeerTls(
        settings_of(
            authority,
            tls_trust_certs_file=authority.chain,
            broker_client_certificate_file=own.chain,
            broker_client_key_file=own.key,
        )
    )
    for each, name in ((tls, "broker"), (peer, "peer")):
        before = each.current
        authority.issue(name, valid_s=-60)
        for _ in range(2):  # It is tried again at each check.
            with pytest.raises(UnusableCertificate, match="the earlier certificate stays in use"):
                each.reload()
        assert each.current is before
        authority.issue(name)
        assert each.reload()


def test_expired_certificate_replaces_another_expired_one(authority: Authority) -> None:
    """Neither is of use; so a broker starts with one, too."""
    authority.issue("broker")
    settings = settings_of(authority)
    authority.issue("broker", valid_s=-60)
    tls = ServerTls(settings)
    authority.issue("broker", valid_s=-30)
    assert tls.reload()
    assert tls.expires_at_s < time.time()


def test_unchanged_files_leave_the_context(authority: Authority) -> None:
    tls = ServerTls(settings_of(authority))
    before = tls.current
    assert not tls.reload()
    assert tls.current is before


def test_changed_files_make_a_fresh_context(authority: Authority) -> None:
    tls = ServerTls(settings_of(authority))
    before = tls.current
    authority.issue("broker", valid_s=3600)
    assert tls.reload()
    assert tls.current is not before
    assert tls.expires_at_s == pytest.approx(time.time() + 3600, abs=60)


def test_authority_that_is_gone_from_the_file_is_not_trusted(
    authority: Authority, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    other = Authority(tmp_path / "other")
    trusted.write_bytes(authority.chain.read_bytes() + other.chain.read_bytes())
    tls = ServerTls(
        settings_of(authority, tls_client_certificates="required", tls_trust_certs_file=trusted)
    )
    client = authority.client_context(other.issue("alice"))
    assert handshake(tls.current, client)
    trusted.write_bytes(authority.chain.read_bytes())
    assert tls.reload()
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        handshake(tls.current, client)


def spoil_key(settings: Settings) -> None:
    assert settings.tls_key_file is not None
    settings.tls_key_file.write_bytes(settings.tls_key_file.read_bytes()[:100])


def take_key_of_another(settings: Settings) -> None:
    assert settings.tls_key_file is not None
    other = Authority(settings.tls_key_file.parent / "another").issue("broker")
    settings.tls_key_file.write_bytes(other.key.read_bytes())


def spoil_certificate(settings: Settings) -> None:
    assert settings.tls_certificate_file is not None
    settings.tls_certificate_file.write_bytes(settings.tls_certificate_file.read_bytes()[:100])


def empty_certificate(settings: Settings) -> None:
    assert settings.tls_certificate_file is not None
    settings.tls_certificate_file.write_bytes(b"")


def remove_certificate(settings: Settings) -> None:
    assert settings.tls_certificate_file is not None
    settings.tls_certificate_file.unlink()


def show_key_to_others(settings: Settings) -> None:
    assert settings.tls_key_file is not None
    settings.tls_key_file.chmod(0o644)


def empty_trusted(settings: Settings) -> None:
    assert settings.tls_trust_certs_file is not None
    settings.tls_trust_certs_file.write_bytes(b"")


def cut_trusted(settings: Settings) -> None:
    assert settings.tls_trust_certs_file is not None
    settings.tls_trust_certs_file.write_bytes(settings.tls_trust_certs_file.read_bytes()[:200])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_key, "tls_key_file .* cannot be used"),
        (take_key_of_another, r"\(key values mismatch\)"),
        (spoil_certificate, "tls_certificate_file .* cannot be used"),
        (empty_certificate, "tls_certificate_file .* cannot be used"),
        (remove_certificate, "tls_certificate_file: .* cannot be read"),
        (show_key_to_others, "tls_key_file: .*others than its owner.*chmod 600"),
        (empty_trusted, "tls_trust_certs_file .* cannot be used"),
        (cut_trusted, "tls_trust_certs_file .* cannot be used"),
    ],
)
def test_unusable_file_is_named_and_leaves_the_context(
    authority: Authority, spoil: Callable[[Settings], None], message: str
) -> None:
    settings = settings_of(
        authority, tls_client_certificates="wanted", tls_trust_certs_file=authority.chain
    )
    tls = ServerTls(settings)
    before, trusting = tls.current, authority.client_context(authority.issue("alice"))
    spoil(settings)
    with pytest.raises(UnusableCertificate, match=message):
        tls.reload()
    assert tls.current is before
    assert handshake(tls.current, trusting)
    with pytest.raises(UnusableCertificate, match=message):
        ServerTls(settings)


def test_pair_that_is_half_written_is_taken_when_it_is_whole(authority: Authority) -> None:
    settings = settings_of(authority)
    tls = ServerTls(settings)
    assert settings.tls_key_file is not None
    key = settings.tls_key_file.read_bytes()
    authority.issue("broker")
    whole = settings.tls_key_file.read_bytes()
    settings.tls_key_file.write_bytes(key)
    with pytest.raises(UnusableCertificate, match="key values mismatch"):
        tls.reload()
    settings.tls_key_file.write_bytes(whole)
    assert tls.reload()


def test_key_with_a_password_is_refused_without_a_question(authority: Authority) -> None:
    made = authority.issue("broker", password=b"secret")
    with pytest.raises(UnusableCertificate, match=r"tls_key_file .* is protected by a password"):
        ServerTls(Settings(**server_settings(made)))  # type: ignore[arg-type]


class TestPeerTls:
    def test_verifies_chain_and_name(self, authority: Authority, tmp_path: Path) -> None:
        server = ServerTls(settings_of(authority)).current
        peer = PeerTls(Settings(broker_client_trust_certs_file=authority.chain))
        assert peer.preferred
        handshake(server, peer.current)
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(server, peer.current, "127.0.0.2")
        stranger = ServerTls(settings_of(Authority(tmp_path / "stranger"))).current
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get"):
            handshake(stranger, peer.current)

    def test_trusts_the_authorities_of_clients_by_default(self, authority: Authority) -> None:
        peer = PeerTls(Settings(tls_trust_certs_file=authority.chain))
        assert peer.preferred
        handshake(ServerTls(settings_of(authority)).current, peer.current)

    def test_shows_its_certificate(self, authority: Authority) -> None:
        own = authority.issue("broker-2")
        peer = PeerTls(
            Settings(
                broker_client_trust_certs_file=authority.chain,
                broker_client_certificate_file=own.chain,
                broker_client_key_file=own.key,
            )
        )
        server = ServerTls(
            settings_of(
                authority, tls_client_certificates="required", tls_trust_certs_file=authority.chain
            )
        )
        assert handshake(server.current, peer.current)

    def test_without_files_trusts_the_system_and_prefers_plain(self, authority: Authority) -> None:
        peer = PeerTls(Settings())
        assert not peer.preferred
        assert not peer.reload()
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(ServerTls(settings_of(authority)).current, peer.current)

    def test_loads_changed_files(self, authority: Authority, tmp_path: Path) -> None:
        trusted = tmp_path / "trusted.pem"
        trusted.write_bytes(Authority(tmp_path / "old").chain.read_bytes())
        peer = PeerTls(Settings(broker_client_trust_certs_file=trusted))
        server = ServerTls(settings_of(authority)).current
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(server, peer.current)
        trusted.write_bytes(authority.chain.read_bytes())
        assert peer.reload()
        handshake(server, peer.current)
