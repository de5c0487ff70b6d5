"""The checkpoints directory as it stands: which steps are complete for a lineage, and how things leave it.

What is damaged or not visible is no part of a complete step. A failing disk, or a format of a newer release,
is an error instead: nobody may conclude from it that a step is not there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_io import _native
from prime_io.manifest import MANIFEST, CorruptCheckpointError, Stamp, read_manifest

CHECKPOINTS = "checkpoints"
ABANDONED = "abandoned"
ORCHESTRATOR = "orchestrator"
COMPONENTS = (ORCHESTRATOR, "trainer")

Predicate = Callable[[Path], bool]
Components = Sequence[str] | Mapping[str, Predicate | None]

log = logging.getLogger("prime_io.checkpoint")
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def normalize(components: Components) -> dict[str, Predicate | None]:
    """Component names with their predicates; None for those committed with a manifest."""
    known: dict[str, Predicate | None] = (
        dict(components) if isinstance(components, Mapping) else dict.fromkeys(components)
    )
    if isinstance(components, str) or not known:
        raise ValueError("components: a sequence of names, or a mapping from names to predicates")
    for name in known:
        if not _NAME.fullmatch(name):
            raise ValueError(f"components: {name!r} is not a name of letters, digits, '_', '.' and '-'")
    return known


def step_of(name: str) -> int | None:
    """N of the name `step_<N>`, None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Step:
    """One `step_<N>` directory."""

    number: int
    complete: bool
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    damaged: Mapping[str, CorruptCheckpointError] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The directory name."""
        return f"step_{self.number}"


class Steps:
    """Reads `<run>/checkpoints` for one lineage. Heads of visible manifests are immutable and kept."""

    def __init__(
        self,
        run: Path,
        *,
        components: Mapping[str, Predicate | None],
        visible: Callable[[str, int], bool],
    ) -> None:
        self.path = run / CHECKPOINTS
        self.root = _native.Root(str(self.path), create=True)
        self._components = components
        self._visible = visible
        self._kept: dict[tuple[int, str], Stamp] = {}
        self._told: set[str] = set()

    def visible(self, stamp: Stamp) -> bool:
        """Whether the component with this head counts for the lineage."""
        return self._visible(stamp.lineage, stamp.step)

    def stamp(self, step: int, name: str) -> Stamp:
        """The head of the manifest of a component that is there. CorruptCheckpointError if it is damaged."""
        kept = self._kept.get((step, name))
        if kept is not None:
            return kept
        directory = f"step_{step}/{name}"
        where = self.path / directory
        stamp = read_manifest(self.root, directory, where, kind=Stamp)
        if stamp.step != step or stamp.component != name:
            raise CorruptCheckpointError(
                f"read {where / MANIFEST}: it is of step {stamp.step}, component {stamp.component!r}"
            )
        if self.visible(stamp):
            self._kept[step, name] = stamp
        return stamp

    def find(self, step: int, name: str) -> Stamp | None:
        """The head of a component, or None if there is no such component."""
        return self.stamp(step, name) if self.there(step, name) else None

    def look(self) -> dict[int, Step]:
        """Every `step_<N>` directory, ascending. Other names are not ours and not looked at."""
        numbers = sorted(
            number for name, is_dir in self.root.list() if is_dir and (number := step_of(name)) is not None
        )
        steps = {number: self._look(number) for number in numbers}
        for key in list(self._kept):
            if key[0] not in steps:
                self._kept.pop(key, None)
        return steps

    def complete(self) -> list[int]:
        """The numbers of the visible complete steps, ascending."""
        return [step.number for step in self.look().values() if step.complete]

    def _look(self, number: int) -> Step:
        names = {
            name for name, is_dir in self.root.list(f"step_{number}") if is_dir and _NAME.fullmatch(name)
        }
        stamps: dict[str, Stamp] = {}
        damaged: dict[str, CorruptCheckpointError] = {}
        for key in list(self._kept):
            if key[0] == number and key[1] not in names:
                self._kept.pop(key, None)
        for name in sorted(names):
            if self._components.get(name) is not None:
                continue
            try:
                stamps[name] = self.stamp(number, name)
            except CorruptCheckpointError as error:
                # A name that is not among our components need not be ours, and retention may have taken the
                # directory since it was listed.
                if name in self._components and self.there(number, name):
                    damaged[name] = error
                    if str(error) not in self._told:
                        self._told.add(str(error))
                        log.warning("step %d is not complete: %s", number, error)
        complete = all(
            predicate(self.path / f"step_{number}" / name)
            if predicate is not None
            else name in stamps and self.visible(stamps[name])
            for name, predicate in self._components.items()
        )
        return Step(number, complete, stamps, damaged)

    def there(self, step: int, name: str) -> bool:
        """Whether a component's directory is there now."""
        return any(entry == name for entry, _ in self.root.list(f"step_{step}"))


def set_aside(run: _native.Root, source: str, *, lineage: str, target: str) -> str:
    """Move `source` durably to `abandoned/<lineage>/<target>`, or beside what has that name already."""
    for attempt in range(1, 1000):
        free = f"{ABANDONED}/{lineage}/{target}" + (f".{attempt}" if attempt > 1 else "")
        try:
            run.rename(source, free)
        except FileExistsError:
            continue
        return free
    raise FileExistsError(f"move {source} to {ABANDONED}/{lineage}/{target}: a thousand such names are taken")


def trash_name() -> str:
    """A fresh `.trash-*` name of this process."""
    return ".trash-" + _native.temporary_name().removeprefix(".tmp-")


def throw_away(root: _native.Root, source: str) -> None:
    """Rename `source` to trash, durably: from then on it is no checkpoint, whatever is left of it. Unlink it.

    What cannot be unlinked now (NFS keeps names of open files) stays trash, for `empty_trash`.
    """
    trash = trash_name()
    root.rename(source, trash)
    _unlink(root, trash)


def empty_trash(root: _native.Root) -> list[str]:
    """Remove every `.trash-*` of a directory; returns their names."""
    names = [name for name, _ in root.list() if name.startswith(".trash-")]
    for name in names:
        _unlink(root, name)
    return names


def _unlink(root: _native.Root, name: str) -> None:
    try:
        root.remove(name)
    except OSError as error:
        log.warning("remove %s: %s; left for the next time", name, error)
