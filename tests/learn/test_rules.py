"""Every rule for the batch dimension: a use that it allows, in which records stay apart, and some that it refuses."""

import functools
import operator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as trees

from matrixdp.learn.record_independence import module_rules, rebuilt, rules, traced
from matrixdp.learn.record_independence.rules import FUNCTIONS, MODULES, Batched, BatchSize, NoRule
from matrixdp.learn.record_independence.traced import TracedModel

RECORDS = 5
SIZE = BatchSize(traced._SIZE)


class Rows:
    """A batched argument in a case: numbers, or classes below 3."""

    def __init__(self, *shape, classes=False):
        self.shape, self.classes = shape, classes

    def draw(self, generator):
        if self.classes:
            return torch.randint(0, 3, (RECORDS, *self.shape), generator=generator)
        return 0.1 + 0.8 * torch.rand(RECORDS, *self.shape, generator=generator)

    def batched(self):
        kind = torch.int64 if self.classes else torch.float32
        return Batched(torch.empty(SIZE, *self.shape, dtype=kind, device="meta"))


def use(*args, **kwargs):
    return args, kwargs


V, M, IMAGE, INDEX = Rows(4), Rows(4, 6), Rows(4, 8, 8), Rows(classes=True)
POSITION = torch.ones(SIZE, 1, device="meta")  # a number for each place in the batch
TABLE, FILTERS = torch.randn(3, 2), torch.randn(2, 4, 3)
BINARY = {"add", "sub", "mul", "div", "truediv", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
          "maximum", "minimum", "type_as"}  # fmt: skip
UNARY_OPTIONS = {"clamp": use(V, 0.2, 0.5), "clamp_min": use(V, 0.2), "clamp_max": use(V, 0.5), "pow": use(V, 2.0),
                 "to": use(V, torch.float64), "type": use(V, torch.float64), "lerp": use(V, V, 0.5),
                 "masked_fill": use(V, torch.tensor([True, False, True, False]), 0.0),
                 "_threshold": use(V, 0.1, 0.0), "dropout1d": use(M, 0.0), "dropout2d": use(IMAGE, 0.0),
                 "dropout3d": use(Rows(2, 3, 3, 3), 0.0), "dropout": use(V, 0.0), "alpha_dropout": use(V, 0.0),
                 "feature_alpha_dropout": use(V, 0.0), "and_": use(INDEX, INDEX), "or_": use(INDEX, INDEX),
                 "invert": use(INDEX)}  # fmt: skip


def entrywise(function):
    name = function.__name__
    if name == "where":
        allowed = use(V, 0.5, 0.1) if function is Tensor.where else use(torch.tensor([True, False] * 2), V, V)
        allowed = use(V, torch.tensor([True, False] * 2), V) if function is Tensor.where else allowed
    else:
        allowed = UNARY_OPTIONS.get(name, use(V, V) if name in BINARY else use(V))
    return allowed, [use(V, M), use(V, POSITION), use(V, SIZE), use(V, other=M)]


ALONG = {"glu": use(V, 1), "squeeze": use(Rows(1, 4), 1)}


def along(function):
    allowed = ALONG.get(function.__name__, use(V, dim=-1))
    return allowed, [use(V, dim=0), use(V, -2), use(V), use(M, (1, 0)), use(V, SIZE), use(V, V)]


def pools(function):
    name = function.__name__
    argument = {"1d": M, "2d": IMAGE, "3d": Rows(2, 4, 4, 4)}[name[-2:]]
    options = (2.0, 2) if name.startswith("lp") else (2,)
    return use(argument, *options), [use(argument, SIZE), use(argument, argument), use(torch.randn(2, 3, 4), 2)]


def sizes(shape):
    return [use(V, *shape), use(V, 2, -1), use(M, -1, 6)]


def losses(targets):
    def cases(function):
        refused = [use(V, V), use(V, torch.ones(4), reduction="none"), use(V, Rows(1), reduction="none"),
                   use(V, targets, reduction="mean"), use(Rows(1), INDEX, reduction="sum"),
                   use(V, V, POSITION, reduction="none")]  # fmt: skip
        if targets is V:
            refused.append(use(Rows(1), INDEX, reduction="none"))  # would compare each record with all targets
        return use(V, targets, reduction="none"), refused

    return cases


