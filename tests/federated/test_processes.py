"""Both kinds of federated learning between real processes on this machine, some of which are killed on the way."""

import os
import signal

import numpy as np
import pytest

from flower_link import VICTIM, Link, lines, spends
from matrixdp import Ledger

pytestmark = pytest.mark.slow

ROUNDS = 3
OTHER = 0  # the processes of the other node, VICTIM, are killed

# Two participants, one batch, and then its gradient. The victim's process is killed once, between spend and draw.
SPLIT = """
import os, signal
from pathlib import Path
import numpy as np, torch
from torch import nn
from matrixdp import Budget
from matrixdp.federated import SplitPlan, vertical
from matrixdp.federated.split_learning.noise import FeatureNoise

FOLDER = Path({folder!r})
added = FeatureNoise.added

def added_or_killed(self, features):
    if os.environ["VICTIM"] == "1" and not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return added(self, features)

FeatureNoise.added = added_or_killed

def network(number):
    torch.manual_seed(number)
    return nn.Linear(2, 3)

def data(number):
    return np.random.default_rng(number).normal(size=(30, 2)).astype(np.float32), None

def note(name, line):
    with (FOLDER / name).open("a") as file:
        file.write(f"{{line}}\\n")

plan = SplitPlan(records=30, epochs=1, batch_size=30, budget=Budget(8.0, 1e-5))
client = vertical.client_app(network, data, plan=plan, folder=FOLDER / "participants")
server = vertical.server_app(
    lambda: nn.Linear(6, 2), lambda: np.arange(30) % 2, plan=plan, timeout=120, retries=3,
    on_epoch=lambda done: note("epochs", done), on_end=lambda network: note("ends", network.weight.sum().item()),
)
"""

# In the second round the victim stops between its spend and its draw, and waits to be killed. The server's clock stands
# still, except in this round after the kill, so it waits for whoever is alive. It notes a second wait for the victim.
AVERAGE = """
import os, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np, torch
from torch import nn
from matrixdp import Budget
from matrixdp.federated import ClientLevel, LocalTraining, flower, horizontal
from matrixdp.learn.noise import ParameterNoise

FOLDER = Path({folder!r})
done_rounds, updates, seconds_passed, read = [], [], [0.0], flower._reply

def sleep(seconds):
    time.sleep(seconds)
    if len(done_rounds) == 1 and (FOLDER / "killed").exists():
        seconds_passed[0] += seconds
    if len(done_rounds) == 2 and len(updates) == 4:  # the other client has answered
        (FOLDER / "waited-again").touch()

def read_and_count(message):
    reply = read(message)
    if reply.arrays is not None:
        updates.append(reply)
    return reply

flower._reply = read_and_count
flower.time = SimpleNamespace(monotonic=lambda: seconds_passed[0], sleep=sleep)
add_ = ParameterNoise.add_

def add_slowly(self, flat):
    if os.environ["VICTIM"] == "1" and (FOLDER / "rounds").exists():
        (FOLDER / "draft").write_text(str(os.getpid()))
        (FOLDER / "draft").rename(FOLDER / "victim")
        time.sleep(600)
    add_(self, flat)

ParameterNoise.add_ = add_slowly

def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)

def data(number):
    x = np.random.default_rng(number).normal(size=(200, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)

def keep(weights):
    np.save(FOLDER / "weights-draft.npy", weights)
    (FOLDER / "weights-draft.npy").rename(FOLDER / "weights.npy")

def on_round(done):
    done_rounds.append(done)
    with (FOLDER / "rounds").open("a") as file:
        file.write(f"{{done}}\\n")

privacy = ClientLevel(budget=Budget(8.0, 1e-5), rounds={rounds}, clip=0.1)
client = horizontal.client_app(
    model, data, clients=2, training=LocalTraining(), privacy=privacy, folder=FOLDER / "participants"
)
server = horizontal.server_app(
    model, clients=2, rounds={rounds}, timeout=600, patience=1, on_round=on_round,
    on_end=lambda network: keep(network.weight.detach().numpy()),
)
"""


