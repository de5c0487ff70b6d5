"""Where hard links do not reach, pins are copies: met for real, on real mounts, as real users."""

from __future__ import annotations

import asyncio
import grp
import json
import logging
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mounts import Mounts, mounts_below, need, need_root
from prime_io import CheckpointManager, PayloadStore, prepare_resume
from prime_io.manifest import Manifest, unseal
from runs import payload, save, trainer, tree

EXT4_LINKS = 65_000


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path / "mounts") as made:
        yield made


def how_pinned(manager: CheckpointManager, step: int) -> dict[str, str]:
    path = manager.component_path(step, "orchestrator") / "manifest.json"
    return {file: pin.how for file, pin in unseal(path.read_bytes(), path, kind=Manifest).pins.items()}


def round_trip(run: Path, root: Path, *, copied: bool, back: str) -> None:
    """Save, lose every payload, load, link back: the same, whether pins are links or copies."""
    prepare_resume(run, None)
    manager = CheckpointManager(run_dir=run, on_save_error="raise")
    with PayloadStore(root, owner=True) as store:
        assert manager.link_probe(store) != copied
        segments = [payload(store, n, version=n % 2) for n in range(6)]
        report = save(manager, store, 1, segments[:4], spills=segments[4:], state={"a": b"state"})
        assert report is not None
        assert (report.pinned, report.copied, report.missing) == (6, 6 if copied else 0, ())
        trainer(manager, 1)
        assert set(how_pinned(manager, 1).values()) == {"copy" if copied else "link"}
        store.reclaim([segment.file for segment in segments])
        state, pins = manager.load(store=store)
        assert state == {"a": b"state"}
        answers = pins.link_back(pins.files)
        assert set(answers) == {segment.file for segment in segments}
        assert set(answers.values()) == {back}
        for n, segment in enumerate(segments):
            assert np.array_equal(store.read(segment, verify=True), np.full((8, 4), n, np.uint8))
        # The pins are the checkpoint's own: what happens to the live names does not reach them.
        store.reclaim([segment.file for segment in segments])
        assert set(pins.link_back(pins.files).values()) == {back}
        assert not [path for path in tree(run) | tree(root) if ".tmp-" in path]


def test_links_where_they_reach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: on one filesystem pins are links, and nothing is said of copies."""
    round_trip(tmp_path / "run", tmp_path / "run/payloads", copied=False, back="linked")
    assert "cop" not in caplog.text


def test_exdev_of_another_filesystem(
    tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: a store on another filesystem (EXDEV) is pinned by copies, and the log says so."""
    root = mounts.tmpfs("size=8m") / "payloads"
    round_trip(tmp_path / "run", root, copied=True, back="copied")
    assert "6 of 6 pins are copies" in caplog.text and "pins will be copies" in caplog.text


