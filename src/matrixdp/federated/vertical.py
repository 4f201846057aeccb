"""Vertical federated learning on Flower: participants with different attributes of the same records.

    plan = SplitPlan(records=32561, epochs=5, batch_size=512, budget=Budget(3.0, 1e-5))
    client = vertical.client_app(network, data, plan=plan, participants=2, folder=folder)
    server = vertical.server_app(top, labels, plan=plan, participants=2, evaluate=accuracy)
    flwr.simulation.run_simulation(server, client, num_supernodes=2)

The server has the labels and the top network. It asks for the features of one batch after the other and sends along the
gradient of the batch before. Without one of the participants it cannot go on: then the run ends, and says why. Between
real SuperNodes, Flower starts a process for every message, so take few, large batches.

A participant sends noisy features or declines, and nothing else; with unit "record" also features of public records.
How long it takes is not hidden. It has to trust the code of the app, which Flower brings from the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

from matrixdp import _extras

_extras.require("federated", "flwr")

import numpy as np
import numpy.typing as npt
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.messages import Reply, answered, ask, await_nodes, partition_of, request, unpack
from matrixdp.federated.participant import Arrays
from matrixdp.federated.split import Half, SplitPlan, Top


@dataclass(frozen=True)
class Epoch:
    """How far a run has come: the epochs that are complete, what the evaluation found, and why the run ended early."""

    number: int
    metrics: Mapping[str, float]
    ended: str = ""

    def __str__(self) -> str:
        metrics = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        return f"epoch {self.number}{metrics}" + (f"; the run ends here: {self.ended}" if self.ended else "")


def client_app(
    network: Callable[[int], nn.Module],
    data: Callable[[int], tuple[Any, Any]],
    *,
    plan: SplitPlan,
    participants: int = 2,
    folder: str | os.PathLike[str],
) -> ClientApp:
    """A Flower app that releases a participant's features.

    Args:
        network: makes the network of the participant with this number, always the same one; tanh is applied to it.
        data: the attributes that this participant has, of all records, and of the public records of the evaluation (or
            None); the number is its `partition-id`.
        plan: what all have agreed on.
        participants: how many there are.
        folder: where each participant keeps its ledger, network and last reply, in a folder `participant-NUMBER`; an
            absolute path.
    """
    _check.count("participants", participants)
    place = Path(folder)
    known: dict[int, tuple[Half, Any]] = {}
    app = ClientApp()

    def half(context: Context) -> tuple[int, Half, Any]:
        number = partition_of(context, participants)
        if number not in known:
            inputs, public = data(number)
            made = Half(network(number), inputs, plan=plan, folder=place / f"participant-{number}")
            log(INFO, "participant %s\n%s", number, made.guarantees)
            known[number] = made, public
        return number, *known[number]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def answer() -> Arrays:
            number, participant, _ = half(context)
            arrays, settings = unpack(message)
            reply = participant.answer(str(context.run_id), settings["step"], arrays.get("gradient"))
            return {"number": np.array(number), **reply}

        return answered(message, answer)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        def answer() -> Arrays:
            number, participant, public = half(context)
            if public is None:
                raise InvalidInput("data gave no public records to evaluate on")
            return {"number": np.array(number), "features": participant.evaluate(str(context.run_id), public)}

        return answered(message, answer)

    return app


def server_app(
    top: Callable[[], nn.Module],
    labels: Callable[[], Any],
    *,
    plan: SplitPlan,
    participants: int = 2,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    learning_rate: float = 0.1,
    timeout: float = 120.0,
    retries: int = 1,
    wait: float = 120.0,
    evaluate: Callable[[Tensor], Mapping[str, float]] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    on_end: Callable[[nn.Module], None] | None = None,
) -> ServerApp:
    """A Flower app that joins the noisy features and trains the top network.

    Args:
        top: makes the top network, for the features of all participants, joined in the order of their numbers.
        labels: the labels of all records.
        plan: what all have agreed on.
        participants: how many there are.
        loss: (outputs, labels) -> the mean loss of a batch.
        learning_rate: of the top network.
        timeout: seconds to wait for the features of a batch.
        retries: how often to ask again where no reply came, such as from a process that was killed; the answer to a
            step is made once, however often it is asked for.
        wait: seconds to wait for the participants to connect.
        evaluate: metrics, from the outputs for the public records, after every epoch.
        on_epoch: told of every epoch.
        on_end: given the top network.
    """
    _check.count("participants", participants)
    if evaluate is not None and plan.unit == "participant":
        raise InvalidInput(
            "evaluate needs unit 'record': with unit 'participant' the networks of the participants are not private, "
            "and their features of public records would give them away"
        )
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server = Top(top(), labels(), plan=plan, loss=loss, learning_rate=learning_rate)
        link = _Link(grid, await_nodes(grid, participants, wait), timeout, retries)
        gradients: list[Any] = []

        def report(epoch: int, metrics: Mapping[str, float], ended: str = "") -> None:
            done = Epoch(epoch, metrics, ended)
            log(ERROR if ended else INFO, "%s", done)
            if on_epoch is not None:
                on_epoch(done)

        step = 0
        try:
            for step in range(plan.steps):
                features = link.features(step, gradients)
                if step % plan.batches == 0 and step > 0:
                    report(step // plan.batches, metrics_of(link, step, server))
                gradients = server.learn(step, features)
            link.send(plan.steps, gradients)
            report(plan.epochs, metrics_of(link, plan.steps, server))
        except (_Ended, InvalidInput) as reason:
            report(step // plan.batches, {}, str(reason))
        if on_end is not None:
            on_end(server.network)

    def metrics_of(link: _Link, step: int, server: Top) -> Mapping[str, float]:
        if evaluate is None:
            return {}
        return evaluate(server.outputs(link.features(step, [], MessageType.EVALUATE)))

    return app


class _Ended(Exception):
    """A participant is missing, so the run is over; the text says which, and why."""


class _Link:
    """The way to the participants: which node is which, learned from the first replies."""

    def __init__(self, grid: Grid, nodes: list[int], timeout: float, retries: int) -> None:
        self.grid, self.nodes, self.timeout, self.retries = grid, nodes, timeout, retries
        self.numbers: dict[int, int] = {}

    def send(self, step: int, gradients: list[Any], kind: str = MessageType.TRAIN) -> dict[int, Arrays]:
        """Sends each participant its own gradient; the replies by node."""
        replies: dict[int, Reply] = {}
        missing = self.nodes
        for _ in range(1 + self.retries):
            contents = {
                node: request({"gradient": gradients[self.numbers[node]]} if gradients else {}, step=step)
                for node in missing
            }
            replies |= ask(self.grid, contents, timeout=self.timeout, group=str(step), kind=kind)
            missing = [node for node in self.nodes if node not in replies or replies[node].lost]
            if not missing:
                break
        given: dict[int, Arrays] = {}
        for node in self.nodes:
            if node not in replies:
                raise _Ended(f"no reply from node {node}")
            arrays = replies[node].arrays
            if arrays is None:
                verb = "failed" if replies[node].lost else "declined"
                raise _Ended(f"node {node} {verb}: {replies[node].reason}")
            given[node] = arrays
        return given

    def features(self, step: int, gradients: list[Any], kind: str = MessageType.TRAIN) -> list[Any]:
        """The features of all participants, in the order of their numbers."""
        given = self.send(step, gradients, kind)
        if not all({"number", "features"} <= set(arrays) for arrays in given.values()):
            raise _Ended(f"no features for step {step}: a participant has another plan")
        if not all(_is_block(arrays["features"]) and arrays["number"].size == 1 for arrays in given.values()):
            raise _Ended("features that are no matrix of finite numbers")
        self.numbers = {node: int(arrays["number"].item()) for node, arrays in given.items()}
        blocks = {self.numbers[node]: arrays["features"] for node, arrays in given.items()}
        if sorted(blocks) != list(range(len(self.nodes))):
            raise _Ended(f"the participants must be numbered from 0 to {len(self.nodes) - 1}, got {sorted(blocks)}")
        return [blocks[number] for number in sorted(blocks)]


def _is_block(features: npt.NDArray[Any]) -> bool:
    return features.ndim == 2 and features.dtype.kind == "f" and bool(np.all(np.isfinite(features)))
