"""`make_private`: batches of any structure, in loops that step by the trainer or call backward() themselves."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn import ClippedGradients, PrivateSGD, make_private

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS, WIDTH = 40, 5
EACH = nn.CrossEntropyLoss(reduction="none")
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(RECORDS, WIDTH, generator=GENERATOR), torch.arange(RECORDS) % 2


class Items(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return self.make(index)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x, weights):
        return self.first(x) + self.second(weights)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x, mask=None):
        return {"logits": self.linear(x if mask is None else x * mask)}


def by_name(outputs, batch):
    return EACH(outputs["logits"], batch["y"])


STRUCTURES = {
    "tensors": (TensorDataset(X, Y), lambda: nn.Linear(WIDTH, 2), EACH),
    "pairs": (Items(lambda i: (X[i], int(Y[i]))), lambda: nn.Linear(WIDTH, 2), EACH),
    "two inputs": (Items(lambda i: (X[i], X[i] ** 2, Y[i])), Two, EACH),
    "two inputs in one": (Items(lambda i: ((X[i], X[i] ** 2), Y[i])), Two, EACH),
    "two inputs, tensors": (TensorDataset(X, X**2, Y), Two, EACH),
    "dictionary": (Items(lambda i: {"x": X[i], "mask": (X[i] > 0).float(), "y": Y[i]}), Named, by_name),
    "one tensor": (
        Items(lambda i: X[i]),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda outputs, x: ((outputs - x) ** 2).mean(1),
    ),
    "nested targets": (
        Items(lambda i: (X[i], {"y": Y[i]})),
        lambda: nn.Linear(WIDTH, 2),
        lambda outputs, targets: EACH(outputs, targets["y"]),
    ),
}


def test_several_inputs_stay_together_where_a_model_takes_them_so():
    class Pair(Two):
        def forward(self, both):
            return super().forward(*both)

    run = private(STRUCTURES["two inputs in one"][0], Pair())
    run.train()
    assert run.steps == 5


def private(data, model, loss=EACH, optimizer=torch.optim.SGD, **changes):
    options = {"budget": Budget(3.0, 1e-5), "clip": 1.0, "epochs": 2, **changes}
    loader = options.pop("loader", None) or DataLoader(data, batch_size=8, shuffle=True)
    with pytest.warns(UserWarning, match="Poisson"):
        return make_private(model, optimizer(model.parameters(), lr=0.1), loader, loss=loss, **options)


@pytest.mark.parametrize("what", STRUCTURES)
def test_batches_of_any_structure(what):
    data, model, loss = STRUCTURES[what]
    run = private(data, model(), loss, largest_batch=3)
    assert isinstance(run, PrivateSGD)
    assert len(run) == 5
    for _ in range(2):
        for batch in run:
            run.step(batch)
    assert run.steps == 10
    assert run.gradients.slow_because is None
    assert 0 < run.epsilon() <= 3.0
    with pytest.raises(BudgetExceeded):
        run.train()


@pytest.mark.parametrize("what", STRUCTURES)
def test_clipped_sums_are_those_of_the_records(what):
    """One record alone has the gradient that PyTorch gives."""
    data, make, loss = STRUCTURES[what]
    model = make()
    run = private(data, model, loss, clip=1e-3)
    batch = next(b for b in run.batches(4) if len(torch.utils._pytree.tree_leaves(b.drawn)[0]))
    run.gradients.zero()
    run.gradients.accumulate(*batch.drawn)
    records = len(torch.utils._pytree.tree_leaves(batch.drawn)[0])
    assert float(run.gradients.flat.norm()) <= 1e-3 * records * (1 + 1e-6)
    assert run.gradients.flat.count_nonzero()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_and_schedulers(kind):
    model = nn.Linear(WIDTH, 2)
    run = private(TensorDataset(X, Y), model, optimizer=kind)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    epochs = []
    run.train(2, callbacks=[lambda trainer, epoch: epochs.append((epoch, trainer.steps)), lambda *_: scheduler.step()])
    assert epochs == [(1, 5), (2, 10)]
    assert scheduler.get_last_lr() == [pytest.approx(0.025)]


@pytest.mark.parametrize("callbacks", [3, lambda trainer, epoch: None, [print, 3]])
def test_callbacks_are_checked_before_anything_is_spent(callbacks):
    run = private(TensorDataset(X, Y), nn.Linear(WIDTH, 2))
    with pytest.raises(InvalidInput, match="callbacks must be a list"):
        run.train(1, callbacks=callbacks)
    assert run.steps == 0


def test_a_loss_of_dictionaries_gets_them_whole():
    data = [{"input": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    run = private(data, nn.Linear(WIDTH, 2))
    with pytest.raises(InvalidInput, match="the loss gets the outputs and the whole dictionary"):
        run.train(1)
    assert run.steps == 0


def test_an_optimizer_that_asks_for_several_gradients_is_refused():
    with pytest.raises(InvalidInput, match="LBFGS"):
        private(TensorDataset(X, Y), nn.Linear(WIDTH, 2), optimizer=torch.optim.LBFGS)


def test_a_collation_sees_one_record_at_a_time():
    """Or it could subtract the mean of the batch."""
    seen = []

    def centred(records):
        seen.append(len(records))
        x, y = torch.stack([r[0] for r in records]), torch.tensor([int(r[1]) for r in records])
        return x - x.mean(0), y

    data = TensorDataset(X, Y)
    run = private(data, nn.Linear(WIDTH, 2), loader=DataLoader(data, batch_size=8, collate_fn=centred))
    run.train(2)
    assert set(seen) == {1}


def test_what_is_no_tensor_is_refused_without_being_quoted():
    with pytest.raises(InvalidInput, match="drop texts") as refusal:
        private(Items(lambda i: {"x": X[i], "name": "Ann"}), Named(), by_name).train()
    assert "Ann" not in str(refusal.value)


def test_wrong_arguments_are_refused():
    model, data = nn.Linear(WIDTH, 2), TensorDataset(X, Y)
    optimizer, options = torch.optim.SGD(model.parameters(), lr=0.1), {"budget": Budget(3.0, 1e-5), "clip": 1.0}
    with pytest.raises(InvalidInput, match="must be a DataLoader"):
        make_private(model, optimizer, data, loss=EACH, **options)
    with pytest.raises(InvalidInput, match="batch_size"):
        make_private(model, optimizer, DataLoader(data, batch_size=None), loss=EACH, **options)
    with pytest.raises(InvalidInput, match="loss must be given"):
        make_private(model, optimizer, DataLoader(data), **options)
    with pytest.raises(InvalidInput, match="exclude each other"):
        make_private(model, optimizer, DataLoader(data), loss=EACH, trust_loop=True, **options)


def test_a_compiled_model_is_trained_by_what_was_compiled():
    model = nn.Linear(WIDTH, 2)
    run = private(TensorDataset(X, Y), torch.compile(model, backend="eager"))
    before = model.weight.clone()
    run.train(1)
    assert run.gradients.slow_because is None
    assert not torch.equal(model.weight, before)


# --- loops that call backward() themselves ---


def trusted(model=None, data=None, optimizer=torch.optim.SGD, **changes):
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 2)) if model is None else model
    return private(TensorDataset(X, Y) if data is None else data, model, None, optimizer, trust_loop=True, **changes)


def test_a_loop_of_its_own(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    model, optimizer, loader = trusted(optimizer=torch.optim.Adam, ledger=ledger)
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    assert steps == loader.trainer.steps == 2 * len(loader)
    assert loader.trainer.certificate.remark == "independence of the loss assumed"
    assert "independence of the loss assumed" in ledger.history()[0].source
    x, y = next(iter(loader))
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(BudgetExceeded):
        optimizer.step()


@pytest.mark.parametrize(("clip", "size"), [(0.05, 8), (100.0, 8), (100.0, 1)])
def test_its_sums_are_those_of_the_trainer(clip, size):
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 2))
    same = copy.deepcopy(model)
    expected, noise = ClippedGradients(same, EACH, clip=clip), []
    batches = DataLoader(TensorDataset(X, Y), batch_size=size)
    model, optimizer, loader = trusted(model, clip=clip, loader=batches, epochs=1)
    loader.trainer.noise.__dict__["_draws"] = {torch.device("cpu"): lambda flat, _: noise.append(flat.clone())}
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        same.load_state_dict(model.state_dict())
        expected.zero()
        expected.accumulate(x, y)
        optimizer.step()
        if loader._records:
            # entries may cancel, so their rounding is measured by that of a record, which is about 1
            torch.testing.assert_close(noise[-1], expected.flat, rtol=1e-4, atol=1e-5)
        else:
            assert not noise[-1].any()
    assert len(noise) == len(loader)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_runs_before_the_noise(optimizer):
    """As Lightning calls it; in the optimizer's own step it would replace the noisy gradient by a plain one."""
    model, optimizer, loader = trusted(optimizer=optimizer)
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if loader.trainer.steps else optimizer.step(closure=closure)
        assert float(loss.detach()) > 0
        handed = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(handed, loader.trainer.gradients.flat.float(), rtol=1e-6, atol=0)
    assert loader.trainer.steps == len(loader)
    x, y = next(iter(loader))
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(InvalidInput, match="second pass"):
        optimizer.step(lambda: functional.cross_entropy(model(x), y).backward())


