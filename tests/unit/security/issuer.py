"""An issuer of tokens on this machine: its discovery document, its keys, and tokens of it."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from security.oidc_keys import DISCOVERY_PATH
from tests.unit.security.authority import Authority, subject

NOW_S: Final = 1_800_000_000.0
AUDIENCE: Final = "magnetar"


class Issuer:
    """Serves a document and a key set, which tests may replace, and signs tokens by P-256."""

    def __init__(self) -> None:
        self.url = ""
        self.keys = {"first": ec.generate_private_key(ec.SECP256R1())}
        self.document: dict[str, object] = {}
        self.answer: Callable[[], web.Response] | None = None
        """Makes what is sent in place of the keys."""
        self.authority_pem = b""
        """The authority that has signed its certificate."""
        self.fetches = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    def listens_at(self, url: str) -> None:
        """Be the issuer of this URL."""
        self.url = url
        self.document = {"issuer": url, "jwks_uri": f"{url}/keys"}

    def claims(self, **changed: object) -> dict[str, object]:
        """The claims of a valid token; a claim that is None is left out."""
        whole = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "alice",
            "iat": NOW_S - 60,
            "exp": NOW_S + 3600,
            **changed,
        }
        return {name: value for name, value in whole.items() if value is not None}

    def token(self, key: str | None = "first", /, **changed: object) -> bytes:
        """A token; `key` is its key id too, None for a token without one."""
        headers = {} if key is None else {"kid": key}
        signing = self.keys[key or "first"]
        return jwt.encode(self.claims(**changed), signing, "ES256", headers).encode()

    async def discover(self, _request: web.Request) -> web.Response:
        self.fetches += 1
        await self.go_on.wait()
        return web.json_response(self.document)

    async def list_keys(self, _request: web.Request) -> web.Response:
        if self.answer is not None:
            return self.answer()
        return web.Response(body=self.key_set())

    def key_set(self) -> bytes:
        """The public keys."""
        keys = [
            {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": name, "alg": "ES256"}
            for name, key in self.keys.items()
        ]
        return json.dumps({"keys": keys}).encode()


@asynccontextmanager
async def serving(
    directory: Path, authority: Authority | None = None, *, host: str = "localhost"
) -> AsyncIterator[Issuer]:
    """An issuer at a free port; by https if there is an authority, which signs for `host`."""
    issuer, context = Issuer(), None
    if authority is not None:
        certificate, key, trusted = authority.write(directory, subject(host), host)
        issuer.authority_pem = trusted.read_bytes()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
    application = web.Application()
    application.router.add_get(DISCOVERY_PATH, issuer.discover)
    application.router.add_get("/keys", issuer.list_keys)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "localhost", 0, ssl_context=context).start()
        scheme = "http" if context is None else "https"
        issuer.listens_at(f"{scheme}://localhost:{runner.addresses[0][1]}")
        yield issuer
    finally:
        issuer.go_on.set()
        await runner.cleanup()
