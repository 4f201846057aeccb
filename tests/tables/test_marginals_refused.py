"""What plans of marginals refuse, before anything is spent."""

import math

import numpy as np
import pytest

from matrixdp import Budget
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.privacy import gaussian
from matrixdp.residuals import ResidualBasis, Residuals
from matrixdp.tables import plan_marginals

ONE = Budget(1.0, float(gaussian.delta(1.0, 1.0)))  # mu = 1
SIZES = {"age": 5, "sex": 2, "region": 3}
FAMILIES = [("sex", "age"), ("region",), ("sex", "region")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": {}}, "sizes"),
        ({"sizes": {"a": 1, "b": 3}}, "2 or above"),
        ({"sizes": {"a": 2.5}}, "each size"),
        ({"sizes": {3: 2}}, "names"),
        ({"up_to": 4}, "at most 3"),
        ({"up_to": 0}, "up_to"),
        ({"up_to": None}, "either up_to"),
        ({"families": [("age",)]}, "either up_to"),
        ({"up_to": None, "families": []}, "at least one"),
        ({"up_to": None, "families": [()]}, "at least one"),
        ({"up_to": None, "families": ["age"]}, "sequence of columns"),
        ({"up_to": None, "families": [("height",)]}, "name columns"),
        ({"up_to": None, "families": [("age", "age")]}, "name columns"),
        ({"weights": {("age",): 0.0}}, "above 0"),
        ({"weights": {("age", "sex", "region"): 1.0}}, "tables of the plan"),
        ({"targets": {("age",): math.nan}}, "finite"),
        ({"ordered": {"height": "prefix"}}, "ordered"),
        ({"ordered": {"age": "sums"}}, "ordered"),
        ({"contributions": 0}, "records"),
        ({"contributions": 2, "adjacency": "replace"}, "several records"),
        ({"adjacency": "zero-out"}, "add/remove or replace"),
        ({"objective": "median"}, "objective"),
        ({"budget": 1.0}, "Budget|budget"),
        ({"sizes": {f"c{i}": 2 for i in range(300)}, "up_to": 3}, "subsets"),
        (
            {"sizes": {f"c{i}": 2 for i in range(30)}, "up_to": None, "families": [[f"c{i}" for i in range(30)]]},
            "subsets",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(change, words):
    arguments = {"sizes": SIZES, "up_to": 2, "budget": ONE, **change}
    with pytest.raises(InvalidInput, match=words):
        plan_marginals(arguments.pop("sizes"), **arguments)


@pytest.mark.parametrize(
    "counts",
    [
        np.zeros((4, 2), dtype=int),
        np.full((4, 3), 0.5),
        {("age", "sex"): np.zeros((5, 2))},
        {("age",): np.zeros(5, dtype=int)},
        {("age", "sex"): np.zeros(5, dtype=int)},
        lambda columns: np.zeros(3, dtype=int),
        [["secret"]],
    ],
)
def test_bad_counts_are_refused_without_quoting_them(counts):
    with pytest.raises(InvalidInput, match="counts") as refused:
        plan_marginals(SIZES, families=FAMILIES, budget=ONE).release(counts)
    assert "secret" not in str(refused.value)


def test_recipe_refuses_what_it_is_not_for():
    basis = ResidualBasis((2, 3), np.array([[-1, -1], [0, 1]]))
    given = {"shape": (basis.length,), "budget": ONE}
    with pytest.raises(NotApplicable, match="public"):
        calibrate("marginals", sensitivity=Residuals(basis, 1, "replace"), **given)
    with pytest.raises(InvalidInput, match="error"):
        calibrate("marginals", sensitivity=Residuals(basis), error=[1.0], **given)
    for subsets in ([[1, 0]], [[0, 0]], [[0, 5]], [[-1, 0]], [[0, 1], [0, 1]], [0, 1], [[0.5, 1]]):
        with pytest.raises(InvalidInput):
            ResidualBasis((2, 3), np.array(subsets))
    for contrasts in ([[1, -2]], [[0, 0]], [[0.5, -0.5]], [[1, -1], [1, -1]]):
        with pytest.raises(InvalidInput):
            ResidualBasis((2, 3), np.array([[0, 1]]), (np.array(contrasts), None))
    with pytest.raises(InvalidInput, match="exact"):
        basis.residual((0, 1), np.full((2, 3), 2**60))
