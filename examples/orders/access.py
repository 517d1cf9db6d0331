"""How the example reaches a broker with TLS and tokens: by variables of the `magnetar` command."""

import os
from pathlib import Path

from magnetar.settings import ClientOptions


def access() -> tuple[ClientOptions, dict[str, str]]:
    """The authorities to trust and the token: for `magnetar.connect`, and as options of Spark."""
    settings, options = ClientOptions(), dict[str, str]()
    if trust := os.environ.get("MAGNETAR_TLS_TRUST_FILE"):
        settings["tls_trust_file"] = options["tlsTrustFile"] = trust
    if token := os.environ.get("MAGNETAR_TOKEN_FILE"):
        settings["token"] = Path(token).absolute().as_uri()
        options["tokenFile"] = token
    return settings, options
