"""Which file system a path is on, from texts of /proc/self/mountinfo; and what each promises."""

import os
import subprocess
from pathlib import Path

import pytest

from qworker.backend.offers import file_system_of
from qworker.backend.registry import open_backend
from qworker.errors import InvalidURL
from qworker.kit import file_system, linux
from qworker.kit.file_system import FileSystem, durability_at
from qworker.kit.mounts import Mount, find_mount
from qworker.kit.opening import open_directory
from qworker.tools.doctor import run_checks

# Fedora's default: one btrfs, two subvolumes. `stat` gives files there device numbers that stand in no line.
BTRFS = """\
61 1 0:33 /root / rw,relatime shared:1 - btrfs /dev/nvme0n1p3 rw,seclabel,compress=zstd:1,ssd,subvolid=257,subvol=/root
38 61 0:6 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw,seclabel,size=4096k
97 61 0:33 /home /home rw,relatime shared:48 - btrfs /dev/nvme0n1p3 rw,seclabel,compress=zstd:1,\
subvolid=256,subvol=/home
99 61 259:2 / /boot rw,relatime shared:50 - ext4 /dev/nvme0n1p2 rw,seclabel
104 97 0:52 / /home/me/with\\040space\\134 rw - xfs /dev/mapper/a\\040b rw,attr2,noquota
"""
# A container: an overlay, volumes bound into it, and a root that is mounted after what is on it.
CONTAINER = """\
700 800 0:60 / /proc rw,nosuid - proc proc rw
701 800 0:61 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
800 600 0:59 / / rw,relatime master:300 - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/u,workdir=/w
801 800 8:1 /var/lib/docker/volumes/spool/_data /var/spool/app rw,relatime master:1 - ext4 /dev/sda1 rw,nobarrier
802 800 8:1 /etc/hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
803 700 0:62 / /proc/scsi ro,relatime - tmpfs tmpfs ro
"""
# A mount over a directory hides what was mounted below it; and two on one directory: the last one is seen.
HIDDEN = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
20 1 8:2 / /data/spool rw - xfs /dev/sdb rw
30 1 8:3 / /data rw - btrfs /dev/sdc rw
40 30 8:4 / /data/queues rw - tmpfs first rw
41 40 8:5 / /data/queues rw - f2fs second rw
"""
# A root that is its own parent, as old kernels show it, and one without fields that later kernels added.
ROOTFS = """\
1 1 0:1 / / rw - rootfs rootfs rw
17 1 8:1 / / ro,relatime - ext4 /dev/root ro,data=ordered
cannot be understood
"""


@pytest.mark.parametrize(
    ("text", "path", "kind", "source"),
    [
        (BTRFS, "/", "btrfs", "/dev/nvme0n1p3"),
        (BTRFS, "/var/spool/app", "btrfs", "/dev/nvme0n1p3"),
        (BTRFS, "/home", "btrfs", "/dev/nvme0n1p3"),
        (BTRFS, "/homework/spool", "btrfs", "/dev/nvme0n1p3"),
        (BTRFS, "/boot/spool", "ext4", "/dev/nvme0n1p2"),
        (BTRFS, "/bootstrap", "btrfs", "/dev/nvme0n1p3"),
        (BTRFS, "/home/me/with space\\/spool", "xfs", "/dev/mapper/a b"),
        (CONTAINER, "/work/spool", "overlay", "overlay"),
        (CONTAINER, "/var/spool/app", "ext4", "/dev/sda1"),
        (CONTAINER, "/proc/scsi/x", "tmpfs", "tmpfs"),
        (CONTAINER, "/proc/1", "proc", "proc"),
        (HIDDEN, "/data/spool", "btrfs", "/dev/sdc"),
        (HIDDEN, "/data/queues/x", "f2fs", "second"),
        (ROOTFS, "/spool", "ext4", "/dev/root"),
    ],
)
def test_a_path_is_on_the_mount_that_a_walk_to_it_ends_on(
    text: str, path: str, kind: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "mountinfo"
    shown.write_text(text)
    monkeypatch.setattr(linux, "MOUNTINFO", str(shown))
    found = find_mount(path)
    assert found is not None
    assert (found.kind, found.source) == (kind, source)


def test_a_path_whose_mount_is_not_shown_is_on_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tmp_path / "mountinfo"
    shown.write_text("1 0 8:1 / /elsewhere rw - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(linux, "MOUNTINFO", str(shown))
    assert find_mount("/work") is None
    assert find_mount("/elsewhere/spool") is not None


def _system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, *options: str, ext4: str = "") -> FileSystem:
    mount = Mount(id=2, parent=1, point="", kind=kind, source="/dev/x", options=frozenset(("rw", *options)))
    monkeypatch.setattr(file_system, "find_mount", lambda _path: mount)
    monkeypatch.setattr(file_system, "ext4_options", lambda _device, _source: frozenset(ext4.split()))
    return FileSystem.of(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "options", "ext4", "level"),
    [
        ("ext4", [], "rw barrier data=ordered", "disk"),
        ("ext4", [], "rw nobarrier data=ordered", "process"),
        ("ext4", ["nobarrier"], "rw data=ordered", "process"),
        ("ext4", [], "rw barrier", "process"),
        ("ext4", [], "", "process"),
        ("ext3", ["barrier=0"], "data=writeback", "process"),
        ("btrfs", ["compress=zstd:1"], "", "disk"),
        ("btrfs", ["nobarrier"], "", "process"),
        ("xfs", [], "", "disk"),
        ("xfs", ["nobarrier"], "", "process"),
        ("f2fs", ["fsync_mode=nobarrier"], "", "process"),
        ("tmpfs", [], "", "process"),
        ("overlay", [], "", "process"),
    ],
)
def test_power_loss_is_survived_with_a_journal_and_with_barriers_only(
    kind: str, options: list[str], ext4: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _system(monkeypatch, tmp_path, kind, *options, ext4=ext4)
    assert durability_at(str(tmp_path), sync=True) == level
    assert durability_at(str(tmp_path), sync=False) == "process"
    assert durability_at(str(tmp_path / "not" / "there"), sync=True) == level


def test_a_file_system_that_nothing_is_known_of_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "MOUNTINFO", str(tmp_path / "none"))
    system = FileSystem.of(str(tmp_path))
    assert system.kind == ""
    assert not system.survives_power_loss


def test_this_directory_is_where_its_device_is(tmp_path: Path) -> None:
    fd = open_directory(tmp_path)
    try:
        system = FileSystem(fd)
    finally:
        os.close(fd)
    # By what `df` asks: the kernel's own word for the type.
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    points = [line.split()[4] for line in Path(linux.MOUNTINFO).read_text().splitlines()]
    # In a chroot that is a folder of its file system, the mount is not shown.
    assert system.kind in (known if any(map(tmp_path.is_relative_to, points)) else {""})


@pytest.mark.parametrize(
    ("kind", "is_local"),
    [
        *((kind, True) for kind in ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay")),
        *((kind, False) for kind in ("nfs4", "virtiofs", "fuse.bindfs", "fuseblk", "ocfs2", "gfs2", "of-next-year")),
    ],
)
def test_only_known_local_file_systems_count_as_local(
    kind: str, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = _system(monkeypatch, tmp_path, kind)
    assert system.is_local is is_local
    assert system.describe(None) == f"{kind} on /dev/x, {'local' if is_local else 'shared'}"
    assert system.describe(is_local) == f"{kind} on /dev/x, " + (
        "shared (?shared=1)" if is_local else "local (?shared=0)"
    )


def test_a_file_system_whose_mount_is_not_shown_has_the_class_of_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a chroot that is a folder of its file system."""
    monkeypatch.setattr(file_system, "find_mount", lambda _path: None)
    number = subprocess.run(["stat", "-f", "-c", "%t", tmp_path], capture_output=True, text=True, check=True).stdout
    fd = linux.open_path(str(tmp_path))
    try:
        assert linux.file_system_number(fd) == int(number, 16)
    finally:
        os.close(fd)
    for path, is_local in ((tmp_path, True), (Path("/proc"), False)):
        system = FileSystem.of(str(path))
        assert (system.kind, system.is_local) == ("", is_local)


@pytest.mark.parametrize("scheme", ["file", "fsq"])
async def test_a_url_says_whether_hosts_share_its_directory(scheme: str, tmp_path: Path) -> None:
    for value in ("0", "1"):
        url = f"{scheme}://{tmp_path}/spool?shared={value}"
        backend = open_backend(url)
        await backend.open()
        assert f"shared={value}" in backend.describe()
        assert (file_system_of(backend) or "").endswith(f"{('local', 'shared')[int(value)]} (?shared={value})")
        await backend.aclose()
        (check,) = [check for check in await run_checks(url) if check.name == "file system"]
        assert f"(?shared={value})" in check.detail
    with pytest.raises(InvalidURL, match="shared must be one of 0, 1"):
        open_backend(f"{scheme}://{tmp_path}/spool?shared=maybe")
