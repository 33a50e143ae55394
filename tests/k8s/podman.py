"""Podman with a storage of its own, set up for machines whose cgroups and limits it does not own.

Nothing of the system's podman is seen or changed: images, containers and networks lie below one folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]

[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
COMMAND_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 3600.0


class PodmanError(Exception):
    """A podman command failed; the message is what it said."""


@dataclass(frozen=True)
class Podman:
    """Commands on one storage folder."""

    folder: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Podman:
        """Sets the folder up."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(CONTAINERS_CONF)
        return cls(folder)

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Returns what a command prints.

        Raises:
            PodmanError: Its exit status is not 0.
        """
        ended = subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if ended.returncode:
            raise PodmanError(f"podman {' '.join(arguments[:3])}: {ended.stderr[-2000:]}")
        return ended.stdout.strip()

    @property
    def command(self) -> Sequence[str]:
        """How podman is called."""
        root, run = self.folder / "storage", self.folder / "run"
        networks = self.folder / "networks"
        return ("podman", f"--root={root}", f"--runroot={run}", f"--network-config-dir={networks}")

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its commands."""
        return {**os.environ, "CONTAINERS_CONF": str(self.folder / "containers.conf")}

    def remove(self) -> None:
        """Removes its images, containers, networks and the folder."""
        try:
            self("system", "reset", "--force")
        except PodmanError:
            # It may remove the folder of its event log while it still writes there; nothing does the second time.
            self("system", "reset", "--force")
        mount = self.folder / "storage" / "overlay"
        # Podman mounts it onto itself, and leaves it so.
        if mount.is_mount():
            subprocess.run(["umount", str(mount)], check=True, timeout=COMMAND_TIMEOUT_S)
        shutil.rmtree(self.folder)

    def has_image(self, name: str) -> bool:
        """Whether an image of that name is here."""
        try:
            self("image", "exists", name)
        except PodmanError:
            return False
        return True

    def inspect(self, container: str) -> dict[str, Any]:
        """What podman knows of a container."""
        (found,) = json.loads(self("container", "inspect", container))
        described: dict[str, Any] = found
        return described

    def keep_bridge_address(self, network: str) -> None:
        """Keeps a network's bridge from changing its hardware address when a pod comes or goes.

        A bridge takes the lowest address of its ports, and other pods send to the old one for up to two minutes.
        """
        bridge = self("network", "inspect", network, "--format", "{{.NetworkInterface}}")
        address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
        subprocess.run(["ip", "link", "set", bridge, "address", address], check=True, timeout=COMMAND_TIMEOUT_S)

    def address(self, pod: str) -> str:
        """Address of a pod on its network; this machine reaches it, others do not."""
        infra = self("pod", "inspect", pod, "--format", "{{.InfraContainerID}}")
        (network,) = self.inspect(infra)["NetworkSettings"]["Networks"].values()
        address: str = network["IPAddress"]
        return address