def always(allowed, *refused):
    return lambda function: (allowed, list(refused))


RULES = {
    rules.entrywise: entrywise,
    rules.in_place: always(use(V, V), use(torch.zeros(4), V), use(V, M), use(V, SIZE)),
    rules.along: along,
    rules.flipped: always(use(M, (1, 2)), use(M, 1, 0), use(M, (0,)), use(M, -3)),
    rules.normed: always(use(V, 2.0, dim=1), use(V), use(V, 2.0, dim=0), use(V, 2.0, 0), use(V, p=SIZE, dim=1)),
    rules.unsqueezed: always(use(V, -1), use(V, 0), use(V, -3)),
    rules.swapped: always(use(M, 1, -1), use(M, 0, 1), use(M, 1, -3)),
    rules.permuted: always(use(M, (0, 2, 1)), use(M, (1, 0, 2)), use(M, (-1, -2, -3))),
    rules.expanded: always(use(Rows(1), -1, 4), use(V, SIZE, SIZE, 4), use(torch.zeros(1, 4), SIZE, 4)),
    rules.joined: always(use([V, V], dim=1), use([V, V]), use([V, V], dim=-2), use([V, M], 1), use([V, POSITION], 1)),
    rules.parted: always(use(M, 2, dim=1), use(M, 2), use(M, 2, dim=0), use(M, SIZE, dim=1), use(M, V, dim=1)),
    rules.indexed: always(
        use(M, (slice(None), 0)), use(M, 0), use(M, slice(1, None)), use(M, (slice(None, None, -1), 0)),
        use(M, (slice(None), slice(None, SIZE))), use(M, (slice(None), INDEX)), use(M, torch.tensor([0])),
        use(torch.zeros(9), INDEX), use(M, (slice(None), [0, 1], slice(None), [0, 1])),
    ),
    rules.created: always(use(V, (SIZE, 3)), use(V, (3, SIZE)), use(V, (2, 3)), use(V, (SIZE, SIZE))),
    rules.product: always(
        use(M, Rows(6, 2)), use(V, V), use(torch.randn(2, RECORDS), V), use(M, V), use(V, torch.randn(2, 4, 4)),
    ),
    rules.linear: always(use(V, torch.randn(2, 4)), use(Rows(), torch.ones(1, 1)), use(torch.ones(2, 4), V)),
    rules.one_by_one: pools,
    rules.padded: always(use(V, (1, 1)), use(V, (0, 0, 1, -1)), use(V, (SIZE, 1)), use(V, (1, 1), "constant", V)),
    rules.layer_normed: always(use(V, (4,)), use(V, (SIZE, 4)), use(V, (4,), V)),
    rules.embedded: always(
        use(INDEX, TABLE), use(INDEX, V), use(INDEX, TABLE, None, 1.0), use(INDEX, TABLE, scale_grad_by_freq=True),
        use(INDEX, TABLE, None, None, 2.0, True),
    ),
    rules.attention: always(use(M, M, M), use(V, V, V), use(M, M, torch.randn(3, 4, 6)), use(M, M, M, POSITION),
                            use(M, Rows(2, 4, 6), M), use(M, M, M, scale=SIZE)),
    rules.loss: losses(V),
    rules.class_loss: losses(INDEX),
    rules.one_hot: always(use(INDEX, 3), use(INDEX), use(INDEX, -1), use(INDEX, SIZE)),
}  # fmt: skip

