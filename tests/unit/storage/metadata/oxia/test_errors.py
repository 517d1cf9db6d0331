"""Failed calls: what old and new servers say, and what follows."""

import pytest

from storage.metadata.oxia.errors import Action, classify, out_of_time, outcome_unknown, refused


@pytest.mark.parametrize(
    ("code", "text", "action"),
    [
        ("UNAVAILABLE", "connection refused", Action.RETRY),
        ("UNKNOWN", "oxia: server not initialized yet", Action.RETRY),
        ("UNKNOWN", "oxia: resource is already closed", Action.RETRY),
        ("UNKNOWN", "oxia: operation was cancelled", Action.RETRY),
        ("UNKNOWN", "node is not leader for shard 3", Action.FIND_LEADER),
        ("UNKNOWN", "oxia: wrong state for operation", Action.FIND_LEADER),
        ("ABORTED", "whatever", Action.FIND_LEADER),
        ("UNKNOWN", "oxia: session not found", Action.SESSION_GONE),
        ("UNKNOWN", "oxia: invalid session timeout", Action.TELL_OPERATOR),
        ("UNKNOWN", "oxia: namespace not found", Action.TELL_OPERATOR),
        ("UNKNOWN", "oxia: notifications not enabled on namespace", Action.TELL_OPERATOR),
        ("UNAUTHENTICATED", "no token", Action.TELL_OPERATOR),
        ("PERMISSION_DENIED", "not you", Action.TELL_OPERATOR),
        ("DEADLINE_EXCEEDED", "", Action.RETRY),
    ],
)
def test_old_servers_are_understood_by_their_text(code: str, text: str, action: Action) -> None:
    assert classify(code, text).action is action


def test_new_servers_are_understood_by_their_reason() -> None:
    gone = classify("NOT_FOUND", "unknown", b"\x12\x11SESSION_NOT_FOUND\x1a")
    assert gone.action is Action.SESSION_GONE
    moved = classify("UNAVAILABLE", "", b"..NODE_IS_NOT_LEADER..")
    assert moved.action is Action.FIND_LEADER
    assert classify("NOT_FOUND", "unknown").action is Action.TELL_OPERATOR


@pytest.mark.parametrize("text", ["Failed to append to wal: 7", "oxia db: failed to apply batch"])
def test_a_broken_shard_is_an_alarm(text: str) -> None:
    failure = classify("UNKNOWN", text)
    assert failure.shard_is_down
    assert failure.action is Action.RETRY
    assert "restart its server" in str(out_of_time("a put", failure))


def test_sentences_tell_the_next_step() -> None:
    failure = classify("UNAVAILABLE", "refused")
    assert not failure.shard_is_down
    assert "try again" in str(out_of_time("a put", failure))
    assert "no answer" in str(out_of_time("a put", None))
    assert "check the namespace" in str(refused(failure, "a put"))
    unknown = classify("PERMISSION_DENIED", 'oxia: unexpected authority "oxia:6648"')
    assert "allowExtraAuthorities" in str(refused(unknown, "a put"))
    assert "unknown" in str(outcome_unknown("the put of '/a'"))
