"""The TLS context of a client's settings."""

import ssl

from magnetar.errors import InvalidArgument
from magnetar.settings import ClientSettings

__all__ = ["tls_context"]


def tls_context(settings: ClientSettings) -> ssl.SSLContext:
    """Make the TLS context.  Raises `InvalidArgument` for files that cannot be used."""
    trust = settings.tls_trust_file
    try:
        context = ssl.create_default_context(cafile=None if trust is None else str(trust))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"tls_trust_file {str(trust)!r} cannot be used ({error}); "
            "name a PEM file with the authorities' certificates."
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not (settings.tls_check_certificate and settings.tls_check_hostname):
        context.check_hostname = False
    if not settings.tls_check_certificate:
        context.verify_mode = ssl.CERT_NONE
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is not None and key is not None:
        try:
            context.load_cert_chain(str(certificate), str(key))
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"tls_certificate_file {str(certificate)!r} and tls_key_file {str(key)!r} cannot "
                f"be used ({error}); name the PEM files of a certificate and of its key."
            ) from error
    return context
