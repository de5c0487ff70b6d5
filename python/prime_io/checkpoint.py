"""Checkpoints of a run: state and pins of one instant, committed by one rename, visible in one lineage.

    <run>/checkpoints/step_<N>/orchestrator/{state.msgpack, payloads/v<k>/..., manifest.json}
    <run>/checkpoints/step_<N>/trainer/{the trainer's own files, manifest.json}

A step counts once every component of it is committed. A save that is killed leaves a temporary directory, one
that fails leaves nothing, and older steps are touched by retention alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from prime_io import _native
from prime_io.lineage import Lineage, LineageLeftError
from prime_io.manifest import (
    FORMAT,
    STATE,
    CorruptCheckpointError,
    FileStamp,
    Manifest,
    pack_state,
    read_manifest,
    read_state,
    remove_unfinished,
    seal,
    skipped_files,
    verify_files,
)
from prime_io.pins import PinMode, Pins, pin_all, probe_links
from prime_io.retention import RetentionReport, apply_retention
from prime_io.snapshot import SaveReport, Snapshot
from prime_io.steps import (
    CHECKPOINTS,
    COMPONENTS,
    ORCHESTRATOR,
    Components,
    Steps,
    empty_trash,
    log,
    normalize,
    set_aside,
    trash_name,
)

if TYPE_CHECKING:
    from prime_io.store import PayloadStore

__all__ = [
    "CheckpointManager",
    "CorruptCheckpointError",
    "LineageLeftError",
    "Pins",
    "SaveReport",
    "Snapshot",
]

_PAYLOADS = "payloads"
_T = TypeVar("_T")


class CheckpointManager:
    """Saves, finds and loads the checkpoints of one run, for one process of its current lineage."""

    def __init__(
        self,
        *,
        run_dir: str | Path,
        components: Components = COMPONENTS,
        keep_last: int = 2,
        keep_every: int | None = None,
        pin: PinMode = "link",
        on_save_error: Literal["continue", "raise"] = "continue",
        lineage: Lineage | None = None,
    ) -> None:
        """`components` names what makes a step complete. A mapping gives a component of a framework's own
        format a predicate: called with `<run>/checkpoints/step_<N>/<name>`, which need not exist, it says
        whether that component is there whole. None: ours, committed by `save` or `commit_component`."""
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep_last={keep_last}, keep_every={keep_every}: both count from 1")
        if pin not in ("link", "copy", "skip"):
            raise ValueError(f"pin={pin!r}: one of 'link', 'copy', 'skip'")
        if on_save_error not in ("continue", "raise"):
            raise ValueError(f"on_save_error={on_save_error!r}: one of 'continue', 'raise'")
        self.components = normalize(components)
        if ORCHESTRATOR not in self.components or self.components[ORCHESTRATOR] is not None:
            raise ValueError(
                f"components: {ORCHESTRATOR!r} is what save() commits; it must be there, unpredicated"
            )
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.pin = pin
        self.on_save_error = on_save_error
        self.lineage = lineage if lineage is not None else Lineage.load(run_dir)
        self.run_dir = Path(run_dir)
        self.failed_saves = 0
        self._root = _native.Root(str(self.run_dir))
        self._steps = Steps(self.run_dir, components=self.components, visible=self.lineage.visible)
        # One thread: one save (or retention) at a time, the others in order behind it.
        self._thread: ThreadPoolExecutor | None = None
        self._pid = 0

    # --- writing

    async def save(self, snapshot: Snapshot, *, store: PayloadStore) -> SaveReport | None:
        """Commit the orchestrator's component of a step, off the event loop.

        Returns when it is durable: only then may the files of the snapshot be released. None if it failed
        and `on_save_error="continue"`: logged, counted in `failed_saves`, older steps as they were.
        FileExistsError if a visible component of that step is there already; LineageLeftError if the run has
        been resumed by somebody else. A save that has begun goes on though its caller is cancelled.
        """
        return await self._in_turn(partial(self._save, snapshot, store))

    def commit_component(self, step: int, name: str, directory: str | Path) -> Path:
        """Commit `directory` (same filesystem) as component `name` of `step`: fsynced, hashed, stamped with
        the lineage, moved into place by one rename. Returns its path. For the trainer, once its files are
        written. FileExistsError if a visible one is there; LineageLeftError as for `save`."""
        if name not in self.components or self.components[name] is not None:
            ours = [known for known, predicate in self.components.items() if predicate is None]
            raise ValueError(
                f"commit step {step}: {name!r} is not a component with a manifest; those are {ours}"
            )
        self.lineage.check_current(f"commit {name} of step {step}")
        self._make_room(step, name)
        remove_unfinished(_native.Root(str(directory)))
        commit = _native.Commit(str(self._steps.path), step, name, adopt=str(directory))
        try:
            files = {path: FileStamp(size, xxh3) for path, size, xxh3 in commit.files()}
            manifest = seal(self._manifest(step, name, files=files))
        except BaseException:
            commit.abort()
            raise
        self._finish(commit, step, name, manifest)
        return self._steps.path / f"step_{step}" / name

    def new_component_dir(self) -> Path:
        """A fresh directory to write a component into, for `commit_component`; a leftover if the writer dies."""
        directory = self.run_dir / _native.temporary_name()
        directory.mkdir()
        return directory

    async def apply_retention(self) -> RetentionReport:
        """Remove the checkpoints that need not stay, off the event loop. For the orchestrator alone, at each
        save and acknowledgement. What cannot be read stops it before anything is removed."""
        return await self._in_turn(
            partial(
                apply_retention,
                self.lineage,
                self._steps,
                keep_last=self.keep_last,
                keep_every=self.keep_every,
            )
        )

    def remove_leftovers(self) -> list[str]:
        """Remove trash, and temporaries of saves whose process is provably dead. Never a name not ours."""
        removed = [*empty_trash(self._root), *self._remove_dead(self._root)]
        removed += [*empty_trash(self._steps.root), *self._remove_dead(self._steps.root)]
        for step in self._steps.look().values():
            removed += self._remove_dead(_native.Root(str(self._steps.path / step.name)))
        return removed

    def link_probe(self, store: PayloadStore, file: str | None = None) -> bool:
        """Try whether payloads can be pinned by links, for real; one log line says so. At start, and with the
        first `file` that somebody else wrote, who may be another user: FileNotFoundError if it is gone."""
        return self.pin == "link" and probe_links(store, self._steps.path, file)

    # --- reading

    def steps(self) -> list[int]:
        """The visible complete steps, ascending."""
        return self._steps.complete()

    def latest(self) -> int | None:
        """The newest visible complete step; None if there is none."""
        return max(self.steps(), default=None)

    def component_path(self, step: int, name: str, *, verify: bool = False) -> Path:
        """The directory of a visible component. `verify` reads its files again (CorruptCheckpointError)."""
        where = self._steps.path / f"step_{step}" / name
        stamp = self._steps.find(step, name)
        if stamp is None or not self._steps.visible(stamp):
            raise FileNotFoundError(2, f"no component {name!r} of step {step} in this lineage", str(where))
        if verify:
            root = _native.Root(str(where))
            verify_files(root, where, read_manifest(root, "", where, kind=Manifest))
        return where

    def unpinned_files(self) -> set[str]:
        """Payload files that a checkpoint names without holding a name of its own on them (`pin="skip"`).

        Those of every step directory, visible or not: a sweep must spare them. A manifest that cannot be read
        raises, so that nothing is swept because of it.
        """
        files: set[str] = set()
        for step in self._steps.look().values():
            for error in step.damaged.values():
                raise error
            if ORCHESTRATOR in step.stamps:
                where = self._steps.path / step.name / ORCHESTRATOR
                try:
                    files |= skipped_files(_native.Root(str(where)), where)
                except (FileNotFoundError, CorruptCheckpointError):
                    if self._steps.there(step.number, ORCHESTRATOR):
                        raise
                    continue  # retention took it meanwhile: nobody will resume from it
        return files

    def load(
        self, step: int | None = None, *, store: PayloadStore, path: str | Path | None = None
    ) -> tuple[dict[str, bytes], Pins]:
        """The state parts and pins of a visible complete step, by default the newest.

        `path` is a `step_<N>` directory of another run instead: its pins are then linked or copied into this
        store. CorruptCheckpointError names a state file or manifest that is torn, edited or missing; pins are
        looked at by `Pins.link_back`, one by one.
        """
        if path is not None:
            if step is not None:
                raise ValueError("load: give either step or path")
            where = Path(path) / ORCHESTRATOR
            if not where.is_dir():
                raise FileNotFoundError(2, "load: path is not a step_<N> directory of a run", str(where))
        else:
            where = self._steps.path / f"step_{self._choose(step)}" / ORCHESTRATOR
        root = _native.Root(str(where))
        manifest = read_manifest(root, "", where, kind=Manifest)
        if path is None and manifest.store != store.uuid:
            raise ValueError(
                f"load {where}: its payloads belong to store {manifest.store}, not to {store.uuid} "
                f"({store.root}); give path= to bring them into this store"
            )
        state = read_state(root, where, manifest)
        return state, Pins(where / _PAYLOADS, manifest, store, copy=self.pin == "copy")

    # --- the work

    async def _in_turn(self, work: Callable[[], _T]) -> _T:
        if self._thread is None or self._pid != os.getpid():
            self._thread, self._pid = ThreadPoolExecutor(1, "prime-io-checkpoint"), os.getpid()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _save(self, snapshot: Snapshot, store: PayloadStore) -> SaveReport | None:
        self.lineage.check_current(f"save step {snapshot.step}")
        try:
            self._make_room(snapshot.step, ORCHESTRATOR)
            return self._commit(snapshot, store)
        except Exception as error:
            if isinstance(error, FileExistsError) or self.on_save_error == "raise":
                raise
            self.failed_saves += 1
            log.exception(
                "save of step %d failed (%d so far); the run goes on", snapshot.step, self.failed_saves
            )
            return None

    def _commit(self, snapshot: Snapshot, store: PayloadStore) -> SaveReport:
        started = time.monotonic()
        step = snapshot.step
        commit = _native.Commit(str(self._steps.path), step, ORCHESTRATOR)
        try:
            pinned = pin_all(
                commit,
                store,
                segments=snapshot.segments,
                spills=snapshot.spills,
                mode=self.pin,
            )
            state = pack_state(snapshot.state)
            files = {STATE: FileStamp(*commit.write(STATE, state))}
            manifest = seal(
                self._manifest(
                    step,
                    ORCHESTRATOR,
                    store=store.uuid,
                    files=files,
                    missing=pinned.missing,
                    pins=pinned.pins,
                )
            )
        except BaseException:
            commit.abort()
            raise
        self._finish(commit, step, ORCHESTRATOR, manifest)
        if pinned.missing:
            log.warning("save of step %d: %d payload files are missing", step, len(pinned.missing))
        if pinned.copied and self.pin == "link":
            log.warning(
                "save of step %d: %d of %d pins are copies, their files could not be linked (another user's, "
                "or on another filesystem)",
                step,
                pinned.copied,
                len(pinned.pins),
            )
        where = self._steps.path / f"step_{step}" / ORCHESTRATOR
        seconds = time.monotonic() - started
        return SaveReport(
            step, len(pinned.pins), pinned.copied, tuple(pinned.missing), len(state), seconds, where
        )

    def _manifest(self, step: int, component: str, **rest: Any) -> Manifest:
        return Manifest(format=FORMAT, lineage=self.lineage.id, step=step, component=component, **rest)

    def _make_room(self, step: int, name: str) -> None:
        stamp = self._steps.find(step, name)
        if stamp is None:
            return
        if self._steps.visible(stamp):
            raise FileExistsError(17, "save: this component was committed already", f"step_{step}/{name}")
        source = f"{CHECKPOINTS}/step_{step}/{name}"
        moved = set_aside(self._root, source, lineage=stamp.lineage, target=source)
        log.warning("step %d: a %s of lineage %s was there; moved to %s", step, name, stamp.lineage, moved)

    def _finish(self, commit: _native.Commit, step: int, name: str, manifest: bytes) -> None:
        """Commit. What fails after its rename may or may not survive a power cut: it must not count."""
        try:
            commit.finish(manifest)
        except FileExistsError:
            commit.abort()
            raise
        except BaseException:
            commit.abort()
            if any(entry == name for entry, _ in self._steps.root.list(f"step_{step}")):
                self._steps.root.rename(f"step_{step}/{name}", trash_name())
            raise

    def _choose(self, step: int | None) -> int:
        found = self._steps.look()
        complete = [view.number for view in found.values() if view.complete]
        if step is None:
            if not complete:
                raise FileNotFoundError(
                    2,
                    "load: no complete step in this lineage; start with prepare_resume(run, None)",
                    str(self._steps.path),
                )
            return complete[-1]
        if step in found:
            for error in found[step].damaged.values():
                raise error
        if step not in complete:
            raise ValueError(
                f"load: step {step} is not a complete step of {self._steps.path}; those are {complete}"
            )
        return step

    @staticmethod
    def _remove_dead(root: _native.Root) -> list[str]:
        names = [name for name, _ in root.list() if name.startswith(".tmp-") and _native.owner_is_dead(name)]
        for name in names:
            root.remove(name)
        return names
