"""Code of users that PyTorch itself would call, with no watch: overrides, classes of arguments, modes, and texts."""

import contextlib
import functools

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from independence_cases import LOSS, WIDTH, Then, contributions, numbers, trainer
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence.one_record import each_record

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = []


@torch.library.custom_op("matrixdp_tests::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@centred.register_vmap
def _(info, dims, x):
    return x - x.mean(0), 0


def by_capsule(x):
    whole = torch.func.debug_unwrap(x)
    return x * torch.from_dlpack(torch.utils.dlpack.to_dlpack(whole)).sum()


class Callable:
    def __call__(self, x):
        return centred(x)


def forged(x):
    def function(x):
        return centred(x)

    function.__module__ = "torch.nn.functional"
    return handle_torch_function(function, (x,), x)


def hooked(make):
    """A hook is an argument: PyTorch's protocol for overrides looks at it, and never calls it here."""

    def function(x):
        torch.zeros(1, requires_grad=True).register_hook(make(x)())
        return FOUND.pop()

    return function


def with_property(x):
    class Hook:
        @property
        def __class__(self):
            FOUND[:] = [centred(x)]
            return object

        def __call__(self, gradient):
            return gradient

    return Hook


def with_metaclass(x):
    class Kind(type):
        __hash__ = type.__hash__

        def __eq__(cls, other):
            FOUND[:] = [centred(x)]
            return False

    class Hook(metaclass=Kind):
        def __call__(self, gradient):
            return gradient

    return Hook


def with_key(x):
    tensor = torch.zeros(1)

    class Key:
        def __hash__(self):
            return hash(id(tensor))

        def __eq__(self, other):
            FOUND[:] = [centred(x)]
            return False

    tensor.__deepcopy__({Key(): 1})
    return FOUND.pop()


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient * context.saved_tensors[0]


class Changing:
    """The rule of PyTorch when it is first looked at, and another one later."""

    def __init__(self):
        self.rules = [torch.autograd.Function.vmap]

    def __get__(self, owner, kind):
        return self.rules.pop() if self.rules else lambda info, dims, x: (x - x.mean(0), 0)


def by_descriptor(x):
    return type("Own", (Square,), {"vmap": Changing(), "generate_vmap_rule": False}).apply(x)


CALLS = {
    "memory behind vmap": by_capsule,
    "an object": lambda x: handle_torch_function(Callable(), (x,), x),
    "a partial": lambda x: handle_torch_function(functools.partial(centred), (x,), x),
    "a forged module": forged,
    "code in a text": lambda x: handle_torch_function(eval, (x,), "f(x)", {"f": centred, "x": x}),
    "property of an argument": hooked(with_property),
    "metaclass of an argument": hooked(with_metaclass),
    "key of an argument": with_key,
    "rule of a descriptor": by_descriptor,
}


@pytest.mark.parametrize("name", CALLS)
def test_code_that_pytorch_would_call_on_a_whole_batch_is_refused(name):
    FOUND.clear()
    with pytest.raises(InvalidInput, match="one record at a time"):
        each_record(CALLS[name], torch.rand(5, WIDTH))
    FOUND.clear()


def test_an_autograd_function_with_parts_of_its_class_runs():
    class Scaled(Square):
        factor = 3.0

        @staticmethod
        def forward(x):
            return Scaled.factor * x * x

    records = torch.rand(5, WIDTH)
    torch.testing.assert_close(each_record(Scaled.apply, records), 3 * records**2)


def test_no_class_of_the_user_is_made_or_asked_while_a_function_of_pytorch_runs():
    class Own(Square):
        def __init_subclass__(cls):
            FOUND.append(cls)

    records = torch.rand(5, WIDTH)
    torch.testing.assert_close(each_record(Own.apply, records), records**2)
    assert not FOUND


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Functions, Operations])
@pytest.mark.parametrize("fast", [True, False])
def test_modes_that_are_not_pytorchs_are_refused_in_every_step(kind, fast):
    model = Then(torch.sin if fast else lambda x: torch.einsum("bi->bi", x))
    gradients = ClippedGradients(model, LOSS, clip=1.0)
    inputs, targets = numbers().tensors
    assert gradients.prepare(inputs, targets) == fast
    with kind():
        with pytest.raises(InvalidInput, match="mode"):
            gradients.accumulate(inputs, targets)
        with pytest.raises(InvalidInput, match="mode"):  # as the batch may be empty
            gradients.zero()
    gradients.zero()
    gradients.accumulate(inputs, targets)


@pytest.mark.parametrize("kind", [Functions, Operations])
def test_a_step_within_such_a_mode_costs_nothing(kind):
    private = trainer(Then(torch.sin))
    batches = iter(private)
    private.step(next(batches))
    batch = next(batches)
    spent = private.epsilon()
    with kind(), pytest.raises(InvalidInput, match="mode"):
        private.step(batch)
    assert (private.epsilon(), private.steps) == (spent, 1)
    private.step(batch)


@pytest.mark.parametrize("kind", [Functions, Operations])
def test_a_mode_that_the_model_enters_while_it_is_traced_is_refused(kind):
    with contextlib.ExitStack() as left:

        def enter(x):
            left.enter_context(kind())
            return torch.sin(x)

        with pytest.raises(InvalidInput, match="mode"):
            ClippedGradients(Then(enter), LOSS, clip=1.0).accumulate(*numbers().tensors)


class Number(int):
    """Its text ends the call that it is an argument of, and adds the whole batch."""

    def __repr__(self):
        return "0) + torch.sum(getitem, 0, True"


class Name(str):
    """A method that may be called, as it is written into code another one."""

    __slots__ = ()

    def split(self, *_):
        return ["argsort"]

    def __format__(self, _):
        return "argsort"


class Writer(fx.graph.CodeGen):
    """Writes other code than the graph says."""

    def _gen_python_code(self, *args, **kwargs):
        written = super()._gen_python_code(*args, **kwargs)
        written.src = written.src.replace("torch.sin(getitem)", "torch.sin(getitem) + getitem.sum(0)")
        return written


def with_writer(x):
    if isinstance(x, fx.Proxy):
        x.node.graph.set_codegen(Writer())
    return torch.sin(x)


TEXTS = {
    "writer": with_writer,
    "number": lambda x: torch.add(x, Number(0)),
    "name": lambda x: getattr(x, Name("tanh"))(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_arguments_are_not_code_of_the_graph(name):
    gradients = ClippedGradients(Then(TEXTS[name]), LOSS, clip=1.0)
    first, *others = contributions(gradients, numbers())
    assert gradients.slow_because is None
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)


def test_modes_of_pytorch_are_fine():
    with torch.device("cpu"):
        ClippedGradients(Then(torch.sin), LOSS, clip=1.0).accumulate(*numbers().tensors)