def test_a_closure_draws_no_batch():
    """Its records would take part in the step of the batch before, and again in their own."""
    model, optimizer, loader = trusted()
    batches = iter(loader)
    next(batches)

    def closure():
        x, y = next(batches)
        functional.cross_entropy(model(x), y).backward()

    with pytest.raises(InvalidInput, match="closure must not draw"):
        optimizer.step(closure)
    assert (loader.trainer.steps, loader.trainer.epsilon()) == (0, 0.0)


def test_a_model_that_is_one_layer():
    model, optimizer, loader = trusted(nn.Linear(WIDTH, 2))
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert loader.trainer.steps == len(loader)


def test_what_is_assumed_of_a_loop_is_not_lost_in_a_checkpoint():
    model, _, loader = trusted()
    state = loader.trainer.state_dict()
    strict = private(TensorDataset(X, Y), model)
    assert strict.certificate.mu == loader.trainer.certificate.mu
    with pytest.raises(InvalidInput, match="checkpoint"):
        strict.load_state_dict(state)


def test_empty_batches_have_a_step_of_noise_alone():
    model, optimizer, loader = trusted(loader=DataLoader(TensorDataset(X, Y), batch_size=1), epochs=1)
    empty = 0
    for x, y in loader:
        empty += loader._records == 0
        assert len(x) >= 1
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert empty  # fails by chance with probability (1 - (1 - 1/40)^40)^40 < 1e-7
    assert loader.trainer.steps == len(loader)


