"""A broker process with everything on (`Security`), and clients with every kind of credentials.

An issuer of OAuth2 tokens, which the broker takes by OpenID Connect, runs in this process.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

import aiohttp
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.settings import ClientOptions
from tests.java.broker_under_test import MagnetarProcess
from tests.java.fixtures import SETTINGS, serving
from tests.support.child_process import HOST, free_port
from tests.support.oauth2_issuer import CLIENT_ID, Issuer, issuing
from tests.support.oauth2_issuer import SECRET as CLIENT_SECRET
from tests.support.roles import LIFE_S, token_of
from tests.support.security import PASSWORD, ROOT_ROLE, Security

USERS: Final = (ROOT_ROLE, "alice", "stranger")
"""The roles that have a password."""
FAST_HASH_COST: Final = 4
AUDIENCE: Final = "urn:brokers"
NAMESPACE: Final = "public/default"


class Kind(StrEnum):
    """The kinds of credentials of a client."""

    TOKEN = "token"
    TOKEN_FILE = "token file"
    BASIC = "basic"
    OAUTH2 = "oauth2"
    CERTIFICATE = "certificate"


class SecuredBroker:
    """A broker process, its issuer of tokens, and the options of its clients.

    Use `serving_secured`.
    """

    def __init__(self, directory: Path, issuer: Issuer, **more: object) -> None:
        self.directory = directory
        self.security = Security(directory / "security", USERS, FAST_HASH_COST)
        self.authority = self.security.authority
        self.issuer = issuer
        port, http_port = free_port(), free_port()
        self.url = f"pulsar+ssl://{HOST}:{port}"
        self.admin_url = f"https://{HOST}:{http_port}"
        self.issuer_role = ROOT_ROLE
        """The role in the tokens of the issuer."""
        self._sign_by_issuer()
        settings = {
            **SETTINGS,
            **self.security.settings,
            "port_tls": port,
            "http_port_tls": http_port,
            "authentication_providers": "token,oidc,basic,tls",
            "oidc_issuers": issuer.url,
            "oidc_audiences": AUDIENCE,
            "oidc_require_https": False,
            "authentication_refresh_check_s": 1,
            **more,
        }
        self.process = MagnetarProcess(directory, settings)

    def token_file(self, role: str, *, life_s: float = LIFE_S, name: str = "") -> Path:
        """A file with a token of the role; written again if it is there."""
        file = self.directory / f"{name or role}.token"
        new = file.with_suffix(".new")
        new.write_text(token_of(role, life_s=life_s) + "\n")
        new.rename(file)
        return file

    def oauth2(self) -> OAuth2Credentials:
        """The client of the issuer."""
        return OAuth2Credentials(
            self.issuer.url, CLIENT_ID, CLIENT_SECRET, audience=AUDIENCE, require_https=False
        )

    def options(self, kind: Kind, role: str = ROOT_ROLE) -> ClientOptions:
        """The settings of a client with credentials of this kind.

        With OAUTH2 the issuer's tokens have the role from now on.
        """
        options = ClientOptions(tls_trust_file=self.authority.chain)
        match kind:
            case Kind.TOKEN:
                options["token"] = token_of(role)
            case Kind.TOKEN_FILE:
                options["token"] = self.token_file(role).as_uri()
            case Kind.BASIC:
                options["basic"] = BasicCredentials(role, PASSWORD)
            case Kind.OAUTH2:
                self.issuer_role = role
                options["oauth2"] = self.oauth2()
            case Kind.CERTIFICATE:
                own = self.authority.issue(role)
                options["tls_certificate_file"], options["tls_key_file"] = own.chain, own.key
        return options

    async def ask(self, method: str, path: str, body: object = None, **query: str | int) -> object:
        """One REST request below /admin/v2 by the superuser."""
        url = f"{self.admin_url}/admin/v2{path}"
        async with (
            aiohttp.ClientSession(headers=self.security.headers()) as session,
            session.request(
                method, url, json=body, params=query, ssl=self.security.context
            ) as answer,
        ):
            text = await answer.text()
            assert answer.status in (200, 204), (method, path, answer.status, text)
            return json.loads(text) if text else None

    async def create_topic(self, name: str, segments: int = 1) -> str:
        """A scalable topic; its full name."""
        path = f"/scalable/{NAMESPACE}/{name}"
        await self.ask("PUT", path, {}, numInitialSegments=segments)
        return f"topic://{NAMESPACE}/{name}"

    async def split(self, topic: str, segment_id: int) -> None:
        """Split a segment of a scalable topic."""
        await self.ask("POST", f"/{_path(topic)}/split/{segment_id}")

    async def merge(self, topic: str, first_id: int, second_id: int) -> None:
        """Merge two segments that are neighbours."""
        await self.ask("POST", f"/{_path(topic)}/merge/{first_id}/{second_id}")

    async def grant(self, topic: str, role: str, *actions: str) -> None:
        """Let a role do this with a topic."""
        await self.ask("POST", f"/{_path(topic)}/permissions/{role}", list(actions))

    async def withdraw(self, topic: str, role: str) -> None:
        """Take everything that a role may do with a topic."""
        await self.ask("DELETE", f"/{_path(topic)}/permissions/{role}")

    def _sign_by_issuer(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        self.issuer.key_set = {"keys": [{**public, "kid": "first", "alg": "ES256"}]}

        def make_token() -> str:
            now = time.time()
            claims = {
                "iss": self.issuer.url,
                "aud": AUDIENCE,
                "sub": self.issuer_role,
                "iat": int(now) - 1,
                "exp": int(now) + self.issuer.lifetime_s,  # type: ignore[operator]
            }
            return jwt.encode(claims, key, "ES256", {"kid": "first"})

        self.issuer.make_token = make_token


@contextmanager
def serving_secured(
    directory: Path, settings: Mapping[str, object] | None = None
) -> Iterator[SecuredBroker]:
    """The broker, started; it ends without faults of its own in its log."""
    with issuing() as issuer:
        broker = SecuredBroker(directory, issuer, **(settings or {}))
        for _ in serving(broker.process):
            yield broker


def _path(topic: str) -> str:
    domain, _, rest = topic.partition("://")
    return f"{'scalable' if domain == 'topic' else domain}/{rest}"
