"""A small mixture-of-experts transformer that records its routing and can replay another's.

The same class serves inference (bfloat16, key/value cache) and training (float32). The router's weights and
arithmetic are float32 in both, on activations of the model's type: in bfloat16 some of its top-k choices
differ from the float32 trainer's. Replaying the recorded expert ids takes that difference away: the trainer
computes the gates from its own router logits, at the given experts.

**Alignment of routing rows.** Row i belongs to token i. The last token of a sequence is sampled but never fed
to the model, so a generated sequence of n tokens has n - 1 rows, and the trainer feeds exactly those tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are the demo's."""

    vocab_size: int = 30
    max_tokens: int = 17
    d_model: int = 64
    n_layers: int = 3
    n_heads: int = 4
    n_experts: int = 8
    top_k: int = 2
    d_expert: int = 64


MODEL = ModelConfig()


@dataclass
class KVCache:
    """Keys and values [layers, B, heads, T, head_dim] and which of the T columns are real, [B, T]."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    length: int = 0


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.norm = nn.Parameter(torch.ones(config.d_model))
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cache: KVCache | None, layer: int) -> Tensor:
        """`mask` is boolean [B, 1, T, S]: True where a query may look."""
        b, t, d = x.shape
        qkv = self.qkv(_rms_norm(x, self.norm)).view(b, t, 3, self.n_heads, d // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            end = cache.length + t
            cache.keys[layer, :, :, cache.length : end] = k
            cache.values[layer, :, :, cache.length : end] = v
            k, v = cache.keys[layer, :, :, :end], cache.values[layer, :, :, :end]
        scores = (q @ k.transpose(-1, -2)).float() * (d // self.n_heads) ** -0.5
        weights = scores.masked_fill(~mask, -1e9).softmax(-1).to(x.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class MoE(nn.Module):
    """Top-k of the experts, gates renormalised over the chosen."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        e, d, h = config.n_experts, config.d_model, config.d_expert
        self.top_k = config.top_k
        self.norm = nn.Parameter(torch.ones(d))
        self.router = nn.Parameter(torch.randn(e, d) * d**-0.5)
        self.up = nn.Parameter(torch.randn(e, 2 * h, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(e, d, h) * h**-0.5)

    def forward(self, x: Tensor, routing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (output, expert ids [B, T, k], router logits [B, T, experts])."""
        shape, x = x.shape, _rms_norm(x, self.norm).flatten(0, 1)
        logits = F.linear(x.float(), self.router)
        probs = logits.softmax(-1)
        ids = probs.topk(self.top_k, dim=-1).indices if routing is None else routing.flatten(0, 1).long()
        gates = probs.gather(1, ids)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            rows, place = (ids == expert).nonzero(as_tuple=True)
            if len(rows):
                gate, value = F.linear(x[rows], self.up[expert]).chunk(2, dim=-1)
                y = F.linear(F.silu(gate) * value, self.down[expert])
                out = out.index_add(0, rows, y * gates[rows, place, None].to(x.dtype))
        return out.view(shape), ids.view(*shape[:2], -1), logits.view(*shape[:2], -1)


class MoETransformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.max_tokens, config.d_model)
        self.attention = nn.ModuleList(Attention(config) for _ in range(config.n_layers))
        self.moe = nn.ModuleList(MoE(config) for _ in range(config.n_layers))
        self.norm = nn.Parameter(torch.ones(config.d_model))
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.5)

    def forward(
        self,
        tokens: Tensor,
        *,
        routing: Tensor | None = None,
        valid: Tensor | None = None,
        cache: KVCache | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] to float32 logits [B, T, vocab] and the uint8 routing used [B, T, layers, top_k].

        `routing` replays those experts instead of the router's own top-k. `valid` [B, T] marks real tokens;
        padding, left or right, is neither looked at nor counted in positions. With a `cache` the tokens go on
        behind the cached ones. A list given as `router_logits` gets each layer's [B, T, experts], for the
        router's losses.
        """
        t = tokens.shape[1]
        if valid is None:
            valid = torch.ones_like(tokens, dtype=torch.bool)
        start = 0
        if cache is not None:
            start = cache.length
            cache.valid[:, start : start + t] = valid
            valid = cache.valid[:, : start + t]
        positions = (valid.cumsum(1) - 1).clamp(min=0)[:, start:]
        columns = torch.arange(start + t, device=tokens.device)
        mask = (valid[:, None, :] & (columns <= columns[start:, None]))[:, None]
        x = self.embed(tokens) + self.position(positions)
        chosen = []
        for layer, (attention, moe) in enumerate(zip(self.attention, self.moe, strict=True)):
            x = x + attention(x, mask, cache, layer)
            y, ids, logits = moe(x, None if routing is None else routing[:, :, layer])
            x = x + y
            chosen.append(ids)
            if router_logits is not None:
                router_logits.append(logits)
        if cache is not None:
            cache.length += t
        logits = F.linear(_rms_norm(x, self.norm).float(), self.head.weight.float())
        return logits, torch.stack(chosen, 2).to(torch.uint8)

    def new_cache(self, batch: int, tokens: int) -> KVCache:
        c, like = self.config, self.embed.weight
        shape = (c.n_layers, batch, c.n_heads, tokens, c.d_model // c.n_heads)
        keys, values = like.new_zeros(shape), like.new_zeros(shape)
        return KVCache(keys, values, torch.zeros(batch, tokens, dtype=torch.bool, device=like.device))


@dataclass(frozen=True)
class Generation:
    """One finished sequence of n tokens, on the CPU: prompt and completion."""

    tokens: Tensor
    """int32 [n]"""
    mask: Tensor
    """bool [n]: True for the completion"""
    logprobs: Tensor
    """float32 [n]: of the sampled token under the sampling distribution; 0 for the prompt"""
    routing: Tensor
    """uint8 [n - 1, layers, top_k]: row i belongs to token i; the last token was never fed"""

    @property
    def completion(self) -> list[int]:
        return [int(token) for token in self.tokens[self.mask]]


def gumbel_noise(seed: int, tokens: int, vocab: int) -> Tensor:
    """Noise of one rollout; depends on its seed alone, not on its batch or device."""
    uniform = torch.rand(tokens, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniform.clamp(1e-12, 1 - 1e-12).log()).log()


@torch.no_grad()
def generate(
    model: MoETransformer,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    temperature: float,
    seeds: Sequence[int] | None,
    *,
    eos: int,
    pad: int = 0,
) -> list[Generation]:
    """Sample a completion for each prompt; prompts of any lengths share a batch (left padding).

    Row i draws Gumbel noise from ``seeds[i]`` alone. Temperature 0 is greedy, its logprobs are those at
    temperature 1. A row ends with `eos` or after `max_new` tokens.
    """
    device, vocab = model.embed.weight.device, model.config.vocab_size
    width, rows = max(map(len, prompts)), len(prompts)
    noise = torch.zeros(rows, max_new, vocab, dtype=torch.float64)
    if temperature > 0:
        assert seeds is not None and len(seeds) == rows
        noise = torch.stack([gumbel_noise(seed, max_new, vocab) for seed in seeds])
    noise = noise.to(device)
    feed = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    valid = torch.arange(width) >= torch.tensor([[width - len(p)] for p in prompts])
    cache, valid = model.new_cache(rows, width + max_new), valid.to(device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    sampled, logprobs, routing, live = [], [], [], []
    for step in range(max_new):
        logits, used = model(feed, valid=valid, cache=cache)
        logp = F.log_softmax(logits[:, -1] / (temperature or 1.0), -1)
        token = (logp + noise[:, step]).argmax(-1)
        routing.append(used)
        sampled.append(token)
        logprobs.append(logp.gather(1, token[:, None])[:, 0])
        live.append(~done)
        done = done | (token == eos)
        if bool(done.all()):
            break
        feed, valid = token[:, None], torch.ones(rows, 1, dtype=torch.bool, device=device)
    new = torch.stack(live, 1).sum(1).tolist()
    tokens, logps = torch.stack(sampled, 1).int().cpu(), torch.stack(logprobs, 1).cpu()
    routes, result = torch.cat(routing, 1).cpu(), []
    for i, prompt in enumerate(prompts):
        n, first = len(prompt) + new[i], width - len(prompt)
        result.append(
            Generation(
                tokens=torch.cat([torch.tensor(list(prompt), dtype=torch.int32), tokens[i, : new[i]]]),
                mask=torch.arange(n) >= len(prompt),
                logprobs=torch.cat([torch.zeros(len(prompt)), logps[i, : new[i]]]),
                routing=routes[i, first : first + n - 1].clone(),
            )
        )
    return result
