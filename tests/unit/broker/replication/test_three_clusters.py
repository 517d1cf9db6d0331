"""Three clusters, in which not all know each other."""

from pathlib import Path

from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster


async def test_no_cluster_passes_on_what_it_gets_from_another_one(tmp_path: Path) -> None:
    east, middle, west = clusters = [Cluster(tmp_path, name) for name in ("east", "middle", "west")]
    for each in clusters:
        await each.start()
    await east.set_up([middle])
    await middle.set_up([east, west])
    await west.set_up([middle])
    await east.publish(b"e")
    await middle.publish(b"m")
    await west.publish(b"w")
    await until(lambda: all(each.is_done() for each in clusters))
    assert sorted(await east.payloads(2)) == [b"e", b"m"]
    assert sorted(await middle.payloads(3)) == [b"e", b"m", b"w"]
    assert sorted(await west.payloads(2)) == [b"m", b"w"]
    counts = [next(iter(c.broker.topics.loaded().values())).ledger.entry_count for c in clusters]
    assert counts == [2, 3, 2]
    for each in clusters:
        await each.stop()