SPECIAL = {
    torch.zeros: (use(SIZE, 3), [use(3, SIZE), use(SIZE, SIZE), use(size=(SIZE, 2))]),
    torch.ones: (use(SIZE, 3), [use(3, SIZE), use(SIZE, SIZE), use(SIZE, 2, out=V)]),
    Tensor.view: (use(V, SIZE, 2, 2), sizes((2, SIZE, 2))),
    Tensor.reshape: (use(V, SIZE, 2, 2), sizes((-1, SIZE))),
    torch.reshape: (use(V, (SIZE, 2, 2)), [use(V, (2, SIZE, 2)), use(V, (-1,)), use(V, (-1, SIZE))]),
    Tensor.flatten: (use(M, 1), [use(M), use(M, 0, 1)]),
    torch.flatten: (use(M, 1), [use(M), use(M, 0, 1)]),
    Tensor.unflatten: (use(V, 1, (2, 2)), [use(V, 0, (SIZE, 1)), use(V, 0, (1, -1))]),
    torch.stack: (use([V, V], 2), [use([V, V]), use([V, V], -3)]),
    **{unbind: (use(M, dim=1), [use(M), use(M, dim=0), use(M, dim=-3)]) for unbind in (Tensor.unbind, torch.unbind)},
    **{product: (use(M, Rows(6, 2)), [use(V, V), use(V, M)]) for product in (torch.bmm, Tensor.bmm)},
    **{function: (use(M, 1), [use(M, 0), use(M, SIZE), use(M, V)]) for function in (Tensor.cumsum, torch.cumsum)},
    **{
        convolution: (use(argument, filters), [use(Rows(*argument.shape[1:]), filters), use(argument, argument)])
        for convolution, argument, filters in (
            (F.conv1d, M, FILTERS),
            (F.conv2d, IMAGE, torch.randn(2, 4, 3, 3)),
            (F.conv3d, Rows(2, 4, 4, 4), torch.randn(2, 2, 3, 3, 3)),
        )
    },
    F.interpolate: (use(M, scale_factor=2), [use(M, size=SIZE), use(torch.randn(1, 2, 3), 2)]),
    F.unfold: (use(IMAGE, 2), [use(IMAGE, SIZE), use(Rows(8, 8), 2)]),
    F.pixel_shuffle: (use(IMAGE, 2), [use(Rows(8, 8), 2), use(IMAGE, SIZE)]),
    F.group_norm: (use(M, 2), [use(M, SIZE), use(M, 2, V), use(torch.randn(3, 4, 6), 2)]),
    Tensor.permute: (use(M, 0, 2, 1), [use(M, 1, 0, 2), use(M, (2, 1, 0))]),
}


def case(function):
    return SPECIAL[function] if function in SPECIAL else RULES[FUNCTIONS[function]](function)


def row_by_row(kind):
    name = kind.__name__
    argument = {"1d": M, "2d": IMAGE, "3d": Rows(2, 4, 4, 4)}.get(name[-2:], V)
    options = {"GroupNorm": (2, 4), "Threshold": (0.1, 0.0), "Upsample": (None, 2), "PixelShuffle": (2,)}.get(name, ())
    if "Pool" in name:
        options = (2.0, 2) if name.startswith("LP") else (2,)
    argument = {"Upsample": M, "PixelShuffle": IMAGE}.get(name, argument)
    refused = [(kind(*options), use(argument, argument)), (kind(*options), use(torch.randn(2, 3)))]
    if kind is nn.Flatten:
        refused.append((nn.Flatten(0), use(M)))
    return kind(*options).eval(), use(argument), refused


def padding(kind):
    width, fill = int(kind.__name__[-2]), ([0.0] if kind.__name__.startswith("Constant") else [])
    shift = (*[0] * (2 * width - 2), 1, -1)  # moves the records, if they are in that dimension
    few, many = Rows(*[4] * (width - 1)), Rows(*[4] * (width + 1))
    return kind(1, *fill), use(many), [(kind(shift, *fill), use(few)), (kind(1, *fill), use(many, many))]


def normalizing(kind):
    layer = kind((4, 6))
    return layer, use(M), [(kind((traced._SIZE, 4)), use(V)), (layer, use(M, M))]


def softmax(kind):
    return kind(dim=1), use(V), [(kind(dim=0), use(V)), (kind(dim=-2), use(V))]


def batch_norm(kind):
    argument = {"1d": V, "2d": IMAGE, "3d": Rows(4, 2, 2, 2)}[kind.__name__[-2:]]
    unfrozen = kind(4, track_running_stats=False).eval()
    return kind(4).eval(), use(argument), [(kind(4), use(argument)), (unfrozen, use(argument))]


def instance_norm(kind):
    argument = {"1d": M, "2d": IMAGE, "3d": Rows(4, 2, 2, 2)}[kind.__name__[-2:]]
    return kind(4), use(argument), [(kind(4, track_running_stats=True), use(argument))]


