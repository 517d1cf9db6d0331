"""Who makes a request: the credentials in its headers, or its client certificate.

`Authorization: Bearer` has a token, `Authorization: Basic` a name and a password.  Without either,
the certificate of the connection counts.  A proxy names its client in `X-Original-Principal`.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from broker.admin.access import PRINCIPAL, NotAuthenticated
from broker.admin.keys import BROKER
from broker.admin.rest import error_answer
from security.authenticator import Authenticator, OriginalClient
from security.errors import CredentialsRefused, Refusal
from security.identity import Method, Principal
from security.providers import Credentials

ORIGINAL_PRINCIPAL: Final = "X-Original-Principal"
_REFUSED: Final = "Authentication failed: check the credentials of the request."


@web.middleware
async def authenticate(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Set the principal of a request with credentials; 401 if they prove nothing.

    A request without credentials has no principal, or that of the anonymous role.  Whether it is
    served then is up to the access table.
    """
    authenticator = request.app[BROKER].authenticator
    if authenticator is None:
        return await handler(request)
    try:
        principal = await _principal(request, authenticator)
    except CredentialsRefused:
        return challenge(authenticator, _REFUSED)
    if principal is not None:
        request[PRINCIPAL] = principal
    try:
        return await handler(request)
    except NotAuthenticated as error:
        return challenge(authenticator, error.reason)


def challenge(authenticator: Authenticator, reason: str) -> web.Response:
    """An answer 401 that names the schemes that are taken (RFC 9110, WWW-Authenticate)."""
    answer = error_answer(HTTPStatus.UNAUTHORIZED, reason)
    for each in authenticator.challenges:
        answer.headers.add(hdrs.WWW_AUTHENTICATE, each)
    return answer


async def _principal(request: web.Request, authenticator: Authenticator) -> Principal | None:
    address = request.remote or ""
    credentials = credentials_of(request)
    original = _original_principal(request)
    if credentials is None:
        if original is not None:
            raise CredentialsRefused(
                Refusal.INVALID_ROLES, "An original principal came without credentials."
            )
        own = authenticator.anonymous
        return None if own is None else Principal(own)
    identity = await authenticator.authenticate(credentials, address=address)
    client = None if original is None else OriginalClient(original)
    return await authenticator.principal_of(identity, client, address=address)


def _original_principal(request: web.Request) -> str | None:
    """The client that a proxy names.  Raises `CredentialsRefused` if there are several."""
    named = request.headers.getall(ORIGINAL_PRINCIPAL, [])
    if len(named) > 1:
        # A proxy may pass on the header that its client sent, and add its own.
        raise CredentialsRefused(
            Refusal.INVALID_ROLES, f"The header {ORIGINAL_PRINCIPAL} comes twice."
        )
    return named[0] if named else None


def credentials_of(request: web.Request) -> Credentials | None:
    """The credentials of a request; None if it has none.  Raises `CredentialsRefused`."""
    headers = request.headers.getall(hdrs.AUTHORIZATION, [])
    if not headers:
        certificate = client_certificate(request)
        return None if certificate is None else Credentials(Method.TLS, b"", certificate)
    if len(headers) > 1:
        raise CredentialsRefused(Refusal.INVALID_HEADER, "The header Authorization comes twice.")
    scheme, _, value = headers[0].partition(" ")
    if scheme.lower() == "bearer":
        return Credentials(Method.TOKEN, value.strip().encode())
    if scheme.lower() == "basic":
        try:
            return Credentials(Method.BASIC, base64.b64decode(value.strip(), validate=True))
        except binascii.Error as error:
            raise CredentialsRefused(
                Refusal.INVALID_HEADER, "The header Authorization has no base64."
            ) from error
    raise CredentialsRefused(
        Refusal.UNSUPPORTED_METHOD, "The header Authorization has neither Bearer nor Basic."
    )


def client_certificate(request: web.Request) -> bytes | None:
    """The verified client certificate (DER) of the connection; None without one."""
    transport = request.transport
    tls = None if transport is None else transport.get_extra_info("ssl_object")
    found: bytes | None = None if tls is None else tls.getpeercert(binary_form=True)
    return found
