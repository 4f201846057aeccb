"""One record at a time: code that would get behind `vmap`, or keep what it saw, is refused."""

import copy
import functools
import re
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence.one_record import each_record, record_outputs

RECORDS = torch.arange(12.0).reshape(4, 3)
KEPT, TOTAL, ONES = [], torch.zeros(1, 3), torch.ones(3)


@torch.library.custom_op("matrixdp_tests::centre", mutates_args=())
def centre(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@centre.register_vmap
def _(info, dims, x):
    return x - x.mean(0), 0


class Whole(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def with_own_rule(x):
    """The class is made in the pass, so that nothing can look for it before."""

    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, slope):
            return slope

        @staticmethod
        def vmap(info, dims, x):
            return x - x.mean(0), 0

    return Centred.apply(x)


def in_a_mode(x):
    with Whole():
        return x * 2


def in_autograd(read, where="forward"):
    """PyTorch runs what is in here without the modes for torch functions."""

    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            if where == "forward":
                read(x)
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            if where == "context":
                read(inputs[0])

        @staticmethod
        def backward(ctx, slope):
            read(slope)
            return slope

    return Own.apply if where != "backward" else torch.func.grad(lambda x: Own.apply(x * 2).sum())


def in_distance(read):
    return lambda x: F.triplet_margin_with_distance_loss(
        x, x, x, distance_function=lambda a, b: (read(a), (a - b).norm(dim=1))[1], reduction="none"
    )


def in_torch_function(read):
    return torch.overrides.wrap_torch_function(lambda x: (x,))(reading(read))


def keeping(pick):
    def function(x):
        KEPT.append(pick(x))
        return x

    return function


def reading(read):
    return lambda x: (read(x), x)[1]


DOORS = {
    "forward": in_autograd,
    "context": functools.partial(in_autograd, where="context"),
    "backward": functools.partial(in_autograd, where="backward"),
    "distance": in_distance,
    "torch function": in_torch_function,
}
READS = {
    "kept": lambda x: KEPT.append(x),
    "a copy": lambda x: KEPT.append(x * 1),
    "printed": lambda x: KEPT.append(repr(x)),
    "error": lambda x: by_error_text(x),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("door", DOORS)
def test_code_that_a_torch_function_calls_is_watched_too(door, read):
    KEPT.clear()
    with pytest.raises(InvalidInput):
        each_record(lambda x: DOORS[door](READS[read])(x[None]), RECORDS)
    KEPT.clear()


def by_error_text(x):
    """The text has the size of the whole batch in it."""
    try:
        torch.ones(3, 3).copysign_(x)
    except RuntimeError as error:
        return x * len(str(error))
    return x


BEHIND = {
    "text of an error": by_error_text,
    "vmap rule": with_own_rule,
    "custom operation": centre,
    "dispatch mode": in_a_mode,
    "record kept": keeping(lambda x: x),
    "base of a view": keeping(lambda x: x._base if x._base is not None else x),
    "data": keeping(lambda x: x.data),
    "part": keeping(lambda x: x[0]),
    "iterator": keeping(iter),
    "bound method": keeping(lambda x: x.sum),
    "node": reading(lambda x: (x.requires_grad_() * 2).grad_fn),
    "number": reading(lambda x: float(x.sum())),
    "condition": lambda x: x if x.sum() > 3 else -x,
    "print": reading(str),
    "numpy": reading(lambda x: x.detach().numpy()),
    "list": reading(lambda x: x.tolist()),
    "unique": lambda x: x + len(torch.unique(x)),
    "storage": reading(lambda x: x.untyped_storage()),
    "into a constant": lambda x: TOTAL.add_(x),
    "counter": lambda x: x * TOTAL.add_(1).cos(),
    "counter by a view": lambda x: x * TOTAL[0].detach().add_(1).cos(),
    "counter by data": lambda x: x * TOTAL.data.mul_(2),
    "counter by out": lambda x: x * torch.add(TOTAL, 1, out=TOTAL),
}


@pytest.mark.parametrize("what", BEHIND)
def test_what_gets_behind_or_keeps_is_refused(what):
    KEPT.clear()
    with pytest.raises(InvalidInput):
        each_record(lambda x: BEHIND[what](x[None]), RECORDS)
    KEPT.clear()


SOUND = {
    "mean of all": lambda x: x - x.mean(0),
    "constant kept": lambda x: (KEPT.append(torch.ones(3)), x + KEPT[-1])[1],
    "size": lambda x: x / len(x),
    "autograd function": in_autograd(len),
    "backward": in_autograd(len, "backward"),
    "distance": in_distance(len),
    "a view": lambda x: x[0],
    "printed constant": reading(lambda x: str(torch.ones(3))),
    "constant into a copy": lambda x: (x * 1).add_(ONES).mul_(ONES[0]),
    "into a constant of its own": lambda x: x + torch.zeros(3).add_(1),
    "the same, kept": lambda x: (KEPT.append(torch.zeros(3).add_(1)), x + KEPT[-1])[1],
}


@pytest.mark.parametrize("what", SOUND)
def test_what_is_sound_runs_and_sees_one_record(what):
    found = each_record(lambda x: SOUND[what](x[None]), RECORDS)
    for place, row in enumerate(found):
        assert torch.equal(row, each_record(lambda x: SOUND[what](x[None]), RECORDS[place : place + 1])[0])


QUOTING = {
    "gather": lambda x: x.gather(0, (x[:1] * 1000).long()),
    "bag": lambda x: F.embedding_bag((x[None, :1] * 1000).long(), torch.ones(3, 2)),
    "told again": lambda x: told_again(lambda: x.gather(0, (x[:1] * 1000).long())),
}


def told_again(function):
    try:
        return function()
    except RuntimeError as error:
        raise RuntimeError(str(error)) from error


@pytest.mark.parametrize("what", QUOTING)
def test_errors_do_not_quote_a_record(what):
    records = torch.zeros(4, 3)
    records[2, 0] = 4.321
    with pytest.raises(InvalidInput) as caught:
        each_record(QUOTING[what], records)
    assert not re.search("432[01]", "".join(traceback.format_exception(caught.value)))


def test_errors_say_what_vmap_cannot_run():
    with pytest.raises(InvalidInput) as caught:
        each_record(lambda x: x * float(x.sum()), RECORDS)
    assert "vmap" in str(caught.value.__cause__)


def failing(error, pick=lambda x: x):
    def function(x):
        KEPT.append(pick(x))
        raise error

    return function


FAILING = [KeyError(), IndexError(), RuntimeError(), InvalidInput("its own"), KeyboardInterrupt(), SystemExit()]


@pytest.mark.parametrize("error", FAILING, ids=repr)
def test_what_is_kept_when_a_pass_fails_is_gone(error):
    """Tensors of a former pass would be seen as those of the same place in the next one."""
    KEPT.clear()
    for pick in (lambda x: x, lambda x: x.detach() * 2):
        with pytest.raises(BaseException):  # noqa: B017, PT011
            each_record(failing(error, pick), RECORDS)
    for kept in KEPT:
        assert not each_record(lambda x, kept=kept: x * 0 + kept, RECORDS).any()
    KEPT.clear()


@pytest.mark.parametrize("error", FAILING, ids=repr)
def test_after_a_pass_that_failed_none_follows(error):
    model = nn.Linear(3, 2)
    gradients = ClippedGradients(model, nn.CrossEntropyLoss(reduction="none"), clip=1.0)
    batch = RECORDS, torch.zeros(4, dtype=torch.long)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="one at a time"):
        gradients.prepare(*batch)
    handle.remove()
    with model.register_forward_hook(lambda *_: failing(error)(0)), pytest.raises(BaseException):  # noqa: B017, PT011
        gradients.accumulate(*batch)
    with pytest.raises(InvalidInput, match="failed or was refused here before"):
        gradients.accumulate(*batch)


def test_a_traced_model_goes_on_after_an_interrupt(monkeypatch):
    """It has no code of its own that could keep anything."""
    gradients = ClippedGradients(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), clip=1.0)
    batch = RECORDS, torch.zeros(4, dtype=torch.long)
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "_found", lambda *_: failing(KeyboardInterrupt())(0))
        with pytest.raises(KeyboardInterrupt):
            gradients.accumulate(*batch)
    gradients.accumulate(*batch)
    assert gradients.flat.any()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_gradients_of_weight_norm_are_those_of_pytorch(norm):
    model, loss = norm(nn.Linear(3, 2)), nn.CrossEntropyLoss(reduction="none")
    targets = torch.zeros(4, dtype=torch.long)
    gradients = ClippedGradients(model, loss, clip=1e3)
    with pytest.warns(UserWarning, match="one at a time"):
        gradients.accumulate(RECORDS, targets)
    model.zero_grad()
    loss(model(RECORDS), targets).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(gradients.flat, expected.double(), rtol=1e-4, atol=1e-4)