def convolution(kind):
    argument = {"1d": M, "2d": IMAGE, "3d": Rows(4, 3, 3, 3)}[kind.__name__[-2:]]
    layer = kind(4, 2, 3)
    return layer, use(argument), [(layer, use(Rows(*argument.shape[1:]))), (layer, use(torch.randn(1, 4, 6)))]


def recurrent(kind):
    def layer(**options):
        return kind(nn.GRU(6, 2, **options), stacked=False)

    return layer(batch_first=True), use(M), [(layer(), use(M)), (layer(batch_first=True), use(M, Rows(4, 2)))]


def self_attention(kind):
    layer, other = kind(nn.MultiheadAttention(6, 2, batch_first=True)), Rows(4, 6)
    refused = [use(M, other, M), use(V, V, V), use(M), use(M, M, M, key_padding_mask=other)]
    return layer, use(M, M, M), [(layer, arguments) for arguments in refused]


def loss_module(targets):
    def cases(kind):
        other = V if targets is V else Rows(4, 1)
        refused = [(kind(), use(V, targets)), (kind(reduction="sum"), use(V, targets)),
                   (kind(reduction="none"), use(V, torch.ones(4))), (kind(reduction="none"), use(Rows(1), other)),
                   (kind(reduction="none"), use(V, target=targets))]  # fmt: skip
        return kind(reduction="none"), use(V, targets), refused

    return cases


MODULE_RULES = {
    module_rules.row_by_row: row_by_row,
    module_rules.padding: padding,
    module_rules.linear_module: lambda kind: (
        kind(4, 2),
        use(V),
        [(kind(1, 2), use(Rows())), (kind(4, 2), use(torch.ones(4)))],
    ),
    module_rules.convolution: convolution,
    module_rules.normalizing: normalizing,
    module_rules.softmax: softmax,
    rebuilt.recurrent: recurrent,
    rebuilt.self_attention: self_attention,
    module_rules.embedding: lambda kind: (
        kind(3, 2),
        use(INDEX),
        [(kind(3, 2, max_norm=1.0), use(INDEX)), (kind(3, 2, scale_grad_by_freq=True), use(INDEX))],
    ),
    module_rules.batch_norm: batch_norm,
    module_rules.instance_norm: instance_norm,
    module_rules.loss_module: loss_module(V),
    module_rules.class_loss_module: loss_module(INDEX),
}


def followed(function, arguments):
    """What the rules say of a call, on shapes alone."""
    same = functools.cache(Rows.batched)
    args, kwargs = trees.tree_map_only(Rows, same, arguments, is_leaf=lambda a: isinstance(a, Rows))
    args, kwargs = trees.tree_map_only(Tensor, lambda constant: constant.to("meta"), (args, kwargs))
    try:
        if isinstance(function, nn.Module):
            return traced._call_module(function.to("meta"), args, kwargs)
        return traced._call(function, args, kwargs)
    except NoRule:
        raise
    except Exception as error:  # as in `traced._follow`: a rule has not allowed what it does not know
        raise NoRule from error


def computed(function, arguments, others=None):
    """The rows that a call gives for some records; with `others`, all but record 2 are exchanged."""
    generator = torch.Generator().manual_seed(1)

    def drawn(rows):
        found = rows.draw(generator)
        if others is not None:
            fresh = rows.draw(torch.Generator().manual_seed(others))
            found = torch.cat([fresh[:2], found[2:3], fresh[3:]])
        return found

    def size(leaf):
        return RECORDS if isinstance(leaf, BatchSize) else leaf

    args, kwargs = trees.tree_map_only(Rows, drawn, arguments, is_leaf=lambda a: isinstance(a, Rows))
    args, kwargs = trees.tree_map(size, (args, kwargs))
    torch.manual_seed(0)
    return [leaf for leaf in trees.tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]


def assert_apart(function, arguments):
    for one, other in zip(computed(function, arguments), computed(function, arguments, others=7), strict=True):
        assert one.shape[0] == other.shape[0] == RECORDS
        assert torch.equal(one[2], other[2])


def refuses(function, arguments):
    with pytest.raises(NoRule):
        followed(function, arguments)


