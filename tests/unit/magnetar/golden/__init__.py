"""What the official Java client wrote: `python -m tests.interop.golden` makes the files again.

`schemas`: what each schema registers, and bytes of values.  `entries`: what was sent, whole, with
its metadata and values (`{"times": n, "of": b}` is `b` n times).  `message_ids`, `checkpoints`:
bytes, and what the Java client itself reads out of them.  All bytes are base64.
"""

import json
from pathlib import Path
from typing import Any


def golden(name: str) -> list[dict[str, Any]]:
    """The items of that file."""
    text = (Path(__file__).parent / f"{name}.json").read_text("utf-8")
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return items
