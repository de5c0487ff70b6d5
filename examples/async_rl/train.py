"""What the trainer and the inference worker of the demo compute, as functions of models and tensors.

The trainer's weights are float32, the inference worker's bfloat16 copies of them. Nothing here knows files,
processes or groups: advantages come from outside.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import task
from .model import MODEL, Generation, ModelConfig, MoETransformer, generate


@dataclass(frozen=True)
class TrainConfig:
    """The demo's hyper-parameters."""

    warm_start_steps: int = 250
    warm_start_batch: int = 64
    warm_start_lr: float = 4e-3
    whole_share: float = 0.45
    balance: float = 0.01
    router_size: float = 0.1
    lr: float = 5e-4
    minibatches: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    temperature: float = 1.0


@dataclass(frozen=True)
class TokenBatch:
    """Sequences side by side, padded on the right; the trainer feeds ``tokens[:, :-1]``."""

    tokens: Tensor
    """int64 [B, T]"""
    mask: Tensor
    """bool [B, T]: tokens that are trained"""
    valid: Tensor
    """bool [B, T]: real tokens"""
    logprobs: Tensor
    """float32 [B, T]: the inference model's"""
    routing: Tensor
    """uint8 [B, T - 1, layers, top_k]"""

    def to(self, device: torch.device | str) -> TokenBatch:
        return TokenBatch(*(x.to(device) for x in vars(self).values()))

    def rows(self, index: Tensor) -> TokenBatch:
        return TokenBatch(*(x[index] for x in vars(self).values()))


def collate(
    tokens: Sequence[Tensor], mask: Sequence[Tensor], logprobs: Sequence[Tensor], routing: Sequence[Tensor]
) -> TokenBatch:
    """Pad to one length; rows of the routing that no token has name the first `top_k` experts."""
    width, top_k = max(map(len, tokens)), routing[0].shape[-1]
    filler = torch.arange(top_k, dtype=torch.uint8).expand(width - 1, *routing[0].shape[1:])

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, (0, width - len(x)))

    return TokenBatch(
        tokens=torch.stack([pad(x) for x in tokens]).long(),
        mask=torch.stack([pad(x) for x in mask]),
        valid=torch.stack([torch.arange(width) < len(x) for x in tokens]),
        logprobs=torch.stack([pad(x) for x in logprobs]),
        routing=torch.stack([torch.cat([x, filler[len(x) :]]) for x in routing]),
    )


def collate_generations(
    generations: Sequence[Generation], routing: Sequence[Tensor] | None = None
) -> TokenBatch:
    """`collate` of generated sequences, with their own routing or the one given."""
    own = [g.routing for g in generations]
    return collate(
        [g.tokens for g in generations],
        [g.mask for g in generations],
        [g.logprobs for g in generations],
        own if routing is None else routing,
    )


