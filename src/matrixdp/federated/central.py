"""Central differential privacy for any Flower strategy and any ClientApp: a wrapper for one, a mod for the other.

    privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), rounds=50, clients=1000, clip=0.5, sampling_rate=0.1)
    client = ClientApp(mods=[central.clipping_mod(privacy)])
    strategy = central.PrivateStrategy(FedAdam(), privacy, ledger=ledger)
    strategy.start(grid, initial_arrays, num_rounds=50, evaluate_fn=accuracy)      # in the main function of a ServerApp

The wrapper chooses the clients of a round, clips their updates, and adds noise to the sum; see `trusted_server` for the
guarantee and who is trusted. The wrapped strategy sees one reply per round, the private mean, so whatever it does with
it is post-processing. Its own choice of clients is not used. Nor are weights and metrics of clients, which would reveal
private data: use `evaluate_fn`, with public records.

With unit "record", clients send gradients: use `gradient_app` as the ClientApp, and one round per step. The private
mean is then minus the noisy mean gradient: FedAvgM(server_learning_rate=2.0) makes it a step of SGD at rate 2, FedAdam
one of Adam.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, cast

from matrixdp import _extras

_extras.require("federated", "flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from matrixdp import _check
from matrixdp._check import Array as Numbers
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.federated.central_privacy import CentralGuarantees, CentralPrivacy
from matrixdp.federated.flower import (
    FAILED,
    Layout,
    Refused,
    WrappedStrategy,
    handler,
    made_once,
    numbers,
    private_reply,
    report_round,
)
from matrixdp.federated.gradient_client import GradientClient
from matrixdp.federated.local_training import cross_entropy
from matrixdp.federated.participant import Arrays
from matrixdp.federated.trusted_server import TrustedServer

WHO, ROUND, CLIENT = "matrixdp-who", "matrixdp-round", "matrixdp-client"


@dataclass(frozen=True)
class CentralRound:
    """A round as the server sees it; not private, so not to be published.

    Attributes:
        number: from 1.
        asked: the clients that were asked.
        updates: how many updates were used.
        refused: by client, why an update was not used.
        clipped: the clients whose updates were too long; with the mod no update is.
    """

    number: int
    asked: tuple[int, ...]
    updates: int
    refused: Mapping[int, str]
    clipped: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"round {self.number}: {len(self.asked)} clients asked, {self.updates} updates used, "
            f"{len(self.refused)} refused, {len(self.clipped)} clipped by the server"
        )


class PrivateStrategy(WrappedStrategy):
    """A Flower strategy that gets the private mean of each round in place of the clients' replies.

    Guarantee: that of `privacy`, for the models of all rounds, whatever the wrapped strategy computes from the means.
    That strategy must not contact clients itself through the grid. Each object is for one run.

    Args:
        strategy: a Flower strategy, such as FedAvg or FedAdam, with fraction_train=1.
        privacy: the agreed settings.
        ledger: charged for all rounds, before the first client is asked.
        note: a note for the ledger; never data.
        series: the name of the run in the ledger, for a server that may be started again; see `TrustedServer`.
        state: the same for separated rounds: a secret file on this machine.
        wait: seconds to wait for new nodes to say which client they are.
        on_round: called with a CentralRound after every round.
    """

    def __init__(
        self,
        strategy: Strategy,
        privacy: CentralPrivacy,
        *,
        ledger: Any = None,
        note: str = "federated rounds",
        series: str | None = None,
        state: Any = None,
        wait: float = 60.0,
        on_round: Callable[[CentralRound], None] | None = None,
    ) -> None:
        super().__init__(strategy)
        if getattr(strategy, "fraction_train", 1.0) != 1.0:
            raise InvalidInput("strategy must have fraction_train=1.0: the wrapper samples, by privacy.sampling_rate")
        self.privacy, self._charged = privacy, {"ledger": ledger, "note": note, "series": series, "state": state}
        self._wait, self._on_round = _check.positive("wait", wait), on_round
        self._server: TrustedServer | None = None
        self._nodes: dict[int, int] = {}  # the node of each client
        self._asked: dict[int, int] = {}  # the client of each node that was asked
        self._token, self._message = "", cast(Message | None, None)

    @property
    def guarantees(self) -> CentralGuarantees:
        """The guarantee of all rounds together; known once they have begun."""
        if self._server is None:
            raise InvalidInput("the guarantees are known when the rounds have begun")
        return self._server.guarantees

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *arguments: Any, **settings: Any
    ) -> Result:
        """Runs the strategy, as Flower's `start`; refuses too many rounds before any client is asked."""
        if not _check.count("num_rounds", num_rounds) <= self.privacy.rounds:
            raise InvalidInput(f"num_rounds must be at most the {self.privacy.rounds} planned ones, got {num_rounds}")
        if self._server is not None:
            raise InvalidInput("this strategy was started before, and its rounds are paid for once; make another")
        server = self._made(Layout(initial_arrays))
        left = self.privacy.rounds - server.round
        if not num_rounds <= left:  # now, not when they are used up, as the model of that run would be lost
            raise BudgetExceeded(
                f"num_rounds must be at most {left}, the rounds left of {self.privacy.rounds}, got {num_rounds}"
            )
        self._server = server
        return super().start(grid, initial_arrays, num_rounds, *arguments, **settings)

    def _made(self, layout: Layout) -> TrustedServer:
        return TrustedServer(self.privacy, layout.size, **self._charged)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the wrapped strategy to the clients that are asked."""
        self._layout = Layout(arrays)
        if self._server is None:
            self._server = self._made(self._layout)
        self._token = config[ROUND] = f"{server_round}-{secrets.token_hex(16)}"
        made = {m.metadata.dst_node_id: m for m in self.strategy.configure_train(server_round, arrays, config, grid)}
        self._message = next(iter(made.values()), None)
        self._introduce(grid, set(made))
        available = {client: node for client, node in self._nodes.items() if node in made}
        self._asked = {available[client]: client for client in self._server.choose(available)}
        return [made[node] for node in self._asked]

    def _introduce(self, grid: Grid, nodes: set[int]) -> None:
        """Asks new nodes which client they are; a client's node is the last one that named it."""
        new = nodes - set(self._nodes.values())
        content = RecordDict({"config": ConfigRecord({WHO: 1})})
        questions = [Message(content, node, MessageType.TRAIN, ttl=self._wait) for node in sorted(new)]
        for reply in grid.send_and_receive(questions, timeout=self._wait) if questions else []:
            try:
                (metrics,) = reply.content.metric_records.values()
                self._nodes[cast(int, metrics[CLIENT])] = reply.metadata.src_node_id
            except Exception as error:  # one client must not end the run for all
                log(WARNING, "node %s is without the mod (%s)", reply.metadata.src_node_id, type(error).__name__)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's arrays, from the private mean; there are no metrics."""
        if self._server is None or self._message is None:
            raise InvalidInput("strategy has addressed no node, so there is no round to aggregate")
        updates, refused = dict[int, Numbers](), dict[int, str]()
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id, -1)
            if client in updates or client in refused:
                refused[client] = "has answered already"
                continue
            update = self._read(reply, self._update, refused, client)
            if update is not None:
                updates[client] = update
        mean, more = self._server.finish(updates)
        used = [client for client in updates if client not in more]
        refused |= more
        # a float32 sum of model and clipped update rounds
        longest = self.privacy.largest * (1 + 1e-3) + 1e-5 * self._layout.norm
        clipped = tuple(client for client in used if _check.norm(updates[client]) > longest)
        done = CentralRound(server_round, tuple(self._asked.values()), len(used), refused, clipped)
        report_round(done, refused, "client", self._on_round)
        content = private_reply(self.strategy, self._layout.moved(mean))
        return self._moved(server_round, [Message(content, reply_to=self._message)])

    def _update(self, reply: Message) -> Numbers:
        arrays = numbers(Layout.arrays_of(reply))
        if [config[ROUND] for config in reply.content.config_records.values() if ROUND in config] != [self._token]:
            raise Refused("sent a reply to another round, or is without the mod")
        return self._layout.flat(arrays) if self.privacy.unit == "record" else self._layout.difference(arrays)

    def summary(self) -> None:
        """Logs the settings."""
        log(INFO, "\t├──> %s", self.privacy)
        super().summary()


