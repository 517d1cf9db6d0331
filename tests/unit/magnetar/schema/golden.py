"""What the official Java client 5.0.0-M1 made of the same types and values, byte for byte."""

import json
from pathlib import Path
from typing import Any

from magnetar.schema.avro_definition import Json

JAVA: dict[str, Any] = json.loads(Path(__file__).with_name("java_golden.json").read_bytes())


def without_list_classes(tree: Json) -> Json:
    """A definition without the Java classes of lists and byte arrays, which readers ignore."""
    if isinstance(tree, list):
        return [without_list_classes(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("type") == "bytes":
        return "bytes"
    return {
        key: without_list_classes(value)
        for key, value in tree.items()
        if not (key == "java-class" and tree.get("type") == "array")
    }
