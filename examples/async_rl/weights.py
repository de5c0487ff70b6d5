"""Weights and optimizer state as flat dicts of tensors, for safetensors files; nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .model import MODEL, ModelConfig, MoETransformer


def save_weights(model: MoETransformer, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Weights by name for a safetensors file; with a `dtype` all but the routers are converted."""
    state = {name: p.detach() for name, p in model.named_parameters()}
    return {
        name: (p if dtype is None or name.endswith("router") else p.to(dtype)).cpu().contiguous().clone()
        for name, p in state.items()
    }


def load_weights(
    weights: Mapping[str, Tensor], *, config: ModelConfig = MODEL, device: torch.device | str = "cpu"
) -> MoETransformer:
    """A model with these weights, in their types."""
    model = MoETransformer(config)
    model.load_state_dict({name: p.clone() for name, p in weights.items()}, assign=True)
    return model.to(device)


def save_optimizer(model: MoETransformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts as ``<parameter>/<entry>``; empty before the first step."""
    return {
        f"{name}/{entry}": value.detach().cpu().contiguous().clone()
        for name, p in model.named_parameters()
        for entry, value in optimizer.state[p].items()
    }


def load_optimizer(
    model: MoETransformer, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Put back what `save_optimizer` gave; learning rate and the rest stay as constructed."""
    entries: dict[int, dict[str, Tensor]] = {}
    for i, (name, _) in enumerate(model.named_parameters()):
        found = {
            key.rpartition("/")[2]: v.clone() for key, v in state.items() if key.rpartition("/")[0] == name
        }
        if found:
            entries[i] = found
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