def test_what_the_loop_can_be_seen_to_do_wrong_is_refused():
    model, optimizer, loader = trusted()
    batches = iter(loader)
    with pytest.raises(InvalidInput, match="draw the next batch"):
        optimizer.step()
    x, y = next(batches)
    with pytest.raises(InvalidInput, match="backward"):
        optimizer.step()
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(InvalidInput, match="second pass"):
        model(x)
    optimizer.step()
    with pytest.raises(InvalidInput, match="draw the next batch"):
        optimizer.step()
    x, y = next(batches)
    with pytest.raises(InvalidInput, match="a row for each"):
        model(torch.cat([x, x]))
    next(batches)
    x, y = next(batches)
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(InvalidInput, match="left out"):
        optimizer.step()


def test_parameters_outside_their_layers_and_layers_without_rules_are_refused():
    model, optimizer, loader = trusted()
    x, y = next(iter(loader))
    (functional.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()
    with pytest.raises(InvalidInput, match="outside a call"):
        optimizer.step()
    with pytest.raises(InvalidInput, match="leave trust_loop out"):
        trusted(nn.Sequential(nn.Linear(WIDTH, 2), nn.PReLU()))


def test_evaluation_between_steps_takes_no_part():
    model, optimizer, loader = trusted()
    for x, y in loader:
        model.eval()
        with torch.no_grad():
            model(X)
        model.train()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert loader.trainer.steps == len(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


class Adapter(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, 2).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_frozen_parts_stay_as_they_are():
    model = Adapter()
    trained = [*model.down.parameters(), *model.up.parameters()]
    before = copy.deepcopy(model.state_dict())
    data = TensorDataset(X, Y)
    with pytest.warns(UserWarning, match="Poisson"):
        run = make_private(
            model, torch.optim.AdamW(trained), DataLoader(data, batch_size=8),
            loss=EACH, budget=Budget(3.0, 1e-5), clip=1.0, epochs=1,
        )  # fmt: skip
    run.train()
    assert run.gradients.slow_because is None
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"down.weight", "up.weight"}
