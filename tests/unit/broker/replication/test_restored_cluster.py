"""A cluster that was restored from a backup: its positions go back, and nothing is lost unseen."""

import asyncio
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from broker.replication.replicator import Replicator
from magnetar.protocol.ids import Position
from storage.backup import backup
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster

Pair = tuple[Cluster, Cluster]
TOPIC_PATH = "/admin/v2/persistent/public/default/t"
POSITION = f"{TOPIC_PATH}/subscription/pulsar.repl.west"


def failure_of(cluster: Cluster) -> str:
    replicator = cluster.replicators().get("west")
    return (replicator and replicator.failure) or ""


async def restore_after(east: Cluster, directory: Path, *lost: bytes) -> None:
    """Publish messages that a backup of east does not have, and restore that."""
    await east.publish(b"first")
    await until(east.is_done)
    await east.stop()
    copytree(directory / "east", directory / "backup")
    await east.start()
    await east.publish(*lost)
    await until(east.is_done)
    await east.stop()
    rmtree(directory / "east")
    copytree(directory / "backup", directory / "east")
    await east.start()


@pytest.mark.parametrize("deduplicates", [True, False])
async def test_a_restored_cluster_sends_its_new_messages_once_the_topic_is_deleted_there(
    pair: Pair, tmp_path: Path, *, deduplicates: bool
) -> None:
    east, west = pair
    await west.ask("POST", f"{NAMESPACE}/deduplication", deduplicates)
    await restore_after(east, tmp_path, b"lost 1", b"lost 2", b"lost 3")
    await east.publish(b"new 1", b"new 2")
    await until(lambda: "positions of this topic went back" in failure_of(east))
    assert (await east.stats())["replication"]["west"]["replicationBacklog"] == 2
    await west.ask("DELETE", f"{TOPIC_PATH}?force=true")
    await until(east.is_done)
    assert await west.payloads(2) == [b"new 1", b"new 2"]
    assert not failure_of(east)


async def test_skip_all_gives_up_what_a_restored_cluster_has_not_sent(
    pair: Pair, tmp_path: Path
) -> None:
    east, west = pair
    await west.ask("POST", f"{NAMESPACE}/deduplication", True)
    await restore_after(east, tmp_path, b"lost 1", b"lost 2", b"lost 3")
    await east.publish(b"new 1", b"new 2", b"new 3")
    await until(lambda: "positions of this topic went back" in failure_of(east))
    await east.ask("POST", f"{POSITION}/skip_all")
    await until(east.is_done)
    await east.publish(b"new 4")
    await until(east.is_done)
    assert await west.payloads(5) == [b"first", b"lost 1", b"lost 2", b"lost 3", b"new 4"]


@pytest.mark.parametrize("deduplicates", [True, False])
async def test_what_a_restored_backup_publishes_while_the_other_cluster_is_away_arrives(
    pair: Pair, tmp_path: Path, *, deduplicates: bool
) -> None:
    east, west = pair
    await west.ask("POST", f"{NAMESPACE}/deduplication", deduplicates)
    # No subscription there keeps what came before a restart.
    await west.keep_messages()
    await east.publish(b"first")
    await until(east.is_done)
    await asyncio.to_thread(backup, tmp_path / "east", tmp_path / "backup")
    # The next ledger has an id that the backup has not given yet.
    await east.stop()
    await east.start()
    await east.publish(b"lost 1", b"lost 2", b"lost 3")
    await until(east.is_done)
    for stopped in (east, west):
        await stopped.stop()
    rmtree(tmp_path / "east")
    copytree(tmp_path / "backup", tmp_path / "east")
    await east.start()
    await east.publish(b"new 1", b"new 2")
    # The broker that sends them has not seen them come.
    await east.stop()
    await east.start()
    await west.start()
    await until(east.is_done)
    assert await west.payloads(6) == [
        *(b"first", b"lost 1", b"lost 2", b"lost 3"),
        *(b"new 1", b"new 2"),
    ]
    assert not failure_of(east)


@pytest.mark.parametrize("deduplicates", [True, False])
async def test_what_is_sent_again_after_a_lost_answer_is_no_sign_of_a_restored_cluster(
    pair: Pair, *, deduplicates: bool
) -> None:
    east, west = pair
    await west.ask("POST", f"{NAMESPACE}/deduplication", deduplicates)
    answered: list[Position] = []
    with pytest.MonkeyPatch.context() as patch:
        # No answer is noted, as if the broker had died before.
        patch.setattr(Replicator, "stored", lambda _, position, before: answered.append(position))
        await east.publish(b"1", b"2", b"3")
        await until(lambda: len(answered) == 3)
        await east.stop()
    await east.start()
    await east.publish(b"4")
    await until(east.is_done)
    assert await west.payloads(4) == [b"1", b"2", b"3", b"4"]
    assert not failure_of(east)
