"""A broker that knows its clients by tokens, and the tokens of roles in the forms of clients."""

import base64
import time
from typing import Final

from magnetar.protocol.pulsar_pb2 import CommandConnect, FeatureFlags
from security.token_keys import signing_secret
from security.tokens import create_token

SECRET: Final = bytes(range(32))
SECRET_KEY: Final = f"data:;base64,{base64.b64encode(SECRET).decode()}"
"""The same, as a setting."""
TOKENS: Final[dict[str, object]] = {
    "authentication_providers": ("token",),
    "token_secret_keys": (SECRET_KEY,),
}
"""Settings of a broker that takes these tokens."""
LIFE_S: Final = 3600
JAVA_TOKENS: Final = "org.apache.pulsar.client.impl.auth.AuthenticationToken"


def token_of(role: str, *, life_s: float = LIFE_S, secret: bytes = SECRET) -> str:
    """A token of a role that expires after `life_s`, or has if that is below 0."""
    claims = {"sub": role, "exp": int(time.time() + life_s)}
    return create_token(signing_secret(secret, "the tests"), claims)


def bearer(token: str) -> dict[str, str]:
    """The header of REST requests with a token."""
    return {"Authorization": f"Bearer {token}"}


def java_arguments(token: str, admin_token: str) -> dict[str, str]:
    """Arguments of a case of the Java client, for its client and for the driver's REST requests."""
    return {
        "authPlugin": JAVA_TOKENS,
        "authParams": f"token:{token}",
        "adminToken": admin_token,
    }


def connect_as(role: str, *, refreshes: bool = True, life_s: float = LIFE_S) -> CommandConnect:
    """CONNECT with a token of the role."""
    return CommandConnect(
        auth_method_name="token",
        auth_data=token_of(role, life_s=life_s).encode(),
        feature_flags=FeatureFlags(supports_auth_refresh=refreshes),
    )
