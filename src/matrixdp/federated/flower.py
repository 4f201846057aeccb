"""What the Flower apps share: requests, replies without private text, arrays, and making participants once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from logging import ERROR, INFO, WARNING
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from matrixdp import _check
from matrixdp._check import Array as Numbers
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Arrays, Declined

POLL = 0.1  # seconds between two polls for replies
FAILED = "an error, see the log of this participant"
DECLINED = int(ErrorCode.MOD_FAILED_PRECONDITION)

T = TypeVar("T")
Answer = Callable[[Context, Arrays, Mapping[str, Any]], Arrays]


def made_once(count: int, make: Callable[[int], T]) -> Callable[[Context], T]:
    """Maps a context to its participant, one of `count`; each process makes it once, at the first request.

    Its number is in the participant's own settings (--node-config), which the server cannot change.
    """
    made: dict[int, T] = {}

    def participant(context: Context) -> T:
        number, total = context.node_config.get("partition-id"), context.node_config.get("num-partitions", count)
        if not (isinstance(number, int) and 0 <= number < count and total == count):
            raise InvalidInput(
                f"node-config must have partition-id from 0 to {count - 1} and num-partitions={count}, "
                f"got partition-id={number!r}, num-partitions={total!r}"
            )
        if number not in made:
            made[number] = make(number)
        return made[number]

    return participant


def handler(answer: Answer) -> Callable[[Message, Context], Message]:
    """Flower's handler of a request, from a function of context, arrays and settings.

    Flower sends the text of an exception to the server, so no exception leaves the handler. A reply has the form that
    Flower's strategies expect, with the same weight for all; a refusal is an error, which they skip.
    """

    def handle(message: Message, context: Context) -> Message:
        try:
            (settings,) = message.content.config_records.values()
            arrays = _record(answer(context, _arrays(message), settings))
            return Message(
                RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message
            )
        except Declined as reason:
            log(WARNING, "declined: %s", reason)
            text = str(reason)
        except Exception as error:  # its text may quote a record
            log(ERROR, "failed, and nothing was sent: %s", _check.origin(error))
            text = FAILED
        return Message(Error(DECLINED, text), reply_to=message)

    return handle


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _arrays(message: Message) -> Arrays:
    return numbers(message.content.array_records["arrays"])


def numbers(record: ArrayRecord) -> Arrays:
    """The arrays of a record, as NumPy arrays."""
    return {name: array.numpy() for name, array in record.items()}


@dataclass(frozen=True)
class Reply:
    """A participant's reply: arrays, or the reason why there are none, and whether the message was lost."""

    arrays: Arrays | None
    reason: str = ""
    lost: bool = False


def request(arrays: Arrays, settings: Mapping[str, int]) -> RecordDict:
    """The content of a message to a participant."""
    return RecordDict({"arrays": _record(arrays), "config": ConfigRecord(dict(settings))})


def ask(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    group: str,
    *,
    timeout: float,
    enough: int | None = None,
    patience: float | None = None,
    late: Collection[int] = (),
    kind: str = MessageType.TRAIN,
) -> dict[int, Reply]:
    """Sends each node its message and waits for the replies.

    Args:
        grid: Flower's grid.
        contents: the request to each node.
        group: the name of these messages in Flower's logs.
        timeout: seconds to wait at most; later replies are ignored, and messages not yet delivered expire.
        enough: after this many replies with arrays, wait for the others no longer than `patience`.
        patience: in seconds; None for the whole timeout.
        late: nodes that are asked like the others, but not waited for.
        kind: Flower's type of message.

    Returns:
        The replies that arrived, by node.
    """
    messages = [Message(sent, node, kind, ttl=timeout, group_id=group) for node, sent in contents.items()]
    nodes = {name: node for name, node in zip(grid.push_messages(messages), contents, strict=False) if name}
    awaited = set(contents) - set(late) or set(contents)
    replies: dict[int, Reply] = {}
    end = time.monotonic() + timeout
    while True:
        for message in grid.pull_messages([name for name, node in nodes.items() if node not in replies]):
            replies[nodes[message.metadata.reply_to_message_id]] = _reply(message)
        if awaited <= set(replies) or time.monotonic() > end:
            return replies
        answered = sum(reply.arrays is not None for reply in replies.values())
        if patience is not None and enough is not None and answered >= enough:
            end, patience = min(end, time.monotonic() + patience), None
        time.sleep(POLL)


def _reply(message: Message) -> Reply:
    if message.has_error() and message.error.code == DECLINED:
        return Reply(None, message.error.reason or "")
    if message.has_error():  # such as a process that was killed
        return Reply(None, f"an error on the way, code {message.error.code}", lost=True)
    try:
        return Reply(_arrays(message))
    except Exception as error:  # one participant must not end the run of all
        return Reply(None, f"a reply that cannot be read ({type(error).__name__})")


