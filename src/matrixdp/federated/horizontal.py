"""Horizontal federated learning on Flower: clients with the same attributes and different records.

    client = horizontal.client_app(model, data, clients=5, training=training, privacy=privacy, folder=folder)
    server = horizontal.server_app(model, clients=5, rounds=20, evaluate=accuracy)
    flwr.simulation.run_simulation(server, client, num_supernodes=5)

A client sends its noisy update or declines, and nothing else: no loss, no number of records, no text of an error. How
long it takes is not hidden. It has to trust the code of the app, which Flower brings from the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from matrixdp import _extras

_extras.require("federated", "flwr")

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.client import Client, Vector, average
from matrixdp.federated.messages import Reply, answered, ask, await_nodes, partition_of, request, unpack
from matrixdp.federated.participant import Arrays
from matrixdp.federated.record_level import RecordLevel
from matrixdp.federated.updates import ClientLevel, LocalTraining, check_model, flat, load

Model = Callable[[], nn.Module]
Data = Callable[[int], tuple[Any, Any]]


@dataclass(frozen=True)
class Round:
    """What happened in a round: how many updates came in, why others did not, and what the evaluation found."""

    number: int
    updates: int
    declined: Mapping[int, str]
    silent: tuple[int, ...]
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        metrics = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        missing = f", {len(self.declined)} declined, {len(self.silent)} silent" if self.declined or self.silent else ""
        return f"round {self.number}: {self.updates} updates{missing}{metrics}"


def client_app(
    model: Model,
    data: Data,
    *,
    clients: int,
    training: LocalTraining,
    privacy: ClientLevel | RecordLevel,
    folder: str | os.PathLike[str],
) -> ClientApp:
    """A Flower app that trains on a client's records and uploads what `privacy` allows.

    Args:
        model: makes the network; the same one as the server's.
        data: the records and labels of the client with this number, which is its `partition-id`.
        clients: how many clients there are.
        training: what a client does in a round.
        privacy: what it uploads, and under which budget.
        folder: where each client keeps its ledger and last replies, in a folder `client-NUMBER`; an absolute path.
    """
    _check.count("clients", clients)
    place = Path(folder)
    privacy.check(model())  # what is wrong shows here already, not on the clients alone
    known: dict[int, Client] = {}
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def answer() -> Arrays:
            number = partition_of(context, clients)
            if number not in known:
                inputs, labels = data(number)
                known[number] = Client(
                    model(), inputs, labels, training=training, privacy=privacy, folder=place / f"client-{number}"
                )
                log(INFO, "client %s\n%s", number, known[number].guarantees)
            arrays, settings = unpack(message)
            return {"update": known[number].upload(str(context.run_id), settings["round"], arrays["parameters"])}

        return answered(message, answer)

    return app


def server_app(
    model: Model,
    *,
    clients: int,
    rounds: int,
    min_replies: int = 1,
    timeout: float = 600.0,
    patience: float | None = None,
    wait: float = 120.0,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_end: Callable[[nn.Module], None] | None = None,
) -> ServerApp:
    """A Flower app that averages the noisy updates, with equal weights, and adds them to the global model.

    Args:
        model: makes the network, with the parameters to start from.
        clients: how many clients there are.
        rounds: how many rounds to make.
        min_replies: with fewer updates than these, a round leaves the model as it is.
        timeout: seconds to wait for the updates of a round. A client that was silent in one round is asked again in
            the next, but no longer waited for until it answers.
        patience: seconds to wait for the others once `min_replies` updates are in; None for as long as there is.
        wait: seconds to wait for the clients to connect.
        evaluate: metrics of the global model, on public records.
        on_round: told of every round.
        on_end: given the final model.
    """
    for name, value in (("clients", clients), ("rounds", rounds), ("min_replies", min_replies)):
        _check.count(name, value)
    if min_replies > clients:
        raise InvalidInput(f"min_replies must be at most the number of clients ({clients}), got {min_replies}")
    for name, seconds in (("timeout", timeout), ("wait", wait), ("patience", patience)):
        if seconds is not None:
            _check.positive(name, seconds)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        network = model()
        check_model(network)
        nodes = await_nodes(grid, clients, wait)
        parameters: Vector = flat(network).cpu().numpy()
        silent: tuple[int, ...] = ()
        for number in range(1, rounds + 1):
            nodes = sorted(grid.get_node_ids()) or nodes  # a client that has started again is a new node
            sent = request({"parameters": parameters}, round=number)
            replies = ask(
                grid,
                dict.fromkeys(nodes, sent),
                timeout=timeout,
                enough=min_replies,
                patience=patience,
                late=silent,
                group=str(number),
            )
            updates, declined = _sorted(replies, parameters.shape)
            parameters = average(parameters, updates, min_replies=min_replies)
            load(network, torch.from_numpy(parameters))
            silent = tuple(node for node in nodes if node not in replies)
            with torch.no_grad():
                metrics = {} if evaluate is None else dict(evaluate(network.eval()))
            done = Round(number, len(updates), declined, silent, metrics)
            log(INFO, "%s", done)
            for node, reason in declined.items():
                log(WARNING, "  node %s: %s", node, reason)
            if len(updates) < min_replies:
                log(WARNING, "  fewer than %s updates: the model stays as it was", min_replies)
            if on_round is not None:
                on_round(done)
        if on_end is not None:
            on_end(network)

    return app


def _sorted(replies: Mapping[int, Reply], shape: tuple[int, ...]) -> tuple[list[Vector], dict[int, str]]:
    """The updates that can be used, and why others cannot."""
    updates, declined = [], {}
    for node, reply in replies.items():
        update = None if reply.arrays is None else reply.arrays.get("update")
        if update is None:
            declined[node] = reply.reason or "a reply without an update"
        elif update.dtype.kind != "f" or update.shape != shape or not np.all(np.isfinite(update)):
            declined[node] = f"an update of shape {update.shape} where it should be {shape}, or not of finite numbers"
        else:
            updates.append(np.asarray(update, dtype=np.float32))
    return updates, declined
