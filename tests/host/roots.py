"""What the kernel of a machine would tell, in a folder that stands for its root."""

from __future__ import annotations

from pathlib import Path

V2_MOUNT = "35 25 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "33 31 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro master:2 - cgroup cgroup rw,cpu,cpuacct\n"
    "36 31 0:33 /docker/abc /sys/fs/cgroup/memory ro master:15 - cgroup cgroup rw,memory\n"
)


def root_of(root: Path, files: dict[str, str]) -> Path:
    """Return the folder, in which these files are written by now."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(root: Path, *, cgroup: str, mounts: str = V2_MOUNT, **files: dict[str, str]) -> Path:
    """Return the root of a machine with these cgroups; ``below``: their files, ``proc``: others."""
    told = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    for folder, names in files.items():
        where = "sys/fs/cgroup" if folder == "below" else folder
        told |= {f"{where}/{name}": text for name, text in names.items()}
    return root_of(root, told)
