"""The trainer process: float32, reads payloads by handle, replays the routing, publishes weights."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from prime_io import (
    CheckpointManager,
    Exchange,
    Gather,
    Lineage,
    PayloadStore,
    Trace,
    TrainBatch,
    load_batch,
)
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from . import task
from .events import EventLog
from .model import Generation, ModelConfig, MoETransformer, generate
from .settings import ROUTED_EXPERTS, Settings
from .train import (
    TokenBatch,
    TrainConfig,
    float32_control,
    greedy_reward,
    grpo_step,
    load_optimizer,
    make_optimizer,
    mismatch,
    optimizer_tensors,
    warm_start,
)

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
        self.config = TrainConfig(warm_start_steps=self.settings.warm_start_steps)
        torch.manual_seed(self.settings.seed)
        shape = ModelConfig(vocab_size=task.VOCAB_SIZE, max_tokens=task.MAX_TOKENS)
        self.model = MoETransformer(shape).to(self.device)
        self.optimizer = make_optimizer(self.model, self.config.lr, self.config.weight_decay)
        self.held_out = task.words()[1][: self.settings.held_out]
        self.known: dict[int, dict[str, Tensor]] = {}
        """Weights by version, to compare log-probabilities at the version that sampled."""

    def start(self) -> int:
        """Warm start, or the state of the step resumed from; publishes its weights. Returns that step."""
        step = self.lineage.resumed_from
        if step is None:
            began = time.perf_counter()
            train_words, _ = task.words()
            warm_start(self.model, train_words, self.config, seed=self.settings.seed)
            self.log("warm_start", {"seconds": time.perf_counter() - began})
            step = 0
            self.log("reward", {"step": 0, "value": greedy_reward(self.model, self.held_out)})
        else:
            directory = self.manager.component_path(step, READER, verify=True)
            self.model.load_state_dict(load_file(directory / "model.safetensors"))
            load_optimizer(self.optimizer, self.model, load_file(directory / "optimizer.safetensors"))
        self.publish(step)
        return step

    def publish(self, version: int) -> None:
        """float32 for our own use, bfloat16 for the workers."""
        self.known[version] = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        for old in [k for k in self.known if k < version - self.settings.max_off_policy_steps - 1]:
            del self.known[old]
        weights = {name: x.bfloat16().cpu().contiguous() for name, x in self.model.state_dict().items()}
        metadata = {"lineage": self.lineage.id, "version": str(version)}
        self.exchange.publish_weights(version, {"model.safetensors": save(weights, metadata)})

    def read(self, batch: TrainBatch) -> tuple[TokenBatch, list[Trace]]:
        """The batch as padded tensors. Routing rows are read from the files straight into their tensor."""
        traces = load_batch(batch, store=self.store)
        samples = [trace.samples[0] for trace in traces]
        n = max(len(sample.token_ids) for sample in samples)
        layers, top_k = self.model.config.n_layers, self.model.config.top_k
        routing = torch.empty(len(samples), n - 1, layers, top_k, dtype=torch.uint8)
        requests = [
            Gather(
                segments=sample.payload, field=ROUTED_EXPERTS, lo=0, hi=n - 1, out=routing[i], fill="spread"
            )
            for i, sample in enumerate(samples)
        ]
        for trace, result in zip(traces, self.store.gather_many(requests, verify=True), strict=True):
            if isinstance(result, Exception):
                self.log("missing_file", {"step": batch.step, "trace": trace.id, "error": str(result)})
                raise result

        def pad(rows: Sequence[object], dtype: torch.dtype) -> Tensor:
            out = torch.zeros(len(samples), n, dtype=dtype)
            for i, row in enumerate(rows):
                values = torch.as_tensor(row)
                out[i, : len(values)] = values
            return out

        tokens = TokenBatch(
            tokens=pad([s.token_ids for s in samples], torch.int64),
            mask=pad([s.mask for s in samples], torch.bool),
            valid=pad([torch.ones(len(s.token_ids)) for s in samples], torch.bool),
            logprobs=pad([s.logprobs for s in samples], torch.float32),
            routing=routing,
        )
        return tokens.to(self.device), traces

    def train(self, batch: TrainBatch) -> None:
        began = time.perf_counter()
        tokens, traces = self.read(batch)
        read_s = time.perf_counter() - began
        versions = [-1 if t.policy is None else t.policy.start for t in batch.traces]
        if batch.checkpoint:
            self.compare(batch.step, tokens, versions)
        advantages = torch.tensor([trace.samples[0].advantages for trace in traces], device=self.device)
        loss = grpo_step(self.model, self.optimizer, tokens, advantages, self.config)
        self.publish(batch.step)
        if batch.checkpoint:
            self.commit(batch.step)
        self.exchange.acknowledge(batch.step, READER)
        self.log(
            "trained_batch",
            {
                "step": batch.step,
                "traces": [trace.id for trace in traces],
                "versions": versions,
                "loss": loss,
                "reward": sum(t.reward or 0.0 for t in traces) / len(traces),
                "read_s": read_s,
                "bytes": int(tokens.valid.sum() - len(traces)) * tokens.routing[0, 0].numel(),
                "seconds": time.perf_counter() - began,
            },
        )

    def compare(self, step: int, tokens: TokenBatch, versions: Sequence[int]) -> None:
        """Log-probability mismatch at equal version: for each version that sampled and is still known here."""
        for version in set(versions) & set(self.known):
            rows = torch.tensor([v == version for v in versions])
            if int(rows.sum()) >= 2:
                part = TokenBatch(*(x[rows.to(x.device)] for x in vars(tokens).values()))
                sampler = MoETransformer(self.model.config).to(self.device)
                sampler.load_state_dict(self.known[version])
                self.log("mismatch", {"step": step, "n": int(rows.sum()), **mismatch(sampler, part)})

    def commit(self, step: int) -> None:
        directory = self.manager.new_component_dir()
        save_file(
            {name: x.contiguous() for name, x in self.model.state_dict().items()},
            directory / "model.safetensors",
        )
        save_file(optimizer_tensors(self.optimizer, self.model), directory / "optimizer.safetensors")
        self.manager.commit_component(step, READER, directory)

    def control(self) -> None:
        """Sampled in float32 and stored, the ids are those that the trainer's own top-k chooses."""
        words = self.held_out[:32]
        sampled = generate(
            self.model, [task.prompt_of(w) for w in words], task.MAX_NEW, 1.0, range(len(words)), eos=task.EOS
        )
        with PayloadStore(self.run_dir / "control", owner=True) as store:
            written = store.write_many([({ROUTED_EXPERTS: g.routing}, 0) for g in sampled])
            stored = [torch.from_numpy(store.read(s[ROUTED_EXPERTS], verify=True)) for s in written]
            again = [
                Generation(g.tokens, g.mask, g.logprobs, routing)
                for g, routing in zip(sampled, stored, strict=True)
            ]
            store.reclaim([segment.file for s in written for segment in s.values()])
        self.log("float32_control", {"n": len(again), "equal": float32_control(self.model, again)})

    def run(self) -> None:
        step = committed = self.start()
        while (batch := self.wait_for(step + 1)) is not None:
            self.train(batch)
            step = batch.step
            committed = step if batch.checkpoint else committed
        if step != committed:
            self.commit(step)
        self.log("reward", {"step": step, "value": greedy_reward(self.model, self.held_out)})
        self.control()
        self.log("trainer_done", {"step": step})

    def wait_for(self, step: int) -> TrainBatch | None:
        """The next batch; None once the orchestrator has said that it will not come."""
        while True:
            batch = self.exchange.read_batch(step)
            if batch is not None:
                return batch
            stop = self.exchange.stop_step()
            if stop is not None and stop < step:
                return None
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="trainer: %(name)s: %(message)s")
    torch.set_num_threads(Settings.load(args.run).threads)
    Trainer(args.run).run()


if __name__ == "__main__":
    main()
