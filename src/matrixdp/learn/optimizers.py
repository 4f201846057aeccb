"""Which optimizers a private training can use."""

from __future__ import annotations

import torch
from torch import nn

from matrixdp.errors import InvalidInput


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises InvalidInput unless all parameters of the optimizer get noisy gradients from the trainer."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput(
            "optimizer must take one gradient per step; LBFGS asks for several, each of which would use budget"
        )
    private = {id(p) for p in model.parameters() if p.requires_grad}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in private]
    if others:
        raise InvalidInput(
            f"optimizer must have trainable parameters of the model alone, {len(others)} of its parameters are not: "
            "their gradients would carry no noise"
        )
    for group in optimizer.param_groups:
        if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
            raise InvalidInput("a fused optimizer needs parameters in the usual memory format; leave fused out")
