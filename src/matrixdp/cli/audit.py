"""`matrixdp audit`: tests a mechanism's claim statistically, on drawn outputs."""

from __future__ import annotations

from typing import Annotated

import typer

from matrixdp.cli import arguments, show, specs


def audit(
    mechanism: arguments.Mechanism,
    shape: arguments.Shape,
    sensitivity: arguments.Sensitivity,
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    adjacency: arguments.Adjacency = None,
    samples: Annotated[int, typer.Option(help="How many outputs to draw for each of two neighbours.")] = 10_000,
    confidence: Annotated[float, typer.Option(help="The probability that the bounds hold.")] = 0.999999,
    method: Annotated[
        str,
        typer.Option(
            help="clopper-pearson assumes nothing; gaussian assumes Gaussian noise, with more power; or auto."
        ),
    ] = "auto",
    option: arguments.Options = None,
    json: arguments.Json = False,
) -> None:
    """Audit one mechanism: draw its noise on the worst two neighbours, and see whether the outputs refute its claim.

    Exit code 0: not rejected, these samples do not refute the claim. 1: rejected, the claim is false.

    Example: matrixdp audit r1smg --shape 10x10 --sensitivity frobenius:1 --epsilon 0.005 --delta 1e-5
    """
    from rich.progress import Progress

    from matrixdp._rounding import rounded_up
    from matrixdp.audit import audit_law
    from matrixdp.budget import Budget

    differences, budget = specs.sensitivity(sensitivity, adjacency), Budget(epsilon, delta)
    certificate = specs.certificate(mechanism, shape, differences, budget, option)
    console = show.console()
    with Progress(console=console, transient=True, disable=json or not console.is_terminal) as bar:
        task = bar.add_task("drawing", total=None)
        result = audit_law(
            certificate.law,
            differences,
            budget,
            samples=samples,
            confidence=confidence,
            method=method,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    exact = {"epsilon": certificate.epsilon(delta), "delta": certificate.delta(epsilon), "attained": certificate.exact}
    if json:
        show.document({"mechanism": mechanism, "certificate": exact, **result.to_dict()})
    else:
        show.text(f"Audit of {certificate.source}")
        least = rounded_up(exact["delta"]) if exact["delta"] >= 1e-300 else "below 1e-300"
        truth = f"epsilon {rounded_up(exact['epsilon'])} at delta {delta:g}, delta {least} at epsilon {epsilon:g}"
        claim, *found, verdict = result.lines()
        about = "" if certificate.mu is not None else ", for the ideal law"
        bound = about if certificate.exact else f"{about} (an upper bound)"
        for name, text in (("change", str(differences)), claim, ("truth", truth + bound), *found):
            show.text(f"  {name:<10} {text}")
        style = "bold red" if result.rejected else "green"
        show.text(f"  {verdict[0]:<10} {verdict[1]}", style)
    if result.rejected:
        raise typer.Exit(1)
