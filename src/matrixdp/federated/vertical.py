"""Vertical federated learning on Flower: participants with different attributes of the same records.

    plan = SplitPlan(records=32561, epochs=2, batch_size=1024, budget=Budget(8.0, 1e-5))
    client = vertical.client_app(network, data, plan=plan, participants=2, folder=folder)
    server = vertical.server_app(top, labels, plan=plan, participants=2, evaluate=accuracy)

Put both into a module and start it by `flwr run`.
The server has the labels and the top network. It requests the features of one batch after the other, each time with the
gradient of the previous batch. If a participant is missing, the run ends and reports why. With real SuperNodes, Flower
starts a process for every message, so use few, large batches. At a small epsilon, release few features in few epochs.
By default a linear discriminant, corrected for the known noise, makes the predictions instead of the top network.

A participant sends noisy features or declines, and nothing else; with unit "record" also features of public records.
Timing is not hidden. The participant must trust the code of the app, which Flower delivers from the server.
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
from flwr.app import Context, MessageType
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.flower import Reply, ask, await_nodes, handler, made_once, metrics_text, request
from matrixdp.federated.participant import Arrays
from matrixdp.federated.split_learning import SplitClient, SplitPlan, SplitServer
from matrixdp.federated.split_learning.client import Features


@dataclass(frozen=True)
class Epoch:
    """The progress of a run: the number of complete epochs, the metrics, and why the run ended early."""

    number: int
    metrics: Mapping[str, float]
    ended: str = ""

    def __str__(self) -> str:
        ending = f"; the run ends here: {self.ended}" if self.ended else ""
        return f"epoch {self.number}{metrics_text(self.metrics)}{ending}"


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
        network: makes the network of the participant with this number, always the same; tanh is applied to its output.
        data: the attributes of all records, and of the public records for evaluation (or None), at the participant with
            this number, which is its `partition-id`.
        plan: the plan of server and participants.
        participants: the number of participants.
        folder: where each participant keeps its ledger, network and last reply, in a folder `participant-NUMBER`; an
            absolute path.
    """
    _check.count("participants", participants)

    def make(number: int) -> tuple[int, SplitClient, Any]:
        inputs, public = data(number)
        client = SplitClient(network(number), inputs, plan=plan, folder=Path(folder) / f"participant-{number}")
        log(INFO, "participant %s\n%s", number, client.guarantees)
        return number, client, public

    participant_of, app = made_once(participants, make), ClientApp()

    @app.train()
    @handler
    def train(context: Context, arrays: Arrays, settings: Mapping[str, Any]) -> Arrays:
        number, client, _ = participant_of(context)
        reply = client.answer(str(context.run_id), settings["step"], arrays.get("gradient"))
        return {"number": np.array(number), **reply}

    @app.evaluate()
    @handler
    def evaluate(context: Context, arrays: Arrays, settings: Mapping[str, Any]) -> Arrays:
        number, client, public = participant_of(context)
        if public is None:
            raise InvalidInput("data gave no public records to evaluate on")
        return {"number": np.array(number), "features": client.evaluate(str(context.run_id), public)}

    return app


