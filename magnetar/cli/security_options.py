"""The options for credentials and TLS, of every command that connects to a broker or asks its REST.

They have the names of the client's settings.  Each may come from the environment.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials, check_one_kind
from magnetar.credentials.secrets import token_source
from magnetar.errors import InvalidArgument

__all__ = ["SecurityOptions", "environment_option"]


def environment_option(
    name: str, said: str, panel: str, variable: str = ""
) -> typer.models.OptionInfo:
    """An option that may come from the environment: `--a-b` from MAGNETAR_A_B, unless said."""
    variable = variable or name.partition("/")[0].removeprefix("--").replace("-", "_").upper()
    option: typer.models.OptionInfo = typer.Option(
        name, envvar=f"MAGNETAR_{variable}", show_envvar=True, help=said, rich_help_panel=panel
    )
    return option


def _option(name: str, said: str) -> typer.models.OptionInfo:
    return environment_option(name, said, "Credentials")


def _tls(name: str, said: str, variable: str = "") -> typer.models.OptionInfo:
    return environment_option(name, said, "TLS", variable)


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """The credentials of one command line, of one kind or none, and its TLS.

    Raises typer.BadParameter.
    """

    token: Annotated[
        str | None,
        _option("--token", "Authentication token; others may see it in the command line"),
    ] = field(default=None, repr=False)
    token_file: Annotated[Path | None, _option("--token-file", "File with the token")] = None
    basic_user: Annotated[
        str | None, _option("--basic-user", "User name, to authenticate with a password")
    ] = None
    basic_password: Annotated[
        str | None,
        _option("--basic-password", "The user's password; others may see it in the command line"),
    ] = field(default=None, repr=False)
    basic_password_file: Annotated[
        Path | None, _option("--basic-password-file", "File with the password")
    ] = None
    oauth2_key_file: Annotated[
        Path | None,
        _option(
            "--oauth2-key-file", "JSON with the client's key, to get tokens from an OAuth2 issuer"
        ),
    ] = None
    oauth2_issuer_url: Annotated[
        str | None, _option("--oauth2-issuer-url", "https:// address of the OAuth2 issuer")
    ] = None
    oauth2_client_id: Annotated[
        str | None, _option("--oauth2-client-id", "Client id, if there is no key file")
    ] = None
    oauth2_client_secret: Annotated[
        str | None,
        _option("--oauth2-client-secret", "Client secret; others may see it in the command line"),
    ] = field(default=None, repr=False)
    oauth2_audience: Annotated[
        str | None, _option("--oauth2-audience", "Audience of the tokens")
    ] = None
    oauth2_scope: Annotated[str | None, _option("--oauth2-scope", "Scope of the tokens")] = None
    oauth2_trust_file: Annotated[
        Path | None,
        _option("--oauth2-trust-file", "PEM of the authorities to trust for the issuer"),
    ] = None
    oauth2_require_https: Annotated[
        bool,
        _option(
            "--oauth2-require-https/--no-oauth2-require-https",
            "Without: http:// is accepted too, for tests",
        ),
    ] = True
    tls_trust_file: Annotated[
        Path | None,
        _tls("--tls-trust-file", "PEM of the authorities to trust for brokers"),
    ] = None
    # Not MAGNETAR_TLS_CERTIFICATE_FILE: in the environment of a broker that is its own setting.
    tls_certificate_file: Annotated[
        Path | None,
        _tls("--tls-certificate-file", "PEM of our certificate", "CLIENT_CERTIFICATE_FILE"),
    ] = None
    tls_key_file: Annotated[
        Path | None, _tls("--tls-key-file", "PEM of its key", "CLIENT_KEY_FILE")
    ] = None
    tls_check_certificate: Annotated[
        bool,
        _tls(
            "--tls-check-certificate/--no-tls-check-certificate",
            "Without: any broker is trusted, for tests",
        ),
    ] = True
    tls_check_hostname: Annotated[
        bool,
        _tls(
            "--tls-check-hostname/--no-tls-check-hostname",
            "Without: any name in the certificate is accepted, for tests",
        ),
    ] = True

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise typer.BadParameter(
                "give a token or a file with one, not both (MAGNETAR_TOKEN and "
                "MAGNETAR_TOKEN_FILE count too)."
            )
        try:
            check_one_kind(token=self.token_text, basic=self.basic, oauth2=self.oauth2)
            if self.token is not None:
                token_source(self.token)
        except InvalidArgument as error:
            raise typer.BadParameter(
                f"{error} (Options from the environment, MAGNETAR_TOKEN and so on, count too.)"
            ) from None

    @property
    def token_text(self) -> str | None:
        """The token, or `file:///PATH`."""
        # The file is read whenever a broker asks for a token: one that expires can be replaced.
        return self.token if self.token_file is None else self.token_file.absolute().as_uri()

    @property
    def basic(self) -> BasicCredentials | None:
        """The name and the password.  Raises `InvalidArgument`."""
        given = (self.basic_user, self.basic_password, self.basic_password_file)
        if all(each is None for each in given):
            return None
        return BasicCredentials(
            self.basic_user or "", self.basic_password, self.basic_password_file
        )

    @property
    def oauth2(self) -> OAuth2Credentials | None:
        """The client of an issuer.  Raises `InvalidArgument`."""
        given = (
            self.oauth2_key_file,
            self.oauth2_issuer_url,
            self.oauth2_client_id,
            self.oauth2_client_secret,
            self.oauth2_audience,
            self.oauth2_scope,
        )
        if all(each is None for each in given):
            return None
        return OAuth2Credentials(
            issuer_url=self.oauth2_issuer_url,
            client_id=self.oauth2_client_id,
            client_secret=self.oauth2_client_secret,
            key_file=self.oauth2_key_file,
            audience=self.oauth2_audience,
            scope=self.oauth2_scope,
            trust_file=self.oauth2_trust_file,
            require_https=self.oauth2_require_https,
        )
