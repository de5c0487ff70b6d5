"""What workers return is not trusted: a bad episode costs its member, never the run or a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prime_io import (
    Dispatcher,
    Environment,
    Episode,
    OpenGroup,
    PayloadSegment,
    Policy,
    Progress,
    Rollout,
    Sample,
    TrainSource,
)
from prime_io.sink import EpisodeRefusedError
from work import Bench


def segment(file: str, **more: Any) -> PayloadSegment:
    fields: dict[str, Any] = {"offset": 4096, "pos": 0, "rows": 1, "dtype": "uint8", "shape": (2,)} | more
    return PayloadSegment("routed_experts", file, **fields)


def sample_of(episode: Episode) -> Sample:
    return episode.traces[0].samples[0]


def spoil(name: str, value: Any) -> Callable[[Episode], None]:
    return lambda episode: setattr(sample_of(episode), name, value)


BAD: dict[str, Callable[[Episode], object]] = {
    "a file outside": lambda e: sample_of(e).payload.append(segment("../x")),
    "a file behind a version": lambda e: sample_of(e).payload.append(segment("v0/../../etc/x")),
    "the store's identity": lambda e: sample_of(e).payload.append(segment("STORE")),
    "a temporary": lambda e: sample_of(e).payload.append(segment("v0/.tmp-x")),
    "rows without end": lambda e: sample_of(e).payload.append(segment("v0/x", rows=2**62)),
    "an unknown dtype": lambda e: sample_of(e).payload.append(segment("v0/x", dtype="object")),
    "no tokens": spoil("token_ids", None),
    "tokens beyond int32": spoil("token_ids", [2**40] * 12),
    "a mask of another length": spoil("mask", [True]),
    "a column of objects": spoil("columns", {"x": [object()] * 12}),
    "a scalar that is text": spoil("scalars", {"x": "much"}),
    "a trace id that is a number": lambda e: setattr(e.traces[0], "id", 7),
    "ok that is a number": lambda e: setattr(e.traces[0], "ok", 1),
    "an error that is no text": lambda e: setattr(e.traces[0], "error", 5),
    "native that is text": lambda e: setattr(e, "native", "record"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_episode_counts_as_an_errored_member(tmp_path: Path, kind: str) -> None:
    """Bug: it ended the run, made every save fail, or a checkpoint that could never be loaded."""

    async def main() -> None:
        bench = Bench(tmp_path)
        episode = bench.episode("g")
        BAD[kind](episode)
        await bench.sink.add(episode)
        await bench.sink.add(bench.episode("g"))
        assert (bench.sink.counters["malformed"], bench.sink.queued) == (1, 1)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.sink.state_dict({})))
        assert bench.store.sweep(roots=bench.sink.ledger.files).errors == []
        await bench.sink.drain()
        bench.store.close()
        again = Bench(tmp_path)
        report, _ = await again.sink.load_state_dict(state)
        assert report.queued_kept == 1
        await again.sink.drain()

    asyncio.run(main())


def test_a_task_that_no_checkpoint_could_hold_is_left_out(tmp_path: Path) -> None:
    """Bug: a worker that sent its task back with an array in it made every save fail."""

    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.sink.add(bench.episode("g", task={"q": np.zeros(2)}))
        state = bench.sink.state_dict({"g": OpenGroup("env", {"q": "g"}, 1, 2)})
        [(_, group, members)] = msgspec.msgpack.decode(msgspec.msgpack.encode(state))["groups"]
        assert group["task"] == {"q": "g"} and len(members) == 1
        msgspec.msgpack.encode(bench.sink.state_dict({}))
        await bench.sink.drain()

    asyncio.run(main())


@pytest.mark.parametrize("reward", [True, np.float64(1.5), np.float32(2.0), np.int64(3)])
def test_numbers_of_any_kind_come_back_from_a_checkpoint(tmp_path: Path, reward: Any) -> None:
    """Bug: a bool or numpy reward was saved as it is, and no restore could read it."""

    async def main() -> None:
        bench = Bench(tmp_path)
        for _ in range(2):
            episode = bench.episode("g")
            episode.traces[0].reward = reward
            sample_of(episode).scalars = {"x": reward}
            await bench.sink.add(episode)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.sink.state_dict({})))
        await bench.sink.drain()
        bench.store.close()
        again = Bench(tmp_path)
        await again.sink.load_state_dict(state)
        assert [work.reward for work in again.sink.work()] == [float(reward)] * 2  # type: ignore[union-attr]
        await again.sink.drain()

    asyncio.run(main())


def test_a_reward_that_is_no_number_poisons_nobody(tmp_path: Path) -> None:
    """Bug: one NaN reward made the advantages of all siblings NaN, and they were shipped."""

    async def main() -> None:
        bench = Bench(tmp_path, group_size=3)
        for reward in (float("nan"), 0.0, 1.0):
            await bench.sink.add(bench.episode("g", reward=reward))
        assert len(bench.dropped["unscored"]) == 1
        advantages = [s.advantage for work in bench.sink.work() for s in work.samples]  # type: ignore[union-attr]
        assert advantages == [-1.0, 1.0]
        await bench.sink.drain()

    asyncio.run(main())


def test_the_same_episode_twice_is_refused(tmp_path: Path) -> None:
    """Bug: a worker's retry put one trace id into a batch twice (rule 11)."""

    async def main() -> None:
        bench = Bench(tmp_path)
        first, again = bench.episode("g", name="g/a"), bench.episode("g", name="g/a")
        await bench.sink.add(first)
        with pytest.raises(EpisodeRefusedError, match="already has it"):
            await bench.sink.add(again)
        await bench.sink.add(bench.episode("g"))
        assert bench.sink.queued == 2
        await bench.sink.drain()

    asyncio.run(main())


