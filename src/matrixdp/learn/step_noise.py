"""The noise of a training's steps: independent from step to step, or correlated over time."""

from __future__ import annotations

from typing import Any

import torch

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import GuaranteeViolated, InvalidInput
from matrixdp.learn.clipping import QuantileClip, largest_change
from matrixdp.learn.correlated_noise import CorrelatedNoise, noise_over_time
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.noise import ParameterNoise, balanced, propose
from matrixdp.learn.time_plan import Training, is_over_time, momentum_workload
from matrixdp.mechanisms import RECIPES
from matrixdp.pipeline import sized_together
from matrixdp.sensitivity import Entrywise, Frobenius, Sensitivity


def noise_of_steps(
    noise: str | NoiseLaw,
    gradients: ClippedGradients,
    optimizer: torch.optim.Optimizer,
    *,
    units: int,
    contributions: int,
    batch_size: int,
    steps: int | None,
    budget: Budget,
    clip: float | QuantileClip,
    order: str,
    groups: int | None,
    by_layer: bool,
    generator: torch.Generator | None,
    **options: Any,
) -> tuple[ParameterNoise | CorrelatedNoise, Sensitivity, float]:
    """The noise, the set that it is certified for, and the sampling rate.

    Args:
        noise: a mechanism's name, or a law that is used as it is.
        gradients: what it is added to.
        optimizer: its momentum decides the workload of noise over time.
        units: how many units there are; a unit is one record, or several.
        contributions: the most records of a unit that count.
        batch_size: the expected number of units in a batch.
        steps: how many are planned; None if that is open.
        budget: for all steps.
        clip: see PrivateSGD.
        order: see PrivateSGD.
        groups: see PrivateSGD.
        by_layer: see PrivateSGD.
        generator: see PrivateSGD.
        **options: options of the mechanism.
    """
    if contributions > 1 and isinstance(clip, QuantileClip):
        raise InvalidInput("clip must be a number where several records of a unit count: QuantileClip counts units")
    change = contributions * largest_change(gradients.radius, contributions * units)  # by one unit, in a step's sum
    if is_over_time(noise):
        if by_layer or gradients.norm != "l2" or steps is None or isinstance(clip, QuantileClip):
            raise InvalidInput(
                "noise over time needs epochs or steps, clipping='l2', a fixed clip, and by_layer left out"
            )
        public = Training(
            records=units,
            batch_size=batch_size,
            steps=steps,
            size=len(gradients.flat),
            change=change,
            order=order,
            groups=groups,
        )
        options = {"workload": momentum_workload(optimizer), **options}
        correlated = noise_over_time(public, noise, budget, generator, **options)
        return correlated, public.sensitivity, correlated.rate
    if order != "sampled" or groups is not None:
        raise InvalidInput("order and groups are for noise over time; noise='banded', bands=1 is independent")
    sensitivity = Frobenius(change) if gradients.norm == "l2" else Entrywise(change)
    rate, size = batch_size / units, len(gradients.flat)
    largest = units * sensitivity.frobenius_radius((size,))
    if not isinstance(noise, str):
        if by_layer or options:
            raise InvalidInput("by_layer and options of a mechanism go with its name; a NoiseLaw is used as it is")
        if not isinstance(noise, NoiseLaw) or noise.shape != (size,):
            raise InvalidInput(
                f"noise must be a mechanism's name, or a law on all {size} parameters, got {_check.kind(noise)}"
            )
        return ParameterNoise(noise, sensitivity, largest, generator=generator), sensitivity, rate
    if RECIPES[_check.choice("noise", noise, RECIPES)].refuted:
        raise GuaranteeViolated(
            f"{noise} rests on a theorem that is false, so no size of it is known to be enough; use "
            "noise='analytic', or pass the law that calibrate() gives, with accept_violation=True"
        )
    if steps is None:
        raise InvalidInput("epochs or steps must be given: they decide how much noise a step needs")
    law = propose(noise, gradients.shapes, sensitivity, by_layer=by_layer, **options)
    if isinstance(law, Gaussian):
        law = balanced(law, sensitivity)
    sized = sized_together(law, sensitivity, budget, steps, rate)
    found = ParameterNoise(sized.law, sensitivity, largest, drawing=sized.drawing, generator=generator)
    return found, sensitivity, rate
