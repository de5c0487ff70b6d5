"""`resume.py` alone and in the sink: what survives, what is asked for again, who holds what."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prime_io import (
    Dispatcher,
    Environment,
    Episode,
    GroupCancellation,
    Ledger,
    OpenGroup,
    PayloadSegment,
    Policy,
    Progress,
    Rollout,
    StoredEpisode,
    TaskRequest,
    TrainSource,
    missing_rollouts,
    pin_set,
    survivors,
)
from work import Bench


def segment(file: str, rows: int = 4) -> PayloadSegment:
    return PayloadSegment("f", file, 4096, 0, rows, "uint8", (2,))


def state_of(bench: Bench) -> Any:
    """The sink's state as it comes back from a checkpoint."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(bench.sink.state_dict({})))


async def restart(bench: Bench, state: Any, **options: Any) -> tuple[Bench, Any, Any]:
    """The store's next life: a new sink with the old one's state."""
    await bench.sink.drain()
    root = Path(bench.store.root)
    bench.store.close()
    again = Bench(root, progress=Progress(step=bench.progress.step), **options)
    report, requests = await again.sink.load_state_dict(state)
    return again, report, requests


def test_ledger_frees_a_file_with_its_last_holder() -> None:
    """A file is free when nobody holds it: work, a snapshot, a shipped batch; not before."""
    ledger = Ledger()
    work = ledger.hold([segment("v1/a"), segment("v2/b")])
    other = ledger.hold([segment("v2/b")])
    ledger.ship(1, work)
    assert ledger.oldest_version() == 1
    assert ledger.files() == {"v1/a", "v2/b"}
    ledger.trained(1)
    ledger.trained(1)
    assert ledger.take_free() == ["v1/a"]
    ledger.release(other)
    assert ledger.take_free() == ["v2/b"]
    assert ledger.take_free() == []
    assert ledger.oldest_version() is None
    assert ledger.bytes == 0


def test_ledger_makes_releases_wait_for_open_snapshots() -> None:
    """Releases wait for every snapshot that was open when they were asked for, in whatever order saves end."""
    ledger = Ledger()
    a, b, c = (ledger.hold([segment(f"v{i}/x")]) for i in range(3))
    first = ledger.open_snapshot()
    ledger.release(a)
    second = ledger.open_snapshot()
    ledger.release(b)
    assert ledger.files() == {"v0/x", "v1/x", "v2/x"}
    assert ledger.oldest_version() == 0
    again = ledger.hold([segment("v1/x")])
    ledger.close_snapshot(second)
    assert not ledger.has_free, "the first snapshot needs them too"
    ledger.close_snapshot(first)
    assert ledger.take_free() == ["v0/x"]
    ledger.release(again)
    ledger.release(c)
    assert ledger.take_free() == ["v1/x", "v2/x"]
    assert ledger.bytes == len(ledger) == 0


def test_ledger_sees_to_many_files_piece_by_piece() -> None:
    """Rule 12: whatever a batch or a snapshot held, a call costs the loop a bounded number of files."""
    ledger, n = Ledger(), 5 * Ledger.AT_ONCE
    for i in range(n):
        ledger.ship(1 + i % 2, ledger.hold([segment(f"v{i % 2}/{i}")]))
    ledger.trained(1)
    assert len(ledger) == n - Ledger.AT_ONCE
    waiting = ledger.open_snapshot()
    ledger.trained(2)
    first = ledger.take_free(10)
    assert len(first) == 10 and first == sorted(first)
    assert len(ledger.take_free()) == Ledger.AT_ONCE - 10, (
        "the others were still held when the snapshot opened"
    )
    assert not ledger.has_free and ledger.oldest_version() == 0
    ledger.close_snapshot(waiting)
    assert ledger.has_free and len(ledger) == n - 2 * Ledger.AT_ONCE
    while ledger.has_free:
        assert len(ledger.take_free(100)) <= 100
    assert ledger.bytes == len(ledger) == 0 and ledger.oldest_version() is None


def test_ledger_what_is_held_again_waits_for_the_later_snapshot() -> None:
    """Bug: a file let go under one snapshot, held again and let go under the next was freed with the first."""
    ledger = Ledger()
    held = ledger.hold([segment("v0/x")])
    first = ledger.open_snapshot()
    ledger.release(held)
    held = ledger.hold([segment("v0/x")])
    second = ledger.open_snapshot()
    ledger.release(held)
    ledger.close_snapshot(first)
    assert not ledger.has_free and "v0/x" in ledger
    ledger.close_snapshot(second)
    assert ledger.take_free() == ["v0/x"]


