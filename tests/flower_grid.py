"""A Flower grid in this process, and what Flower's processes set for themselves."""

from uuid import uuid4

import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid

try:
    from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError:  # Flower before 1.41 needs none
    TaskIdentity = None


class HereGrid(Grid):
    """Nodes 100, 101, ... that answer at once; those in `silent` get their messages and say nothing."""

    def __init__(self, app, nodes, partitions=None, silent=(), run=7):
        self.app, self.nodes, self.silent, self.number = app, range(100, 100 + nodes), set(silent), run
        self.partitions, self.replies, self.asked, self.moved = partitions or nodes, {}, [], {}

    def push_messages(self, messages):
        names = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(uuid4())
            names.append(message.metadata.message_id)
            self.asked.append(node)
            if node not in self.silent:
                settings = {"partition-id": self.moved.get(node, node) - 100, "num-partitions": self.partitions}
                self.replies[names[-1]] = self.app(message, Context(self.number, node, settings, RecordDict(), {}))
        return names

    def pull_messages(self, message_ids):
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def get_node_ids(self):
        return list(self.nodes)

    def set_run(self, run): ...

    def run(self): ...

    def create_message(self, *_): ...

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))


def identify(change=setattr):
    """Sets what Flower's processes set for themselves."""
    if TaskIdentity is not None:
        for name, value in (("_run_id", 7), ("_node_id", 1), ("_task_id", 1)):
            change(TaskIdentity, name, value)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """What Flower's processes set for themselves, for the time of a test."""
    identify(monkeypatch.setattr)
