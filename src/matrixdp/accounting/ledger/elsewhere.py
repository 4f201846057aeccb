"""Releases made outside matrixdp, with the tightest profile that each form of statement allows.

- mu: Gaussian noise, exactly.
- rho (zCDP): Rényi divergences alpha rho at every order, which add up; see `renyi.Concentrated`.
- (epsilon, delta): the worst pair of laws with this guarantee, exactly; see `stated.by_budget`.
- An event of dp-accounting: Gaussian and discrete Laplace noise exactly, Laplace noise by 257 points on its curve,
  compositions and Poisson samples of these, and zCDP as above.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matrixdp import _check
from matrixdp.accounting.composition import Part
from matrixdp.accounting.renyi import Concentrated
from matrixdp.accounting.stated import by_budget, laplace
from matrixdp.adjacency import Adjacency, checked
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee, Profile

_UP = 1.0 + 2.0**-48
_FORMS = (
    'a Certificate or Guarantee, a Budget(epsilon, delta), {"mu": ...}, {"rho": ...}, {"epsilon": ..., "delta": ...} '
    "or a DpEvent of dp-accounting"
)


def adjacency_of(what: Any, stated: str | None, known: Adjacency | None) -> Adjacency:
    """The adjacency of a statement: its own, or as stated beside it, or else the one that is known.

    Raises:
        InvalidInput: if there is none, or what is stated is not that of a certificate.
    """
    own = what.adjacency if isinstance(what, Guarantee) else known
    if stated is None and own is None:
        raise InvalidInput("adjacency is missing: add/remove, replace or zero-out, as the ledger has none yet")
    found = checked(stated or own)
    if isinstance(what, Guarantee) and found != own:
        raise InvalidInput(f"adjacency must be that of the certificate, {own}, got {found}")
    return found


def parts_of(what: Any, adjacency: Adjacency) -> list[Part]:
    """The releases in a statement of any form, with their counts and sampling rates."""
    if isinstance(what, Guarantee):
        return [Part(what)]
    if isinstance(what, Budget):
        return [Part(Guarantee(by_budget(what), adjacency))]
    if isinstance(what, Mapping):
        return [Part(Guarantee(_by_numbers(what), adjacency))]
    if type(what).__module__.partition(".")[0] == "dp_accounting":
        return _by_event(what, adjacency)
    raise InvalidInput(f"what must be {_FORMS}, got {_check.kind(what)}")


def _by_numbers(what: Mapping[str, Any]) -> Profile:
    names = {*what}
    if names == {"mu"}:
        return GaussianProfile(_check.positive("mu", what["mu"]))
    if names == {"rho"}:
        return Concentrated(_check.positive("rho", what["rho"]))
    if names in ({"epsilon", "delta"}, {"epsilon"}):
        return by_budget(Budget(what["epsilon"], what.get("delta", 0.0)))
    raise InvalidInput(f"what must be {_FORMS}")


def _by_event(event: Any, adjacency: Adjacency) -> list[Part]:
    from dp_accounting import dp_event as dp

    def one(profile: Profile) -> list[Part]:
        return [Part(Guarantee(profile, adjacency))]

    if isinstance(event, dp.NoOpDpEvent):
        return []
    if isinstance(event, dp.GaussianDpEvent):
        return one(GaussianProfile(_UP / _check.positive("noise_multiplier", event.noise_multiplier)))
    if isinstance(event, dp.LaplaceDpEvent):
        return one(laplace(_UP / _check.positive("noise_multiplier", event.noise_multiplier)))
    if isinstance(event, dp.DiscreteLaplaceDpEvent):
        scale = 1.0 / (_check.positive("noise_parameter", event.noise_parameter) * _UP)
        return one(DiscreteProfile(1.0, scale, _check.count("sensitivity", event.sensitivity)))
    if isinstance(event, dp.ZCDpEvent) and event.xi == 0:
        return one(Concentrated(event.rho))
    if isinstance(event, dp.SelfComposedDpEvent):
        times = _check.count("count", event.count)
        return [Part(p.certificate, p.count * times, p.sampling_rate) for p in _by_event(event.event, adjacency)]
    if isinstance(event, dp.ComposedDpEvent):
        return [part for each in event.events for part in _by_event(each, adjacency)]
    if isinstance(event, dp.PoissonSampledDpEvent):
        inside = _by_event(event.event, adjacency)
        if [(part.count, part.sampling_rate) for part in inside] == [(1, 1.0)]:
            return [Part(inside[0].certificate, 1, event.sampling_probability)]
    raise InvalidInput(
        f"what must be an event of Gaussian, Laplace, discrete Laplace or concentrated noise, or a composition or "
        f"Poisson samples of single ones, got {type(event).__name__}; state it as a rho, or as epsilon and delta"
    )
