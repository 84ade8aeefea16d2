"""A small disk for a test, which fills up for real."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """`before`: words that begin a command which shall see it. `look`: it, as seen from here."""

    def __init__(self, folder, keeper):
        self.folder, self.look = folder, Path(f"/proc/{keeper.pid}/root{folder}")
        self.before = ["nsenter", f"--target={keeper.pid}", "--user", "--mount"]
        self.before += ["--preserve-credentials", f"--wd={os.getcwd()}"]

    def grow(self, size):
        command = [*self.before, "mount", "-o", f"remount,size={size}", str(self.folder)]
        subprocess.run(command, check=True)

    def fill(self):
        """To the last page; returns the file to remove again."""
        path = self.look / "filler"
        with path.open("wb", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue
        return path


@contextmanager
def small_disk(folder, size, options=""):
    """A tmpfs at `folder`, in a mount namespace of its own that one process keeps alive; skips
    where the kernel does not let users mount."""
    script = f'mount -t tmpfs -o size={size}{options} tmpfs "{folder}" && echo up && exec sleep 1d'
    if not shutil.which("unshare"):
        pytest.skip("no private mounts here")
    command = ["unshare", "-rm", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        try:
            if keeper.stdout.readline() != "up\n":
                pytest.skip("no private mounts here")
            yield SmallDisk(folder, keeper)
        finally:
            keeper.kill()
