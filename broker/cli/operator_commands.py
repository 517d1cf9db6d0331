"""The sub-commands of `magnetar` for operators: they ask a running broker, or make keys and tokens.

Apart from those that run a broker, so that a broker starts without them.
"""

import http.client
import ssl
import urllib.error
from http import HTTPStatus
from typing import Final

import typer

from broker.cli.failure import fail
from broker.cli.ledgers import register_ledgers
from broker.cli.permissions import register_permissions
from broker.cli.rest_client import RestFailure, fetch, no_answer, refusal
from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, asking
from broker.cli.tokens import register_tokens
from broker.cli.topics import register_topics
from broker.cli.transactions import register_transactions

HEALTH_TIMEOUT_S: Final = 3
HEALTH: Final = "/admin/v2/brokers/health"
"""For superusers: with a line for each thing that is damaged in the data directory."""
READY: Final = "/admin/v2/brokers/ready"
"""For everybody: whether the broker serves and its stores take writes."""
_NOT_ADMITTED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class _NotAdmitted(RestFailure):
    """The broker answers, but refuses the credentials, or its certificate is not trusted."""


@asking
def health(admin: Admin = DEFAULT_ADMIN) -> None:
    """Check the health of a broker: status 0 if it is well."""
    try:
        try:
            typer.echo(_health_for_superusers(admin))
        except _NotAdmitted:
            if admin.names_credentials or admin.local is None or admin.local.broker is None:
                raise
            # READY needs no credentials: a broker of this machine is well though the token has
            # expired, or there is none.
            typer.echo(_answer(admin, READY, None, _unverified(admin.tls_context())))
    except RestFailure as error:
        raise fail(error) from error


def _health_for_superusers(admin: Admin) -> str:
    authorization, local = admin.authorization(), admin.local
    needed = local is not None and local.broker is not None and local.broker.authentication
    if needed and authorization is None:
        raise _NotAdmitted
    return _answer(admin, HEALTH, authorization, admin.tls_context())


def _unverified(context: ssl.SSLContext | None) -> ssl.SSLContext | None:
    # Nothing secret is sent, and a broker whose certificate was replaced a moment ago is well.
    if context is not None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _answer(admin: Admin, path: str, authorization: str | None, tls: ssl.SSLContext | None) -> str:
    """Send a GET, and return the broker's answer.  Raises `RestFailure`."""
    url = f"{admin.url.rstrip('/')}{path}"
    try:
        return fetch(url, HEALTH_TIMEOUT_S, authorization=authorization, tls=tls).decode()
    except urllib.error.HTTPError as error:
        said = refusal(error, admin.url, with_credentials=authorization is not None)
        kind = _NotAdmitted if error.code in _NOT_ADMITTED else RestFailure
        raise kind(f"{url} reports a failure, {said}") from error
    except http.client.RemoteDisconnected as error:  # It is an HTTPException too.
        raise RestFailure(no_answer(admin.url, error)) from error
    except http.client.HTTPException as error:
        raise RestFailure(f"{url} does not speak HTTP: name the broker's REST port.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        untrusted = isinstance(reason, ssl.SSLCertVerificationError)
        kind = _NotAdmitted if untrusted else RestFailure
        raise kind(no_answer(admin.url, error)) from error


def register(app: typer.Typer) -> None:
    """Add the sub-commands."""
    app.command("health")(health)
    register_ledgers(app)
    register_permissions(app)
    register_tokens(app)
    register_topics(app)
    register_transactions(app)