def test_ledger_random_walk_agrees_with_a_plain_model() -> None:
    """Holds and releases in any order: held files, bytes and least version are those of a plain count."""
    chance = random.Random(7)
    ledger, model, held = Ledger(), Counter[str](), []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            files = held.pop(chance.randrange(len(held)))
            ledger.release(files)
            model.subtract(files)
        else:
            files = ledger.hold(
                segment(f"v{chance.randrange(5)}/{chance.randrange(4)}")
                for _ in range(chance.randrange(1, 4))
            )
            held.append(files)
            model.update(files)
        model += Counter()
        assert ledger.files() == set(model)
        assert ledger.bytes == len(model) * (4096 + 8)
        assert ledger.oldest_version() == min((int(f[1]) for f in model), default=None)
    assert not set(ledger.take_free()) & set(model)


def test_missing_rollouts_counts_errored_and_cancelled_as_delivered() -> None:
    """Rule 5: 5 of 8 members leave exactly 3; errored ones count; never below zero."""
    errored = StoredEpisode("e", "env", "g", None, 0, [], ok=False)
    assert missing_rollouts(OpenGroup("env", 0, 1, 8, [errored] * 5)) == 3
    assert missing_rollouts(OpenGroup("env", 0, 1, 8, [errored] * 5, cancelled=3)) == 0
    assert missing_rollouts(OpenGroup("env", 0, 1, 2, [errored] * 5)) == 0


@pytest.mark.parametrize("damage", ["missing", "short", "corrupt"])
def test_survivors_name_the_reason(tmp_path: Path, damage: str) -> None:
    """Work whose payload is gone, cut short, or another file's is dropped under its own reason."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.fill(2)
        work = list(bench.sink.work())
        [file, *_] = [f for f in pin_set(work[:1]) if f.startswith("v0/")]
        path = tmp_path / file
        if damage == "missing":
            path.unlink()
        elif damage == "short":
            with path.open("r+b") as f:
                f.truncate(path.stat().st_size - 1)
        else:
            other = bench.store.write({"x": b"\0" * (path.stat().st_size - 4096)}, version=0)["x"]
            path.unlink()
            (tmp_path / other.file).rename(path)
        kept, report = survivors(work, store=bench.store)
        assert kept == work[1:]
        assert report == {damage: 1}
        await bench.sink.drain()

    asyncio.run(main())


def test_an_error_that_is_no_answer_is_raised(tmp_path: Path) -> None:
    """ELOOP (or EACCES, EIO) is never reported as missing: nothing may be dropped because of it."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.fill(1)
        work = list(bench.sink.work())
        file = next(iter(pin_set(work)))
        (tmp_path / file).unlink()
        (tmp_path / file).symlink_to("/etc/hostname")
        with pytest.raises(OSError, match="not known") as caught:
            survivors(work, store=bench.store)
        assert caught.value.filename == file
        await bench.sink.drain()

    asyncio.run(main())


def test_rule_03_restore_drops_what_is_gone_and_keeps_the_rest(tmp_path: Path) -> None:
    """Rule 3: a queued trace whose required payload is gone is dropped and counted; work without payload stays."""

    async def main() -> None:
        bench = Bench(tmp_path)
        lost, *kept = await bench.fill(2)
        plain = await bench.fill(1, payload=False)
        state = state_of(bench)
        work = {w.trace_id: w for w in bench.sink.work()}  # type: ignore[union-attr]
        for s in work[lost].samples[0].payload:
            (tmp_path / s.file).unlink()
        again, report, requests = await restart(bench, state)
        assert again.sink.queued_trace_ids() == [*kept, *plain]
        assert (report.queued_kept, report.queued_missing) == (5, 1)
        assert again.sink.dropped_at_restore == {"queued_gone": [lost]}
        assert not requests, "rule 4: a lost queued trace is not asked for again"
        await again.sink.drain()

    asyncio.run(main())


def test_rule_04_siblings_of_a_lost_trace_keep_their_advantages(tmp_path: Path) -> None:
    """Rule 4: when one trace of a group is lost at a restore, the others are trained with what they were given."""

    async def main() -> None:
        bench = Bench(tmp_path, group_size=3, batch_size=2)
        names = [f"g/{i}" for i in range(3)]
        for reward, name in enumerate(names):
            await bench.sink.add(bench.episode("g", name=name, reward=float(reward**2)))
        state = state_of(bench)
        work = {w.trace_id: w for w in bench.sink.work()}  # type: ignore[union-attr]
        given = {name: [s.advantage for s in w.samples] for name, w in work.items()}
        assert len({tuple(a) for a in given.values()}) == 3
        for s in work["g/1"].samples[0].payload:
            (tmp_path / s.file).unlink()
        again, report, requests = await restart(bench, state, group_size=3, batch_size=2)
        assert report.queued_missing == 1 and not requests
        batch = again.sink.take_batch()
        assert batch is not None
        assert {t.trace_id: [s.advantage for s in t.samples] for t in batch.traces} == {
            name: given[name] for name in ("g/0", "g/2")
        }
        assert not again.results, "the group was scored, and is not a second time"
        await again.sink.drain()

    asyncio.run(main())


