"""What the launcher knows of a run from its events and its files, and whether the run kept its promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_io import CheckpointManager, Lineage

from .events import EventReader
from .settings import Settings

Event = dict[str, Any]


def files_there(run: Path) -> set[str]:
    payloads = run / "payloads"
    return {str(path.relative_to(payloads)) for path in payloads.glob("v*/*") if path.is_file()}


@dataclass(frozen=True)
class Moment:
    """The state of a run at a kill, seen against the newest complete checkpoint."""

    step: int
    cut: Event
    reclaimed: frozenset[str]
    """Files of the cut's queued traces that the store has no more."""
    trained: int
    dead_batches: frozenset[int]
    dead_weights: frozenset[int]

    @classmethod
    def look(cls, run: Path, lineage: Lineage, events: EventReader) -> Moment | None:
        step = CheckpointManager(run_dir=run, lineage=lineage).latest()
        cut = next((e for e in events.of("cut", lineage.id) if e["step"] == step), None)
        if step is None or cut is None:
            return None
        named = {file for files in cut["files"].values() for file in files}
        batches = {int(p.name[5:]) for p in lineage.batches_dir.glob("step_*")}
        weights = {int(p.name[1:]) for p in lineage.weights_dir.glob("v*")}
        trained = max((e["step"] for e in events.of("trained_batch", lineage.id)), default=0)
        return cls(
            step,
            cut,
            frozenset(named - files_there(run)),
            trained,
            frozenset(s for s in batches if s > step),
            frozenset(v for v in weights if v > step),
        )

    def lacks(self, settings: Settings) -> list[str]:
        """Which of the things that make a kill hard are not given."""
        conditions = {
            "a batch queued at the cut": len(self.cut["queued"]) >= settings.batch_size,
            "a group partly done at the cut": any(
                0 < done < target for done, target in self.cut["groups"].values()
            ),
            "a result emitted but not consumed at the cut": self.cut["emitted"] >= 1,
            "a file of the cut reclaimed since": bool(self.reclaimed),
            "batches shipped since": bool(self.dead_batches),
            "weights published since": bool(self.dead_weights),
        }
        return [name for name, given in conditions.items() if not given]

    def unpinned_and_gone(self, run: Path) -> set[str]:
        """Queued traces of the cut with a file that neither the store nor the checkpoint has."""
        pins = run / "checkpoints" / f"step_{self.step}" / "orchestrator" / "payloads"
        return {
            trace
            for trace, files in self.cut["files"].items()
            if any(file in self.reclaimed and not (pins / file).exists() for file in files)
        }