def name(function):
    where = "Tensor." if function in {getattr(Tensor, n, None) for n in (getattr(function, "__name__", ""),)} else ""
    return where + getattr(function, "__name__", str(function))


@pytest.mark.parametrize("function", FUNCTIONS, ids=name)
def test_a_function_keeps_records_apart_or_is_refused(function):
    allowed, refused = case(function)
    followed(function, allowed)
    assert_apart(function, allowed)
    assert refused
    for arguments in refused:
        refuses(function, arguments)


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_module_keeps_records_apart_or_is_refused(kind):
    layer, allowed, refused = MODULE_RULES[MODULES[kind]](kind)
    assert_apart(layer, allowed)
    followed(layer, allowed)
    assert refused
    for other, arguments in refused:
        refuses(other, arguments)


def test_every_rule_has_a_planted_violation():
    assert set(RULES) | {rules.reshaped, rules.convolved} == set(FUNCTIONS.values())
    assert set(MODULE_RULES) == set(MODULES.values())


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (Tensor.add_, use(torch.zeros(2), 1.0)),
        (operator.iadd, use(torch.zeros(2), 1.0)),
        (F.dropout, use(torch.zeros(2), 0.5, True, True)),
        (torch.exp, use(torch.zeros(2), out=torch.zeros(2))),
        (operator.mul, use(SIZE, 2)),
        (torch.arange, use(SIZE)),
        (torch.unique, use(V)),
        (torch.randperm, use(SIZE)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_writes_into_constants_or_computes_with_the_batch_size_is_refused(function, arguments):
    refuses(function, arguments)
    assert torch.arange in rules.ON_CONSTANTS


# --- around the rules: what is traced is all that runs ---


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        return self.linear(self.function(self, x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, slope):
        return slope


def getitem(parts, index):
    """Has the name of a function with a rule."""
    return parts[index]


torch.fx.wrap("getitem")


class Own(Tensor):
    pass


def without_gradients(module, x):
    with torch.no_grad():
        return x * 2


AROUND = {
    "custom autograd function": lambda module, x: StraightThrough.apply(x),
    "no_grad": without_gradients,
    "namesake": lambda module, x: getitem([x, x], 0),
    "buffer written": lambda module, x: x + module.shift.add_(1.0),
    "buffer, one row": lambda module, x: module.shift.expand(x.shape[0], 4).__iadd__(x),
    "constant made in the pass": lambda module, x: x + torch.randn(4),
    "the first so many places": lambda module, x: x[:, : x.shape[0]],
    "hook on a tensor": lambda module, x: x.register_hook(lambda slope: slope / slope.norm()) and x,
}


@pytest.mark.parametrize("what", AROUND)
def test_what_the_graph_would_not_have_is_not_traced(what):
    with pytest.raises(NoRule):
        TracedModel(Model(AROUND[what]), None, (torch.randn(3, 4),), None)
    TracedModel(Model(lambda module, x: x + module.shift), None, (torch.randn(3, 4),), None)


def test_layers_with_methods_of_their_own_are_looked_into():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1]._call_impl = lambda x: x - x.mean(0)
    with pytest.raises(NoRule):
        TracedModel(model, None, (torch.randn(3, 4),), None)


def test_tensors_of_other_types_and_modules_that_are_not_copied_are_not_traced():
    with pytest.raises(NoRule):
        TracedModel(nn.Linear(4, 2), None, (torch.randn(3, 4).as_subclass(Own),), None)
    model = Model(lambda module, x: x + module.shift)
    model.shift = torch.zeros(4).as_subclass(Own)
    with pytest.raises(NoRule):
        TracedModel(model, None, (torch.randn(3, 4),), None)

    class Same(nn.Linear):
        def __deepcopy__(self, memo):
            return self

    with pytest.raises(NoRule):
        TracedModel(nn.Sequential(Same(4, 2)), None, (torch.randn(3, 4),), None)


def test_a_trained_layer_that_the_loss_calls_is_not_traced():
    model = nn.Sequential(nn.Linear(4, 2))
    again = functools.partial(lambda layer, outputs, targets: layer(targets).sum(1) + outputs.sum(1), model[0])
    with pytest.raises(NoRule):
        TracedModel(model, again, (torch.randn(3, 4),), torch.randn(3, 4))
