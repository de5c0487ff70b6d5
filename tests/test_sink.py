"""`TrainSink`: order, scoring, staleness, releases, and state of one instant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prime_io import (
    Episode,
    GroupCancellation,
    OpenGroup,
    PayloadStore,
    Policy,
    Progress,
    TaskRequest,
    Trace,
    TrainBatch,
    load_batch,
)
from prime_io.sink import EpisodeRefusedError
from work import FIELD, Bench


def run(coroutine):  # type: ignore[no-untyped-def]
    return asyncio.run(coroutine)


def test_rule_01_a_batch_takes_the_oldest_version_first_then_arrival(tmp_path: Path) -> None:
    """Rule 1: batches are ordered by policy.start, or dispatch_version when the policy is None, then arrival."""

    async def main() -> None:
        bench = Bench(tmp_path, batch_size=6)
        new = await bench.fill(1, policy=3, version=3)
        frozen = await bench.fill(1, policy=None, version=2)
        old = await bench.fill(1, policy=1, version=1)
        batch = bench.sink.take_batch()
        assert batch is not None
        assert [t.trace_id for t in batch.traces] == [*old, *frozen, *new]
        await bench.sink.drain()

    run(main())


def test_a_batch_loads_what_was_added(tmp_path: Path) -> None:
    """Every per-token array, scalar and payload row of a trace comes out of the batch as it went in."""

    async def main() -> None:
        bench = Bench(tmp_path)
        episodes = [bench.episode("g"), bench.episode("g")]
        rows = [bench.store.read(e.traces[0].samples[0].payload[0]).copy() for e in episodes]
        for episode in episodes:
            await bench.sink.add(episode)
        batch = bench.sink.take_batch()
        assert batch is not None
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=type(batch))
        for episode, trace, expected in zip(
            episodes, load_batch(again, store=bench.store), rows, strict=True
        ):
            sent, got = episode.traces[0].samples[0], trace.samples[0]
            for name in ("token_ids", "mask", "logprobs"):
                np.testing.assert_array_equal(getattr(sent, name), getattr(got, name))
            np.testing.assert_array_equal(sent.columns["temperatures"], got.columns["temperatures"])
            assert got.scalars == sent.scalars
            values, valid = bench.store.gather(got.payload, FIELD, 0, 11, verify=True)
            np.testing.assert_array_equal(values, expected)
            assert valid.all()
        assert [t.samples[0].advantages for t in load_batch(again, store=bench.store)] == [-1.0, 1.0]
        await bench.sink.drain()

    run(main())


def test_rule_12_a_packed_batch_is_the_batch(tmp_path: Path) -> None:
    """Rule 12: what the loop takes without decoding it is, byte for byte, the batch; and progress counts the same."""

    async def main() -> None:
        one, other = Bench(tmp_path / "one"), Bench(tmp_path / "other")
        for bench in (one, other):
            for group in ("g", "h"):
                for i in range(2):
                    await bench.sink.add(
                        bench.episode(group, name=f"{group}/{i}", payload=False, reward=float(i))
                    )
        packed = one.sink.take_packed()
        assert packed is not None
        decoded = msgspec.msgpack.decode(packed.encode(), type=TrainBatch)
        assert msgspec.msgpack.encode(decoded) == packed.encode()
        assert [t.trace_id for t in decoded.traces] == packed.trace_ids == ["g/0", "g/1"]
        assert decoded.files == packed.files == sorted({s.file for t in decoded.traces for s in t.segments()})
        batch = other.sink.take_batch()
        assert batch is not None and [t.trace_id for t in batch.traces] == packed.trace_ids
        assert one.progress == other.progress == Progress(2, 24, 2, 1)
        for bench in (one, other):
            await bench.sink.drain()

    run(main())


def test_rule_12_a_large_group_is_queued_in_turns_and_in_one_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules 2 and 12: others get their turn while a group is made ready, and see it open and whole, or queued."""

    async def main() -> None:
        monkeypatch.setattr("prime_io.sink._PREPARED_TOGETHER", 2)
        bench = Bench(tmp_path, group_size=12)
        for i in range(11):
            await bench.sink.add(bench.episode("g", payload=False, reward=float(i)))
        ready, seen = bench.sink._ready, list[tuple[int, int]]()

        def look(*args: Any) -> Any:
            asyncio.get_running_loop().call_soon(note)
            return ready(*args)

        def note() -> None:

            state = bench.sink.state_dict({})
            seen.append((len(state["queue"]), sum(len(members) for _, _, members in state["groups"])))

        monkeypatch.setattr(bench.sink, "_ready", look)
        await bench.sink.add(bench.episode("g", payload=False, reward=99.0))
        assert set(seen) <= {(0, 12), (12, 0)} and seen.count((0, 12)) >= 8
        assert bench.sink.queued == 12
        await bench.sink.drain()

    run(main())


