"""`FakeLoad`: rollouts with the payload shapes of real models, whose contents follow from their ids."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ..dispatcher import Rollout
from ..segment import PayloadSegment, shift
from ..store import PayloadStore
from ..types import Array, Episode, PolicySpan, Sample, Trace

FIELD = "routed_experts"


class WrongBytesError(AssertionError):
    """A trace holds what is not its own."""


class Shape(msgspec.Struct, frozen=True):
    """Routed experts of a model as inference engines return them: all layers, those without experts zero."""

    layers: int
    top_k: int
    experts: int
    dense: tuple[int, ...] = ()
    """Layers without experts."""

    @property
    def dtype(self) -> str:
        """The narrowest unsigned type that holds every expert id."""
        return "uint8" if self.experts <= 256 else "uint16"


PRESETS = {
    "qwen3-30b-a3b": Shape(48, 8, 128),
    "glm-4.5-air": Shape(46, 8, 128, dense=(0,)),
    "glm-5": Shape(78, 8, 256, dense=(0, 1, 2)),
    "kimi-k2": Shape(61, 8, 384, dense=(0,)),
    "qwen3-next": Shape(48, 10, 512),
    "nemotron-3-super": Shape(88, 22, 512, dense=tuple(range(0, 88, 2))),
}
"""By model. Which layers of the last one are without experts is an example of a hybrid, not its exact pattern."""


class Plan(msgspec.Struct, frozen=True):
    """What a rollout will do: known before it starts."""

    episode_id: str
    delay_s: float
    fails: bool


class FakeLoad:
    """`run_episode` for a `Dispatcher`: waits, fails and writes as its seed says, the same in every process.

    Ids come from the group (task and occurrence) and the member; `with_lineage` adds the life that made them.
    `tokens` and `delay_s` are ranges; `error_rate` rollouts raise; `straggler_rate` ones take `straggler_s` longer.
    A trace has `turns` turns, each with a payload file of its own. With more than 256 experts every second turn
    keeps to ids below 256 and is stored as uint8, so that segments of both widths meet in one sample. An
    episode has `traces` traces that share its spill file.
    """

    def __init__(
        self,
        *,
        store: PayloadStore,
        shape: Shape = PRESETS["qwen3-30b-a3b"],
        seed: int = 0,
        tokens: tuple[int, int] = (16, 48),
        turns: int = 2,
        traces: int = 1,
        delay_s: tuple[float, float] = (0.01, 0.1),
        error_rate: float = 0.0,
        straggler_rate: float = 0.0,
        straggler_s: float = 1.0,
        with_lineage: bool = False,
    ) -> None:
        if turns < 1 or traces < 1 or tokens[0] <= turns:
            raise ValueError(
                f"FakeLoad: turns={turns}, traces={traces}, tokens={tokens}: a turn needs a token, "
                "a sample one more"
            )
        self.store = store
        self.shape = shape
        self._seed = seed
        self._tokens = tokens
        self._turns = turns
        self._traces = traces
        self._delay_s = delay_s
        self._error_rate = error_rate
        self._straggler_rate = straggler_rate
        self._straggler_s = straggler_s
        self._with_lineage = with_lineage

    # -- making

    async def __call__(self, rollout: Rollout) -> Episode:
        """Run one rollout. RuntimeError for one that is planned to fail."""
        payload = await self.work(rollout)
        return self.episode(rollout, payload)

    async def work(self, rollout: Rollout) -> dict[str, list[PayloadSegment]]:
        """An inference worker's half: take the planned time, then write. Per trace its segments."""
        plan = self.plan(rollout)
        await asyncio.sleep(plan.delay_s)
        if plan.fails:
            raise RuntimeError(f"{plan.episode_id} fails, as planned")
        return await asyncio.to_thread(self.write, rollout)

    def plan(self, rollout: Rollout) -> Plan:
        """What this rollout will do."""
        name = f"{rollout.group_id}.{rollout.member}"
        if self._with_lineage:
            name += f"@{rollout.lineage[:8]}"
        chance = self._chance(f"plan/{name}")
        delay = float(chance.uniform(*self._delay_s))
        fails, straggles = chance.random() < self._error_rate, chance.random() < self._straggler_rate
        return Plan(name, delay + self._straggler_s * bool(straggles), bool(fails))

    def trace_ids(self, rollout: Rollout) -> list[str]:
        """The ids of the traces of this rollout."""
        name = self.plan(rollout).episode_id
        return [name] if self._traces == 1 else [f"{name}/{i}" for i in range(self._traces)]

    def write(self, rollout: Rollout) -> dict[str, list[PayloadSegment]]:
        """Write the payload files of this rollout, one per trace and turn, in one batch."""
        turns = [(name, *turn) for name in self.trace_ids(rollout) for turn in self._turns_of(name)]
        written = self.store.write_many(
            [{FIELD: self.rows(name)[lo:hi].astype(dtype)} for name, lo, hi, dtype in turns],
            version=rollout.dispatch_version,
        )
        payload: dict[str, list[PayloadSegment]] = {}
        for (name, lo, _, _), result in zip(turns, written, strict=True):
            if isinstance(result, Exception):
                raise result
            payload.setdefault(name, []).extend(shift(result.values(), lo))
        return payload

    def episode(self, rollout: Rollout, payload: Mapping[str, Sequence[PayloadSegment]]) -> Episode:
        """An environment worker's half: the episode around payload that was written."""
        plan = self.plan(rollout)
        traces = [Trace(name, self._reward(name), [self.sample(name, payload[name])]) for name in payload]
        return Episode(
            id=plan.episode_id,
            env_name=rollout.env_name,
            group_id=rollout.group_id,
            task=rollout.task,
            policy=PolicySpan(rollout.dispatch_version, rollout.dispatch_version),
            dispatch_version=rollout.dispatch_version,
            traces=traces,
            native=f"record of {plan.episode_id}".encode(),
            lineage=rollout.lineage,
        )

    # -- what a trace of this id holds

    def n_tokens(self, trace_id: str) -> int:
        """The length of its sample."""
        return int(self._chance(f"tokens/{trace_id}").integers(self._tokens[0], self._tokens[1] + 1))

    def sample(self, trace_id: str, payload: Sequence[PayloadSegment] = ()) -> Sample:
        """Its sample, with this payload."""
        n = self.n_tokens(trace_id)
        chance = self._chance(f"sample/{trace_id}")
        return Sample(
            token_ids=chance.integers(0, 150_000, n, np.int32),
            mask=np.arange(n) >= n // 4,
            logprobs=-chance.random(n, np.float32),
            payload=list(payload),
            columns={"temperatures": np.full(n, chance.random(), np.float32)},
        )

    def rows(self, trace_id: str) -> Array:
        """Its routed experts: [n_tokens - 1, layers, top_k], in the model's narrow type."""
        shape, n = self.shape, self.n_tokens(trace_id) - 1
        first = self._chance(f"rows/{trace_id}").integers(0, shape.experts, (n, shape.layers, 1), np.uint16)
        rows: Array = first + np.arange(shape.top_k, dtype=np.uint16)
        for lo, hi, dtype in self._turns_of(trace_id):
            rows[lo:hi] %= 256 if dtype == "uint8" and shape.experts > 256 else shape.experts
        rows[:, list(shape.dense)] = 0
        return rows.astype(shape.dtype)

    def check(self, traces: Sequence[Trace], *, store: PayloadStore | None = None) -> int:
        """Read every byte of loaded traces and compare; returns the number of payload bytes.

        WrongBytesError names the trace and what is not its own. What cannot be read raises as `gather` does.
        """
        store = store or self.store
        checked = 0
        for trace in traces:
            for sample in trace.samples:
                own = self.sample(trace.id)
                for name, want, got in [
                    *((f, getattr(own, f), getattr(sample, f)) for f in ("token_ids", "mask", "logprobs")),
                    *((f, column, sample.columns.get(f)) for f, column in own.columns.items()),
                ]:
                    if not np.array_equal(want, got):
                        raise WrongBytesError(f"trace {trace.id}: {name} is not its own")
                rows, valid = store.gather(sample.payload, FIELD, 0, len(own.token_ids) - 1, verify=True)
                if not valid.all() or not np.array_equal(rows, self.rows(trace.id)):
                    raise WrongBytesError(f"trace {trace.id}: {FIELD} is not its own")
                checked += rows.nbytes
        return checked

    def _turns_of(self, trace_id: str) -> list[tuple[int, int, str]]:
        """(first row, end, dtype) of each turn."""
        rows = self.n_tokens(trace_id) - 1
        ends = [rows * (i + 1) // self._turns for i in range(self._turns)]
        wide = self.shape.dtype
        return [
            (lo, hi, "uint8" if i % 2 else wide)
            for i, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    def _reward(self, trace_id: str) -> float:
        return float(self._chance(f"reward/{trace_id}").integers(0, 4))

    def _chance(self, name: str) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
