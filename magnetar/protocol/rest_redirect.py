"""Which redirects of a broker's REST interface clients follow.  Pure."""

from urllib.parse import urljoin, urlsplit

__all__ = ["RedirectRefused", "redirect_target"]


class RedirectRefused(Exception):
    """A redirect that is not followed; the message is a sentence with the next step."""


def redirect_target(url: str, location: str, *, with_credentials: bool) -> str:
    """The URL to which a redirect leads, if requests may go on there.

    Brokers send requests on to the owner of a topic, so the host may be another one; by HTTPS its
    certificate is checked as that of the first.  The scheme never becomes a weaker one, and stays
    the same where credentials go along.  Raises `RedirectRefused`.
    """
    try:
        target = urljoin(url, location)
        before, after = urlsplit(url), urlsplit(target)
        hostname = after.hostname
    except ValueError:
        raise RedirectRefused(
            f"{url} redirects the request to something that is no address; name another broker."
        ) from None
    schemes = ("https",) if before.scheme == "https" else ("http", "https")
    if with_credentials:
        schemes = (before.scheme,)
    if not hostname or after.scheme not in schemes:
        raise RedirectRefused(
            f"{before.scheme}://{before.netloc} redirects the request to {after.scheme or 'no'}"
            f"://{hostname or ''}, which is not followed"
            f"{', as it has credentials' if with_credentials else ''}: name a broker whose "
            "addresses all have the scheme of this one."
        )
    return target