def test_rule_03_a_gone_optional_field_is_removed_from_its_sample(tmp_path: Path) -> None:
    """Rule 3: losing an optional field costs the field, not the trace."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.fill(1, pixels=True)
        state = state_of(bench)
        for work in bench.sink.work():
            for s in work.segments():
                if s.field == "pixels":
                    (tmp_path / s.file).unlink()
        again, report, _ = await restart(bench, state)
        assert (report.queued_kept, report.optional_fields_lost) == (2, 2)
        assert {s.field for w in again.sink.work() for s in w.samples[0].payload} == {  # type: ignore[union-attr]
            "routed_experts"
        }
        await again.sink.drain()

    asyncio.run(main())


def test_rule_03_stale_and_too_new_work_is_dropped_first(tmp_path: Path) -> None:
    """Rule 3: staleness is judged at N + 1 with the new configuration, and counted as such, not as missing."""

    async def main() -> None:
        bench = Bench(tmp_path, policy=Policy(100))
        old = await bench.fill(1, policy=0)
        fresh = await bench.fill(1, policy=4, version=4)
        new = await bench.fill(1, policy=50, version=50)
        state = state_of(bench)
        for work in bench.sink.work():
            if work.trace_id in old + new:  # type: ignore[union-attr]
                for s in work.segments():
                    (tmp_path / s.file).unlink(missing_ok=True)
        bench.progress.step = 6
        again, report, _ = await restart(bench, state, max_off_policy_steps=2)
        assert again.sink.queued_trace_ids() == fresh
        assert (report.queued_stale, report.queued_too_new, report.queued_missing) == (2, 2, 0)
        await again.sink.drain()

    asyncio.run(main())


def test_rule_04_open_groups_ask_for_exactly_what_is_missing(tmp_path: Path) -> None:
    """Rule 4: a restored group goes on under its task and id, and asks for its missing members only."""

    async def main() -> None:
        bench = Bench(tmp_path, group_size=4)
        first = bench.episode("g")
        await bench.sink.add(first)
        await bench.sink.add(bench.episode("g"))
        state = state_of(bench)
        (tmp_path / first.traces[0].samples[0].payload[0].file).unlink()
        again, report, requests = await restart(bench, state, group_size=4)
        assert [(r.group_id, r.task, r.rollouts, r.first_member) for r in requests] == [
            ("g", {"q": "g"}, 3, 4)
        ]
        assert (report.members_kept, report.members_missing, report.rollouts_requested) == (1, 1, 3)
        for _ in range(3):
            await again.sink.add(again.episode("g"))
        assert again.sink.queued == 4
        await again.sink.drain()

    asyncio.run(main())


def test_rule_04_a_group_without_results_goes_on_with_new_member_numbers(tmp_path: Path) -> None:
    """Bug: a group dispatched before the cut, without a result yet, numbered its members from 0 after a resume."""

    async def main() -> None:
        bench = Bench(tmp_path)
        source = TrainSource(envs=[Environment("env", [{"q": 1}], 2)], seed=0)

        async def never(rollout: Rollout) -> Episode:
            await asyncio.Event().wait()
            raise AssertionError

        dispatcher = Dispatcher(
            source=source,
            run_episode=never,
            policy=bench.policy,
            progress=bench.progress,
            max_inflight=2,
            max_off_policy_steps=4,
        )
        dispatcher.pump()
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(bench.sink.state_dict(dispatcher.open_train_groups()))
        )
        await dispatcher.close()
        again, _, requests = await restart(bench, state)
        assert requests == [TaskRequest("env", {"q": 1}, 1, 2, "env-000000", first_member=2)]
        # Nor does the life after: what was asked for is known to the dispatcher alone.
        state = state_of(again)
        _, _, requests = await restart(again, state)
        assert [request.first_member for request in requests] == [4]

    asyncio.run(main())


def test_rule_05_a_restored_group_that_lacks_nothing_is_scored_at_once(tmp_path: Path) -> None:
    """Rule 5: all members are there: it is scored, requests nothing, and `on_result` runs once."""

    async def main() -> None:
        stuck = asyncio.Event()

        async def never(traces: object) -> list[float]:
            await stuck.wait()
            return []

        bench = Bench(tmp_path, score_group=never)
        await bench.sink.add(bench.episode("g"))
        last = asyncio.ensure_future(bench.sink.add(bench.episode("g")))
        while not any(len(g.members) == 2 for g in bench.sink.open_groups.values()):
            await asyncio.sleep(0.005)
        state = state_of(bench)
        last.cancel()
        again, report, requests = await restart(bench, state)
        assert (report.groups_complete, report.rollouts_requested, requests) == (1, 0, [])
        assert again.sink.queued == 2
        assert len(again.results) == 1
        await again.sink.drain()

    asyncio.run(main())


def test_rule_04_undispatched_requests_survive_a_second_kill(tmp_path: Path) -> None:
    """Rule 4: a group that was restored and not yet dispatched again is open in the next cut too."""

    async def main() -> None:
        bench = Bench(tmp_path, group_size=3)
        await bench.sink.add(bench.episode("g"))
        again, _, [request] = await restart(bench, state_of(bench), group_size=3)
        third, _, [repeated] = await restart(again, state_of(again), group_size=3)
        assert repeated.rollouts == request.rollouts == 2
        assert repeated.first_member > request.first_member
        await third.sink.drain()

    asyncio.run(main())


def test_rule_01_restored_traces_come_first_among_equals(tmp_path: Path) -> None:
    """Rule 1: restored traces keep their arrival, and the counter goes on above the highest saved."""

    async def main() -> None:
        bench = Bench(tmp_path, batch_size=4, progress=Progress(step=5))
        before = await bench.fill(1, policy=3)
        again, _, _ = await restart(bench, state_of(bench), batch_size=4)
        after = await again.fill(1, policy=3)
        assert again.sink.queued_trace_ids() == [*before, *after]
        await again.sink.drain()

    asyncio.run(main())


def test_unknown_formats_and_environments_are_sentences_to_act_on(tmp_path: Path) -> None:
    """A state of another format, with a part missing, or of other environments says what to do."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.fill(1)
        state = state_of(bench)
        for broken, message in (
            ({**state, "format": 9}, "format 9; this version of prime-io reads 1"),
            ({k: v for k, v in state.items() if k != "queue"}, "not complete: .*queue"),
        ):
            with pytest.raises(ValueError, match=message):
                await Bench.sink_of(bench.store).load_state_dict(broken)
        with pytest.raises(ValueError, match=r"environments \['env'\] that are not configured"):
            await Bench.sink_of(bench.store, group_size={"other": 2}).load_state_dict(state)
        await bench.sink.drain()

    asyncio.run(main())