def test_rule_08_a_run_that_ends_while_a_group_is_made_ready_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 8: cancelled between two traces of a group, their files are given up with it."""

    async def main() -> None:
        monkeypatch.setattr("prime_io.sink._PREPARED_TOGETHER", 1)
        bench = Bench(tmp_path, group_size=4)
        for i in range(3):
            await bench.sink.add(bench.episode("g", reward=float(i)))
        ready = bench.sink._ready

        def cancel(*args: Any) -> Any:
            adding.cancel()
            return ready(*args)

        monkeypatch.setattr(bench.sink, "_ready", cancel)
        adding = asyncio.ensure_future(bench.sink.add(bench.episode("g", reward=9.0)))
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert bench.sink.queued == 0 and len(bench.sink.open_groups["g"].members) == 4
        await bench.sink.discard_all()
        assert len(bench.sink.ledger) == 0 and not bench.files()

    run(main())


def test_rule_02_a_result_inside_an_unfinished_add_is_missing_from_the_cut(tmp_path: Path) -> None:
    """Rule 2: a cut taken while `add` waits has the group open under its task, without that member."""

    async def main() -> None:
        held = asyncio.Event()

        async def wait(episode: Episode) -> None:
            await held.wait()

        bench = Bench(tmp_path, score_episode=wait)
        adding = asyncio.ensure_future(bench.sink.add(bench.episode("g")))
        await asyncio.sleep(0.01)
        known = {"g": OpenGroup("env", {"q": "g"}, 1, 2)}
        [(name, group, members)] = bench.sink.state_dict(known)["groups"]
        assert (name, group.task, group.target, members) == ("g", {"q": "g"}, 2, [])
        held.set()
        await adding
        [(_, _, members)] = bench.sink.state_dict(known)["groups"]
        assert len(members) == 1
        await bench.sink.drain()

    run(main())


def test_state_is_one_instant(tmp_path: Path) -> None:
    """Rule 2: what happens after `state_dict` returned does not change what it returned."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.fill(2)
        await bench.sink.add(bench.episode("open"))
        state = bench.sink.state_dict({})
        before = msgspec.msgpack.encode(state)
        await bench.sink.add(bench.episode("open"))
        assert bench.sink.take_batch() is not None
        bench.sink.trained(1)
        bench.sink.counters["shipped"] += 5
        assert msgspec.msgpack.encode(state) == before
        await bench.sink.drain()

    run(main())


