"""The jars of BookKeeper and ZooKeeper, and how a Java program is run on them.

Rules: Maven resolves `pom.xml` into `build/parts/lib` once, and again only when it changed; every
program gets a small heap, the serial collector, and logs to its standard error.
"""

from pathlib import Path
from typing import Final

from tests.support.tools import built_once, copy_jars, digest_of

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE.parents[1] / "build" / "parts"
POM: Final = HERE / "pom.xml"
LIB: Final = BUILD / "lib"
OPENED_PACKAGES: Final = ("java.base/java.nio", "java.base/jdk.internal.misc")
"""What netty reaches for by reflection on JDK 17."""

PULSAR_DRIVERS: Final = (
    "-Dbookkeeper.metadata.bookie.drivers="
    "org.apache.pulsar.metadata.bookkeeper.PulsarMetadataBookieDriver",
    "-Dbookkeeper.metadata.client.drivers="
    "org.apache.pulsar.metadata.bookkeeper.PulsarMetadataClientDriver",
)
"""Options that make `metadata-store:` URIs known to BookKeeper."""


def resolve_jars() -> Path:
    """Directory with the jars, which is filled if need be."""
    built_once(BUILD / "lib.sha256", digest_of([POM], HERE), lambda: copy_jars(POM, LIB))
    return LIB


def java_command(
    main_class: str,
    *arguments: str,
    heap_mb: int,
    direct_mb: int = 0,
    options: tuple[str, ...] = (),
    classes: Path | None = None,
) -> list[str]:
    """The command line of a Java program on the jars, and on `classes` before them."""
    lib = resolve_jars()
    opened = [arg for name in OPENED_PACKAGES for arg in ("--add-opens", f"{name}=ALL-UNNAMED")]
    return [
        "java",
        f"-Xmx{heap_mb}m",
        *([f"-XX:MaxDirectMemorySize={direct_mb}m"] if direct_mb else []),
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",
        f"-Dlog4j.configurationFile={HERE / 'log4j2.xml'}",
        "-Dio.netty.tryReflectionSetAccessible=true",
        *opened,
        *options,
        *("-cp", f"{classes}:{lib}/*" if classes else f"{lib}/*"),
        main_class,
        *arguments,
    ]