def test_scoring_that_cannot_spill_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a full disk at the advantages of a group ended the run; rule 13 says its members are asked again."""

    async def main() -> None:
        def score(traces: Any) -> Any:
            return [[np.ones(12, np.float32)] for _ in traces]

        bench = Bench(tmp_path, score_group=score)
        await bench.sink.add(bench.episode("g"))
        write, calls = bench.store.write, []

        def full(tensors: Any, **options: Any) -> Any:
            calls.append(tensors)
            if len(calls) == 2:  # the first is the episode's own spill
                raise OSError(28, "No space left on device", "v0")
            return write(tensors, **options)

        last = bench.episode("g")
        with monkeypatch.context() as patch:
            patch.setattr(bench.store, "write", full)
            await bench.sink.add(last)
        [request] = bench.sink.requests
        assert (request.rollouts, request.first_member) == (2, 2)
        for _ in range(2):
            await bench.sink.add(bench.episode("g"))
        assert bench.sink.queued == 2
        await bench.sink.drain()
        assert bench.files() == bench.sink.ledger.files()

    asyncio.run(main())


def test_rule_09_a_rollout_that_returns_nonsense_or_is_cancelled_from_inside_is_an_errored_member() -> None:
    """Bug: its group stayed open for ever, without a word."""

    async def main() -> None:
        async def run_episode(rollout: Rollout) -> Any:
            if rollout.member == 0:
                raise asyncio.CancelledError
            if rollout.member == 1:
                return None
            kind: Any = "eval" if rollout.member == 3 else "train"
            return Episode("e", "env", "elsewhere", 0, None, 0, [], kind=kind)

        source = TrainSource(envs=[Environment("env", [0], 4)], seed=0)
        dispatcher = Dispatcher(
            source=source,
            run_episode=run_episode,
            policy=Policy(),
            progress=Progress(),
            max_inflight=4,
            max_off_policy_steps=1,
        )
        dispatcher.pump()
        results = [await dispatcher.next_result() for _ in range(4)]
        assert all(isinstance(r, Episode) and not r.ok and r.group_id == "env-000000" for r in results)
        assert not dispatcher.inflight

    asyncio.run(main())