def server_app(
    top: Callable[[], nn.Module],
    labels: Callable[[], Any],
    *,
    plan: SplitPlan,
    participants: int = 2,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    learning_rate: float = 0.1,
    discriminant: bool = True,
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
        plan: the plan of server and participants.
        participants: the number of participants.
        loss: (outputs, labels) -> the mean loss of a batch.
        learning_rate: of the top network; with 0 it keeps its initial parameters.
        discriminant: after each epoch, predict by a linear discriminant of the epoch's features, corrected for the
            known noise (`SplitServer.discriminant`). The top network then only provides the participants' gradients,
            which are standardized (`SplitServer.standardized`). If False, the top network predicts, which is required
            where labels are not classes, or noise differs between features.
        timeout: seconds to wait for the features of a batch.
        retries: how often to ask again if no reply arrived, such as from a process that was killed. A participant draws
            the answer to a step once, however often it is asked.
        wait: seconds to wait for the participants to connect.
        evaluate: metrics, from the outputs for the public records, after every epoch.
        on_epoch: called after every epoch.
        on_end: called with the network that predicts: the top network, or the last discriminant.
    """
    _check.count("participants", participants)
    if evaluate is not None and plan.unit == "participant":
        raise InvalidInput(
            "evaluate needs unit 'record': with unit 'participant' the participants' networks are not private, and "
            "their features of public records would reveal them"
        )
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server = SplitServer(top(), labels(), plan=plan, loss=loss, learning_rate=learning_rate)
        if discriminant:
            server.check_discriminant()  # before anything is spent
        connected = _Participants(grid, await_nodes(grid, participants, wait), timeout, retries)
        decides, epoch = server.network, dict[int, list[Features]]()

        def report(step: int, ended: str = "") -> None:
            nonlocal decides
            metrics: Mapping[str, float] = {}
            if discriminant and not ended:
                decides = server.discriminant(epoch)
                epoch.clear()
            if evaluate is not None and not ended:
                public = connected.features(step, [], MessageType.EVALUATE)
                metrics = evaluate(server.outputs(public, decides))
            done = Epoch(step // plan.batches, metrics, ended)
            log(ERROR if ended else INFO, "%s", done)
            if on_epoch is not None:
                on_epoch(done)

        step, gradients = 0, list[Features]()
        try:
            for step in range(plan.steps):
                features = connected.features(step, gradients)
                if step % plan.batches == 0 and step > 0:
                    report(step)
                gradients = server.learn(step, features)
                if discriminant:
                    epoch[step] = features
                    gradients = [server.standardized(gradient) for gradient in gradients]
            connected.send(plan.steps, gradients)
            report(plan.steps)
        except (_Ended, InvalidInput) as reason:
            report(step, str(reason))
        if on_end is not None:
            on_end(decides)

    return app


class _Ended(Exception):
    """A participant is missing, so the run is over; the text says which, and why."""


class _Participants:
    """The participants as the server sees them; the replies say which node has which number."""

    def __init__(self, grid: Grid, nodes: list[int], timeout: float, retries: int) -> None:
        self.grid, self.nodes, self.timeout, self.retries = grid, nodes, timeout, retries
        self.numbers: dict[int, int] = {}

    def send(self, step: int, gradients: list[Features], kind: str = MessageType.TRAIN) -> dict[int, Arrays]:
        """Sends each participant its own gradient; returns the replies by node."""
        own = {node: {"gradient": gradients[self.numbers[node]]} if gradients else {} for node in self.nodes}
        replies, missing = dict[int, Reply](), self.nodes
        for _ in range(1 + self.retries):
            contents = {node: request(own[node], {"step": step}) for node in missing}
            replies |= ask(self.grid, contents, str(step), timeout=self.timeout, kind=kind)
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

    def features(self, step: int, gradients: list[Features], kind: str = MessageType.TRAIN) -> list[Features]:
        """The features of all participants, in the order of their numbers."""
        given = self.send(step, gradients, kind)
        if not all({"number", "features"} <= set(arrays) for arrays in given.values()):
            raise _Ended(f"no features for step {step}: a participant has another plan")
        for node, arrays in given.items():
            block = arrays["features"]
            if not (
                arrays["number"].size == 1 and block.ndim == 2 and block.dtype.kind == "f" and np.isfinite(block).all()
            ):
                raise _Ended(f"node {node} sent features that are not a matrix of finite numbers")
        self.numbers = {node: int(arrays["number"].item()) for node, arrays in given.items()}
        by_number = {self.numbers[node]: arrays["features"] for node, arrays in given.items()}
        if sorted(by_number) != list(range(len(self.nodes))):
            raise _Ended(f"the participants must be numbered from 0 to {len(self.nodes) - 1}, got {sorted(by_number)}")
        return [by_number[number] for number in sorted(by_number)]
