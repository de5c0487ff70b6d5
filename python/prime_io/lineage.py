"""Lives of a run. A resume begins a new lineage; what a dead one left behind is not visible any more.

`<run>/LINEAGE` holds the chain of lineages from the first life to this one. Replacing it is the commit point
of a resume: before it, the run is as it was; after it, everything newer than the step resumed from is ignored
by everyone, whether it has been moved to `<run>/abandoned/` yet, or is published by a straggler next week.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import msgspec

from prime_io import _native
from prime_io.steps import CHECKPOINTS, COMPONENTS, Components, Step, Steps, log, normalize, set_aside

FORMAT = 1
_FILE = "LINEAGE"
_LIMIT = 64 << 20
_LIVES = "lineages"
_PAYLOADS = "payloads"
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}-[0-9]+-[0-9]+-[0-9a-f]+", re.ASCII)
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}", re.ASCII)


class LineageLeftError(RuntimeError):
    """Another life of the run has begun: this process belongs to a dead one and must end."""


class Link(msgspec.Struct, frozen=True):
    """One life: its id, and the step at which its parent was left (None for the first life)."""

    id: str
    resumed_at: int | None


class _File(msgspec.Struct, frozen=True):
    format: int
    chain: list[Link]


class _Format(msgspec.Struct, frozen=True):
    format: int


class Lineage:
    """The chain of lives of a run, up to this one. Immutable."""

    def __init__(self, run: Path, chain: tuple[Link, ...]) -> None:
        self._run = run
        self._chain = chain
        self._until: dict[str, float] = {}
        left = inf
        for link in reversed(chain):
            self._until[link.id] = left
            left = min(left, inf if link.resumed_at is None else link.resumed_at)

    @classmethod
    def load(cls, run: str | Path, *, expected: str | None = None) -> Lineage:
        """Read `<run>/LINEAGE`. FileNotFoundError if the run was never started.

        `expected`: the id of the life that this process was launched for. LineageLeftError if the run is in
        another one: a process that starts late must not join a life that it does not belong to.
        """
        run = Path(run)
        try:
            data = _native.Root(str(run)).read(_FILE, limit=_LIMIT)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                "no LINEAGE: start the run with prepare_resume(run, None), in one process, before any other",
                str(run / _FILE),
            ) from error
        found = cls(run, _decode(data, run / _FILE))
        if expected is not None and found.id != expected:
            raise LineageLeftError(
                f"{run} is in lineage {found.id}, and this process was launched for {expected}: it must end"
            )
        return found

    def __repr__(self) -> str:
        return f"Lineage({self.id!r}, run={str(self._run)!r}, resumed_from={self.resumed_from})"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._run

    @property
    def chain(self) -> tuple[Link, ...]:
        """All lives, the first one first."""
        return self._chain

    @property
    def id(self) -> str:
        """The id of this life."""
        return self._chain[-1].id

    @property
    def resumed_from(self) -> int | None:
        """The step that this life was resumed from, None if it started the run."""
        return self._chain[-1].resumed_at

    def visible(self, lineage_id: str, step: int) -> bool:
        """Whether what `lineage_id` made at `step` counts: of this life, or of an ancestor at a step no later
        than any at which it, or a life between, was left."""
        return step <= self._until.get(lineage_id, -inf)

    def is_current(self) -> bool:
        """Whether the run is still in this life. False once a resume has begun another."""
        return Lineage.load(self._run).id == self.id

    def check_current(self, operation: str) -> None:
        """LineageLeftError if the run has been resumed since."""
        if not self.is_current():
            raise LineageLeftError(
                f"{operation} in {self._run}: the run has been resumed since, lineage {self.id} was left; "
                "this process must end"
            )

    @property
    def directory(self) -> Path:
        """`<run>/lineages/<id>`: what this life tells its own processes."""
        return self._run / _LIVES / self.id

    @property
    def batches_dir(self) -> Path:
        """Where the orchestrator publishes `step_<s>`."""
        return self.directory / "batches"

    @property
    def weights_dir(self) -> Path:
        """Where the trainer publishes `v<k>`."""
        return self.directory / "weights"

    @property
    def acks_dir(self) -> Path:
        """Where readers acknowledge: `step_<s>.<reader>`."""
        return self.directory / "acks"


def prepare_resume(run: str | Path, step: int | None, *, components: Components = COMPONENTS) -> Lineage:
    """Begin a new life of `run`, in one process, before any other of the new life starts.

    `step` is a visible complete step (ValueError otherwise), or None to start: a run that has complete steps
    is not started anew (FileExistsError). First the new lineage is made durable; then whatever the dead ones
    left (checkpoints newer than `step`, incomplete steps and temporaries, invisible components, batches,
    weights, acknowledgements) is moved to `<run>/abandoned/`. Nothing is deleted. Killed at any moment, call
    it again.

    `components` must be those of the run's `CheckpointManager`. BlockingIOError if the owner of
    `<run>/payloads` is alive: an old orchestrator that goes on would delete what the new life stands on.
    """
    run = Path(run)
    with _no_owner(run):
        return _prepare(run, step, components)


@contextmanager
def _no_owner(run: Path) -> Iterator[None]:
    """Hold the store's lock, so that no orchestrator deletes and no other resume moves things meanwhile."""
    try:
        store = _native.Store(str(run / _PAYLOADS), create=False, owner=True)
    except FileNotFoundError:
        yield  # no store yet, so nobody owns it
        return
    try:
        yield
    finally:
        store.close()


