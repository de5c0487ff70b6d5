"""The trainer process: float32, reads batches by the loader, replays the routing, publishes weights."""

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
    CorruptPayloadError,
    Exchange,
    FieldSpec,
    Lineage,
    PayloadLoader,
    PayloadStore,
    Step,
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
SEQ_LEN = 256
"""Rows of a packed sequence."""


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

    def read(self, step: Step) -> list[Generation]:
        """The traces of a batch, in its order: slices of the packed tensors that the loader read."""
        read: dict[str, Generation] = {}
        for packed in step:
            routing = packed.payload[ROUTED_EXPERTS].rows
            for sample in packed.samples:
                own = slice(sample.start, sample.start + sample.n_tokens)
                tokens, mask, logprobs = packed.token_ids[own], packed.mask[own], packed.logprobs[own]
                # The last token was never fed: it has no row.
                read[sample.trace_id] = Generation(tokens, mask, logprobs, routing[own][:-1])
        return [read[trace.trace_id] for trace in step.batch.traces]

    def train(self, step: Step, loader: PayloadLoader) -> None:
        began = time.perf_counter()
        batch, generations = step.batch, self.read(step)
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
        loader.done(batch.step)
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
        fields = {ROUTED_EXPERTS: FieldSpec(align="token-1")}
        with PayloadLoader(
            self.store,
            self.exchange,
            fields,
            seq_len=SEQ_LEN,
            start=step + 1,
            reader=READER,
            on_missing="raise",
        ) as loader:
            try:
                for each in loader:
                    self.train(each, loader)
                    step = each.number
                    committed = step if each.batch.checkpoint else committed
            except (OSError, CorruptPayloadError) as error:
                self.log("missing_file", {"step": step + 1, "error": str(error)})
                raise
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
