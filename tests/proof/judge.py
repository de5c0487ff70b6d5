"""Whether a run kept its promises, from what its processes told and from what it left on disk.

The judge knows nothing of what the library thinks of itself, but for the chain of lineages: it follows the
events of the lives that count, each up to the cut that the next one went on from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prime_io import CheckpointManager, TaskRequest

from .events import Event
from .roles import Config

BENIGN_IN_A_LIFE_THAT_WAS_LEFT = (
    "LineageLeftError",
    "FileNotFoundError",
    "CorruptPayloadError",
    "CancelledError",
)


@dataclass
class Verdict:
    """Every promise that was broken, and what was counted."""

    violations: list[str] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    steps: list[list[str]] = field(default_factory=list)
    """The trace ids of each step trained."""

    def promise(self, kept: bool, otherwise: str) -> None:
        if not kept:
            self.violations.append(otherwise)


def judge(run: Path, config: Config, events: list[Event], *, finished: bool) -> Verdict:
    """`finished`: the last life came to its end. Otherwise only what holds at any time is looked at."""
    verdict = Verdict()
    left = {event["lineage"] for event in events if event["event"] == "lingers"}
    for event in events:
        if event["event"] == "failed" and "WrongBytes" in event["error"]:
            verdict.violations.append(f"wrong bytes: {event['error']}")
        if event["event"] == "failed" and event["lineage"] not in left:
            verdict.rows["reads of a missing or wrong file"] += any(
                name in event["error"] for name in ("WrongBytes", "FileNotFound", "CorruptPayload")
            )
    verdict.rows["reads of a missing or wrong file"] += 0
    if not finished:
        return verdict
    line = Line(json.loads((run / "LINEAGE").read_bytes())["chain"], events)
    _trained(verdict, config, line)
    _traces(verdict, line)
    _groups(verdict, config, line)
    _restored(verdict, config, line)
    _resumed_from_the_newest(verdict, events)
    _left(verdict, run, config, line)
    return verdict


class Line:
    """The lives that the end stands on, each with its events up to the cut that was gone on from."""

    def __init__(self, chain: list[dict[str, object]], events: list[Event]) -> None:
        self.ids = [str(link["id"]) for link in chain]
        self.resumed_at = [link["resumed_at"] for link in chain]
        self.events = events
        of = {i: [e for e in events if e["lineage"] == name] for i, name in enumerate(self.ids)}
        self.path: list[tuple[int, list[Event], int | None]] = [(len(chain) - 1, of[len(chain) - 1], None)]
        """(life in the chain, its events that count, the step at which it was left)."""
        while self.path[0][0] > 0:
            step = self.resumed_at[self.path[0][0]]
            assert isinstance(step, int)
            owner, at = self._cut(of, self.path[0][0], step)
            self.path.insert(0, (owner, of[owner][: at + 1], step))

    def _cut(self, of: dict[int, list[Event]], before: int, step: int) -> tuple[int, int]:
        """The life that made the cut of `step`, and where in its events: the newest before life `before`."""
        for life in range(before - 1, -1, -1):
            for at, event in enumerate(of[life]):
                if event["event"] == "cut" and event["step"] == step:
                    return life, at
        raise AssertionError(f"a life was resumed from step {step}, of which no cut is known")

    def counted(self, *names: str) -> Iterator[Event]:
        """What happened along the line, in order."""
        for _, events, _ in self.path:
            yield from (event for event in events if event["event"] in names)

    def trained(self) -> Iterator[Event]:
        """Batches that the trainer trained along the line: a life that was left counts up to that step."""
        for life, _, left in self.path:
            for event in self.events:
                if event["event"] == "trained" and event["role"] != "launcher" and "traces" in event:
                    if event["lineage"] == self.ids[life] and (left is None or event["step"] <= left):
                        yield event


def _trained(verdict: Verdict, config: Config, line: Line) -> None:
    steps = [event["step"] for event in line.trained()]
    verdict.promise(steps == list(range(1, config.steps + 1)), f"the steps trained are {steps}")
    verdict.steps = [event["traces"] for event in line.trained()]
    times = Counter(trace for event in line.trained() for trace in event["traces"])
    twice = [trace for trace, n in times.items() if n > 1]
    verdict.promise(not twice, f"{len(twice)} traces were trained twice, such as {twice[:2]}")
    verdict.rows["traces trained"] += len(times)
    verdict.rows["trained twice"] += len(twice)


def _traces(verdict: Verdict, line: Line) -> None:
    """Every trace that was taken in ends once: trained, or dropped for one reason."""
    known: dict[str, None] = {}
    fates: dict[str, list[str]] = {}
    for _, events, left in line.path:
        for event in events:
            match event["event"]:
                case "added":
                    known.update(dict.fromkeys(event["traces"]))
                case "cut":
                    known.update(dict.fromkeys([*event["queued"], *event["members"]]))
                case "shipped" if left is None or event["step"] < left:
                    for trace in event["traces"]:
                        fates.setdefault(trace, []).append(f"shipped in {event['step']}")
                case "dropped":
                    for trace in event["traces"]:
                        fates.setdefault(trace, []).append(event["reason"])
                case "restored":
                    for trace in [t for t in known if t not in fates]:
                        reason = _dropped_as(event, trace)
                        if reason:
                            fates.setdefault(trace, []).append(reason)
    # The batch at whose taking the cut was made is told of after the cut: the trainer's word stands for it.
    shipped = {
        trace for fate in fates for trace in [fate] if any(f.startswith("shipped") for f in fates[fate])
    }
    trained = {trace: event["step"] for event in line.trained() for trace in event["traces"]}
    for trace, step in trained.items():
        if trace not in shipped:
            fates.setdefault(trace, []).append(f"trained in {step}")
    lost = [trace for trace in known if trace not in fates]
    verdict.promise(not lost, f"{len(lost)} traces vanished without a reason, such as {lost[:2]}")
    doubled = {trace: fate for trace, fate in fates.items() if len(fate) > 1}
    verdict.promise(
        not doubled, f"{len(doubled)} traces ended more than once, such as {list(doubled.items())[:2]}"
    )
    untrained = sorted(shipped - set(trained))
    verdict.promise(not untrained, f"{len(untrained)} traces were shipped and never trained: {untrained[:2]}")
    strangers = sorted(set(trained) - set(known))
    verdict.promise(not strangers, f"{len(strangers)} trained traces were never taken in: {strangers[:2]}")
    verdict.rows["traces dropped for a reason"] += len(fates) - len(trained)
    verdict.rows["traces lost"] += len(lost)


def _dropped_as(restored: Event, trace: str) -> str | None:
    for reason, names in restored["dropped"].items():
        if trace in names or (reason.startswith("members") and trace.partition("/")[0] in names):
            return f"{reason} at restore"
    return None


def _groups(verdict: Verdict, config: Config, line: Line) -> None:
    """Every task drawn is finished or open at each cut that counts, and the draws are those of the seed."""
    drawn: list[tuple[str, object]] = []
    finished: list[str] = []
    last_life = line.path[-1][1]
    last_cut = max((i for i, e in enumerate(last_life) if e["event"] == "cut"), default=None)
    done = line.resumed_at[-1] == config.steps
    verdict.promise(last_cut is not None or done, "the last life made no cut")
    for _, events, left in line.path:
        for at, event in enumerate(events):
            if event["event"] == "drawn":
                drawn.append((event["group"], event["task"]))
            elif event["event"] == "consumed":
                finished.append(event["group"])
            elif event["event"] == "cut" and at == (last_cut if left is None else len(events) - 1):
                where = f"at the cut of step {event['step']}"
                names = [group for group, _ in drawn]
                state = Counter(finished) + Counter(list(event["open"]))
                verdict.promise(
                    state == Counter(names),
                    f"{where} drawn and finished or open: {_differ(Counter(names), state)}",
                )
                verdict.promise(
                    sum(event["drawn"].values()) == len(names), f"{where} the source counts {event['drawn']}"
                )
                if left is None:
                    break
    source = config.source()
    planned: list[TaskRequest] = [source.next_task(1) for _ in drawn]
    verdict.promise(
        [(request.group_id, request.task) for request in planned] == drawn,
        "the tasks drawn are not those that the seed draws without a kill",
    )
    verdict.rows["groups finished"] += len(finished)


def _differ(want: Counter[str], got: Counter[str]) -> str:
    return f"missing {dict(want - got)}, too many {dict(got - want)}"


def _restored(verdict: Verdict, config: Config, line: Line) -> None:
    """What a resume found is what the cut held: nothing pinned is lost, and exactly the rest is asked for again."""
    for (_, events, _), (_, following, _) in zip(line.path, line.path[1:], strict=False):
        cut = events[-1]
        restored = next((e for e in following if e["event"] == "restored"), None)
        if restored is None:
            verdict.violations.append("a resumed life restored nothing")
            continue
        kept, dropped = set(restored["queued"]), restored["dropped"]
        gone = [name for reason, names in dropped.items() if reason.endswith("_gone") for name in names]
        verdict.promise(config.pin == "skip" or not gone, f"{len(gone)} pinned traces were lost: {gone[:2]}")
        unexplained = [t for t in cut["queued"] if t not in kept and not _dropped_as(restored, t)]
        verdict.promise(
            not unexplained, f"{len(unexplained)} queued traces were not restored: {unexplained[:2]}"
        )
        verdict.rows["queued traces restored"] += len(cut["queued"]) - len(unexplained)
        row = "traces lost with files that were not pinned" if config.pin == "skip" else "pinned traces lost"
        verdict.rows[row] += len(gone) + len(unexplained)
        members = [
            name for reason, names in dropped.items() if reason.startswith("members") for name in names
        ]
        lacking = Counter(name.rpartition(".")[0] for name in members)
        wanted = {
            group: target - done - cancelled + lacking[group]
            for group, (done, cancelled, target) in cut["open"].items()
            if target - done - cancelled + lacking[group] > 0
        }
        verdict.promise(
            restored["requests"] == wanted, f"asked again for {restored['requests']}, not for {wanted}"
        )


def _resumed_from_the_newest(verdict: Verdict, events: list[Event]) -> None:
    """A step that was acknowledged as complete is there to be resumed from, or a newer one is."""
    saved: dict[tuple[str, int], set[str]] = {}
    newest = looked = 0
    for event in events:
        if event["event"] == "looks":
            looked = newest
        elif event["event"] == "saved" and event["committed"]:
            saved.setdefault((event["lineage"], event["step"]), set()).add("orchestrator")
        elif event["event"] == "committed":
            saved.setdefault((event["lineage"], event["step"]), set()).add("trainer")
        elif event["event"] == "resume":
            complete = event["complete"]
            verdict.promise(
                (max(complete, default=0)) >= looked,
                f"step {looked} was acknowledged as complete, but complete are {complete}",
            )
            # Only lives that this resume leaves behind at or after that step still count.
            limit = event["step"] or 0
            saved = {key: done for key, done in saved.items() if key[1] <= limit}
            newest = min(newest, limit)
        newest = max([newest, *(step for (_, step), done in saved.items() if len(done) == 2)])


def _left(verdict: Verdict, run: Path, config: Config, line: Line) -> None:
    """At the end: no payload file, no temporary, no trash, nothing of former lives; only what retention keeps."""
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    payloads = {f for f in files if f.startswith("payloads/v") and not f.endswith("notes.txt")}
    if config.pin == "skip":
        payloads -= {f"payloads/{file}" for file in CheckpointManager(run_dir=run).unpinned_files()}
    orphans = sorted(payloads)
    verdict.promise(not orphans, f"{len(orphans)} payload files are left, such as {orphans[:2]}")
    verdict.rows["unneeded payload files"] += len(orphans)
    life = line.ids[-1]
    kept = {config.steps, line.resumed_at[-1]}
    kept |= set(range(config.steps - config.keep_last * config.checkpoint_every, config.steps + 1))
    allowed = ("LINEAGE", "payloads/", f"lineages/{life}/", "notes.txt", "checkpoints/notes.txt")
    allowed += tuple(
        f"checkpoints/step_{step}/{who}/" for step in kept for who in ("orchestrator", "trainer")
    )
    # What stragglers of a life that was left still say stays where nobody listens, until the next resume.
    allowed += tuple(f"lineages/{event['lineage']}/" for event in line.events if event["event"] == "lingers")
    if line.resumed_at[-1] == config.steps:
        allowed += ("abandoned/",)  # goes once this life has a complete step, and it had none to make
    others = sorted(f for f in files if not f.startswith(allowed) or "/.trash-" in f)
    temporaries = (f for f in files if "/.tmp-" in f or f.startswith(".tmp-"))
    others += sorted(f for f in temporaries if "abandoned/" not in allowed or not f.startswith("abandoned/"))
    verdict.promise(not others, f"{len(others)} other files are left, such as {others[:3]}")
    verdict.rows["other unneeded files"] += len(others)
    end = [event for event in line.path[-1][1] if event["event"] == "finished"]
    verdict.promise(len(end) == 1, "the last life did not finish")
    for event in end:
        verdict.promise(event["held"] == 0, f"{event['held']} files are still held")
        failed = {
            n: c for n, c in event["counters"].items() if n in ("refused", "reclaim_failed", "malformed")
        }
        verdict.promise(not failed, f"counters {failed}")