def await_nodes(grid: Grid, count: int, timeout: float) -> list[int]:
    """Waits until this many nodes are connected, and returns them."""
    end = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < count and time.monotonic() < end:
        time.sleep(POLL)
    if len(nodes) != count:
        raise InvalidInput(
            f"{count} participants were expected and {len(nodes)} are connected after {timeout:g} s; start as many "
            "SuperNodes (num_supernodes in a simulation) as the server app expects"
        )
    return nodes


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics as the end of a log line."""
    return "".join(f", {name} {value:.4f}" for name, value in metrics.items())


def private_reply(strategy: Strategy, arrays: ArrayRecord) -> RecordDict:
    """The content of a reply to a strategy: arrays, and a weight that is the same for all."""
    weight = str(getattr(strategy, "weighted_by_key", "num-examples"))
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({weight: 1.0})})


def report_round(done: T, refused: Mapping[int, str], whose: str, on_round: Callable[[T], None] | None) -> None:
    """Logs a round and why replies were not used, and calls `on_round`."""
    log(INFO, "%s", done)
    for name, reason in refused.items():
        log(WARNING, "  %s %s: %s", whose, name, reason)
    if on_round is not None:
        on_round(done)


class Refused(Exception):
    """A reply that is not used; the text says why, and begins with a verb."""


class WrappedStrategy(Strategy):
    """A Flower strategy around another one, which asks clients only to train: other replies would not be private.

    Args:
        strategy: a Flower strategy, such as FedAvg or FedAdam.
    """

    def __init__(self, strategy: Strategy) -> None:
        if not isinstance(strategy, Strategy):
            raise InvalidInput(f"strategy must be one of flwr.serverapp.strategy, got {_check.kind(strategy)}")
        self.strategy, self._layout = strategy, Layout(ArrayRecord())

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: what clients would answer is not private."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """No metrics: what clients would answer is not private."""
        return None

    def summary(self) -> None:
        """Logs the settings of the wrapped strategy."""
        self.strategy.summary()

    def _read(self, reply: Message, read: Callable[[Message], T], refused: dict[int, str], name: int) -> T | None:
        """The content of a reply; None if it cannot be used, with the reason in `refused`."""
        try:
            return read(reply)
        except Refused as reason:
            refused[name] = str(reason)
        except Exception as error:  # one client must not end the run of all
            refused[name] = f"sent a reply that cannot be read ({type(error).__name__})"
        return None

    def _moved(self, server_round: int, replies: list[Message]) -> tuple[ArrayRecord | None, None]:
        """The wrapped strategy's arrays from these replies, in the dtypes of the model."""
        found, _ = self.strategy.aggregate_train(server_round, replies)
        return None if found is None else self._layout.restored(found), None


class Layout:
    """The arrays of a model as one vector of its real numbers; other arrays, such as counters, stay as they are."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self._arrays = numbers(arrays)
        self._real = [name for name, values in self._arrays.items() if values.dtype.kind == "f"]
        self._flat = _flat([self._arrays[name] for name in self._real])
        self.size, self.norm = len(self._flat), _check.norm(self._flat)
        self._largest = min((float(np.finfo(self._arrays[name].dtype).max) for name in self._real), default=0.0)

    @staticmethod
    def arrays_of(reply: Message) -> ArrayRecord:
        """The arrays of a reply."""
        if reply.has_error():
            raise Refused(
                reply.error.reason if reply.error.code == DECLINED else f"has failed, code {reply.error.code}"
            )
        if len(reply.content.array_records) != 1:
            raise Refused("sent a reply without exactly one record of arrays")
        return next(iter(reply.content.array_records.values()))

    def flat(self, returned: Arrays) -> Numbers:
        """Returned arrays as a vector."""
        if list(returned) != list(self._arrays):
            raise Refused("sent arrays with other names than those of the model")
        found = [returned[name] for name in self._real]
        for name, values in zip(self._real, found, strict=True):
            if values.dtype.kind != "f" or values.shape != self._arrays[name].shape:
                raise Refused(f"sent arrays of other shapes or types than those of the model ({name})")
        with np.errstate(over="ignore"):  # numbers wider than doubles
            return _flat(found)

    def difference(self, returned: Arrays) -> Numbers:
        """Returned arrays minus these."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused later, or clipped
            return self.flat(returned) - self._flat

    def update(self, returned: Arrays) -> Numbers:
        """Returned arrays minus these; refused unless finite in the dtypes of the model."""
        found = self.difference(returned)
        if not np.all(np.abs(found) <= self._largest):
            raise Refused("sent parameters that are not finite")
        return found

    def moved(self, update: Numbers) -> ArrayRecord:
        """These arrays plus an update."""
        values, place = dict(self._arrays), 0
        moved = self._flat + update
        for name in self._real:
            old = self._arrays[name]
            values[name] = moved[place : place + old.size].reshape(old.shape).astype(old.dtype)
            place += old.size
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in values.items()})

    def restored(self, arrays: ArrayRecord) -> ArrayRecord:
        """The arrays of a strategy in the dtypes of the model; counters, which averages would change, stay."""
        values = {name: arrays[name].numpy() if name in self._real else old for name, old in self._arrays.items()}
        types = {name: old.dtype for name, old in self._arrays.items()}
        return ArrayRecord({name: Array(np.asarray(array, dtype=types[name])) for name, array in values.items()})


def _flat(arrays: list[Any]) -> Numbers:
    return np.concatenate([np.zeros(0), *(np.asarray(values, dtype=np.float64).ravel() for values in arrays)])