@pytest.mark.parametrize(
    "kind", ["trained", "stale", "zero", "rejected", "errored", "eval", "cancelled", "drained"]
)
def test_rule_08_every_way_out_releases(tmp_path: Path, kind: str) -> None:
    """Rule 8: whichever way work leaves the pipeline, no file of it stays and the ledger is empty."""

    async def main() -> None:
        bench = Bench(
            tmp_path,
            filter_zero_advantages=kind == "zero",
            admit=(lambda episode: False) if kind == "rejected" else None,
        )
        if kind == "trained":
            await bench.fill(1)
            assert bench.sink.take_batch() is not None
            assert bench.files()
            bench.sink.trained(1)
        elif kind == "stale":
            await bench.fill(1, policy=0)
            bench.progress.step = 6
            assert bench.sink.take_batch() is None
            assert len(bench.dropped["stale_queued"]) == 2
        elif kind == "zero":
            await bench.fill(1, reward=0.5)
            assert len(bench.dropped["zero_advantage"]) == 2
        elif kind == "rejected":
            await bench.fill(1)
            assert bench.sink.counters["rejected"] == 2
        elif kind == "errored":
            await bench.fill(1, ok=False, error="the environment broke")
            assert bench.sink.counters["errored"] == 2
            assert bench.forgotten
        elif kind == "eval":
            await bench.sink.add(bench.episode(kind="eval"))
            assert bench.sink.counters["eval"] == 1
        elif kind == "cancelled":
            await bench.sink.add(bench.episode("g", policy=0))
            bench.progress.step = 6
            await bench.sink.cancel(GroupCancellation("env", "g", 1, "stale"))
            assert bench.forgotten == ["g"]
            assert not bench.results, "rule 9: on_result never runs for a stale group"
        else:
            await bench.fill(1)
            await bench.sink.add(bench.episode("open"))
            await bench.sink.discard_all()
        await bench.sink.drain()
        assert not bench.files()
        assert len(bench.sink.ledger) == 0 == bench.sink.ledger.bytes

    run(main())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": None}, "exactly one of"),
        ({"token_batch_size": 5}, "exactly one of"),
        ({"batch_size": 0}, "a batch of 0 cannot be filled"),
        ({"batch_size": None, "token_batch_size": -1}, "a batch of -1 cannot be filled"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": {}}, "every environment needs one"),
        ({"group_size": {"env": 4, "other": 0}}, "every environment needs one"),
    ],
)
def test_options_are_checked_at_construction(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    """Promise: a wrong option is a ValueError when the sink is made, in words."""
    with PayloadStore(tmp_path, owner=True) as store:
        Bench.sink_of(store)
        with pytest.raises(ValueError, match=why):
            Bench.sink_of(store, **options)
    with PayloadStore(tmp_path) as store, pytest.raises(ValueError, match="owner=True"):
        Bench.sink_of(store)


def test_an_environment_without_a_group_size_is_named(tmp_path: Path) -> None:
    """Bug: a cancellation of an environment without a group size was a bare KeyError; an episode of it is refused."""

    async def main() -> None:
        bench = Bench(tmp_path, group_size={"env": 2})
        with pytest.raises(EpisodeRefusedError, match=r"'other' has no group_size \(there are \['env'\]\)"):
            await bench.sink.add(bench.episode("g", env_name="other"))
        with pytest.raises(ValueError, match="'other' has no group_size"):
            await bench.sink.cancel(GroupCancellation("other", "g", 1, "stale"))
        await bench.sink.drain()
        assert not bench.files() and not bench.sink.open_groups

    run(main())


def test_truncated_samples_release_what_they_do_not_need(tmp_path: Path) -> None:
    """Rule 8, truncated: a sample is cut to seq_len with its payload; a file beyond it is reclaimed."""

    async def main() -> None:
        bench = Bench(tmp_path, seq_len=6)
        episode = bench.episode("g")
        sample = episode.traces[0].samples[0]
        [late] = bench.store.write({FIELD: np.ones((2, 2, 2), np.uint8)}, version=0).values()
        sample.payload.append(msgspec.structs.replace(late, pos=9))
        await bench.sink.add(episode)
        await bench.sink.drain()
        [(_, group)] = bench.sink.open_groups.items()
        [stored] = group.members[0].traces[0].samples
        assert stored.n_tokens == 6
        assert [s.rows for s in stored.payload] == [6]
        assert late.file not in bench.files()

    run(main())


def test_samples_that_share_a_file_release_it_once_all_are_trained(tmp_path: Path) -> None:
    """Rule 8: two traces of one file: it goes when the second of them was trained, not before."""

    async def main() -> None:
        bench = Bench(tmp_path, batch_size=1)
        [shared] = bench.store.write({FIELD: np.ones((11, 2, 2), np.uint8)}, version=0).values()
        for i in range(2):
            episode = bench.episode("g", payload=False, reward=float(i))
            episode.traces[0].samples[0].payload.append(shared)
            await bench.sink.add(episode)
        for step, there in ((1, True), (2, False)):
            assert bench.sink.take_batch() is not None
            bench.sink.trained(step)
            await bench.sink.drain()
            assert (shared.file in bench.files()) is there

    run(main())


def test_rule_10_other_lineages_and_future_policies_are_refused(tmp_path: Path) -> None:
    """Rule 10: `add` refuses an episode of another lineage or of an unpublished policy; its files go."""

    async def main() -> None:
        bench = Bench(tmp_path, policy=Policy(3))
        with pytest.raises(ValueError, match="lineage 'dead'"):
            await bench.sink.add(bench.episode(lineage="dead"))
        with pytest.raises(ValueError, match="policy version 4 is above the current 3"):
            await bench.sink.add(bench.episode(policy=4))
        await bench.sink.drain()
        assert not bench.files()
        assert not bench.sink.open_groups

    run(main())


def test_rule_05_a_group_never_takes_more_than_its_target(tmp_path: Path) -> None:
    """Rule 5: a member beyond the target is refused, also while the last one is still being stored."""

    async def main() -> None:
        bench = Bench(tmp_path)
        results = await asyncio.gather(
            *(bench.sink.add(bench.episode("g")) for _ in range(3)), return_exceptions=True
        )
        assert sum(isinstance(r, ValueError) for r in results) == 1
        assert bench.sink.queued == 2
        await bench.sink.drain()

    run(main())


def test_rule_05_a_group_cancelled_while_an_add_is_pending_is_scored_once(tmp_path: Path) -> None:
    """Bug: cancelling more members while one was being spilled scored the group, and a second time with that one."""

    async def main() -> None:
        held = asyncio.Event()

        async def wait(episode: Episode) -> None:
            await held.wait()

        bench = Bench(tmp_path, score_episode=wait)
        adding = [asyncio.ensure_future(bench.sink.add(bench.episode("g"))) for _ in range(2)]
        await asyncio.sleep(0)
        await bench.sink.cancel(GroupCancellation("env", "g", 2, "overload"))
        assert not bench.forgotten, "two of its members are on their way"
        held.set()
        await asyncio.gather(*adding)
        assert bench.forgotten == ["g"] and len(bench.results) == 1
        assert bench.sink.queued == 2 and bench.sink.counters["owed"] == 2
        await bench.sink.drain()

    run(main())


def test_rule_05_a_spill_that_fails_in_a_cancelled_group_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a group cancelled while its last member's spill failed asked for a rollout that nobody waited for."""

    async def main() -> None:
        bench = Bench(tmp_path)
        episode, held = bench.episode("g"), asyncio.Event()

        async def wait(episode: Episode) -> None:
            await held.wait()

        bench.sink._score_episode = wait
        adding = asyncio.ensure_future(bench.sink.add(episode))
        await asyncio.sleep(0)
        await bench.sink.cancel(GroupCancellation("env", "g", 2, "overload"))

        def full(*args: object, **kwargs: object) -> object:
            raise OSError(28, "No space left on device", "v0")

        monkeypatch.setattr(bench.store, "write", full)
        held.set()
        await adding
        assert not bench.sink.requests and bench.forgotten == ["g"] and not bench.sink.open_groups
        await bench.sink.drain()
        assert not bench.files()

    run(main())


def test_rule_05_a_request_for_no_rollouts_cannot_be_made() -> None:
    """Rule 5: no zero-rollout request exists."""
    with pytest.raises(ValueError, match="at least 1"):
        TaskRequest("env", None, 1, 0, "g")


def test_rule_06_stale_members_are_filtered_when_the_group_is_scored(tmp_path: Path) -> None:
    """Rule 6: what is stale when its group is scored is left out; what the group owed is counted before."""

    async def main() -> None:
        bench = Bench(tmp_path, group_size=3)
        await bench.sink.add(bench.episode("g", policy=0))
        bench.progress.step = 6
        await bench.sink.add(bench.episode("g", policy=5, version=5))
        await bench.sink.add(bench.episode("g", policy=5, version=5))
        assert bench.sink.queued == 2
        assert len(bench.dropped["stale_members"]) == 1
        assert bench.sink.counters["owed"] == 3
        await bench.sink.drain()

    run(main())


def test_rule_07_the_oldest_version_sees_queue_groups_and_untrained_batches(tmp_path: Path) -> None:
    """Rule 7: a version directory stays live while a queued, open or shipped trace names a file in it."""

    async def main() -> None:
        bench = Bench(tmp_path)
        assert bench.sink.oldest_live_payload_version() is None
        await bench.fill(1, policy=2, version=2)
        await bench.sink.add(bench.episode("open", policy=4, version=4))
        assert bench.sink.take_batch() is not None
        assert bench.sink.oldest_live_payload_version() == 2
        bench.sink.trained(1)
        assert bench.sink.oldest_live_payload_version() == 4
        await bench.sink.drain()

    run(main())


def test_rule_13_a_failed_spill_is_counted_and_the_member_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 13: a spill that fails releases the episode's files and asks for that member again."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.sink.add(bench.episode("g"))
        episode = bench.episode("g")

        def full(*args: object, **kwargs: object) -> object:
            raise OSError(28, "No space left on device", "v0")

        with monkeypatch.context() as patch:
            patch.setattr(bench.store, "write", full)
            await bench.sink.add(episode)
        await bench.sink.drain()
        [request] = bench.sink.requests
        assert (request.group_id, request.rollouts, request.first_member) == ("g", 1, 2)
        assert bench.sink.counters["spill_failed"] == 1
        assert episode.traces[0].samples[0].payload[0].file not in bench.files()
        await bench.sink.add(bench.episode("g"))
        assert bench.sink.queued == 2
        await bench.sink.drain()

    run(main())


def test_a_malformed_episode_counts_as_delivered(tmp_path: Path) -> None:
    """A worker that returns a column of the wrong length costs its member, not the run."""

    async def main() -> None:
        bench = Bench(tmp_path)
        episode = bench.episode("g")
        episode.traces[0].samples[0].columns["short"] = np.zeros(3, np.float32)
        await bench.sink.add(episode)
        await bench.sink.add(bench.episode("g"))
        assert bench.sink.counters["malformed"] == 1
        assert bench.sink.queued == 1
        await bench.sink.drain()

    run(main())


def test_per_token_advantages_are_spilled(tmp_path: Path) -> None:
    """Rule 13: a scorer is given loaded columns, and what it adds per token is spilled beside them."""

    async def main() -> None:
        def score(traces):  # type: ignore[no-untyped-def]
            return [[np.asarray(t.samples[0].logprobs * 2)] for t in traces]

        bench = Bench(tmp_path, score_group=score)
        await bench.fill(1)
        batch = bench.sink.take_batch()
        assert batch is not None
        for trace in load_batch(batch, store=bench.store):
            assert isinstance(trace, Trace)
            sample = trace.samples[0]
            np.testing.assert_array_equal(sample.advantages, sample.logprobs * 2)
        bench.sink.trained(1)
        await bench.sink.drain()
        assert not bench.files()

    run(main())


def test_a_batch_left_empty_by_filters_ships_nothing(tmp_path: Path) -> None:
    """Rule 8: a batch that staleness empties does not advance the step."""

    async def main() -> None:
        bench = Bench(tmp_path, progress=Progress(step=1))
        await bench.fill(1, policy=0)
        bench.progress.step = 9
        assert not bench.sink.ready()
        assert bench.sink.take_batch() is None
        assert bench.progress.step == 9
        await bench.sink.drain()

    run(main())


def test_token_batches_take_whole_traces_up_to_their_size(tmp_path: Path) -> None:
    """`token_batch_size`: a batch is full at the first trace that reaches the number of tokens."""

    async def main() -> None:
        bench = Bench(tmp_path, batch_size=None, token_batch_size=30)
        await bench.fill(1)
        assert not bench.sink.ready()
        await bench.fill(1)
        batch = bench.sink.take_batch()
        assert batch is not None
        assert sum(t.n_tokens for t in batch.traces) == 36
        await bench.sink.drain()

    run(main())