def gradient_app(
    model: Callable[[], nn.Module],
    data: Callable[[int], tuple[Any, Any]],
    *,
    privacy: CentralPrivacy,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> ClientApp:
    """A Flower app that answers each round with the sum of the clipped gradients of a secret sample of its records.

    Args:
        model: makes the network. The server sends its parameters as one array, "parameters" (`tensors.flat`).
        data: the inputs and labels of the client with this number, which is its `partition-id`.
        privacy: the agreed settings, with unit "record".
        loss: (outputs, labels) -> one value per record.
    """

    def make(number: int) -> GradientClient:
        return GradientClient(model(), *data(number), privacy=privacy, loss=loss)

    client_of, app = made_once(privacy.clients, make), ClientApp(mods=[clipping_mod(privacy)])

    @app.train()
    @handler
    def train(context: Context, arrays: Arrays, settings: Mapping[str, Any]) -> Arrays:
        return {"parameters": client_of(context).update(arrays["parameters"])}

    return app


def clipping_mod(privacy: CentralPrivacy) -> Mod:
    """A mod for a ClientApp: it clips the update, adds the client's number, and drops the rest of the reply.

    With unit "record", the app itself clips, and the arrays are sent unchanged. With unit "client" the server clips
    again, and does not rely on the mod. The client's number is `partition-id` in its own settings (--node-config).
    Errors are sent without their text, and metrics are not sent, because they would reveal private data.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            number = _check.number("partition-id", context.node_config.get("partition-id"))
            metrics = MetricRecord({CLIENT: int(number), "num-examples": 1})
            configs = list(message.content.config_records.values())
            if any(WHO in config for config in configs):
                return Message(RecordDict({"metrics": metrics}), reply_to=message)
            (token,) = [config[ROUND] for config in configs if ROUND in config]
            (sent,) = message.content.array_records.values()
            layout = Layout(ArrayRecord({name: Array(array.numpy().copy()) for name, array in sent.items()}))
            reply = call_next(message, context)
            ((key, returned),) = reply.content.array_records.items()
            clips = privacy.unit == "client"
            records = {key: layout.moved(privacy.clipped(layout.difference(numbers(returned)))) if clips else returned}
            return Message(
                RecordDict({**records, "metrics": metrics, "config": ConfigRecord({ROUND: token})}), reply_to=message
            )
        except Exception as error:  # its text may quote a record
            log(WARNING, "failed, and nothing was sent: %s", _check.origin(error))
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, FAILED), reply_to=message)

    return mod
