"""`matrixdp calibrate`: the noise of one mechanism, and what it guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matrixdp.cli import arguments, show, specs

if TYPE_CHECKING:
    from matrixdp.distributions import NoiseLaw


def calibrate(
    mechanism: arguments.Mechanism,
    shape: arguments.Shape,
    sensitivity: arguments.Sensitivity,
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    adjacency: arguments.Adjacency = None,
    option: arguments.Options = None,
    json: arguments.Json = False,
) -> None:
    """Calibrate one mechanism: the noise it adds, and the certificate of what that noise guarantees.

    Example: matrixdp calibrate analytic --shape 6x248 --sensitivity frobenius:2.449 --epsilon 1 --delta 1e-6
    """
    from matrixdp._rounding import rounded_up
    from matrixdp.budget import Budget
    from matrixdp.mechanisms import expected_error
    from matrixdp.mechanisms.choice import has_task
    from matrixdp.privacy.certificate import between
    from matrixdp.privacy.drawing import has_safe_sampler

    budget = Budget(epsilon, delta)
    with show.working("calibrating"):
        certificate = specs.certificate(mechanism, shape, specs.sensitivity(sensitivity, adjacency), budget, option)
    noise = certificate.law
    kept, error = certificate.meets(budget), noise.expected_squared_error()
    safe, bars, half = has_safe_sampler(noise, certificate.mu), certificate.standard_error_range, _half_width(noise)
    if json:
        show.document(
            {
                "mechanism": mechanism,
                "standard_error": None if bars is None else list(bars),
                "half_width_95": None if half is None else list(half),
                "root_mean_square": noise.root_mean_square,
                "expected_squared_error": error,
                "keeps_budget": kept,
                "has_float_safe_sampler": safe,
                "certificate": certificate.to_dict(),
            }
        )
        return
    show.text(f"Noise: {noise.describe()}; E||Z||^2 = {error:.6g}")
    options = specs.mechanism_options(option or [])
    if has_task(options, certificate.sensitivity):
        of_task = expected_error(noise, options, certificate.sensitivity)
        show.text(f"expected squared error of the task: {of_task:.6g}")
    if half is not None:
        show.text(f"95 % of the noise lies within +-{between(*half)}")
    show.text(certificate)
    if not kept:
        true_delta = rounded_up(certificate.delta(epsilon), 3)
        show.text(f"This noise does not keep {budget}: at that epsilon its delta is {true_delta}.", "red")
    elif not safe:
        show.text("`matrixdp release` refuses this noise: it is not floating-point-safe.", "red")


def _half_width(noise: NoiseLaw) -> tuple[float, float] | None:
    """The least and the largest half-width of intervals that cover an entry's noise with 95 %, or None if not known."""
    import numpy as np

    from matrixdp.errors import NotApplicable

    try:
        sizes = noise.margin(0.95).size
    except NotApplicable:
        return None
    return float(np.min(sizes)), float(np.max(sizes))
