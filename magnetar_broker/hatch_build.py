"""How `magnetar-broker` is built: of the packages at the root, and for `magnetar` of its version.

Rules: the version is that of the root's pyproject.toml; the wheel has the broker's packages inside
`magnetar_broker`; an editable install has nothing but the path of the checkout.
"""

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE: Final = Path(__file__).resolve().parent
PACKAGES: Final = ("broker", "config", "security", "storage", "txn")


class SameVersion(MetadataHookInterface):
    """Adds `magnetar`, of the same version, to the dependencies that pyproject.toml lists."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies."""
        library = f"magnetar=={metadata['version']}"
        metadata["dependencies"] = [library, *self.config["dependencies"]]


class PackagesInside(BuildHookInterface[Any]):
    """Puts the packages where they hide no module of a user."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the folders of a wheel.  Raises RuntimeError for an sdist, which lacks them."""
        if self.target_name != "wheel":
            raise RuntimeError(
                "magnetar-broker is built of folders beside its own, so it has no sdist: make the "
                "wheel with `pip wheel --no-deps ./magnetar_broker` in a checkout."
            )
        if version == "editable":
            return
        inside = {HERE.parent / name: f"magnetar_broker/{name}" for name in PACKAGES}
        inside[HERE / "__init__.py"] = "magnetar_broker/__init__.py"
        build_data["force_include"].update({str(place): name for place, name in inside.items()})
