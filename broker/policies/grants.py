"""Changes of the grants on topics in a namespace's record: `auth_policies.destination_auth`.

Each takes and changes the decoded JSON.  A topic has the same grants in every domain.
"""

from magnetar.protocol.names import InvalidTopicName, TopicName, parse_topic_name
from security.access import topic_key

Json = dict[str, object]


def grant(granted: Json, topic: TopicName, role: str, actions: list[str]) -> None:
    """Replace the actions of a role on a topic, in every domain."""
    revoke(granted, topic, role)
    by_role = granted.setdefault(str(topic), {})
    if isinstance(by_role, dict):
        by_role[role] = actions


def revoke(granted: Json, topic: TopicName, role: str) -> None:
    """Remove a role from a topic, and the topic if no role remains."""
    for text in _keys_of(granted, topic):
        by_role = granted[text]
        if isinstance(by_role, dict):
            by_role.pop(role, None)
            if not by_role:
                del granted[text]


def forget_topic(record: Json, topic: TopicName) -> None:
    """Remove all grants on a topic from a namespace's record."""
    section = record.get("auth_policies")
    granted = section.get("destination_auth") if isinstance(section, dict) else None
    if isinstance(granted, dict):
        for text in _keys_of(granted, topic):
            del granted[text]


def _keys_of(granted: Json, topic: TopicName) -> list[str]:
    """The keys by which a topic is named, in whatever domain."""
    wanted, found = topic_key(topic), []
    for text in granted:
        try:
            if topic_key(parse_topic_name(text)) == wanted:
                found.append(text)
        except InvalidTopicName:
            continue
    return found
