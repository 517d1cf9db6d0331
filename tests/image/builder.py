"""Builds and runs the Dockerfile without a container engine: debootstrap for the base, buildah.

Rules: everything is kept under one directory of the project's build tree; the machine's own apt
and pip configuration is copied into the base, so that the build reaches the same registries; the
image is run as its configuration says (user, entry point, environment, volume, health check).
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = "localhost/magnetar-base"
IMAGE = "localhost/magnetar"
TOOLS = ("buildah", "debootstrap", "prometheus")
STEP_TIMEOUT_S = 900
MACHINE_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def run(*command: str, timeout_s: int = STEP_TIMEOUT_S) -> str:
    """Run a command to its end; its output, or an AssertionError that shows it."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def buildah(*arguments: str) -> str:
    """Buildah with a storage driver that needs no kernel support."""
    return run("buildah", "--storage-driver", "vfs", *arguments)


def install_tools() -> None:
    """Debian packages, for machines that lack them (needs root)."""
    if all(shutil.which(tool) for tool in TOOLS):
        return
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "--yes", "-qq", *TOOLS)


def debian_mirror() -> str:
    """The mirror that this machine's own apt uses."""
    lines = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)").splitlines()
    for line in lines:
        uri, _, release = line.partition(" ")
        if release == "bookworm":
            return uri
    raise AssertionError("apt on this machine has no Debian 12 source: image tests need one.")


def build_base(work: Path) -> None:
    """A minimal Debian as `BASE_IMAGE`; kept between runs."""
    if BASE_IMAGE in buildah("images", "--format", "{{.Name}}"):
        return
    tree = work / "base"
    if tree.exists():
        shutil.rmtree(tree)
    run(
        "debootstrap",
        "--variant=minbase",
        "--include=ca-certificates",
        "bookworm",
        str(tree),
        debian_mirror(),
    )
    shutil.copytree("/etc/apt/apt.conf.d", tree / "etc/apt/apt.conf.d", dirs_exist_ok=True)
    for name in MACHINE_FILES:
        if Path(name).exists():
            target = tree / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)
    container = buildah("from", "scratch").strip()
    buildah("copy", "--quiet", container, str(tree), "/")
    buildah("commit", "--quiet", container, BASE_IMAGE)
    buildah("rm", container)
    shutil.rmtree(tree)


def build_image() -> None:
    """The project's Dockerfile on that base."""
    buildah(
        "bud",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        "--build-arg",
        f"BASE={BASE_IMAGE}",
        "--tag",
        IMAGE,
        ".",
    )


class ImageContainer:
    """A container of the image, run as its own configuration says."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._name = buildah("from", IMAGE).strip()
        inspected = json.loads(buildah("inspect", "--type", "container", self._name))
        self.config: dict[str, object] = inspected["Docker"]["config"]
        self._environment = environment
        uid = int(
            run(
                "buildah",
                "--storage-driver",
                "vfs",
                "run",
                "--isolation",
                "chroot",
                self._name,
                "id",
                "-u",
            ).strip()
        )
        self.uid = uid
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self, arguments: Sequence[str]) -> list[str]:
        variables = [f"--env={name}={value}" for name, value in self._environment.items()]
        return [
            "buildah",
            "--storage-driver",
            "vfs",
            "run",
            "--isolation",
            "chroot",
            *variables,
            self._name,
            "--",
            *arguments,
        ]

    def start(self, log: Path) -> None:
        """Entry point and command of the image."""
        words = [*self._strings("Entrypoint"), *self._strings("Cmd")]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(words), stdout=output, stderr=output, cwd=ROOT
            )

    def healthy(self) -> bool:
        """What the image's own health check says."""
        check = self.config["Healthcheck"]
        assert isinstance(check, dict)
        kind, *words = check["Test"]
        assert kind == "CMD"
        done = subprocess.run(self._command(words), capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def terminate(self) -> int:
        """SIGTERM to the broker inside; the exit status that buildah passes on."""
        assert self._process is not None
        for pid in self._broker_pids():
            os.kill(pid, signal.SIGTERM)
        return self._process.wait(timeout=60)

    def close(self) -> None:
        """Stop whatever still runs and remove the container."""
        if self._process is not None and self._process.poll() is None:
            for pid in self._broker_pids():
                os.kill(pid, signal.SIGKILL)
            self._process.wait(timeout=60)
        buildah("rm", self._name)

    def _strings(self, name: str) -> list[str]:
        value = self.config[name]
        assert isinstance(value, list)
        return [str(word) for word in value]

    def _broker_pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                owner = entry.stat().st_uid
            except OSError:
                continue
            # Not its parent of the same words, which only passes the exit status on.
            broker = b"python" in words[0] and b"standalone" in words
            if owner == self.uid and broker:
                found.append(int(entry.name))
        return found