def test_exdev_between_two_mounts_of_one_filesystem(
    tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: two bind mounts with one st_dev do not link: it is tried, not concluded."""
    root = mounts.bind(tmp_path / "elsewhere")
    assert root.stat().st_dev == tmp_path.stat().st_dev
    round_trip(tmp_path / "run", root / "payloads", copied=True, back="copied")
    assert "6 of 6 pins are copies" in caplog.text


def test_a_filesystem_without_links(mounts: Mounts, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: a run on vfat, which has no hard links at all (EPERM), saves and resumes with copies."""
    disk = mounts.image("vfat", 16 << 20)
    (disk / "a").touch()
    with pytest.raises(PermissionError):
        os.link(disk / "a", disk / "b")
    round_trip(disk / "run", disk / "run/payloads", copied=True, back="copied")
    assert "6 of 6 pins are copies" in caplog.text


@pytest.mark.parametrize("error", ["ENOSYS", "EOPNOTSUPP"])
def test_a_fuse_mount_without_links(mounts: Mounts, error: str, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: a run on FUSE that knows no links (ENOSYS, EOPNOTSUPP) saves and resumes with copies."""
    disk = mounts.without_links(error)
    round_trip(disk / "run", disk / "run/payloads", copied=True, back="copied")
    assert "6 of 6 pins are copies" in caplog.text


def test_emlink(mounts: Mounts, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: a payload with as many links as its filesystem allows (EMLINK) is copied, the others are linked."""
    disk = mounts.image("ext4", 64 << 20)
    run, root, more = disk / "run", disk / "run/payloads", disk / "more"
    prepare_resume(run, None)
    manager = CheckpointManager(run_dir=run, on_save_error="raise")
    more.mkdir()
    with PayloadStore(root, owner=True) as store:
        full, plain = payload(store, 1), payload(store, 2)
        for n in range(EXT4_LINKS - 1):
            os.link(root / full.file, more / str(n))
        assert (root / full.file).stat().st_nlink == EXT4_LINKS
        report = save(manager, store, 1, [full, plain])
        assert report is not None and (report.pinned, report.copied) == (2, 1)
        assert "1 of 2 pins are copies" in caplog.text
        assert how_pinned(manager, 1) == {full.file: "copy", plain.file: "link"}
        trainer(manager, 1)
        store.reclaim([full.file, plain.file])
        _, pins = manager.load(store=store)
        assert pins.link_back(pins.files) == {full.file: "linked", plain.file: "linked"}
        # And on the way back: the pin itself has no link left to give.
        store.reclaim([full.file, plain.file])
        pin = manager.component_path(1, "orchestrator") / "payloads" / full.file
        shutil.rmtree(more)
        more.mkdir()
        for n in range(EXT4_LINKS - 1):
            os.link(pin, more / str(n))
        assert pins.link_back(pins.files) == {full.file: "copied", plain.file: "linked"}
        for n, segment in enumerate((full, plain), 1):
            assert np.array_equal(store.read(segment, verify=True), np.full((8, 4), n, np.uint8))


# --- another user


class Shared:
    """A run of user nobody that root's workers write into, and a way to be that user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.user = pwd.getpwnam("nobody")

    def as_nobody(self, work: Callable[[], Any]) -> Any:
        """The result of `work` in a child of that user, as JSON."""
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
            child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(self.user.pw_gid)
                os.setuid(self.user.pw_uid)
                os.umask(0o022)
                answer = json.dumps(work())
                status = 0
            except BaseException as error:
                answer = json.dumps(f"{type(error).__name__}: {error}")
            os.write(writer, answer.encode())
            os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = json.loads(pipe.read() or '"it died"')
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, answer
        return answer


@pytest.fixture
def shared() -> Iterator[Shared]:
    need_root()
    try:
        made = Shared(Path(tempfile.mkdtemp(prefix="prime-io-")))
        grp.getgrgid(made.user.pw_gid)
    except KeyError:
        pytest.skip("needs a user nobody and its group")
    protected = Path("/proc/sys/fs/protected_hardlinks")
    try:
        if not protected.exists() or protected.read_text().strip() != "1":
            pytest.skip("needs fs.protected_hardlinks=1")
        os.chown(made.path, made.user.pw_uid, made.user.pw_gid)
        made.path.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(made.path)


@pytest.mark.parametrize("group_writable", [False, True])
def test_eperm_of_another_users_file(shared: Shared, group_writable: bool) -> None:
    """Promise: another user's 0644 payload (protected_hardlinks, EPERM) is copied; a group-writable one links."""
    run, root = shared.path / "run", shared.path / "run/payloads"

    def start() -> None:
        prepare_resume(run, None)
        store = PayloadStore(root, owner=True, group_writable=group_writable)
        payload(store, 1)
        store.close()

    shared.as_nobody(start)
    with PayloadStore(root, create=False, group_writable=group_writable) as worker:
        segment = payload(worker, 7)
    theirs = (root / segment.file).stat()
    assert theirs.st_uid == 0
    assert theirs.st_mode & 0o777 == (0o664 if group_writable else 0o644)

    def save_and_resume() -> dict[str, Any]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("prime_io").addHandler(handler)
        manager = CheckpointManager(run_dir=run, on_save_error="raise")
        store = PayloadStore(root, owner=True, group_writable=group_writable)
        own = payload(store, 2)
        probe, theirs = manager.link_probe(store), manager.link_probe(store, segment.file)
        report = save(manager, store, 1, [segment, own])
        assert report is not None
        trainer(manager, 1)
        os.unlink(root / segment.file)
        _, pins = manager.load(store=store)
        answers = pins.link_back([segment.file, own.file])
        rows = store.read(segment, verify=True)
        return {
            "uid": os.getuid(),
            "probe": probe,
            "theirs": theirs,
            "copied": report.copied,
            "how": how_pinned(manager, 1)[segment.file],
            "own": how_pinned(manager, 1)[own.file],
            "back": answers[segment.file],
            "rows": sorted(set(rows.ravel().tolist())),
            "told": told,
        }

    answer = shared.as_nobody(save_and_resume)
    assert answer["uid"] != 0 and answer["rows"] == [7]
    # A trial link of an own file works: only the first file of somebody else tells.
    assert answer["probe"] and answer["own"] == "link"
    assert answer["theirs"] is group_writable
    assert any("group_writable=True" in line for line in answer["told"]) == (not group_writable)
    assert answer["how"] == ("link" if group_writable else "copy")
    assert answer["copied"] == (0 if group_writable else 1)
    # The copy belongs to the orchestrator, so it may be linked on the way back.
    assert answer["back"] == "linked"
    assert any("1 of 2 pins are copies" in line for line in answer["told"]) == (not group_writable)


# --- errors that only some kernels and network filesystems give

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_pin_fallbacks import {name}
{name}(Path(sys.argv[1]){more})
"""


def injected(run: Path, error: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run it with every link refused by `error`."""
    need("strace", "strace")
    command = [sys.executable, "-c", script, str(run), str(Path(__file__).parent)]
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=link,linkat"]
    strace += ["-e", f"inject=link,linkat:error={error}"]
    probe = subprocess.run([*strace, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    return subprocess.run([*strace, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("error", ["ENOSYS", "EOPNOTSUPP", "EPERM", "EXDEV", "EMLINK"])
def test_every_errno_that_refuses_links(tmp_path: Path, error: str) -> None:
    """Promise: ENOSYS and EOPNOTSUPP of FUSE and object stores, and the others, from the kernel: copies."""
    script = SCRIPT.format(
        name="round_trip",
        more=', Path(sys.argv[1]) / "payloads", copied=True, back="copied"',
    )
    done = injected(tmp_path / "run", error, script)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 pins are copies" in done.stderr


def failing_save(run: Path) -> None:
    """A save of which every link fails with an error that says nothing of links."""
    manager = CheckpointManager(run_dir=run)
    with PayloadStore(run / "payloads", owner=True) as store:
        before = tree(run)
        segment = payload(store, 1)
        assert asyncio.run(_no_save(manager, store, segment)) is None
        assert manager.failed_saves == 1
        assert tree(run) == before | {f"payloads/{segment.file}"}
        assert os.listdir(run / "checkpoints") == []


async def _no_save(manager: CheckpointManager, store: PayloadStore, segment: Any) -> Any:
    from prime_io import Snapshot

    return await manager.save(Snapshot(1, {}, [segment]), store=store)


@pytest.mark.parametrize("error", ["EIO", "EACCES", "EDQUOT", "EROFS"])
def test_other_errors_of_a_link_are_no_reason_to_copy(tmp_path: Path, error: str) -> None:
    """Promise: an error that says nothing of links fails the save: no fallback hides a failing disk."""
    run = tmp_path / "run"
    prepare_resume(run, None)
    PayloadStore(run / "payloads").close()
    done = injected(run, error, SCRIPT.format(name="failing_save", more=""))
    assert done.returncode == 0, done.stderr
    assert "save of step 1 failed" in done.stderr
