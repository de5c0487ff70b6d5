"""Which checkpoints stay. Run by the orchestrator alone, at each save and acknowledgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prime_io import _native
from prime_io.lineage import Lineage
from prime_io.steps import ABANDONED, Step, Steps, empty_trash, log, throw_away


@dataclass(frozen=True)
class RetentionReport:
    """Steps that retention removed, and whether abandoned/ went."""

    removed: tuple[int, ...] = ()
    abandoned: bool = False


def choose(
    steps: Mapping[int, Step], *, keep_last: int, keep_every: int | None, resumed_from: int | None
) -> list[int]:
    """The steps to remove: complete ones beyond `keep_last` and `keep_every`, and incomplete ones older than
    the newest complete. Never the newest complete one, nor the one resumed from, nor one with a damaged
    manifest: that is for a person to look at."""
    complete = sorted(number for number, step in steps.items() if step.complete)
    if not complete:
        return []
    kept = set(complete[-keep_last:])
    if resumed_from is not None:
        kept.add(resumed_from)
    return [
        number
        for number, step in sorted(steps.items())
        if number < complete[-1]
        and number not in kept
        and not step.damaged
        and not (step.complete and keep_every is not None and number % keep_every == 0)
    ]


def apply_retention(
    lineage: Lineage, steps: Steps, *, keep_last: int, keep_every: int | None
) -> RetentionReport:
    """Remove what `choose` says, each step by a durable rename first; then abandoned/, once this life has a
    complete step of its own. Anything that cannot be read stops it before it removes anything."""
    found = steps.look()
    doomed = choose(found, keep_last=keep_last, keep_every=keep_every, resumed_from=lineage.resumed_from)
    own = any(
        step.complete and any(stamp.lineage == lineage.id for stamp in step.stamps.values())
        for step in found.values()
    )
    # An old life that was not killed must not take what the new one stands on.
    if not lineage.is_current():
        log.error("retention of %s: another life of the run has begun; nothing is removed", lineage)
        return RetentionReport()
    for number in doomed:
        throw_away(steps.root, found[number].name)
    empty_trash(steps.root)
    run = _native.Root(str(lineage.run))
    abandoned = own and any(name == ABANDONED for name, _ in run.list())
    if abandoned:
        throw_away(run, ABANDONED)
    empty_trash(run)
    if doomed or abandoned:
        log.info("retention: removed steps %s%s", doomed, " and abandoned/" if abandoned else "")
    return RetentionReport(tuple(doomed), abandoned)
