"""The files that unit tests read are what the Java client says (`tests/interop/golden.py`)."""

from tests.interop.java_client import JavaClient
from tests.unit.magnetar.golden import golden


async def test_schemas(java: JavaClient) -> None:
    for item in golden("schemas"):
        values = [sample["value"] for sample in item["samples"]]
        facts = await java.schema(item["kind"], values)
        assert facts["encoded"] == [sample["bytes"] for sample in item["samples"]]
        assert facts["info"]["type"] == item["java_type"]
        if item["registered"] is not None:
            for part in ("name", "data", "properties"):
                assert facts["info"][part] == item["registered"][part]


async def test_positions(java: JavaClient) -> None:
    for item in golden("message_ids"):
        facts = await java.explain_id(item["bytes"])
        assert facts["meaning"] == item["meaning"]
        if len(facts["meaning"].get("topic_vectors", ())) < 2:  # of several the order is by luck
            assert facts["bytes"] == item["bytes"]
    for item in golden("checkpoints"):
        facts = await java.explain_checkpoint(item["bytes"])
        assert (facts["bytes"], facts["meaning"]) == (item["bytes"], item["meaning"])
