"""Horizontal federated learning on Flower: clients with the same attributes and different records.

    client = horizontal.client_app(model, data, clients=5, training=training, privacy=privacy, folder=folder)
    server = horizontal.server_app(model, clients=5, rounds=20, evaluate=accuracy)
    flwr.simulation.run_simulation(server, client, num_supernodes=5)

A client sends its noisy update or declines, and nothing else: no loss, no number of records, no text of an error.
Timing is not hidden. The client must trust the code of the app, which Flower delivers from the server.
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
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.client import Client, UploadPrivacy, Vector, average
from matrixdp.federated.flower import Reply, ask, await_nodes, handler, made_once, metrics_text, request
from matrixdp.federated.local_training import LocalTraining
from matrixdp.federated.participant import Arrays
from matrixdp.federated.tensors import check_model, flat, load


@dataclass(frozen=True)
class Round:
    """A round: the number of updates, why clients declined, who did not reply, and the metrics of the model."""

    number: int
    updates: int
    declined: Mapping[int, str]
    silent: tuple[int, ...]
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        missing = f", {len(self.declined)} declined, {len(self.silent)} silent" if self.declined or self.silent else ""
        return f"round {self.number}: {self.updates} updates{missing}{metrics_text(self.metrics)}"


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[int], tuple[Any, Any]],
    *,
    clients: int,
    training: LocalTraining,
    privacy: UploadPrivacy,
    folder: str | os.PathLike[str],
) -> ClientApp:
    """A Flower app that trains on a client's records and uploads what `privacy` allows.

    Args:
        model: makes the network; the same one as the server's.
        data: the inputs and labels of the client with this number, which is its `partition-id`.
        clients: the number of clients.
        training: what a client does in a round.
        privacy: ClientLevel or RecordLevel, with the budget of each client.
        folder: where each client keeps its ledger and last replies, in a folder `client-NUMBER`; an absolute path.
    """
    _check.count("clients", clients)
    privacy.check(model())  # errors in the settings show here, not on the clients alone

    def make(number: int) -> Client:
        own = Path(folder) / f"client-{number}"
        client = Client(model(), *data(number), training=training, privacy=privacy, folder=own)
        log(INFO, "client %s\n%s", number, client.guarantees)
        return client

    client_of, app = made_once(clients, make), ClientApp()

    @app.train()
    @handler
    def train(context: Context, arrays: Arrays, settings: Mapping[str, Any]) -> Arrays:
        update = client_of(context).upload(str(context.run_id), settings["round"], arrays["parameters"])
        return {"update": update}

    return app


def server_app(
    model: Callable[[], nn.Module],
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
        model: makes the network, with the initial parameters.
        clients: the number of clients.
        rounds: the number of rounds.
        min_replies: with fewer updates than this, a round leaves the model unchanged.
        timeout: seconds to wait for the updates of a round. A client that did not reply in one round is asked again
            in the next, but not waited for until it replies.
        patience: seconds to wait for the others after `min_replies` updates; None for the whole timeout.
        wait: seconds to wait for the clients to connect.
        evaluate: metrics of the global model, on public records.
        on_round: called after every round.
        on_end: called with the final model.
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
            nodes = sorted(grid.get_node_ids()) or nodes  # a client that was restarted is a new node
            sent = dict.fromkeys(nodes, request({"parameters": parameters}, round=number))
            replies = ask(grid, sent, str(number), timeout=timeout, enough=min_replies, patience=patience, late=silent)
            updates, declined = _usable(replies, parameters.shape)
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
                log(WARNING, "  fewer than %s updates: the model is unchanged", min_replies)
            if on_round is not None:
                on_round(done)
        if on_end is not None:
            on_end(network)

    return app


def _usable(replies: Mapping[int, Reply], shape: tuple[int, ...]) -> tuple[list[Vector], dict[int, str]]:
    """The updates that can be used, and why others cannot."""
    updates, declined = [], {}
    for node, reply in replies.items():
        update = None if reply.arrays is None else reply.arrays.get("update")
        if update is None:
            declined[node] = reply.reason or "a reply without an update"
        elif update.dtype.kind != "f" or update.shape != shape or not np.all(np.isfinite(update)):
            declined[node] = f"an update of shape {update.shape} instead of {shape}, or not of finite numbers"
        else:
            updates.append(np.asarray(update, dtype=np.float32))
    return updates, declined