def test_rule_08_a_random_walk_ends_with_no_unneeded_file(tmp_path: Path) -> None:
    """Rule 8: add, cancel, filter, ship, train and restart in any order: files on disk are the held ones."""

    async def main() -> None:
        chance = random.Random(11)
        options: dict[str, Any] = {"group_size": 3, "filter_zero_advantages": True}
        bench = Bench(tmp_path, **options)
        shipped: list[int] = []
        groups = [f"g{i}" for i in range(4)]
        for round_ in range(120):
            what = chance.choices(
                ["add", "cancel", "ship", "train", "step", "restart"], [10, 1, 4, 3, 1, 0.4]
            )[0]
            group = chance.choice(groups)
            if what == "add":
                start = max(bench.progress.step - 1 - chance.randrange(3), 0)
                episode = bench.episode(
                    group,
                    policy=start,
                    version=start,
                    reward=chance.choice([0.0, 1.0]),
                    ok=chance.random() > 0.1,
                )
                await bench.sink.add(episode)
            elif what == "cancel":
                await bench.sink.cancel(GroupCancellation("env", group, 1, "overload"))
            elif what == "ship":
                batch = bench.sink.take_batch()
                shipped += [batch.step] if batch else []
            elif what == "train" and shipped:
                bench.sink.trained(shipped.pop(0))
            elif what == "step":
                bench.progress.step += 1
            elif what == "restart" and not shipped:
                bench, _, _ = await restart(bench, state_of(bench), **options)
            await bench.sink.drain()
            assert bench.files() == bench.sink.ledger.files(), f"after {what} in round {round_}"
        for step in shipped:
            bench.sink.trained(step)
        await bench.sink.discard_all()
        assert not bench.files()
        assert len(bench.sink.ledger) == 0

    asyncio.run(main())
