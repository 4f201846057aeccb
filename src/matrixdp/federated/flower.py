"""What both Flower apps share: requests, replies without private text, and the participants of a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from logging import ERROR, WARNING
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Arrays, Declined

POLL = 0.1  # seconds between two looks for replies
FAILED = "an error, see the log of this participant"

T = TypeVar("T")
Answer = Callable[[Context, Arrays, Mapping[str, Any]], Arrays]


def made_once(count: int, make: Callable[[int], T]) -> Callable[[Context], T]:
    """Gives the participant of a context: one of `count`, which a process makes once, when it is first asked.

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
    """Flower's handler of a request, from a function of context, arrays and settings; it replies or refuses.

    Flower sends the text of an exception to the server, so no exception leaves the handler.
    """

    def handle(message: Message, context: Context) -> Message:
        try:
            arrays = _record(answer(context, _arrays(message), message.content.config_records["settings"]))
            return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"declined": 0})}), reply_to=message)
        except Declined as reason:
            log(WARNING, "declined: %s", reason)
            text = str(reason)
        except Exception as error:  # its text may quote a record
            log(ERROR, "failed, and nothing was sent: %s", _check.origin(error))
            text = FAILED
        refusal = RecordDict({"metrics": MetricRecord({"declined": 1}), "refusal": ConfigRecord({"reason": text})})
        return Message(refusal, reply_to=message)

    return handle


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _arrays(message: Message) -> Arrays:
    return {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}


@dataclass(frozen=True)
class Reply:
    """A participant's reply: arrays, or the reason why there are none, and whether the message was lost."""

    arrays: Arrays | None
    reason: str = ""
    lost: bool = False


def request(arrays: Arrays, **settings: int) -> RecordDict:
    """The content of a message to a participant."""
    return RecordDict({"arrays": _record(arrays), "settings": ConfigRecord(dict(settings))})


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
        enough: after this many replies with arrays, the others are waited for no longer than `patience`.
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
    if message.has_error():  # such as a process that was killed
        return Reply(None, f"an error on the way, code {message.error.code}", lost=True)
    try:
        if "arrays" not in message.content:
            return Reply(None, str(message.content.config_records["refusal"]["reason"]))
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
