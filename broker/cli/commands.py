"""The sub-commands of `magnetar` that run a broker, or read its settings or its data directory.

A failure is one sentence on standard error and a status other than 0.
"""

import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from broker.cli.failure import fail
from config.settings import Settings
from magnetar.protocol.server_error import MagnetarError

if TYPE_CHECKING:
    from security.first_start_files import SecurityFiles

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings", envvar="MAGNETAR_CONFIG")
]
PortTls = Annotated[
    int | None, typer.Option(help="Binary protocol port with TLS, 6651 by custom; none unless set")
]
BinaryPort = Annotated[int | None, typer.Option(help="Binary protocol port [6650]")]
HttpPort = Annotated[int | None, typer.Option(help="REST and metrics port [8080]")]
BindHost = Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1]")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Serve everybody who reaches the ports")
]
HttpPortTls = Annotated[
    int | None, typer.Option(help="REST and metrics port with TLS, 8443 by custom; none unless set")
]


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


def _secure_option(text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option("--secure", help=text, envvar="MAGNETAR_SECURE")
    return option


def _make_security_files(config: Path | None, given: Mapping[str, object]) -> "SecurityFiles":
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


def _stays_secure(context: typer.Context, config: Path | None, given: Mapping[str, object]) -> bool:
    """Whether `--secure` holds beside the other settings.

    The option and `insecure` exclude each other.  MAGNETAR_SECURE is the default of the image: it
    gives way to `insecure` and to settings of authentication.
    """
    from config.settings import ConfigurationError, one_flag, one_setting

    try:
        insecure = one_flag("insecure", config, given)
        providers = one_setting("authentication_providers", config)
    except ConfigurationError as error:
        raise fail(error) from error
    source = context.get_parameter_source("secure")
    if source is not None and source.name == "ENVIRONMENT":
        return not insecure and providers in ("", "()", "[]")
    if insecure:
        raise fail("--secure and --insecure exclude each other: give one of them.")
    return True


def standalone(
    context: typer.Context,
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
        _secure_option(
            "TLS, tokens and authorization, by a key, a superuser's token and a certificate that "
            "the first start makes in the data directory; from the environment it gives way to "
            "settings of authentication and to insecure"
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
    if secure:
        secure = _stays_secure(context, config, given)
    hints: Sequence[str] = ()
    if secure:
        files = _make_security_files(config, given)
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
    with quick_imports():
        from broker.cli.serving import serve
        from config.logging import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    raise typer.Exit(serve(settings, hints))


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules in less time and memory: imports are most of a broker's start."""
    # Structlog loads rich where it finds it, for tracebacks; the broker prints them without.
    hide = "rich" not in sys.modules
    if hide:
        sys.modules["rich"] = None  # type: ignore[assignment]  # "There is no such module."
    gc.disable()  # Modules make next to no garbage.
    try:
        yield
    finally:
        gc.enable()
        if hide:
            del sys.modules["rich"]


def show_config(
    context: typer.Context,
    config: ConfigFile = None,
    secure: Annotated[
        bool, _secure_option("As `magnetar standalone --secure` sets them; see there")
    ] = False,
) -> None:
    """Print every setting with its value and meaning, as TOML that can be used again."""
    from config.settings import is_secret, one_setting

    defaults: Mapping[str, object] = {}
    if secure and _stays_secure(context, config, {}):
        from security.first_start_files import SecurityFiles

        defaults = SecurityFiles.of(Path(one_setting("data_dir", config))).settings
    settings = _settings(config, defaults=defaults)
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        typer.echo(f"# {field.description or name}")
        if value is None or is_secret(name):
            typer.echo(f"# {name} = {'(not set)' if not value else '(not shown)'}")
        else:
            shown = value if isinstance(value, int | float | str | tuple) else str(value)
            typer.echo(f"{name} = {json.dumps(shown)}")


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
    """Add the sub-commands that run a broker or need none."""
    app.command("standalone")(standalone)
    app.command("broker")(broker)
    app.command("config")(show_config)
    app.command("backup")(backup)
