"""The records of a probe: a few real ones, and others made from them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# How many records a probe chooses from, and how many its batches have.
POOL, SMALL, LARGE = 64, 5, 16

chance = secrets.SystemRandom()


@dataclass(frozen=True)
class Pool:
    """A few records, from which the batches of a probe are made."""

    inputs: tuple[Tensor, ...]
    targets: Any

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...], targets: Any) -> Pool:
        """Some of the records, as they are if at least two differ, and perturbed at random otherwise."""
        size = len(inputs[0])
        chosen = torch.tensor(chance.sample(range(size), min(size, POOL)), device=inputs[0].device)
        # numbers that are not finite would hide everything else
        whole = tuple(torch.nan_to_num(t[chosen].detach()) if t.is_floating_point() else t[chosen] for t in inputs)
        pool = cls(whole, _rows(targets, chosen, size))
        if not pool.differs:
            again = torch.arange(max(SMALL, len(pool)), device=chosen.device) % len(pool)
            pool = cls(tuple(t[again] for t in pool.inputs), _rows(pool.targets, again, len(pool))).perturbed()
        return pool

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def differs(self) -> bool:
        """Whether there are two different records."""
        return any(bool((t != t[:1]).any()) for t in self.inputs)

    def batch(self, places: Sequence[int], labels: Sequence[int] | None = None) -> tuple[tuple[Tensor, ...], Any]:
        """The records at these places, with their own targets or those at other places."""
        device = self.inputs[0].device
        at = torch.tensor(list(places), device=device)
        by = at if labels is None else torch.tensor(list(labels), device=device)
        return tuple(t[at] for t in self.inputs), _rows(self.targets, by, len(self))

    def draw(self, count: int) -> list[int]:
        """Places at random, all different if there are enough."""
        everywhere = range(len(self))
        return chance.sample(everywhere, count) if count <= len(self) else chance.choices(everywhere, k=count)

    def others(self, places: Sequence[int]) -> list[int]:
        """For each place one with another record, where there is one."""
        kinds = self._kinds(self.inputs)
        return [chance.choice([p for p in range(len(self)) if kinds[p] != kinds[at]] or [at]) for at in places]

    def unlike(self, place: int, count: int) -> list[int]:
        """Places at random whose targets differ from the one here, where there are such."""
        kinds = self._kinds(_tensors_in(self.targets))
        return chance.choices([p for p in range(len(self)) if kinds[p] != kinds[place]] or [place], k=count)

    def _kinds(self, tensors: Sequence[Tensor]) -> list[int]:
        rows = [t.detach().reshape(len(t), -1).cpu().numpy() for t in tensors if t.shape[:1] == (len(self),)]
        return [hash(tuple(part[place].tobytes() for part in rows)) for place in range(len(self))]

    def double(self) -> Pool:
        """The same in float64."""
        inputs, targets = _mapped(lambda t: t.double() if t.is_floating_point() else t, (self.inputs, self.targets))
        return Pool(inputs, targets)

    def scaled(self, factor: float) -> Pool:
        """Numbers of another size."""
        return replace(self, inputs=tuple(t * factor if t.is_floating_point() else t for t in self.inputs))

    def shuffled(self) -> Pool:
        """Every feature from a record of its own."""
        return replace(self, inputs=tuple(_shuffled(t) for t in self.inputs))

    def perturbed(self) -> Pool:
        """Numbers perturbed at random, by about their own size."""
        return replace(self, inputs=tuple(perturbed(t) for t in self.inputs))

    def repeated(self) -> Pool:
        """Two records, repeated."""
        first = chance.randrange(len(self))
        return Pool(*self.batch([first, *self.others([first])] * (LARGE // 2)))


def _rows(value: Any, places: Tensor, size: int) -> Any:
    """These rows of all tensors in a value that have so many; of plain lists too."""
    if isinstance(value, (list, tuple)) and len(value) == size and not any(isinstance(v, Tensor) for v in value):
        return type(value)([value[place] for place in places.tolist()])
    return _mapped(lambda t: t[places.to(t.device)] if t.shape[:1] == (size,) else t, value)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with all tensors in it changed."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(function, inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(function, inner) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, inner) for inner in value)
    return value


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda t: found.append(t) or t, value)  # type: ignore[func-returns-value]
    return found


def _shuffled(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(len(tensor), -1)
    order = torch.rand(flat.shape, device=flat.device).argsort(0)
    return flat.gather(0, order).view(tensor.shape)


def perturbed(tensor: Tensor) -> Tensor:
    """Numbers perturbed at random, by about their own size."""
    if not tensor.is_floating_point():
        return tensor
    size = tensor.abs().mean()
    return tensor + torch.randn_like(tensor) * torch.where(size > 0, size, torch.ones_like(size))