@dataclass
class Verdict:
    """Rows of the final table, and every promise that was broken."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def row(self, name: str, value: object) -> None:
        self.rows.append((name, str(value)))

    def promise(self, kept: bool, otherwise: str) -> None:
        if not kept:
            self.broken.append(otherwise)


def judge(
    run: Path,
    settings: Settings,
    events: EventReader,
    lives: list[Lineage],
    moment: Moment,
    expected_missing: set[str],
    *,
    threshold: float | None,
) -> Verdict:
    """`expected_missing`: traces whose payload was gone for good when the run was killed."""
    first, second = lives
    verdict = Verdict()
    _rewards(verdict, events, threshold)
    _mismatch(verdict, events)
    _bytes(verdict, events)
    _restored(verdict, settings, events, second, moment, expected_missing)
    _trained(verdict, events, first, second, moment)
    _left(verdict, run, events, second)
    return verdict


def _rewards(verdict: Verdict, events: EventReader, threshold: float | None) -> None:
    rewards = list(events.of("reward"))
    start, end = rewards[0]["value"], rewards[-1]["value"]
    warm = next(events.of("warm_start"))["seconds"]
    verdict.row("supervised warm start", f"{warm:.1f} s")
    verdict.row("held-out greedy reward, start -> end", f"{start:.3f} -> {end:.3f}")
    if threshold is not None:
        verdict.row("threshold", f"{threshold:.2f}")
        verdict.promise(end >= threshold, f"the reward {end:.3f} is below {threshold}")


def _mismatch(verdict: Verdict, events: EventReader) -> None:
    seen = list(events.of("mismatch"))
    n = sum(e["n"] for e in seen)
    verdict.promise(n > 0, "log-probabilities were never compared at equal version")
    if not n:
        return
    mean = {kind: sum(e[kind] * e["n"] for e in seen) / n for kind in ("replayed", "own", "shifted", "other")}
    names = {
        "replayed": "mean |logprob mismatch|, routing replayed",
        "own": "  without replay (the trainer's own routing)",
        "shifted": "  control: rows shifted by one",
        "other": "  control: another trace's rows",
    }
    for kind, name in names.items():
        verdict.row(name, f"{mean[kind]:.5f}   ({mean[kind] / mean['replayed']:.1f}x)")
    for kind in ("shifted", "other"):
        verdict.promise(mean[kind] >= 10 * mean["replayed"], f"control {kind!r} is not 10x worse than replay")
    verdict.promise(mean["own"] > mean["replayed"], "replay does not lower the mismatch")
    control = next(events.of("float32_control"), None)
    equal = control is not None and control["equal"]
    verdict.row("float32 control: own top-k equals the stored ids", "yes" if equal else "NO")
    verdict.promise(equal, "in float32 the trainer's own top-k differs from the stored ids")


def _bytes(verdict: Verdict, events: EventReader) -> None:
    rollouts = list(events.of("rollouts"))
    written, read = sum(e["bytes"] for e in rollouts), sum(e["bytes"] for e in events.of("trained_batch"))
    verdict.row("rollouts sampled", sum(e["n"] for e in rollouts))
    verdict.row("payload bytes written / read by the trainer", f"{written:,} / {read:,}")


def _restored(
    verdict: Verdict,
    settings: Settings,
    events: EventReader,
    second: Lineage,
    moment: Moment,
    expected_missing: set[str],
) -> None:
    restored = next(events.of("restored", second.id))
    report = restored["report"]
    queued, kept = set(moment.cut["queued"]), set(restored["queued"])
    dropped = restored["dropped"]
    stale = set(dropped.get("queued_stale", ())) | set(dropped.get("queued_too_new", ()))
    gone = set(dropped.get("queued_gone", ()))
    verdict.row("killed at / resumed from step", f"{moment.trained} / {moment.step}")
    verdict.row("queued at the cut, files reclaimed since", f"{len(queued)}, {len(moment.reclaimed)} files")
    verdict.row("queue restored", len(queued & kept))
    reasons = {name: n for name, n in report.items() if n and name.startswith("queued_")}
    for name in ("queued_in_checkpoint", "queued_kept"):
        reasons.pop(name, None)
    verdict.row("queue dropped, by reason", reasons or "none")
    verdict.row("rollouts asked for again", report["rollouts_requested"])
    complete = kept - queued
    if complete:
        verdict.row("traces of groups complete at the cut, scored at once", len(complete))
    verdict.promise(not queued - kept - stale - gone, "queued traces vanished without a reason")
    if settings.pin == "skip":
        verdict.row("lost with their files (--pin skip)", len(gone))
        verdict.promise(gone == expected_missing - stale, "the report's missing are not the reclaimed ones")
    else:
        verdict.promise(not gone, f"{len(gone)} pinned queued traces were lost")
    missing = {g: target - done for g, (done, target) in moment.cut["groups"].items() if done < target}
    asked = restored["requests"]
    lost = report["members_in_checkpoint"] - report["members_kept"]
    verdict.promise(
        all(asked.get(group, 0) >= n for group, n in missing.items())
        and (lost > 0 or _agree(asked, missing)),
        "the open groups' missing members are not what was asked for again",
    )


def _agree(asked: dict[str, int], missing: dict[str, int]) -> bool:
    return all(asked[group] == n for group, n in missing.items())


def _trained(verdict: Verdict, events: EventReader, first: Lineage, second: Lineage, moment: Moment) -> None:
    line: list[str] = []
    for e in events.of("trained_batch"):
        if e["lineage"] == second.id or e["step"] <= moment.step:
            line += e["traces"]
    verdict.row("traces trained along the lineage", len(line))
    verdict.promise(len(line) == len(set(line)), "a trace was trained twice")
    steps = [
        e["step"] for e in events.of("trained_batch") if e["lineage"] == second.id or e["step"] <= moment.step
    ]
    verdict.promise(steps == list(range(1, len(steps) + 1)), f"the steps trained are {steps}")
    restored = next(events.of("restored", second.id))
    inherited = set(restored["queued"]) | set(moment.cut["members"])
    foreign = [
        trace
        for e in events.of("trained_batch", second.id)
        for trace in e["traces"]
        if not trace.endswith(second.id[:6]) and trace not in inherited
    ]
    verdict.promise(not foreign, f"work of the dead lineage was trained: {foreign[:3]}")
    accounted = set(line)
    for e in events.of("dropped", second.id):
        accounted |= set(e["traces"])
    unaccounted = set(restored["queued"]) - accounted
    verdict.promise(not unaccounted, f"{len(unaccounted)} restored traces were neither trained nor counted")
    missing = list(events.of("missing_file"))
    verdict.promise(not missing, f"the trainer met a missing file: {missing[:1]}")


def _left(verdict: Verdict, run: Path, events: EventReader, second: Lineage) -> None:
    finished = next(events.of("finished", second.id))
    counters = finished["counters"]
    swept = [e["reclaimed"] for e in events.of("swept", second.id)]
    verdict.row("files reclaimed in the second life", counters.get("reclaimed", 0))
    verdict.row("files swept after the restore / at the end", " / ".join(map(str, swept)))
    needed = CheckpointManager(run_dir=run, lineage=second).unpinned_files()
    orphans = files_there(run) - needed
    verdict.row("files left that nobody needs", len(orphans))
    verdict.promise(not orphans, f"{len(orphans)} orphans are left, such as {sorted(orphans)[:2]}")
