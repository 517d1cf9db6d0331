"""PromQL: enough of it to know which names an expression uses, and which names there are."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric

FAMILY_ENDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
    "info": ("_info",),
}
STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
MATCHERS: Final = re.compile(r"\{([^}]*)\}")
NAME: Final = re.compile(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()")
WORDS: Final = {"and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True)
class Query:
    """Names of metrics, patterns of such names, and names of labels in an expression."""

    names: set[str]
    patterns: set[str]
    labels: set[str]

    @classmethod
    def parse(cls, expression: str) -> "Query":
        patterns = set(re.findall(r'__name__=~"([^"]+)"', expression))
        text = STRING.sub('""', expression)
        labels = set()
        for inside in MATCHERS.findall(text):
            labels |= set(re.findall(r"(\w+)\s*[=!]", inside))
        text = MATCHERS.sub("", text)
        for inside in GROUPING.findall(text):
            labels |= {label.strip() for label in inside.split(",")}
        text = re.sub(r"\[[^\]]*\]", "", GROUPING.sub("", text))
        return cls(set(NAME.findall(text)) - WORDS, patterns, labels)


def sample_labels(families: Sequence[Metric]) -> dict[str, set[str]]:
    """Every sample name that these families can have, with the labels seen."""
    found: dict[str, set[str]] = {}
    for family in families:
        for ending in FAMILY_ENDINGS[family.type]:
            found.setdefault(family.name + ending, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