def test_tensors_in_a_reference_cycle_are_not_kept():
    def function(x):
        cycle = [x]
        cycle.append(cycle)
        return x * 2

    assert torch.equal(each_record(function, RECORDS), RECORDS * 2)


def test_attributes_that_a_model_sets_are_gone_afterwards():
    class Keeps(nn.Module):
        last = None

        def forward(self, x):
            self.last = x
            return x

    model = Keeps()
    record_outputs(model, (RECORDS,))
    assert model.last is None


def test_a_parameter_that_is_written_into_is_refused_before_any_record():
    """It would count the passes: an empty batch takes none, a large one several."""

    class Shrinks(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    model, loss = Shrinks(3, 2), nn.CrossEntropyLoss(reduction="none")
    gradients = ClippedGradients(copy.deepcopy(model), loss, clip=1.0)
    with pytest.raises(InvalidInput, match="writes into parameters"):
        gradients.prepare(RECORDS, torch.zeros(4, dtype=torch.long))
    with pytest.raises(InvalidInput, match="writes into parameters"):
        record_outputs(model.requires_grad_(False), (RECORDS,))


def test_running_statistics_outside_of_the_model_are_not_moved():
    """They would count the passes too; PyTorch does not mark that a batch norm writes into them."""
    mean, variance, constants = torch.zeros(3), torch.ones(3), torch.arange(12.0).reshape(4, 3)

    def function(training):
        return lambda record: record + nn.functional.batch_norm(constants, mean, variance, training=training).sum(0)

    assert each_record(function(False), RECORDS).shape == RECORDS.shape
    with pytest.raises(InvalidInput):
        each_record(function(True), RECORDS)
    assert torch.equal(mean, torch.zeros(3))


class Weighed(nn.Module):
    """A loss with a trained number of its own and one of the model's layers."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, y):
        return F.cross_entropy(outputs, y, reduction="none") * self.scale + self.layer.weight.square().sum()


def test_a_loss_module_may_use_layers_of_the_model():
    torch.manual_seed(0)
    model, y = nn.Linear(3, 2), torch.tensor([1])
    gradients = ClippedGradients(model, Weighed(model), clip=1e3)
    gradients.accumulate(RECORDS[:1], y)
    losses = Weighed(model)(model(RECORDS[:1]), y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(losses.sum(), list(model.parameters()))])
    torch.testing.assert_close(gradients.flat, expected.double(), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_would_be_lost_in_a_closure_is_refused():
    model, y = nn.Linear(3, 2), torch.tensor([1, 0, 1, 1])
    losses = {
        "weights alone": lambda out, y: F.cross_entropy(out, y, reduction="none") + model.weight.square().sum(),
        "with a record": lambda out, y: F.cross_entropy(out * model.bias, y, reduction="none"),
    }
    for loss in losses.values():
        with pytest.raises(InvalidInput, match="whose gradient would be lost"):
            ClippedGradients(model, loss, clip=1.0).accumulate(RECORDS, y)
