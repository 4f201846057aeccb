"""The papers' theorems on composition and sampling.

They are functions of (epsilon, delta) only; an Accountant uses the whole privacy profile of the noise, and gives
smaller totals. They reproduce published results, for comparison. Totals are rounded up, budgets per step rounded down.
`k` is the number of steps, and `slack` the delta that a theorem adds for a smaller epsilon.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special

from matrixdp import _check
from matrixdp.accounting.pairs import check_sampling_rate
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian

AMPLIFICATIONS = ("exact", "linear")

_UNIT = 2.0**-53
_UP, _DOWN = 1.0 + 64.0 * _UNIT, 1.0 - 256.0 * _UNIT  # beyond rounding of a closed form, and its inverse
_LARGEST_EPSILON = 700.0  # e^epsilon overflows above it
_LARGEST_K = 10**6  # the most terms of the optimal composition


# --- composition ---


def basic(epsilon: float, delta: float, k: int) -> tuple[float, float]:
    """Basic composition: (k epsilon, k delta).

    Guarantee: k steps, each (epsilon, delta)-private, are together private with the returned pair.
    Source: dwork2014algorithmic, Theorem 3.16. Deviates: none.
    """
    epsilon, delta, k = _step(epsilon, delta, k)
    return k * epsilon * _UP, min(k * delta * _UP, 1.0)


def strong(epsilon: float, delta: float, k: int, slack: float) -> tuple[float, float]:
    """Strong composition: epsilon grows with the root of k.

    Guarantee: k steps, each (epsilon, delta)-private, are together private with the returned pair.
    Source: dwork2014algorithmic, Theorem 3.20; it is ji2024less, equation 16, for one step of (q epsilon_0, q delta_0).
    Deviates: none.
    """
    epsilon, delta, k = _step(epsilon, delta, k)
    slack = _check.probability("slack", slack)
    return _strong_epsilon(epsilon, k, slack) * _UP, min((k * delta + slack) * _UP, 1.0)


def _strong_epsilon(epsilon: float, k: int, slack: float) -> float:
    return math.sqrt(-2.0 * k * math.log(slack)) * epsilon + k * epsilon * math.expm1(epsilon)


def strong_step(epsilon: float, delta: float, k: int, slack: float) -> tuple[float, float]:
    """What each of k steps may spend for a total of (epsilon, delta) by strong composition.

    Guarantee: `strong` of the returned pair is at most (epsilon, delta).
    Source: ji2024less, equation 16, solved for the step. Deviates: none; rounded down.
    """
    epsilon, delta, k = _step(epsilon, delta, k)
    left = delta * _DOWN - _check.probability("slack", slack)
    if not left > 0.0:
        raise InvalidInput(f"slack must be below delta = {delta:g}, got {slack!r}: nothing would be left for the steps")
    high = min(epsilon / math.sqrt(-2.0 * k * math.log(slack)), _LARGEST_EPSILON)

    def excess(step: float) -> float:
        return _strong_epsilon(step, k, slack) * _UP - epsilon

    step = optimize.brentq(excess, 0.0, high * _UP, xtol=1e-300, rtol=1e-15)
    return float(step) * _DOWN, left / k * _DOWN


def amortised(
    epsilon: float, delta: float, epochs: float, sampling_rate: float, slack: float, *, amplification: str = "exact"
) -> tuple[float, float]:
    """What a step of private gradient descent may spend on its batch, for a total of (epsilon, delta).

    Guarantee: with amplification "exact" and Poisson sampling under add/remove, epochs / sampling_rate steps that are
        each private with the returned pair on their batch are together (epsilon, delta)-private. With "linear", none.
    Source: ji2024less, equation 16 and section 7.3, with amplification "linear".
    Deviates: 1. sampling turns epsilon_0 into log(1 + q (e^epsilon_0 - 1)), which is more than the q epsilon_0 of the
        paper: 29 times more at its epsilon_0 = 5.42. So "exact" is the default; 2. the number of steps is rounded up.

    Args:
        epsilon: of all steps.
        delta: of all steps.
        epochs: passes over the records.
        sampling_rate: q, the share of the records in a batch.
        slack: delta' of the paper.
        amplification: "exact", or "linear" as published.
    """
    rate, epochs = check_sampling_rate(sampling_rate), _check.positive("epochs", epochs)
    linear = _check.choice("amplification", amplification, AMPLIFICATIONS) == "linear"
    step = strong_step(epsilon, delta, math.ceil(epochs / rate * (1.0 - 1e-12)), slack)
    return (step[0] / rate, step[1] / rate) if linear else before_sampling(*step, rate)


def kov(epsilon: float, delta: float, k: int, slack: float) -> tuple[float, float]:
    """The closed form of Kairouz, Oh and Viswanath.

    Guarantee: k steps, each (epsilon, delta)-private, are together private with the returned pair.
    Source: kairouz2017composition, Theorem 3.4. Deviates: none.
    """
    epsilon, delta, k = _step(epsilon, delta, k)
    slack = _check.probability("slack", slack)
    drift = math.tanh(0.5 * epsilon) * epsilon * k
    spread = min(-math.log(slack), math.log(math.e + math.sqrt(k) * epsilon / slack))
    total = min(k * epsilon, drift + epsilon * math.sqrt(2.0 * k * spread))
    return total * _UP, min(-math.expm1(k * math.log1p(-delta) + math.log1p(-slack)) * _UP, 1.0)


def optimal_delta(epsilon: float, delta: float, k: int, total_epsilon: float) -> float:
    """The least delta that holds for all (epsilon, delta)-private steps, at a given total epsilon.

    Guarantee: k steps, each (epsilon, delta)-private, are together (total_epsilon, returned delta)-private; some such
    steps are not private with less.
    Source: kairouz2017composition, Theorem 3.3. Deviates: stated for every total epsilon, not only (k - 2i) epsilon;
        both follow from randomised response with a leak being the worst of all such steps.
    """
    epsilon, delta, k = _step(epsilon, delta, k)
    total_epsilon = _check.at_least_zero("total_epsilon", total_epsilon)
    if not k <= _LARGEST_K:
        raise InvalidInput(f"k must be at most {_LARGEST_K}, got {k}; use kov, or an Accountant")
    # the loss is (k - 2l) epsilon when l of the k responses point the other way
    log_up, log_down = -np.logaddexp(0.0, -epsilon), -np.logaddexp(0.0, epsilon)
    terms = math.floor(0.5 * (k - total_epsilon / epsilon)) + 2 if epsilon > 0.0 else 0
    others = np.arange(min(max(terms, 0), k + 1), dtype=np.float64)
    excess = np.maximum((k - 2.0 * others) * epsilon - total_epsilon, 0.0)
    log_choices = special.gammaln(k + 1.0) - special.gammaln(others + 1.0) - special.gammaln(k - others + 1.0)
    log_masses = log_choices + (k - others) * log_up + others * log_down
    rounding = 16.0 * _UNIT * (8.0 + k * (math.log(k + 1.0) + epsilon + 1.0))
    leak = min(float(np.sum(np.exp(log_masses) * -np.expm1(-excess))) * (1.0 + rounding), 1.0 - _UNIT)
    return min(-math.expm1(k * math.log1p(-delta) + math.log1p(-leak)) * _UP, 1.0)


def gaussian_step(epsilon: float, delta: float, k: int) -> float:
    """The mu of each of k Gaussian releases that are together (epsilon, delta)-private; the std is sensitivity / mu.

    Guarantee: k releases with Gaussian noise are together (epsilon, delta)-private with this mu, and with no larger.
    Source: yang2021improved, Theorem 4. Deviates: none; rounded down.
    """
    mu = float(gaussian.mu(_epsilon(epsilon), _check.probability("delta", delta)))
    return mu / math.sqrt(_check.count("k", k)) * (1.0 - 8.0 * _UNIT)


# --- sampling ---


def sampled(epsilon: float, delta: float, sampling_rate: float) -> tuple[float, float]:
    """Amplification by sampling: (log(1 + q (e^epsilon - 1)), q delta).

    Guarantee: a step that is (epsilon, delta)-private under add/remove, run on records that each enter with probability
    q, independently, is private with the returned pair under add/remove.
    Source: balle2018subsampling, Theorem 8. Deviates: none.
    """
    epsilon, delta, _ = _step(epsilon, delta, 1)
    rate = check_sampling_rate(sampling_rate)
    return _log_mixture(epsilon, rate) * _UP, rate * delta * _UP


def before_sampling(epsilon: float, delta: float, sampling_rate: float) -> tuple[float, float]:
    """What a step may spend on a sample, so that (epsilon, delta) is spent on the records.

    Guarantee: `sampled` of the returned pair is at most (epsilon, delta); a delta of 1 or more means any.
    Source: balle2018subsampling, Theorem 8, solved for the step. Deviates: none; rounded down.
    """
    epsilon, delta, _ = _step(epsilon, delta, 1)
    rate = check_sampling_rate(sampling_rate)
    if epsilon < 1.0:
        step = math.log1p(math.expm1(epsilon) / rate)
    else:
        step = epsilon - math.log(rate) + math.log1p(-(1.0 - rate) * math.exp(-epsilon))
    return step * _DOWN, delta / rate * _DOWN


def sampled_pure(epsilon: float, sampling_rate: float) -> float:
    """Amplification of a pure epsilon as in MGM: log((1 - q + q e^epsilon) / (1 - q + q e^-epsilon)).

    Guarantee: an epsilon-private step, run on records that are each left out with probability 1 - q, independently, is
    private with the returned epsilon. That holds also if the record of one person is replaced by another.
    Source: yang2023matrix, Theorem 6, solved for the outer epsilon; beimel2014bounds. Deviates: none.
    """
    epsilon, rate = _epsilon(epsilon), check_sampling_rate(sampling_rate)
    return (_log_mixture(epsilon, rate) - _log_mixture(-epsilon, rate)) * _UP


def before_sampling_pure(epsilon: float, sampling_rate: float) -> float:
    """The epsilon* that a step may spend on a sample, so that a pure epsilon is spent on the records.

    Guarantee: `sampled_pure` of the answer is at most epsilon.
    Source: yang2023matrix, Theorem 6, where f(epsilon, epsilon*) = q; beimel2014bounds. Deviates: rounded down.
    """
    epsilon, rate = _epsilon(epsilon), check_sampling_rate(sampling_rate)
    return (0.5 * epsilon + math.asinh((1.0 - rate) / rate * math.sinh(0.5 * epsilon))) * _DOWN


def _log_mixture(epsilon: float, rate: float) -> float:
    """log(1 - q + q e^epsilon)."""
    change = rate * math.expm1(epsilon)
    return math.log1p(change) if change > -0.5 else math.log(1.0 - rate + rate * math.exp(epsilon))


# --- arguments ---


def _epsilon(value: float) -> float:
    if not _check.at_least_zero("epsilon", value) <= _LARGEST_EPSILON:
        most = f"{_LARGEST_EPSILON:g}"
        raise InvalidInput(f"epsilon must be at most {most}, got {_check.shown(value)}: above, it protects nothing")
    return float(value)


def _step(epsilon: float, delta: float, k: int) -> tuple[float, float, int]:
    if not 0.0 <= _check.number("delta", delta) < 1.0:
        raise InvalidInput(f"delta must be 0 or above and below 1, got {_check.shown(delta)}; 1e-6 is a common choice")
    return _epsilon(epsilon), float(delta), _check.count("k", k)
