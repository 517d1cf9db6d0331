"""Policies that change while a topic is being loaded are in force for it."""

from pathlib import Path

from broker.policies.policy_kinds import MESSAGE_TTL
from broker.topics.replication import NoReplication
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.waiting import until

NAME = parse_topic_name("persistent://public/default/t")


async def test_a_policy_that_changes_while_a_topic_is_loaded_is_in_force(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:

        class ChangingMeanwhile(NoReplication):
            async def open(self) -> None:
                await broker.namespaces.change(
                    NAME.namespace_name, lambda record: record.update({MESSAGE_TTL.member: 7})
                )
                await until(lambda: broker.policies.of(NAME).message_ttl_s == 7)

        broker.topics.replicate = ChangingMeanwhile.of
        topic = await broker.topics.get(NAME, create=True)
        assert topic.policies.message_ttl_s == 7