def _prepare(run: Path, step: int | None, components: Components) -> Lineage:
    root = _native.Root(str(run), create=True)
    known = normalize(components)
    try:
        old: Lineage | None = Lineage.load(run)
    except FileNotFoundError:
        if step is not None:
            raise
        old = None
    steps = Steps(run, components=known, visible=old.visible if old else lambda _id, _step: False)
    _check(run, step, old, steps)

    link = Link(uuid.uuid4().hex, step)
    # Started again, a run that never completed a step keeps nothing: its former lives are no ancestors.
    chain = (*old.chain, link) if old and step is not None else (link,)
    body = msgspec.json.encode(_File(FORMAT, list(chain))) + b"\n"
    root.write(_FILE, body, durable=True, exclusive=old is None)

    new = Lineage(run, chain)
    moved = _clear(root, new, old, Steps(run, components=known, visible=new.visible))
    log.log(
        logging.WARNING if step is None and moved else logging.INFO,
        "lineage %s of %s: %s; %d things of former lives moved to abandoned/",
        new.id,
        run,
        "started, no step was ever complete" if step is None else f"resumed from step {step}",
        len(moved),
    )
    return new


def _check(run: Path, step: int | None, old: Lineage | None, steps: Steps) -> None:
    found = steps.look()
    complete = [n for n, view in found.items() if view.complete]
    if step is not None:
        if step not in complete:
            raise ValueError(
                f"resume {run} at step {step}: "
                + (
                    f"complete steps are {complete}"
                    if complete
                    else "it has no complete step; start with None"
                )
            )
    elif complete and old:
        raise FileExistsError(
            f"start {run}: it has complete steps {complete}; resume it with prepare_resume(run, "
            f"{complete[-1]}), or start in another directory"
        )
    elif damaged := [error for view in found.values() for error in view.damaged.values()]:
        raise FileExistsError(
            f"start {run}: no step is complete, but a component that was committed is damaged; to start anew "
            f"nevertheless, move it away ({damaged[0]})"
        )
    elif old is None and any(view.stamps for view in found.values()):
        raise FileExistsError(
            f"start {run}: it has checkpoints of steps {list(found)} but no LINEAGE; if it was copied, copy "
            "that too; to start from one of them, load it with path= in another run directory"
        )


def _clear(root: _native.Root, new: Lineage, old: Lineage | None, steps: Steps) -> list[str]:
    """Move what is not visible in `new` to abandoned/, each thing by one durable rename."""
    moved: list[str] = []
    last = new.resumed_from
    dead = old.id if old else new.id

    def move(source: str, *, lineage: str, target: str) -> None:
        try:
            moved.append(set_aside(root, source, lineage=lineage, target=target))
        except FileNotFoundError:
            log.info("%s is gone: a process of a former life is still at work", source)

    for step in steps.look().values():
        directory = f"{CHECKPOINTS}/{step.name}"
        if last is None or step.number > last or not step.complete:
            move(directory, lineage=_owner(step, new, dead), target=directory)
            continue
        for name, stamp in step.stamps.items():
            if not steps.visible(stamp):
                lineage = _safe(stamp.lineage, dead)
                move(f"{directory}/{name}", lineage=lineage, target=f"{directory}/{name}")
    for directory in [CHECKPOINTS, *(f"{CHECKPOINTS}/{step.name}" for step in steps.look().values())]:
        for name, _ in root.list(directory):
            # Of a killed save. Its owner may be unprovable (another host, a reboot), but is of a dead life.
            if name.startswith(".tmp-"):
                move(f"{directory}/{name}", lineage=dead, target=f"{CHECKPOINTS}/{name[1:]}")
    for life, is_dir in root.list(_LIVES):
        if is_dir and life != new.id and _ID.fullmatch(life):
            for name, _ in root.list(f"{_LIVES}/{life}"):
                if not name.startswith(".") or _TEMPORARY.fullmatch(name):
                    move(f"{_LIVES}/{life}/{name}", lineage=life, target=name.lstrip("."))
    for name, _ in root.list():
        # A component that was being written, perhaps on another host: large, and its owner unprovable.
        if _TEMPORARY.fullmatch(name):
            move(name, lineage=dead, target=name[1:])
    return moved


def _owner(step: Step, new: Lineage, dead: str) -> str:
    for stamp in step.stamps.values():
        if not new.visible(stamp.lineage, stamp.step):
            return _safe(stamp.lineage, dead)
    return dead


def _safe(lineage_id: str, otherwise: str) -> str:
    return lineage_id if _ID.fullmatch(lineage_id) else otherwise


def _decode(data: bytes, path: Path) -> tuple[Link, ...]:
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version != FORMAT:
            raise ValueError(
                f"read {path}: lineage format {version}, but this prime-io reads format {FORMAT}: use the "
                "release that wrote it, or a newer one"
            )
        chain = tuple(msgspec.json.decode(data, type=_File).chain)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"read {path}: torn or edited ({error}); restore it from a copy of the run"
        ) from error
    good = bool(chain) and chain[0].resumed_at is None
    good = good and all(_ID.fullmatch(link.id) for link in chain) and len({c.id for c in chain}) == len(chain)
    if not good or any(link.resumed_at is None or link.resumed_at < 0 for link in chain[1:]):
        raise ValueError(f"read {path}: not a chain of lineages; restore it from a copy of the run")
    return chain
