"""Builds and runs the Dockerfile without a container engine: debootstrap for the base, buildah.

Rules: everything is kept under one directory of the project's build tree, buildah's storage too;
of that a minimal Debian outlasts the tests, and nothing else.  The machine's own apt and pip
configuration is copied into it, so that the build reaches the same registries.  The image is run as
its configuration says (user, entry point, environment, volume, health check), and as carefully as
an operator may run it: on a read-only root, without capabilities.
"""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
WORK: Final = ROOT / "build" / "image"
BASE_IMAGE: Final = "localhost/magnetar-base"
IMAGE: Final = "localhost/magnetar"
DEBIAN: Final = "bookworm"
TOOLS: Final = ("buildah", "debootstrap", "prometheus")
STEP_TIMEOUT_S: Final = 900
MACHINE_FILES: Final = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
MAY_MOUNT: Final = 1 << 21
"""CAP_SYS_ADMIN: a container without it has a root user who cannot build images."""
ENTERING: Final = """
set -e
root=$1 volume=$2 uid=$3 gid=$4; shift 4
mount --bind "$root" "$root"
mount --bind "$volume" "$root/data"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -o remount,bind,ro "$root"
exec chroot "$root" /usr/bin/setpriv --reuid "$uid" --regid "$gid" --clear-groups \\
  --bounding-set=-all --inh-caps=-all --no-new-privs -- /usr/bin/env -i "$@"
"""
"""A shell enters the container in a name space of mounts of its own, and becomes its process."""
BUILDAH: Final = (
    "buildah",
    *("--root", str(WORK / "storage"), "--runroot", str(WORK / "run")),
    # Needs no support by the kernel.
    *("--storage-driver", "vfs"),
)


def run(*command: str, timeout_s: int = STEP_TIMEOUT_S) -> str:
    """Run a command to its end; its output, or an AssertionError that shows it."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def buildah(*arguments: str) -> str:
    """Run buildah on a storage of the project's own."""
    return run(*BUILDAH, *arguments)


# What the machine must have


def wrong_machine() -> str | None:
    """Say why this machine cannot build images, whatever is installed; None if it can."""
    if os.geteuid() != 0:
        return "the tests are not run by root"
    status = Path("/proc/self/status")
    effective = [line for line in status.read_text().splitlines() if line.startswith("CapEff:")]
    if not int(effective[0].split()[1], 16) & MAY_MOUNT:
        return "root may not mount here"
    if shutil.which("apt-get") is None or debian_mirror() is None:
        return "apt has no source of Debian 12 here"
    return None


def missing_tools() -> str | None:
    """Say which tools are missing; None if all are there."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{' and '.join(missing)} cannot be found" if missing else None


def install_tools() -> None:
    """Install the missing tools from Debian's packages."""
    if missing_tools() is not None:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "--yes", "-qq", "--no-install-recommends", *TOOLS)


def debian_mirror() -> str | None:
    """The mirror that this machine's own apt uses; None if it has none of Debian 12."""
    lines = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)").splitlines()
    return next((uri for uri, _, name in map(_parted, lines) if name == DEBIAN), None)


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


# Building


@contextmanager
def built_image() -> Iterator[None]:
    """The image is there while the block lasts, for one run of the tests at a time."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clean_up()  # After tests that were killed.
        build_base()
        try:
            build_image()
            yield
        finally:
            clean_up()


def clean_up() -> None:
    """Remove everything from the storage but the base, and the volumes."""
    shutil.rmtree(WORK / "volumes", ignore_errors=True)
    buildah("rm", "--all")
    names = "{{.ID}} {{.Name}}"
    images = [line.split() for line in buildah("images", "--format", names).splitlines()]
    for image in [name for name, *known in images if known != [BASE_IMAGE]]:
        buildah("rmi", "--force", image)


def build_base() -> None:
    """Make `BASE_IMAGE`, a minimal Debian, unless an earlier run did."""
    if BASE_IMAGE in buildah("images", "--format", "{{.Name}}").split():
        return
    mirror = debian_mirror()
    assert mirror is not None
    container = buildah("from", "scratch").strip()
    tree = Path(buildah("mount", container).strip())
    run("debootstrap", "--variant=minbase", "--include=ca-certificates", DEBIAN, str(tree), mirror)
    shutil.copytree("/etc/apt/apt.conf.d", tree / "etc/apt/apt.conf.d", dirs_exist_ok=True)
    for name in MACHINE_FILES:
        if Path(name).exists():
            target = tree / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)
    for loaded in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(tree / loaded)
        (tree / loaded / "partial").mkdir(parents=True)
    buildah("commit", "--quiet", container, BASE_IMAGE)
    buildah("rm", container)


def build_image() -> None:
    """Build the project's Dockerfile on that base."""
    buildah(
        *("bud", "--isolation", "chroot", "--format", "docker"),
        *("--build-arg", f"BASE={BASE_IMAGE}", "--tag", IMAGE, "."),
    )


# Running


class ImageContainer:
    """A container of the image, run as its own configuration says, with variables beside."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._name = buildah("from", IMAGE).strip()
        inspected = json.loads(buildah("inspect", "--type", "container", self._name))
        self.config: dict[str, object] = inspected["Docker"]["config"]
        own = dict(each.split("=", 1) for each in self.words("Env"))
        self._environment = {**own, **environment}
        self._tree = Path(buildah("mount", self._name).strip())
        passwd = (self._tree / "etc/passwd").read_text("utf-8").splitlines()
        user = next(
            line.split(":") for line in passwd if line.startswith(f"{self.config['User']}:")
        )
        self.uid, self.gid = int(user[2]), int(user[3])
        self.volume = WORK / "volumes" / self._name
        """The directory of the volume /data."""
        shutil.rmtree(self.volume, ignore_errors=True)
        shutil.copytree(self._tree / "data", self.volume)
        kept = (self._tree / "data").stat()
        os.chown(self.volume, kept.st_uid, kept.st_gid)
        self._process: subprocess.Popen[bytes] | None = None

    def asked(self, *arguments: str) -> str:
        """Run a command in the container, which must end with status 0; return what it prints."""
        return run(*self._command(arguments))

    def _command(self, words: Sequence[str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        place = [str(self._tree), str(self.volume), str(self.uid), str(self.gid)]
        shell = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTERING, "sh"]
        return [*shell, *place, *variables, *words]

    def start(self, log: Path, *command: str) -> int:
        """Start the entry point with a command; return the process's id."""
        words = [*self.words("Entrypoint"), *command]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(words), stdout=output, stderr=output, cwd=ROOT
            )
        return self._process.pid

    def healthy(self) -> bool:
        """What the image's own health check says."""
        check = self.config["Healthcheck"]
        assert isinstance(check, dict)
        kind, *words = check["Test"]
        assert kind == "CMD"
        done = subprocess.run(self._command(words), capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def terminate(self) -> int:
        """SIGTERM to the broker inside; its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=60)

    def kill(self) -> None:
        """SIGKILL to the broker inside, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=60)

    def close(self) -> None:
        """Stop whatever still runs and remove the container."""
        self.kill()
        buildah("rm", self._name)
        shutil.rmtree(self.volume)

    def words(self, name: str) -> list[str]:
        """A list of the image's configuration."""
        value = self.config[name]
        assert isinstance(value, list)
        return [str(word) for word in value]
