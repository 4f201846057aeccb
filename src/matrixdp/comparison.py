"""All mechanisms side by side: the noise that each would add, and what that noise truly guarantees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from matrixdp import _check, _extras
from matrixdp._check import Shape
from matrixdp._rounding import rounded_up
from matrixdp.accounting import methods
from matrixdp.accounting.filter import adaptive_epsilon
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import NotApplicable, NotCertifiable
from matrixdp.mechanisms import RECIPES, expected_error, proposals
from matrixdp.mechanisms.choice import has_task
from matrixdp.pipeline import proposed
from matrixdp.privacy import records
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.drawing import has_safe_sampler
from matrixdp.sensitivity import Sensitivity

if TYPE_CHECKING:
    import pandas
    from rich.console import Group

COPIES = 10
"""How many releases of each mechanism are priced together."""

# A claim is called exact when the true delta is this close to it.
TIGHT = 1e-5


@dataclass(frozen=True)
class Row:
    """One mechanism on one setting; numbers are NaN where it proposes no noise.

    Attributes:
        mechanism: its name.
        source: the paper or textbook that it is from.
        root_mean_square: of the noise, over the entries.
        expected_squared_error: on the task.
        claimed_delta: the delta of the budget.
        exact_delta: the delta of the noise at the budget's epsilon.
        verdict: see `compare`.
        gaussian: whether the noise is Gaussian.
        planned_epsilon: epsilon of `Comparison.copies` such releases at the budget's delta, if all of them are planned
            together; NaN for noise that `release` refuses.
        adaptive_epsilon: the same in a ledger, if each release is chosen in view of earlier answers.
        note: why the mechanism proposes no noise.
    """

    mechanism: str
    source: str
    root_mean_square: float
    expected_squared_error: float
    claimed_delta: float
    exact_delta: float
    verdict: str
    gaussian: bool = False
    planned_epsilon: float = math.nan
    adaptive_epsilon: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, the least error first; `of_task` says whether errors are those of a task."""

    shape: Shape
    sensitivity: Sensitivity
    budget: Budget
    rows: tuple[Row, ...]
    copies: int
    of_task: bool = False

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, with None for what has no value."""
        return [{k: None if v != v else v for k, v in asdict(row).items()} for row in self.rows]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        _extras.require("tables", "pandas")
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows])

    @property
    def applicable(self) -> tuple[Row, ...]:
        """The rows of mechanisms that propose noise."""
        return tuple(row for row in self.rows if not row.note)

    @property
    def least_error(self) -> float:
        """The least expected squared error of floating-point-safe noise that keeps the budget; NaN if there is none."""
        return min((row.expected_squared_error for row in self.rows if row.verdict in KEEPS), default=math.nan)

    @property
    def auto(self) -> str | None:
        """The mechanism that "auto" takes among these: the one with the least error."""
        kept = {row.mechanism: row.expected_squared_error for row in self.rows if row.verdict in KEEPS}
        return next((name for name in RECIPES if name in kept and kept[name] <= self.least_error * (1 + 1e-9)), None)

    def __rich__(self) -> Group:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        sides = " x ".join(str(side) for side in self.shape)
        title = f"{sides}, {self.sensitivity} ({self.sensitivity.adjacency})\nclaimed: {self.budget}"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)  # 80 columns are enough
        table.add_column("mechanism", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        error = "error" if self.of_task else "E||Z||^2"
        for heading in (error, "x best", "true delta", f"{self.copies} plan", "adapt"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.applicable:
            table.add_row(
                row.mechanism,
                f"[{COLOURS[row.verdict]}]{row.verdict}[/]",
                f"{row.expected_squared_error:.3g}",
                f"{row.expected_squared_error / self.least_error:.3g}",
                rounded_up(row.exact_delta, 3) if not 0 < row.exact_delta < 1e-300 else "< 1e-300",
                *(rounded_up(e, 3) if e == e else "" for e in (row.planned_epsilon, row.adaptive_epsilon)),
            )
        return Group(table, *(Text(note, style="dim") for note in self._notes()))

    def _notes(self) -> list[str]:
        """The notes below the table."""
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row.note:
                reason = row.note.removeprefix(f"{row.mechanism} ").removeprefix("is ")  # the name stands before it
                reasons.setdefault(reason, []).append(row.mechanism)
        notes = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        if self.of_task:
            notes.append("error: expected squared error of the task in the options; over time running sums by default.")
        unsafe = [row.mechanism for row in self.rows if row.verdict == UNSAFE]
        if unsafe:
            notes.append(f"{', '.join(unsafe)}: the ideal law keeps the claim, but release refuses it: {_WHY}.")
        if self.auto is not None:
            notes.append(
                f"auto takes {self.auto}: the least error for one release of all that are floating-point-safe."
            )
        priced = {row.mechanism: row.planned_epsilon for row in self.rows if row.verdict == "exact"}
        if priced:
            notes.append(
                f"{self.copies} plan, adapt: the epsilon that {self.copies} such releases cost a ledger "
                f"at delta {self.budget.delta:g}, planned together, or each chosen in view of earlier answers."
            )
            least = min(priced, key=priced.__getitem__)
            if self.auto in priced and priced[least] < priced[self.auto] * (1 - 1e-3):
                notes.append(
                    f"Where {self.copies} share a budget, {least} costs less than {self.auto}: see Budget.plan."
                )
        return notes

    def __str__(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=80).print(self)  # the width of most terminals
        return text.getvalue()


KEEPS = ("exact", "loose")
UNSAFE = "not float-safe"
COLOURS = {"exact": "green", "loose": "yellow", "violated": "bold red", "unproven": "red", UNSAFE: "red"}
_WHY = "the guarantee does not cover the floating-point numbers of its sampler"


def compare(
    shape: Any,
    sensitivity: Sensitivity,
    budget: Budget,
    mechanisms: Sequence[str | NoiseLaw] | None = None,
    *,
    copies: int = COPIES,
    **options: Any,
) -> Comparison:
    """Calibrates every mechanism to one budget and certifies what each proposes.

    Args:
        shape: the shape of the value to release.
        sensitivity: what a neighbour can change.
        budget: the guarantee that each mechanism claims to keep.
        mechanisms: names of mechanisms, or noise laws; all mechanisms by default.
        copies: how many releases of each are priced together.
        **options: options, each passed to the mechanisms that know it.

    Returns:
        Rows, each with a verdict. "exact": the claim is tight. "loose": it holds, with room to spare. "violated": it
        does not hold. "unproven": an upper bound on the true delta, not known to be attained, exceeds the claim. "not
        float-safe": the ideal law keeps the claim, but it has no floating-point-safe sampler, and `release` refuses it.

    Example:
        >>> from matrixdp import Budget, Frobenius, compare
        >>> rows = compare((10, 10), Frobenius(1.0), Budget(0.5, 1e-6), mechanisms=["analytic", "classic", "r1smg"])
        >>> sorted((row.mechanism, row.verdict) for row in rows)
        [('analytic', 'exact'), ('classic', 'loose'), ('r1smg', 'violated')]
    """
    copies = _check.count("copies", copies)
    shape = _check.any_shape(shape)
    laws = [proposed(each, shape, sensitivity, budget, {}) for each in mechanisms or () if isinstance(each, NoiseLaw)]
    names = [each for each in mechanisms or () if not isinstance(each, NoiseLaw)]
    rows = [_row(_name(law), law.source, law, sensitivity, budget, options, copies) for law in laws]
    if names or not laws:
        for recipe, law in proposals(shape, sensitivity, budget, options, names):
            rows.append(_row(recipe.name, recipe.source, law, sensitivity, budget, options, copies))
    rows.sort(key=lambda row: (bool(row.note), row.verdict not in KEEPS, row.expected_squared_error))
    of_task = has_task(options, sensitivity)
    return Comparison(shape, sensitivity, budget, tuple(rows), copies, of_task)


def _name(law: NoiseLaw) -> str:
    """The name shown for a law that was given in place of a mechanism's name."""
    return records.kind_of(law) or type(law).__name__


