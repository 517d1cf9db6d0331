"""The broker's sub-commands of `magnetar`.

A failure is one sentence on standard error and a status other than 0.
"""

import http.client
import json
import ssl
import urllib.error
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from broker.cli.failure import fail
from broker.cli.ledgers import register_ledgers
from broker.cli.rest_client import RestFailure, fetch, not_trusted, refusal
from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, asking
from broker.cli.tokens import register_tokens
from broker.cli.topics import register_topics
from broker.cli.transactions import register_transactions
from config.settings import Settings
from magnetar.protocol.server_error import MagnetarError

if TYPE_CHECKING:
    from security.first_start import SecurityFiles

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings", envvar="MAGNETAR_CONFIG")
]
PortTls = Annotated[
    int | None, typer.Option(help="Binary protocol port with TLS, 6651 by custom [none]")
]
BinaryPort = Annotated[int | None, typer.Option(help="Binary protocol port [6650]")]
HttpPort = Annotated[int | None, typer.Option(help="REST and metrics port [8080]")]
BindHost = Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1]")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Serve everybody who reaches the ports")
]
HttpPortTls = Annotated[
    int | None, typer.Option(help="REST and metrics port with TLS, 8443 by custom [none]")
]
HEALTH_TIMEOUT_S = 3


def _settings(
    config: Path | None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    # Heavy modules are imported only when their command runs.
    from config.settings import ConfigurationError, load_settings

    try:
        return load_settings(config, overrides, defaults=defaults)
    except ConfigurationError as error:
        raise fail(error) from error


def _secured(config: Path | None, given: Mapping[str, object]) -> "SecurityFiles":
    """Make what a secure broker needs in its data directory, unless it is there."""
    from config.settings import ConfigurationError, one_setting
    from security.errors import InvalidSecret
    from security.first_start import security_files

    try:
        data_dir = Path(one_setting("data_dir", config, given))
        host = one_setting("advertised_host", config, given)
        return security_files(data_dir, host, now=datetime.now(UTC))
    except (ConfigurationError, InvalidSecret, OSError) as error:
        raise fail(error) from error


def standalone(
    data_dir: Annotated[Path | None, typer.Option(help="Directory of all durable data")] = None,
    port: BinaryPort = None,
    http_port: HttpPort = None,
    port_tls: PortTls = None,
    http_port_tls: HttpPortTls = None,
    bind_host: BindHost = None,
    advertised_host: Annotated[
        str | None, typer.Option(help="Host name for clients [127.0.0.1]")
    ] = None,
    insecure: Insecure = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="TLS, tokens and authorization, by a key, a superuser's token and a certificate "
            "that the first start makes in the data directory",
        ),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Run the embedded broker: one process, one data directory."""
    given: dict[str, object] = {
        "data_dir": data_dir,
        "port": port,
        "http_port": http_port,
        "port_tls": port_tls,
        "http_port_tls": http_port_tls,
        "bind_host": bind_host,
        "advertised_host": advertised_host,
        "insecure": insecure,
    }
    if secure and insecure:
        raise fail("--secure and --insecure exclude each other: give one of them.")
    hints: Sequence[str] = ()
    if secure:
        files = _secured(config, given)
        settings = _settings(config, given, files.settings)
        hints = files.hints(settings)
    else:
        settings = _settings(config, given)
    if settings.in_cluster:
        raise fail("metadata_store_url names a store that brokers share: run `magnetar broker`.")
    _serve(settings, hints)


def broker(
    config: ConfigFile = None,
    port: BinaryPort = None,
    http_port: HttpPort = None,
    port_tls: PortTls = None,
    http_port_tls: HttpPortTls = None,
    bind_host: BindHost = None,
    advertised_host: Annotated[
        str | None, typer.Option(help="Host name for clients and other brokers [127.0.0.1]")
    ] = None,
    insecure: Insecure = None,
) -> None:
    """Run one broker of a cluster: metadata in Oxia or ZooKeeper, ledgers on BookKeeper."""
    settings = _settings(
        config,
        {
            "port": port,
            "http_port": http_port,
            "port_tls": port_tls,
            "http_port_tls": http_port_tls,
            "bind_host": bind_host,
            "advertised_host": advertised_host,
            "insecure": insecure,
        },
    )
    if not settings.in_cluster:
        raise fail(
            "a broker of a cluster needs metadata_store_url and bookkeeper_metadata_service_uri: "
            "set them, or run `magnetar standalone`."
        )
    _serve(settings)


def _serve(settings: Settings, hints: Sequence[str] = ()) -> NoReturn:
    from broker.cli.serving import serve
    from config.logging import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    raise typer.Exit(serve(settings, hints))


def show_config(config: ConfigFile = None) -> None:
    """Print every setting with its value and meaning, as TOML that can be used again."""
    from config.settings import is_secret

    settings = _settings(config)
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        typer.echo(f"# {field.description or name}")
        if value is None or is_secret(name):
            typer.echo(f"# {name} = {'(not set)' if not value else '(not shown)'}")
        else:
            shown = value if isinstance(value, int | float | str | tuple) else str(value)
            typer.echo(f"{name} = {json.dumps(shown)}")


@asking
def health(admin: Admin = DEFAULT_ADMIN) -> None:
    """Check the health of a broker: status 0 if it is well."""
    url = f"{admin.url.rstrip('/')}/admin/v2/brokers/health"
    known = None
    try:
        known = admin.authorization()
        tls = admin.tls_context()
        typer.echo(fetch(url, HEALTH_TIMEOUT_S, authorization=known, tls=tls).decode())
    except RestFailure as error:
        raise fail(error) from error
    except urllib.error.HTTPError as error:
        said = refusal(error, admin.url, known=known is not None)
        raise fail(f"{url} reports a failure, {said}") from error
    except http.client.HTTPException as error:
        raise fail(f"{url} does not speak HTTP: name the broker's REST port.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise fail(not_trusted(admin.url, reason)) from error
        raise fail(f"{url} does not answer ({error}).") from error


def backup(
    to: Annotated[Path, typer.Option(help="Directory that does not exist yet")],
    data_dir: Annotated[Path, typer.Option(help="Data directory of the broker")] = Path("data"),
) -> None:
    """Copy a data directory while its broker runs; the copy opens as a data directory."""
    from storage.backup import backup as copy_data_directory

    try:
        copy_data_directory(data_dir, to)
    except (MagnetarError, OSError) as error:
        raise fail(error) from error
    typer.echo(f"{data_dir} is backed up in {to}.")


def register(app: typer.Typer) -> None:
    """Add the sub-commands: the entry point of the group `magnetar.commands`."""
    app.command("standalone")(standalone)
    app.command("broker")(broker)
    app.command("config")(show_config)
    app.command("health")(health)
    app.command("backup")(backup)
    register_ledgers(app)
    register_tokens(app)
    register_topics(app)
    register_transactions(app)
