"""The role of a client certificate: exactly one common name, or the first alternative name."""

import asyncio
import ipaddress
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import CERTIFICATE_BYTES
from security.certificates import PrincipalName, TlsProvider, identity_of
from security.errors import CredentialsRefused, Refusal
from security.identity import Method
from security.providers import Credentials
from tests.unit.security.authority import Authority, der, subject

AUTHORITY = Authority()
NAMES = [
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    x509.UniformResourceIdentifier("spiffe://cluster/orders"),
    x509.DNSName("orders.example"),
]


def certificate(name: x509.Name, names: list[x509.GeneralName] | None = None) -> bytes:
    return der(AUTHORITY.sign(name, names or [])[0])


def refusal_of(data: bytes, principal: PrincipalName = "cn") -> Refusal:
    with pytest.raises(CredentialsRefused) as refused:
        identity_of(data, principal)
    return refused.value.reason


@pytest.mark.parametrize("name", ["orders", "Orders Ltd.", "Bestellungen-ü", "a=b", "a#b"])
def test_the_common_name_is_the_role(name: str) -> None:
    identity = identity_of(certificate(subject(name), NAMES), "cn")
    assert (identity.role, identity.method) == (name, Method.TLS)
    assert identity.expires_at_s is not None
    assert 0 < identity.expires_at_s - time.time() <= 24 * 3600


@pytest.mark.parametrize("names", [(), ("a", "b"), ("a", "a")])
def test_a_subject_without_exactly_one_common_name_is_refused(names: tuple[str, ...]) -> None:
    assert refusal_of(certificate(subject(*names))) is Refusal.INVALID_CN


@pytest.mark.parametrize("name", ["a,b", "admin,OU=x", "a\\b", 'a"b', "a+b", "a<b", "a;b", "#a"])
def test_a_common_name_that_a_subject_escapes_is_refused(name: str) -> None:
    assert refusal_of(certificate(subject(name))) is Refusal.INVALID_CN


def test_a_common_name_that_is_joined_with_another_attribute_is_refused() -> None:
    joined = x509.RelativeDistinguishedName(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "a"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "b"),
        ]
    )
    assert refusal_of(certificate(x509.Name([joined]))) is Refusal.INVALID_CN


@pytest.mark.parametrize("name", [" ", " a", "a ", "a*", "a\x00b", "a\nb"])
def test_a_common_name_that_is_no_role_is_refused(name: str) -> None:
    assert refusal_of(certificate(subject(name))) is Refusal.INVALID_ROLE


def test_the_first_alternative_name_that_is_a_name_is_the_role() -> None:
    data = certificate(subject("other"), NAMES)
    assert identity_of(data, "san").role == "spiffe://cluster/orders"
    mail = certificate(subject("other"), [x509.RFC822Name("a@example"), *NAMES])
    assert identity_of(mail, "san").role == "a@example"


def test_a_certificate_without_an_alternative_name_is_refused() -> None:
    assert refusal_of(certificate(subject("orders")), "san") is Refusal.INVALID_CN
    assert refusal_of(certificate(subject("orders"), NAMES[:1]), "san") is Refusal.INVALID_CN


def test_an_alternative_name_for_many_hosts_is_refused() -> None:
    data = certificate(subject("orders"), [x509.DNSName("*.example")])
    assert refusal_of(data, "san") is Refusal.INVALID_ROLE


async def test_the_certificate_of_a_tls_connection_proves_its_role(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    ours = AUTHORITY.write(tmp_path, subject("broker"), "localhost")
    theirs = AUTHORITY.write(tmp_path / "client", subject("orders"), "orders.example")
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ours[2])
    server_tls.load_cert_chain(ours[0], ours[1])
    server_tls.verify_mode = ssl.CERT_REQUIRED
    client_tls = ssl.create_default_context(cafile=ours[2])
    client_tls.load_cert_chain(theirs[0], theirs[1])
    shown: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.set_result(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.close()

    server = await asyncio.start_server(serve, "localhost", 0, ssl=server_tls)
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("localhost", port, ssl=client_tls)
    credentials = Credentials("tls", certificate=await shown)
    assert (await TlsProvider("cn", now_s=time.time).authenticate(credentials)).role == "orders"
    assert "orders" not in repr(credentials)
    writer.close()
    server.close()


WHOLE = certificate(subject("orders"), NAMES)


@given(
    at=st.integers(0, len(WHOLE) - 1),
    new=st.binary(max_size=3),
    principal=st.sampled_from(["cn", "san"]),
)
def test_a_damaged_certificate_raises_nothing_else(
    at: int, new: bytes, principal: PrincipalName
) -> None:
    damaged = WHOLE[:at] + new + WHOLE[at + len(new) :]
    try:
        identity_of(damaged, principal)
    except CredentialsRefused:
        pass


@given(data=st.binary(max_size=64))
def test_bytes_that_are_no_certificate_are_refused(data: bytes) -> None:
    assert refusal_of(data) is Refusal.INVALID_CERTS


def test_a_large_certificate_is_refused_unparsed() -> None:
    assert refusal_of(WHOLE + bytes(CERTIFICATE_BYTES)) is Refusal.INVALID_CERTS


async def test_the_provider_asks_for_a_certificate_that_has_not_expired() -> None:
    now_s = time.time()
    provider = TlsProvider("cn", now_s=lambda: now_s)
    with pytest.raises(CredentialsRefused) as missing:
        await provider.authenticate(Credentials("tls"))
    assert missing.value.reason is Refusal.INVALID_CERTS
    credentials = Credentials("tls", certificate=WHOLE)
    assert (await provider.authenticate(credentials)).role == "orders"
    now_s += 2 * 24 * 3600
    with pytest.raises(CredentialsRefused) as expired:
        await provider.authenticate(credentials)
    assert expired.value.expired