def _row(
    name: str,
    source: str,
    law: NoiseLaw | NotApplicable,
    sensitivity: Sensitivity,
    budget: Budget,
    options: dict[str, Any],
    copies: int,
) -> Row:
    """The row of one mechanism: what its noise guarantees, or why it proposes none."""
    try:
        if isinstance(law, NotApplicable):
            raise law
        certificate = certify(law, sensitivity, budget)
    except (NotApplicable, NotCertifiable) as reason:
        return Row(name, source, math.nan, math.nan, math.nan, math.nan, "not applicable", note=str(reason))
    word = verdict(certificate, budget)
    if word in KEEPS and not has_safe_sampler(law, certificate.mu):
        word = UNSAFE
    planned = adaptive = math.nan
    if word in KEEPS:
        adjacency, use = str(certificate.adjacency), Use(certificate.profile)
        planned = adaptive = methods.pure_epsilon({use: copies})
        if budget.delta > 0:
            planned = methods.epsilon({use: copies}, adjacency, budget.delta)
            adaptive = adaptive_epsilon(use, copies, budget.delta, adjacency)
    return Row(
        mechanism=name,
        source=source,
        root_mean_square=law.root_mean_square,
        expected_squared_error=expected_error(law, options, sensitivity),
        claimed_delta=budget.delta,
        exact_delta=certificate.delta(budget.epsilon),
        verdict=word,
        gaussian=isinstance(law, Gaussian),
        planned_epsilon=planned,
        adaptive_epsilon=adaptive,
    )


def verdict(certificate: Certificate, budget: Budget) -> str:
    """Whether a claimed budget is tight for the ideal law, holds with room to spare, or does not hold."""
    true_delta = certificate.delta(budget.epsilon)
    if true_delta > budget.delta:
        return "violated" if certificate.exact else "unproven"
    return "exact" if certificate.exact and true_delta >= budget.delta * (1 - TIGHT) else "loose"
