"""What a resume would make of a checkpoint, told before anything is started. Touches nothing.

The judgement is `restore`'s own, over the store as it would be once the pins had their names back.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from .checkpoint import CheckpointManager
from .lineage import Lineage
from .pins import Pins
from .restore import RestoreReport, restore, saved_progress, sink_state
from .resume import missing_rollouts
from .segment import FieldSpec, PayloadSegment, byte_range
from .steps import CHECKPOINTS, COMPONENTS, Components
from .store import PayloadStore, Probe


class Plan(msgspec.Struct, frozen=True):
    """What `prepare_resume(run, step)` and a restore of that step would come to."""

    run: str
    step: int
    next_step: int
    """The batch that the resumed run would ship first."""
    lineage: str
    complete_steps: list[int]
    max_off_policy_steps: int | None
    """None: staleness was not judged."""
    report: RestoreReport
    """As the restore would report; a file that would be copied from its pin counts as linked."""
    environments: dict[str, dict[str, int]]
    """The counts of the report that are not zero, by environment."""
    dropped: dict[str, list[str]]
    """Ids of traces and episodes that would be dropped, by outcome."""
    requests: dict[str, int]
    """The rollouts that would be asked for again, by open group."""
    lost_files: dict[str, str]
    """Files that neither the store nor a good pin would give, and why."""


def plan(
    run: str | Path,
    step: int | None = None,
    *,
    max_off_policy_steps: int | None = None,
    fields: Mapping[str, FieldSpec] | None = None,
    store: str | Path | None = None,
    components: Components = COMPONENTS,
) -> Plan:
    """What a resume of `run` from `step` (default: the newest complete one) would keep, drop and ask for again.

    Takes no lock and writes nothing, so that it can be asked of a run that is still going. `store` is the
    payload directory, `<run>/payloads` by default; `fields` and `components` are those of the run. Without
    `max_off_policy_steps` nothing is judged stale. FileNotFoundError if there is nothing to resume from;
    ValueError if `step` is not a complete step, CorruptCheckpointError if it is damaged.
    """
    run = Path(run)
    lineage = Lineage.load(run)
    nothing = FileNotFoundError(errno.ENOENT, "nothing to resume: the run has no complete step", str(run))
    if not (run / CHECKPOINTS).is_dir():
        raise nothing  # a manager would make it
    manager = CheckpointManager(run_dir=run, components=components, lineage=lineage)
    if step is None and (step := manager.latest()) is None:
        raise nothing
    with PayloadStore(run / "payloads" if store is None else store, create=False) as payloads:
        parts, pins = manager.load(step, store=payloads)
        state = sink_state(parts, step=pins.step)
        next_step = saved_progress(parts, step=pins.step).step
        view = _AsRestored(payloads, pins)
        restored = restore(
            state,
            store=view,
            step=next_step,
            max_off_policy_steps=max_off_policy_steps,
            fields=fields or {},
            environments=None,
            pins=view,
        )
    missing = {group_id: missing_rollouts(group) for group_id, group in restored.groups.items()}
    return Plan(
        run=str(run),
        step=pins.step,
        next_step=next_step,
        lineage=lineage.id,
        complete_steps=manager.steps(),
        max_off_policy_steps=max_off_policy_steps,
        report=restored.report,
        environments={
            env: {kind: n for kind, n in counts.items() if n}
            for env, counts in sorted(restored.by_env.items())
        },
        dropped=restored.dropped,
        requests={group_id: n for group_id, n in missing.items() if n},
        lost_files=view.lost,
    )


class _AsRestored:
    """A store as it would be after `Pins.link_back`: files that would come from a good pin are there."""

    def __init__(self, store: PayloadStore, pins: Pins) -> None:
        self._store, self._pins = store, pins
        self._from_pin: set[str] = set()
        self.lost: dict[str, str] = {}

    def link_back(self, files: Sequence[str]) -> dict[str, str | Exception]:
        answers = self._pins.link_back(files, dry_run=True)
        self._from_pin.update(file for file, answer in answers.items() if answer in ("linked", "replaced"))
        self.lost.update((f, str(answer)) for f, answer in answers.items() if isinstance(answer, Exception))
        return answers

    def probe(self, asked: Sequence[PayloadSegment]) -> Probe:
        probe = self._store.probe(asked)
        for i, segment in enumerate(asked):
            if segment.file in self._from_pin:
                size = self._pins.pin(segment.file).size
                short = not 0 <= _end(segment) <= size
                probe.present[i], probe.size[i] = not short, size
                probe.errno[i] = errno.ENODATA if short else 0
        return probe

    def checksums(self, files: Sequence[str]) -> list[frozenset[str]]:
        # A pin is good if its header holds every checksum that was pinned: those of all segments at the cut.
        others = [file for file in files if file not in self._from_pin]
        there = dict(zip(others, self._store.checksums(others), strict=True))
        pinned = {file: frozenset(self._pins.pin(file).checksums) for file in set(files) - set(others)}
        found = there | pinned
        return [found[file] for file in files]


def _end(segment: PayloadSegment) -> int:
    """Where it ends in its file; -1 for one that cannot be."""
    try:
        return byte_range(segment)[1]
    except ValueError:
        return -1


def table(made: Plan) -> str:
    """The plan for people: one table of queued traces, one of open groups, by environment."""
    report = made.report
    lines = [
        f"resume of {made.run} from step {made.step}: the next batch is {made.next_step}",
        f"complete steps: {', '.join(map(str, made.complete_steps))}",
        "",
        *_columns(made, "queued traces", "queued", ()),
        "",
        *_columns(made, "open groups", "members", ("groups_in_checkpoint", "groups_complete")),
        "",
        f"payload files: {report.files_present} in place, {report.files_linked} back from their pins, "
        f"{report.files_replaced} replaced by them, {report.files_lost} lost",
    ]
    if report.optional_fields_lost:
        lines.append(f"kept without an optional field that is gone: {report.optional_fields_lost}")
    if made.max_off_policy_steps is None:
        lines.append("staleness was not judged: give --max-off-policy-steps as the run has it")
    return "\n".join(lines)


def _columns(made: Plan, title: str, what: str, first: Sequence[str]) -> Iterable[str]:
    """A row per environment (and one for all), with the outcomes that happened."""
    total = msgspec.structs.asdict(made.report)
    dropped = [f"{what}_{why}" for why in ("stale", "too_new", "missing", "short", "corrupt")]
    kinds = [*first, f"{what}_in_checkpoint", f"{what}_kept", *(kind for kind in dropped if total[kind])]
    heads = [_TITLES.get(kind) or kind.removeprefix(f"{what}_").replace("_", " ") for kind in kinds]
    if what == "members":
        kinds, heads = [*kinds, "rollouts_requested"], [*heads, "rollouts to ask for"]
    counted = [*made.environments.items()]
    if len(counted) != 1:
        counted.append(("all", total))
    rows = [[title, *heads]]
    rows += [[env, *(str(counts.get(kind, 0)) for kind in kinds)] for env, counts in counted]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join(
            [name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]
        )


_TITLES = {
    "groups_in_checkpoint": "in checkpoint",
    "groups_complete": "complete",
    "members_in_checkpoint": "members",
}
