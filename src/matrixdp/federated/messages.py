"""Flower's messages, as both kinds of federated learning use them: arrays out and back, or a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from logging import ERROR, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Arrays, Declined

POLL = 0.1  # seconds between two looks for replies
FAILED = "an error, see the log of this participant"


@dataclass(frozen=True)
class Reply:
    """What came back from a participant: arrays, or the reason why not, and whether it was lost on the way."""

    arrays: Arrays | None
    reason: str = ""
    lost: bool = False


def request(arrays: Arrays, **settings: int) -> RecordDict:
    """The content of a message to a participant."""
    return RecordDict({"arrays": _packed(arrays), "settings": ConfigRecord(dict(settings))})


def _packed(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def unpack(message: Message) -> tuple[Arrays, Mapping[str, Any]]:
    """The arrays and the settings of a request."""
    return _unpacked(message), message.content.config_records["settings"]


def _unpacked(message: Message) -> Arrays:
    return {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}


def answered(message: Message, answer: Callable[[], Arrays]) -> Message:
    """The reply to a message. Flower sends the text of an exception to the server, so none gets out of here."""
    try:
        given = RecordDict({"arrays": _packed(answer()), "metrics": MetricRecord({"declined": 0})})
        return Message(given, reply_to=message)
    except Declined as reason:
        log(WARNING, "declined: %s", reason)
        text = str(reason)
    except Exception as error:  # whatever it is, its text may hold data
        log(ERROR, "failed, and nothing was sent: %s", _check.origin(error))
        text = FAILED
    refusal = RecordDict({"metrics": MetricRecord({"declined": 1}), "refusal": ConfigRecord({"reason": text})})
    return Message(refusal, reply_to=message)


def ask(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    *,
    timeout: float,
    enough: int | None = None,
    patience: float | None = None,
    late: Collection[int] = (),
    group: str = "",
    kind: str = MessageType.TRAIN,
) -> dict[int, Reply]:
    """Sends each node its message and waits for the replies.

    Args:
        grid: Flower's grid.
        contents: what to send, by node.
        timeout: seconds to wait at most; what comes later is not looked at, and messages not yet delivered are void.
        enough: once so many have sent arrays, the others are waited for no longer than `patience`.
        patience: in seconds; None for all the time there is.
        late: nodes that are asked like the others, but not waited for.
        group: what Flower's logs call these messages.
        kind: Flower's type of message.

    Returns:
        The replies that came in, by node.
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
        if patience is not None and enough is not None and _given(replies) >= enough:
            end, patience = min(end, time.monotonic() + patience), None
        time.sleep(POLL)


def _given(replies: Mapping[int, Reply]) -> int:
    return sum(reply.arrays is not None for reply in replies.values())


def _reply(message: Message) -> Reply:
    if message.has_error():  # such as a process that was killed
        return Reply(None, f"an error on the way, code {message.error.code}", lost=True)
    try:
        if "arrays" not in message.content:
            return Reply(None, str(message.content.config_records["refusal"]["reason"]))
        return Reply(_unpacked(message))
    except Exception as error:  # one participant must not end the run of all
        return Reply(None, f"a reply that cannot be read ({type(error).__name__})")


def await_nodes(grid: Grid, count: int, timeout: float) -> list[int]:
    """The nodes, once there are as many as there should be."""
    end = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < count and time.monotonic() < end:
        time.sleep(POLL)
    if len(nodes) != count:
        raise InvalidInput(
            f"{count} participants were expected and {len(nodes)} are connected after {timeout:g} s; start as many "
            "SuperNodes (num_supernodes in a simulation) as the server app is made for"
        )
    return nodes


def partition_of(context: Context, count: int) -> int:
    """The number of this participant, from its own settings (--node-config), which the server cannot change."""
    number, total = context.node_config.get("partition-id"), context.node_config.get("num-partitions", count)
    if not (isinstance(number, int) and 0 <= number < count and total == count):
        raise InvalidInput(
            f"node-config must have partition-id from 0 to {count - 1} and num-partitions={count}, "
            f"got partition-id={number!r}, num-partitions={total!r}"
        )
    return number
