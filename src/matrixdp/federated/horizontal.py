"""Horizontal federated learning on Flower: clients with the same attributes and different records.

    client = horizontal.client_app(model, data, clients=5, training=training, privacy=privacy, folder=folder)
    server = horizontal.server_app(model, clients=5, rounds=20, evaluate=accuracy)

Put both into a module and start it by `flwr run`; examples/federated_adult.py simulates both. Any strategy of
Flower works in place of `server_app`, as the updates are private when they are sent:

    arrays = ArrayRecord({"parameters": Array(flat(model()).numpy())})
    CheckedStrategy(FedAdam()).start(grid, arrays, num_rounds=20)       # in the main function of a ServerApp

A client sends its noisy update or declines, and nothing else: no loss, no number of records, no error text.
Timing is not hidden. The client must trust the code of the app, which Flower delivers from the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from matrixdp import _extras

_extras.require("federated", "flwr")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from torch import nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.client import Client, UploadPrivacy, Vector, average
from matrixdp.federated.flower import (
    Layout,
    Refused,
    Reply,
    WrappedStrategy,
    ask,
    await_nodes,
    handler,
    made_once,
    metrics_text,
    numbers,
    private_reply,
    report_round,
    request,
)
from matrixdp.federated.local_training import LocalTraining
from matrixdp.federated.participant import Arrays
from matrixdp.federated.tensors import check_model, flat, load

ROUND = "server-round"  # as Flower's strategies name it


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
        training: the local training of a round.
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
        parameters = arrays["parameters"]
        return {"parameters": parameters + client_of(context).upload(str(context.run_id), settings[ROUND], parameters)}

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
        timeout: seconds to wait for the updates of a round. A client that did not reply is still asked in later rounds,
            but no round waits for it until it has replied again.
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
            sent = dict.fromkeys(nodes, request({"parameters": parameters}, {ROUND: number}))
            replies = ask(grid, sent, str(number), timeout=timeout, enough=min_replies, patience=patience, late=silent)
            updates, declined = _usable(replies, parameters)
            parameters = average(parameters, updates, min_replies=min_replies)
            load(network, torch.from_numpy(parameters))
            silent = tuple(node for node in nodes if node not in replies)
            with torch.no_grad():
                metrics = {} if evaluate is None else dict(evaluate(network.eval()))
            report_round(Round(number, len(updates), declined, silent, metrics), declined, "node", on_round)
            if len(updates) < min_replies:
                log(WARNING, "  fewer than %s updates: the model is unchanged", min_replies)
        if on_end is not None:
            on_end(network)

    return app


def _usable(replies: Mapping[int, Reply], parameters: Vector) -> tuple[list[Vector], dict[int, str]]:
    """The usable updates, and by node why others are not."""
    updates, declined, layout = [], {}, Layout(ArrayRecord({"parameters": Array(parameters)}))
    for node, reply in replies.items():
        try:
            if reply.arrays is None:
                raise Refused(reply.reason)
            updates.append(layout.update(reply.arrays).astype(np.float32))
        except Refused as reason:
            declined[node] = str(reason)
    return updates, declined


class CheckedStrategy(WrappedStrategy):
    """A Flower strategy for clients whose replies are private: those of `client_app`, or of any app with local noise.

    Unusable replies are left out and reported: errors, other shapes, numbers that are not finite. Weights are equal;
    metrics are neither requested nor used, as they would not be private. It adds no noise and claims no privacy. One
    client can still move the mean arbitrarily; wrap FedMedian or FedTrimmedAvg where that matters.

    Args:
        strategy: a Flower strategy, such as FedAvg or FedAdam.
        on_round: called with a Round after every round.
    """

    def __init__(self, strategy: Strategy, *, on_round: Callable[[Round], None] | None = None) -> None:
        super().__init__(strategy)
        self._on_round, self._asked = on_round, list[int]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the wrapped strategy."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._layout, self._asked = Layout(arrays), [message.metadata.dst_node_id for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's arrays, from the replies that can be used."""
        usable, declined = list[Message](), dict[int, str]()
        for reply in replies:
            arrays = self._read(reply, self._checked, declined, reply.metadata.src_node_id)
            if arrays is not None:
                reply.content = private_reply(self.strategy, arrays)
                usable.append(reply)
        answered = {reply.metadata.src_node_id for reply in usable} | set(declined)
        done = Round(server_round, len(usable), declined, tuple(n for n in self._asked if n not in answered), {})
        report_round(done, declined, "node", self._on_round)
        return self._moved(server_round, usable)

    def _checked(self, reply: Message) -> ArrayRecord:
        arrays = Layout.arrays_of(reply)
        self._layout.update(numbers(arrays))
        return arrays
