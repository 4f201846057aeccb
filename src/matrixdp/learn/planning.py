"""The noise-to-signal ratio for batch sizes, epochs and clips at a budget, before anything is spent."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from matrixdp import _check, _extras
from matrixdp.budget import Budget, checked_budget
from matrixdp.errors import InvalidInput
from matrixdp.learn.clipping import largest_change
from matrixdp.learn.noise import propose
from matrixdp.learn.sampling import count_records
from matrixdp.pipeline import sized_together
from matrixdp.sensitivity import Frobenius

if TYPE_CHECKING:
    import pandas
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One setting of a training.

    Attributes:
        batch_size: the expected size of a batch.
        epochs: how many epochs.
        steps: how many steps, in all epochs.
        clip: the largest norm of a record's gradient.
        noise_multiplier: standard deviation of the noise on each entry of the summed gradients, divided by clip.
        noise_std: standard deviation of the noise on each entry of the averaged gradient.
        noise_to_signal: norm of the noise of a step, divided by the largest norm of the averaged gradient.
        overall: the same for the sum of all steps, where signals add up and noise variances add up.
    """

    batch_size: int
    epochs: int
    steps: int
    clip: float
    noise_multiplier: float
    noise_std: float
    noise_to_signal: float
    overall: float


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Settings and the noise of each; prints as a table."""

    records: int
    parameters: int
    budget: Budget
    rows: tuple[PlanRow, ...]

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best(self) -> PlanRow:
        """The row with the least overall noise-to-signal ratio."""
        return min(self.rows, key=lambda row: row.overall)

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        _extras.require("tables", "pandas")
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows])

    def __rich__(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(
            title=f"{self.records:,} records, {self.parameters:,} trained parameters, {self.budget}",
            caption="noise / signal: if the clipped gradients of all records agree; in truth it is larger. Overall: "
            "of all steps together. A small value helps only if the steps are enough to learn.",
            box=box.SIMPLE_HEAD,
        )
        for heading in ("batch", "epochs", "steps", "clip", "noise std / clip", "std of the mean", "noise / signal"):
            table.add_column(heading, justify="right")
        table.add_column("overall", justify="right")
        for row in self.rows:
            numbers = (row.clip, row.noise_multiplier, row.noise_std, row.noise_to_signal, row.overall)
            counts = (f"{row.batch_size:,}", str(row.epochs), f"{row.steps:,}")
            style = "bold" if row == self.best else None
            table.add_row(*counts, *(f"{number:.3g}" for number in numbers), style=style)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue()


def plan(
    model: nn.Module | int,
    data: Any,
    budget: Budget,
    *,
    batch_sizes: int | Sequence[int],
    epochs: int | Sequence[int],
    clip: float | Sequence[float] = 1.0,
    gradient_norm: float | None = None,
) -> TrainingPlan:
    """The noise that PrivateSGD would add, for each combination of batch size, epochs and clip; nothing is spent.

    Signal is the largest norm that the average of clipped gradients can have; it is reached if the gradients of all
    records agree. Hence the ratios are lower bounds: they compare settings, they do not predict accuracy.

    Guarantee: none is needed, as no record's values are read. Each row's noise is what PrivateSGD adds by default with
    these settings, sized by the same accountant.

    Args:
        model: the model, or the number of trained parameters.
        data: the data set, or the number of records, which is public.
        budget: the guarantee for the whole training.
        batch_sizes: expected sizes of a batch, one or several.
        epochs: one or several.
        clip: clips, one or several.
        gradient_norm: the usual norm of a record's gradient, from public data; a clip above it adds noise without
            adding signal. By default, every gradient is assumed to reach the clip.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import plan
        >>> found = plan(10_000, 60_000, Budget(3.0, 1e-5), batch_sizes=[256, 1024], epochs=10)
        >>> [(row.batch_size, round(row.noise_multiplier, 2)) for row in found]
        [(256, 0.69), (1024, 0.93)]
    """
    checked_budget(budget).with_delta("a training")
    records = _check.count("data", data) if isinstance(data, int) else count_records(data)
    if isinstance(model, nn.Module):
        model = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = _check.count("model", model)
    norm = math.inf if gradient_norm is None else _check.length("gradient_norm", gradient_norm)
    sizes = [_check.count("batch_sizes", size) for size in _several("batch_sizes", batch_sizes)]
    if not max(sizes) <= records:
        raise InvalidInput(f"batch_sizes must be at most the number of records, {records}, got {max(sizes)}")
    lengths = [_check.count("epochs", length) for length in _several("epochs", epochs)]
    clips = [_check.length("clip", bound) for bound in _several("clip", clip)]
    rows = []
    for size, length in itertools.product(sizes, lengths):
        steps = length * math.ceil(records / size)
        change = Frobenius(largest_change(1.0, records))
        law = propose("analytic", [(parameters,)], change)
        multiplier = sized_together(law, change, budget, steps, size / records).law.root_mean_square
        for bound in clips:
            ratio = multiplier * bound / size * math.sqrt(parameters) / min(bound, norm)
            rows.append(
                PlanRow(
                    batch_size=size,
                    epochs=length,
                    steps=steps,
                    clip=bound,
                    noise_multiplier=multiplier,
                    noise_std=multiplier * bound / size,
                    noise_to_signal=ratio,
                    overall=ratio / math.sqrt(steps),
                )
            )
    return TrainingPlan(records=records, parameters=parameters, budget=budget, rows=tuple(rows))


def _several(name: str, values: Any) -> list[Any]:
    found = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    if not found:
        raise InvalidInput(f"{name} must hold at least one number, got none")
    return found
