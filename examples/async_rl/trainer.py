"""The trainer process: float32, reads payloads by handle, replays the routing, publishes weights."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file

from prime_io import (
    CheckpointManager,
    Exchange,
    Gather,
    Lineage,
    PayloadStore,
    TrainBatch,
    load_batch,
)

from . import task
from .events import EventLog
from .model import Generation, MoETransformer, generate
from .settings import ROUTED_EXPERTS, Settings
from .train import (
    TrainConfig,
    collate_generations,
    greedy_reward,
    make_optimizer,
    mismatch,
    token_logprobs,
    train_step,
    warm_start,
)
from .weights import load_optimizer, load_weights, save_optimizer, save_weights

READER = "trainer"


class Trainer:
    def __init__(self, run: Path) -> None:
        self.run_dir = run
        self.settings, self.lineage = Settings.load(run), Lineage.load(run)
        self.log = EventLog(run, "trainer", self.lineage.id)
        self.exchange = Exchange(self.lineage)
        self.store = PayloadStore(run / "payloads", create=False)
        self.manager = CheckpointManager(run_dir=run)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = TrainConfig()
        if self.settings.warm_start_steps is not None:
            self.config = replace(self.config, warm_start_steps=self.settings.warm_start_steps)
        self.held_out = task.words()[1][: self.settings.held_out]
        self.known: dict[int, MoETransformer] = {}
        """Models by version, to compare log-probabilities at the version that sampled."""

    def start(self) -> int:
        """Warm start, or the state of the step resumed from; publishes its weights. Returns that step."""
        step = self.lineage.resumed_from
        if step is None:
            step = 0
            self.model, facts = warm_start(self.settings.seed, self.config, device=self.device)
            self.optimizer = make_optimizer(self.model, self.config.lr)
            self.log("warm_start", facts)
            self.log("reward", {"step": 0, "value": greedy_reward(self.model, self.held_out)})
        else:
            directory = self.manager.component_path(step, READER, verify=True)
            self.model = load_weights(load_file(directory / "model.safetensors"), device=self.device)
            self.optimizer = make_optimizer(self.model, self.config.lr)
            load_optimizer(self.model, self.optimizer, load_file(directory / "optimizer.safetensors"))
        self.publish(step)
        return step

    def publish(self, version: int) -> None:
        """bfloat16 for the workers; the float32 model stays known here for a while."""
        self.known[version] = load_weights(save_weights(self.model), device=self.device)
        for old in [k for k in self.known if k < version - self.settings.max_off_policy_steps - 1]:
            del self.known[old]
        metadata = {"lineage": self.lineage.id, "version": str(version)}
        weights = save(save_weights(self.model, torch.bfloat16), metadata)
        self.exchange.publish_weights(version, {"model.safetensors": weights})

    def read(self, batch: TrainBatch) -> list[Generation]:
        """The traces of a batch. Their routing rows are read from the files straight into one tensor."""
        traces = load_batch(batch, store=self.store)
        samples = [trace.samples[0] for trace in traces]
        rows = [len(sample.token_ids) - 1 for sample in samples]
        layers, top_k = self.model.config.n_layers, self.model.config.top_k
        routing = torch.empty(sum(rows), layers, top_k, dtype=torch.uint8)
        parts = routing.split(rows)
        requests = [
            Gather(segments=sample.payload, field=ROUTED_EXPERTS, lo=0, hi=len(part), out=part)
            for sample, part in zip(samples, parts, strict=True)
        ]
        for trace, result in zip(traces, self.store.gather_many(requests, verify=True), strict=True):
            if isinstance(result, Exception) or not result[1].all():
                self.log("missing_file", {"step": batch.step, "trace": trace.id, "error": str(result)})
                raise RuntimeError(f"batch {batch.step}, trace {trace.id}: {result}")
        return [
            Generation(
                torch.from_numpy(sample.token_ids),
                torch.from_numpy(sample.mask),
                torch.from_numpy(sample.logprobs),
                part,
            )
            for sample, part in zip(samples, parts, strict=True)
        ]

    def train(self, batch: TrainBatch) -> None:
        began = time.perf_counter()
        generations = self.read(batch)
        read_s = time.perf_counter() - began
        versions = [-1 if t.policy is None else t.policy.start for t in batch.traces]
        if batch.checkpoint:
            self.compare(batch.step, generations, versions)
        advantages = torch.tensor([t.samples[0].advantage or 0.0 for t in batch.traces], device=self.device)
        tokens = collate_generations(generations).to(self.device)
        facts = train_step(self.model, self.optimizer, tokens, advantages, self.config, seed=batch.step)
        time.sleep(max(0.0, self.settings.step_s - (time.perf_counter() - began)))
        self.publish(batch.step)
        if batch.checkpoint:
            self.commit(batch.step)
        self.exchange.acknowledge(batch.step, READER)
        self.log(
            "trained_batch",
            {
                "step": batch.step,
                "traces": [trace.trace_id for trace in batch.traces],
                "versions": versions,
                "reward": sum(t.reward or 0.0 for t in batch.traces) / len(batch.traces),
                "read_s": read_s,
                "bytes": sum(g.routing.numel() for g in generations),
                "seconds": time.perf_counter() - began,
                **facts,
            },
        )

    def compare(self, step: int, generations: Sequence[Generation], versions: Sequence[int]) -> None:
        """Log-probability mismatch at equal version, for each version that sampled and is still known here."""
        for version in set(versions) & set(self.known):
            mine = [g for g, v in zip(generations, versions, strict=True) if v == version]
            if len(mine) >= 2 * self.settings.group_size:
                found = asdict(mismatch(self.known[version], mine))
                self.log("mismatch", {"step": step, "n": len(mine), **found})

    def commit(self, step: int) -> None:
        directory = self.manager.new_component_dir()
        save_file(save_weights(self.model), directory / "model.safetensors")
        save_file(save_optimizer(self.model, self.optimizer), directory / "optimizer.safetensors")
        self.manager.commit_component(step, READER, directory)

    def control(self) -> None:
        """Sampled in float32 and stored, the ids are those that the trainer's own top-k chooses."""
        words = self.held_out[:32]
        sampled = generate(
            self.model, [task.prompt_of(w) for w in words], task.MAX_NEW, 1.0, range(len(words)), eos=task.EOS
        )
        with PayloadStore(self.run_dir / "control", owner=True) as store:
            written = store.write_many([{ROUTED_EXPERTS: g.routing} for g in sampled], version=0)
            segments = [s[ROUTED_EXPERTS] for s in written if not isinstance(s, Exception)]
            stored = [torch.from_numpy(rows) for rows in store.read_many(segments, verify=True)]
            store.reclaim(segment.file for segment in segments)
        batch = collate_generations(sampled, stored).to(self.device)
        with torch.no_grad():
            _, used = token_logprobs(self.model, batch, replay=False)
        real = batch.valid[:, 1:]
        equal = bool((used[real] == batch.routing[real]).all())
        self.log("float32_control", {"n": len(sampled), "equal": equal})

    def run(self) -> None:
        step = committed = self.start()
        while (batch := self.exchange.wait_batch(step + 1)) is not None:
            self.train(batch)
            step = batch.step
            committed = step if batch.checkpoint else committed
        if step != committed:
            self.commit(step)
        self.log("reward", {"step": step, "value": greedy_reward(self.model, self.held_out)})
        self.control()
        self.log("trainer_done", {"step": step})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="trainer: %(name)s: %(message)s")
    torch.set_num_threads(Settings.load(args.run).threads)
    Trainer(args.run).run()


if __name__ == "__main__":
    main()