def token_logprobs(
    model: MoETransformer,
    batch: TokenBatch,
    *,
    replay: bool = True,
    temperature: float = 1.0,
    router_logits: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token [B, T], 0 first, and the routing used [B, T - 1, layers, top_k]."""
    logits, used = model(
        batch.tokens[:, :-1],
        routing=batch.routing if replay else None,
        valid=batch.valid[:, :-1],
        router_logits=router_logits,
    )
    logp = F.log_softmax(logits / temperature, -1).gather(2, batch.tokens[:, 1:, None])[..., 0]
    return F.pad(logp, (1, 0)), used


def router_loss(
    router_logits: Sequence[Tensor], routing: Tensor, valid: Tensor, config: TrainConfig
) -> Tensor:
    """Load balance, and small router logits, which keep every gate's share of the output worth replaying.

    Balance is experts * sum(share of the choices * mean probability), 1 when even; over real tokens.
    """
    loss = torch.zeros((), device=valid.device)
    for layer, logits in enumerate(router_logits):
        n, logits = logits.shape[-1], logits[valid]
        share = F.one_hot(routing[:, :, layer][valid].long(), n).float().mean((0, 1))
        loss = loss + config.balance * n * (share * logits.softmax(-1).mean(0)).sum()
        loss = loss + config.router_size * logits.square().mean()
    return loss


def make_optimizer(model: MoETransformer, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def _update(model: MoETransformer, optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return float(norm)


def warm_start(
    seed: int, config: TrainConfig, *, model_config: ModelConfig = MODEL, device: torch.device | str = "cpu"
) -> tuple[MoETransformer, dict[str, float]]:
    """A new float32 model, trained on demonstrations most of which give up; and what that took."""
    began, rng, (train_words, _) = time.perf_counter(), random.Random(seed), task.words()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MoETransformer(model_config).to(device)
    optimizer = make_optimizer(model, config.warm_start_lr)
    loss = torch.zeros(())
    for step in range(config.warm_start_steps):
        left = 1 - step / config.warm_start_steps
        optimizer.param_groups[0]["lr"] = config.warm_start_lr * min((step + 1) / 20, 0.1 + 0.9 * left)
        tokens, mask = [], []
        for word in rng.sample(train_words, config.warm_start_batch):
            prompt, answer = task.prompt_of(word), task.demonstration(word, rng, config.whole_share)
            tokens.append(torch.tensor(prompt + answer))
            mask.append(torch.arange(len(prompt + answer)) >= len(prompt))
        shape = (model_config.n_layers, model_config.top_k)
        routing = [torch.zeros(len(x) - 1, *shape, dtype=torch.uint8) for x in tokens]
        batch = collate(tokens, mask, [x.float() for x in mask], routing).to(device)
        router_logits: list[Tensor] = []
        logp, used = token_logprobs(model, batch, replay=False, router_logits=router_logits)
        loss = -(logp * batch.mask).sum() / batch.mask.sum()
        extra = router_loss(router_logits, used, batch.valid[:, :-1], config)
        _update(model, optimizer, loss + extra, config.max_grad_norm)
    seconds = time.perf_counter() - began
    return model, {"steps": config.warm_start_steps, "loss": float(loss.detach()), "seconds": seconds}


def grpo_loss(
    logprobs: Tensor, batch: TokenBatch, advantages: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """(loss, share of tokens clipped): policy gradient with the ratio to the inference logprobs clipped.

    `advantages` is [B] or [B, T]; the mean is over the batch's masked tokens.
    """
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    tokens = batch.mask.sum().clamp(min=1)
    ratio = (logprobs - batch.logprobs).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    cut = (clipped * advantages < ratio * advantages) & batch.mask
    return -(gain * batch.mask).sum() / tokens, cut.sum() / tokens


def train_step(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    batch: TokenBatch,
    advantages: Tensor,
    config: TrainConfig,
    *,
    seed: int,
) -> dict[str, float]:
    """One pass over the batch in shuffled minibatches, routing replayed; returns means over them."""
    order = torch.randperm(len(batch.tokens), generator=torch.Generator().manual_seed(seed))
    losses, clipped, norms = [], [], []
    for index in order.to(batch.tokens.device).chunk(config.minibatches):
        part, router_logits = batch.rows(index), []
        logp, used = token_logprobs(model, part, temperature=config.temperature, router_logits=router_logits)
        loss, cut = grpo_loss(logp, part, advantages[index], config)
        extra = router_loss(router_logits, used, part.valid[:, :-1], config)
        norms.append(_update(model, optimizer, loss + extra, config.max_grad_norm))
        losses.append(float(loss.detach()))
        clipped.append(float(cut))
    means = {"loss": losses, "clipped": clipped, "grad_norm": norms}
    return {name: sum(values) / len(values) for name, values in means.items()}


@dataclass(frozen=True)
class Mismatch:
    """Mean |inference logprob - trainer logprob| over the trained tokens, by the routing the trainer used."""

    replayed: float
    own: float
    shifted: float
    """each trace's rows moved by one token"""
    other: float
    """another trace's rows"""
    flips: float
    """share of the (token, layer) pairs at which the trainer alone would choose other experts"""


@torch.no_grad()
def mismatch(model: MoETransformer, generations: Sequence[Generation], temperature: float = 1.0) -> Mismatch:
    """Compare the trainer's model with the sequences' inference logprobs under four routings.

    The other trace is the one half the list away, so give traces of at least two groups in order.
    """
    n, device = len(generations), model.embed.weight.device
    others = [generations[(i + n // 2) % n].routing for i in range(n)]
    routings = {
        "replayed": [g.routing for g in generations],
        "shifted": [g.routing.roll(1, 0) for g in generations],
        "other": [o[torch.arange(len(g.routing)) % len(o)] for g, o in zip(generations, others, strict=True)],
    }

    def compare(routing: Sequence[Tensor], replay: bool) -> tuple[float, Tensor]:
        batch = collate_generations(generations, routing).to(device)
        logp, used = token_logprobs(model, batch, replay=replay, temperature=temperature)
        return float((logp - batch.logprobs).abs()[batch.mask].mean()), used[batch.valid[:, 1:]]

    gaps = {name: compare(routing, replay=True)[0] for name, routing in routings.items()}
    own, used = compare(routings["replayed"], replay=False)
    stored = torch.cat(routings["replayed"]).to(device)
    flips = (used.sort(-1).values != stored.sort(-1).values).any(-1).float().mean()
    return Mismatch(own=own, flips=float(flips), **gaps)


def greedy_reward(model: MoETransformer, words: Sequence[str]) -> float:
    """Mean reward of the greedy completions."""
    out = generate(model, [task.prompt_of(w) for w in words], task.MAX_NEW, 0.0, None, eos=task.EOS)
    return sum(task.reward(w, g.completion) for w, g in zip(words, out, strict=True)) / len(words)
