"""Tokens are kept until they are about to expire, and replaced when brokers refuse them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from magnetar.bounds import OAUTH2_EARLY_S, OAUTH2_FRESH_S, OAUTH2_UNKNOWN_LIFETIME_S
from magnetar.credentials.kinds import IssuedToken, OAuth2Credentials
from magnetar.credentials.oauth2 import OAuth2Tokens
from magnetar.errors import AuthenticationFailed

CREDENTIALS = OAuth2Credentials("https://issuer", "id", "secret")


class World:
    """An issuer whose tokens live for `lifetime_s`, and a clock."""

    def __init__(self, lifetime_s: float | None) -> None:
        self.now = 1000.0
        self.lifetime_s = lifetime_s
        self.fetched = 0
        self.fails = False
        self.tokens = OAuth2Tokens(CREDENTIALS, fetch=self.fetch, clock=lambda: self.now)

    def fetch(self, credentials: OAuth2Credentials) -> IssuedToken:
        assert credentials is CREDENTIALS
        if self.fails:
            raise AuthenticationFailed("no")
        self.fetched += 1
        return IssuedToken(f"token-{self.fetched}", self.lifetime_s)


@pytest.mark.parametrize(
    ("lifetime_s", "kept_s"),
    [
        (3600, 3600 - OAUTH2_EARLY_S),
        (100, 90),
        (1, 0.9),
        (None, OAUTH2_UNKNOWN_LIFETIME_S - OAUTH2_UNKNOWN_LIFETIME_S / 10),
    ],
)
def test_token_is_kept_until_it_is_about_to_expire(lifetime_s: float | None, kept_s: float) -> None:
    world = World(lifetime_s)
    assert world.tokens.kept() is None
    assert world.tokens.get() == "token-1"
    world.now += kept_s - 0.01
    assert world.tokens.kept() == world.tokens.get() == "token-1"
    world.now += 0.02
    assert world.tokens.kept() is None
    assert world.tokens.get() == "token-2"


@pytest.mark.parametrize("lifetime_s", [0, -5])
def test_token_that_has_expired_already_is_not_kept(lifetime_s: float) -> None:
    world = World(lifetime_s)
    assert [world.tokens.get(), world.tokens.get()] == ["token-1", "token-2"]


def ask_anew(tokens: OAuth2Tokens) -> str:
    return tokens.get(anew=True)


def after_refusal(tokens: OAuth2Tokens) -> str:
    tokens.refused()
    return tokens.get()


@pytest.mark.parametrize("ask", [ask_anew, after_refusal])
def test_token_is_replaced_if_a_broker_wants_another_one(
    ask: Callable[[OAuth2Tokens], str],
) -> None:
    world = World(3600)
    world.tokens.get()
    assert ask(world.tokens) == "token-1", "a fresh one is as new as the issuer has it"
    world.now += OAUTH2_FRESH_S
    assert ask(world.tokens) == "token-2"
    assert ask(world.tokens) == "token-2", "connections that are asked together share one"
    world.now += OAUTH2_FRESH_S + 1
    assert world.tokens.get() == ("token-2" if ask is ask_anew else "token-3")


def test_failed_fetch_keeps_nothing_and_harms_nothing() -> None:
    world = World(100)
    world.fails = True
    with pytest.raises(AuthenticationFailed):
        world.tokens.get()
    world.fails = False
    assert world.tokens.get() == "token-1"
    world.now, world.fails = world.now + 50, True
    assert world.tokens.get() == "token-1"


def test_threads_share_one_fetch() -> None:
    world, began = World(3600), threading.Barrier(4)

    def get() -> str:
        began.wait()
        return world.tokens.get()

    with ThreadPoolExecutor(4) as pool:
        got = [each.result() for each in [pool.submit(get) for _ in range(4)]]
    assert got == ["token-1"] * 4