# A strategy of Flower with a trusted server. The victim stops in the second round, once, and waits to be killed.
CENTRAL = """
import os, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam
from matrixdp import Budget, Ledger
from matrixdp.federated import CentralPrivacy, central

FOLDER = Path({folder!r})
privacy = CentralPrivacy(budget=Budget(8.0, 1e-5), rounds={rounds}, clients=2, clip=0.1)
client = ClientApp(mods=[central.clipping_mod(privacy)])
server = ServerApp()

@client.train()
def train(message, context):
    if os.environ["VICTIM"] == "1" and (FOLDER / "rounds").exists() and not (FOLDER / "victim").exists():
        (FOLDER / "draft").write_text(str(os.getpid()))
        (FOLDER / "draft").rename(FOLDER / "victim")
        time.sleep(600)
    arrays = message.content.array_records["arrays"]
    moved = ArrayRecord({{name: Array(array.numpy() + 0.01) for name, array in arrays.items()}})
    return Message(RecordDict({{"arrays": moved, "metrics": MetricRecord({{"num-examples": 1}})}}), reply_to=message)

def on_round(done):
    with (FOLDER / "rounds").open("a") as file:
        file.write(f"{{done}}\\n")

@server.main()
def main(grid, context):
    ledger = Ledger(FOLDER / "budget.db", privacy.budget)
    wrapped = central.PrivateStrategy(
        FedAdam(min_train_nodes=2, min_available_nodes=2), privacy, ledger=ledger, on_round=on_round, wait=240
    )
    done = wrapped.start(grid, ArrayRecord({{"w": Array(np.zeros(5))}}), num_rounds={rounds}, timeout=240)
    np.save(FOLDER / "weights-draft.npy", done.arrays["w"].numpy())
    (FOLDER / "weights-draft.npy").rename(FOLDER / "weights.npy")
"""


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    made = Link(tmp_path_factory.mktemp("processes"))
    made.nodes = [made.start_node(number) for number in (OTHER, VICTIM)]
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def split(link):
    """A vertical run to its end, and a second one, for which there is no budget left."""
    app = link.install("split", SPLIT)
    for count in (1, 2):
        link.run(app)
        link.wait(lambda count=count: len(lines(app / "ends")) == count)
    return app


@pytest.fixture(scope="module")
def trusted(link):
    """A run with a trusted server, in which a process of one client is killed."""
    app = link.install("trusted", CENTRAL, rounds=ROUNDS)
    link.run(app)
    link.wait((app / "victim").exists)
    os.kill(int((app / "victim").read_text()), signal.SIGKILL)
    link.wait((app / "weights.npy").exists)
    return app


@pytest.fixture(scope="module")
def average(link, split, trusted):
    """A horizontal run, on the nodes of the others; one of them is killed."""
    app = link.install("average", AVERAGE, rounds=ROUNDS)
    link.run(app)
    link.wait((app / "victim").exists)
    link.kill(link.nodes[VICTIM])
    os.kill(int((app / "victim").read_text()), signal.SIGKILL)
    (app / "killed").touch()
    link.wait(lambda: (app / "weights.npy").exists() or (app / "waited-again").exists())
    return app


def test_a_vertical_run_gets_over_a_killed_process(split):
    assert (split / "killed").exists()
    assert lines(split / "epochs")[0] == "epoch 1"
    assert np.isfinite(float(lines(split / "ends")[0]))


def test_its_participants_have_paid_once(split):
    """The killed one, too: what is drawn after the kill is drawn under the spend before it."""
    for number in (OTHER, VICTIM):
        assert spends(split / "participants" / f"participant-{number}") == ["epoch 0 features", "epoch 0 training"]


def test_a_second_vertical_run_ends_before_it_begins_and_says_why(split):
    (again,) = lines(split / "epochs")[1:]
    assert again.startswith("epoch 0; the run ends here: node ")
    assert again.endswith("declined: the budget (epsilon 8, delta 1e-05) is spent")


def test_a_horizontal_run_goes_on_without_the_killed_client(average):
    assert not (average / "waited-again").exists()
    without = "1 updates, 0 declined, 1 silent"
    assert lines(average / "rounds") == ["round 1: 2 updates", f"round 2: {without}", f"round 3: {without}"]
    assert np.all(np.isfinite(np.load(average / "weights.npy")))


def test_the_other_client_has_paid_once_for_every_round(average):
    assert spends(average / "participants" / f"client-{OTHER}") == [f"round {n}" for n in range(1, ROUNDS + 1)]


def test_the_killed_client_has_paid_for_the_round_in_which_it_was_killed_and_sent_nothing_in_it(average):
    folder = average / "participants" / f"client-{VICTIM}"
    assert spends(folder) == ["round 1", "round 2"]
    (file,) = folder.glob("run-*.npz")
    with np.load(file) as stored:
        assert int(stored["step"]) == 1


def test_a_trusted_server_goes_on_without_the_killed_client_until_it_is_back(trusted):
    rounds = lines(trusted / "rounds")
    assert len(rounds) == ROUNDS
    assert [line.split(", ")[1] for line in rounds] == ["2 updates used", "1 updates used", "2 updates used"]
    assert np.all(np.isfinite(np.load(trusted / "weights.npy")))


def test_its_ledger_was_charged_once_for_all_rounds(trusted):
    entries = Ledger(trusted / "budget.db").history()
    assert [(entry.unit, entry.count, entry.planned) for entry in entries] == [("client", 1, ROUNDS)] * ROUNDS
    assert len({entry.series for entry in entries}) == 1
