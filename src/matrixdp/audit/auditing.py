"""Audits: draw outputs of a mechanism on two neighbouring inputs, and bound its epsilon and delta from below."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.audit import bounds, statistics
from matrixdp.audit.result import METHODS, AuditResult
from matrixdp.audit.statistics import Lesson, Statistic
from matrixdp.budget import Budget, checked_budget
from matrixdp.distributions import Gaussian, NoiseLaw, generator
from matrixdp.errors import InvalidInput
from matrixdp.privacy.certificate import certify
from matrixdp.privacy.laws import added_law
from matrixdp.sensitivity import Sensitivity

Progress = Callable[[int, int], object]
"""Called with the number of outputs drawn so far, and the number in all."""

SAMPLES = 10_000
CONFIDENCE = 1 - 1e-6
_LEAST_SAMPLES = 20
# Outputs are drawn and scored in blocks of at most this many outputs, and entries of outputs.
_BLOCK, _BLOCK_ENTRIES = 500, 2**20
# The most outputs, and entries of outputs, to fit statistics to: more would cost memory and time and gain little.
_LESSON, _LESSON_ENTRIES = 5_000, 2**23
# The scatter matrix of more coordinates would take longer than drawing them.
_MOST_COORDINATES = 400


def audit(
    release_fn: Callable[[Any], Any],
    value: Any,
    neighbour: Any,
    epsilon: float,
    delta: float,
    *,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    statistic: str | Statistic = "auto",
    progress: Progress | None = None,
) -> AuditResult:
    """Tests a claimed (epsilon, delta) of any mechanism on one pair of neighbours.

    At most a quarter of the outputs is used to fit the statistics, and a quarter to choose the statistic and the
    events. The bounds are computed only from the rest.

    Args:
        release_fn: the mechanism; called with an input, it returns numbers or an array of them, of one shape, with
            fresh randomness every time.
        value: an input; if it is an array, each call gets a copy.
        neighbour: another input, a neighbour of the first under the claim's adjacency.
        epsilon: the claimed epsilon, 0 or above.
        delta: the claimed delta, at least 0 and below 1; 0 for a pure claim.
        samples: how many outputs to draw for each input.
        confidence: the probability with which the bounds hold.
        statistic: "linear", "radial", "learned", or "auto", which tries them all; or a function that maps a stack of
            outputs (with one more axis in front) to one number per output.
        progress: called with the number of outputs drawn so far and the number in all.

    Guarantee: if release_fn keeps the claim, it is rejected with probability at most 1 - confidence, whatever the
        mechanism, the statistic and the number of samples.

    Power: Gaussian noise that is 10 % too small takes 60,000 samples to reject at (1, 0.1), and 500,000 at (1, 0.01).
        At a delta of 1e-6 it takes more than can be drawn; `audit_law` detects it there. A mechanism whose delta is 0.2
        where 1e-7 is claimed takes a few thousand.

    Source: jagielski2020auditing; clopper1934use.

    Example:
        >>> import numpy as np
        >>> from matrixdp.audit import audit
        >>> rng = np.random.default_rng(0)
        >>> audit(lambda value: value + rng.normal(0, 0.3), 0.0, 1.0, 1.0, 0.01, samples=2000).verdict
        'rejected'
    """
    claim = _claim(epsilon, delta)
    confidence = _confidence(confidence)
    outputs = _Outputs(release_fn, (value, neighbour), _samples(samples), progress)
    if callable(statistic):
        learnt: dict[str, Statistic] = {getattr(statistic, "__name__", "the caller's own"): statistic}
    else:
        options = ["auto", *statistics.LEARNT]
        names = options[1:] if _check.choice("statistic", statistic, options) == "auto" else [statistic]
        lesson = Lesson.of(value, neighbour, outputs.lesson())
        learnt = {name: statistics.LEARNT[name](lesson) for name in names}
    return outputs.judge(learnt, claim, confidence)


def audit_law(
    law: NoiseLaw,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    method: str = "auto",
    release_fn: Callable[[Any], Any] | None = None,
    rng: np.random.Generator | None = None,
    progress: Progress | None = None,
) -> AuditResult:
    """Tests whether noise, as it is drawn, keeps a budget for the witness of its certificate.

    The outputs are judged by the likelihood ratio, the best statistic if the noise follows its law. For a law from
    outside the package, statistics are learned from some of the outputs. The method "gaussian" uses the best linear
    statistic for the covariance that the noise really has, if the value has at most 400 entries and at most half as
    many entries as samples; otherwise the likelihood ratio.

    Args:
        law: the noise law, which determines the witness and the likelihood ratio.
        sensitivity: what a neighbour can change.
        budget: the claim.
        samples: how many outputs to draw for each input.
        confidence: the probability with which the bounds hold.
        method: "clopper-pearson" assumes nothing; "gaussian" assumes that Gaussian noise is added to the input, and
            then detects noise that is a few percent too small, at any delta; "auto" is the second for a Gaussian law.
        release_fn: another mechanism that should add this noise to its input; by default `law.sample` draws it.
        rng: a numpy Generator, reproducible and faster; by default the secure entropy that releases use.
        progress: called with the number of outputs drawn so far and the number in all.

    Guarantee: if the noise keeps the budget, it is rejected with probability at most 1 - confidence; with the method
        "gaussian" only if its assumption is true.

    Source: dong2022gaussian, Corollary 2.13, from mu to (epsilon, delta); nasr2023tight.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget, Frobenius, calibrate
        >>> from matrixdp.audit import audit_law
        >>> budget = Budget(1.0, 1e-6)
        >>> noise = calibrate("analytic", shape=(3,), sensitivity=Frobenius(1.0), budget=budget)
        >>> audit_law(noise, Frobenius(1.0), budget, samples=2000, rng=np.random.default_rng(0)).verdict
        'not rejected'
    """
    checked_budget(budget)
    confidence, samples = _confidence(confidence), _samples(samples)
    if _check.choice("method", method, ["auto", *METHODS]) == "gaussian" and not isinstance(law, Gaussian):
        raise InvalidInput(f"method 'gaussian' is for Gaussian noise, got {type(law).__name__}; use 'clopper-pearson'")
    difference = certify(law, sensitivity).witness
    draw = release_fn if release_fn is not None else lambda value: value + law.sample(rng)
    if added_law(law) is not None:  # whose density is not known here
        inputs, claim = (np.zeros(law.shape), difference), (budget.epsilon, budget.delta)
        return audit(draw, *inputs, *claim, samples=samples, confidence=confidence, progress=progress)
    outputs = _Outputs(draw, (np.zeros(law.shape), difference), samples, progress)
    if outputs.shape != law.shape:
        raise InvalidInput(f"release_fn must return its input with noise, of shape {law.shape}, got {outputs.shape}")
    if method == "clopper-pearson" or not isinstance(law, Gaussian):
        ratio = statistics.likelihood_ratio(law, difference)
        return outputs.judge({"likelihood ratio": ratio}, (budget.epsilon, budget.delta), confidence)
    seen = statistics.coordinates(law, difference, most=min(_MOST_COORDINATES, samples // 2))
    scatter, shift = outputs.scatter(seen.read), seen.read(difference[None])[0]
    mu = bounds.mu_from_scatter(scatter, 2 * samples, shift, seen.weights, confidence)
    lower = bounds.gaussian_bounds(mu, budget.epsilon, budget.delta)
    return AuditResult(budget.epsilon, budget.delta, *lower, seen.name, samples, confidence, "gaussian")


def audit_scores(
    value_scores: Any,
    neighbour_scores: Any,
    epsilon: float,
    delta: float,
    *,
    confidence: float = CONFIDENCE,
    rng: np.random.Generator | None = None,
) -> AuditResult:
    """Tests a claimed (epsilon, delta) from scores that were computed elsewhere, such as those of planted records.

    Args:
        value_scores: one score per independent output on one input.
        neighbour_scores: equally many scores of outputs on its neighbour.
        epsilon: the claimed epsilon, 0 or above.
        delta: the claimed delta, at least 0 and below 1.
        confidence: the probability with which the bounds hold.
        rng: a numpy Generator that shuffles the scores, so that their order does not matter.

    Guarantee: as for `audit`, if the statistic was not fitted to the same outputs.

    Example:
        >>> import numpy as np
        >>> from matrixdp.audit import audit_scores
        >>> rng = np.random.default_rng(0)
        >>> audit_scores(rng.normal(0, 1, 2000), rng.normal(4, 1, 2000), 1.0, 1e-5).verdict
        'rejected'
    """
    claim = _claim(epsilon, delta)
    confidence, randomness = _confidence(confidence), generator(rng)
    given = [
        _check.finite(n, s, ndim=1) for n, s in (("value_scores", value_scores), ("neighbour_scores", neighbour_scores))
    ]
    if len(given[0]) != len(given[1]):
        raise InvalidInput(f"the two lists of scores must be equally long, got {len(given[0])} and {len(given[1])}")
    samples = _samples(len(given[0]))
    for one in given:
        randomness.shuffle(one)
    few = samples // 4
    first, rest = ({"scores": (given[0][part], given[1][part])} for part in (slice(few), slice(few, None)))
    return _judge(first, rest, claim, samples, confidence)


def _judge(
    first: bounds.Scores, rest: bounds.Scores, claim: tuple[float, float], samples: int, confidence: float
) -> AuditResult:
    """Chooses events by the first scores and counts the rest."""
    level = (1 - confidence) / 4  # two events, two probabilities each
    events = bounds.choose_events(first, *claim, level)
    epsilon_lower, delta_lower, name = bounds.bounds_from_events(events, rest, *claim, level)
    return AuditResult(*claim, epsilon_lower, delta_lower, name, samples, confidence, "clopper-pearson")


class _Outputs:
    """Draws outputs on two inputs, block by block, and keeps only what is needed."""

    def __init__(
        self, release_fn: Callable[[Any], Any], inputs: tuple[Any, Any], samples: int, progress: Progress | None
    ) -> None:
        if not callable(release_fn):
            raise InvalidInput(f"release_fn must be a function of one input, got {_check.kind(release_fn)}")
        if all(isinstance(given, (np.ndarray, int, float)) for given in inputs) and np.array_equal(*inputs):
            raise InvalidInput("value and neighbour are the same; give two inputs that differ as neighbours may")
        self.release_fn = release_fn
        self.inputs = inputs
        self.samples = samples
        self.progress = progress
        self.drawn = 0
        self.shape = self._outputs(inputs[0], 1).shape[1:]

    def lesson(self) -> tuple[Array, Array]:
        """Outputs to fit statistics to, at most a quarter of all."""
        entries = max(1, math.prod(self.shape))
        count = max(2, min(self.samples // 4, _LESSON, _LESSON_ENTRIES // entries))
        on_value, on_neighbour = (np.concatenate(list(self._blocks(given, count))) for given in self.inputs)
        return on_value, on_neighbour

    def scores(self, count: int, learnt: Mapping[str, Statistic]) -> bounds.Scores:
        """The scores of fresh outputs on both inputs."""
        sides = []
        for given in self.inputs:
            found: dict[str, list[Array]] = {name: [] for name in learnt}
            for block in self._blocks(given, count):
                for name, score in learnt.items():
                    found[name].append(_scored(name, score, block))
            sides.append({name: np.concatenate(parts) for name, parts in found.items()})
        return {name: (sides[0][name], sides[1][name]) for name in learnt}

    def scatter(self, read: Callable[[Array], Array]) -> Array:
        """The sum of (x - mean)(x - mean)^T over the noise x of all outputs, in the given coordinates."""
        total: Any = 0.0
        squares: Any = 0.0
        pools = ThreadpoolController()
        for given in self.inputs:
            for block in self._blocks(given, self.samples):
                # the product is too small for threads; the mechanism keeps its own
                with pools.limit(limits=1, user_api="blas"):
                    noise = read(block - given)
                    total, squares = total + np.sum(noise, axis=0), squares + noise.T @ noise
        return np.asarray(squares - np.outer(total, total) / (2 * self.samples))

    def judge(self, learnt: Mapping[str, Statistic], claim: tuple[float, float], confidence: float) -> AuditResult:
        """Chooses events by a quarter of the outputs, counts all others, and compares with the claim."""
        first = self.scores(self.samples // 4, learnt)
        rest = self.scores(self.samples - self.drawn // 2, learnt)
        return _judge(first, rest, claim, self.samples, confidence)

    def _blocks(self, given: Any, count: int) -> Iterator[Array]:
        size = max(1, min(_BLOCK, _BLOCK_ENTRIES // max(1, math.prod(self.shape))))
        for start in range(0, count, size):
            block = self._outputs(given, min(size, count - start))
            if block.shape[1:] != self.shape:
                raise InvalidInput(
                    f"release_fn returned shapes {self.shape} and {block.shape[1:]}; it must return one shape"
                )
            self.drawn += len(block)
            if self.progress is not None:
                self.progress(self.drawn, 2 * self.samples)
            yield block

    def _outputs(self, given: Any, count: int) -> Array:
        # a copy, so that a mechanism that writes into its input cannot spoil the next draw
        fresh = given.copy if isinstance(given, np.ndarray) else lambda: given
        drawn = [self.release_fn(fresh()) for _ in range(count)]
        try:
            if np.iscomplexobj(drawn[0]):
                raise TypeError
            with np.errstate(over="ignore"):  # what becomes infinite is refused next
                outputs = np.array(drawn, dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"release_fn must return numbers, in arrays of one shape, got {_check.kind(drawn[0])}; "
                "for a matrixdp release, return its .value"
            ) from None
        if not (outputs.size > 0 and np.all(np.isfinite(outputs))):
            raise InvalidInput("release_fn must return finite numbers, got none, or NaN or infinity; map those first")
        return outputs


def _scored(name: str, score: Statistic, outputs: Array) -> Array:
    scores = np.asarray(score(outputs), dtype=np.float64)
    if scores.shape != (len(outputs),) or np.any(np.isnan(scores)):
        raise InvalidInput(
            f"statistic {name!r} must return one number, never NaN, for each of {len(outputs)} outputs, "
            f"got shape {scores.shape}"
        )
    return scores


def _claim(epsilon: float, delta: float) -> tuple[float, float]:
    claim = _check.at_least_zero("epsilon", epsilon), _check.at_least_zero("delta", delta)
    if not claim[1] < 1:
        raise InvalidInput(f"delta must be below 1, got {_check.shown(delta)}; delta 1 guarantees nothing")
    return claim


def _confidence(confidence: float) -> float:
    if not 0.5 <= _check.number("confidence", confidence) < 1:
        raise InvalidInput(f"confidence must be at least 0.5 and below 1, got {confidence!r}; 0.999 is a common choice")
    return float(confidence)


def _samples(samples: int) -> int:
    if not _check.count("samples", samples) >= _LEAST_SAMPLES:
        raise InvalidInput(
            f"samples must be at least {_LEAST_SAMPLES}, got {samples!r}; a useful audit takes thousands"
        )
    return int(samples)
