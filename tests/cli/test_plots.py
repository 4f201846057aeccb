"""Pictures: the right size, one colour scale in a row, bars that say what the comparison says."""

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.text import Text

from matrixdp import Budget, compare, plots
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms import RECIPES
from matrixdp.sensitivity import Counts, RankOne


@pytest.fixture
def comparison():
    return compare((16, 16), Counts(1), Budget(0.5, 1e-6))


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def images(figure):
    return [axes.images[0] for axes in figure.axes if axes.images]


def test_side_by_side_is_saved_in_the_size_of_its_figure(tmp_path):
    figure = plots.side_by_side([[np.eye(4), np.ones((4, 4))]] * 2, titles=["true", "released"])
    plots.save(figure, tmp_path / "pair.png")
    width, height = figure.get_size_inches() * plots.RESOLUTION
    assert png_size(tmp_path / "pair.png") == (round(width), round(height))


def test_a_row_shares_its_colour_scale_and_another_row_has_its_own():
    figure = plots.side_by_side(
        [[np.eye(3), -5 * np.eye(3)], [np.arange(6.0).reshape(2, 3), np.ones((2, 3))]],
        titles=["true", "released"],
        labels=["small", "large"],
        axes=[("a", "b"), ("c", "d")],
    )
    assert [image.get_clim() for image in images(figure)] == [(-5, 1), (-5, 1), (0, 5), (0, 5)]
    np.testing.assert_array_equal(images(figure)[1].get_array(), -5 * np.eye(3))
    text = {axes.get_xlabel() for axes in figure.axes} | {axes.get_ylabel() for axes in figure.axes}
    assert {"a", "b", "c", "d", "small", "large"} <= text
    assert [axes.get_title() for axes in figure.axes[:4]] == ["true", "released", "", ""]


def test_vectors_are_drawn_as_one_line():
    (image,) = images(plots.side_by_side([[np.arange(5.0)]], titles=["counts"]))
    assert image.get_array().shape == (1, 5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": [], "titles": ["a"]},
        {"rows": [[]], "titles": []},
        {"rows": [[np.eye(2)]], "titles": ["a", "b"]},
        {"rows": [[np.array([[1.0, math.nan]])]], "titles": ["a"]},
        {"rows": [[np.eye(2)]], "titles": ["a"], "labels": ["a", "b"]},
        {"rows": [[np.eye(2)]], "titles": ["a"], "axes": []},
    ],
)
def test_bad_pictures(arguments):
    with pytest.raises(InvalidInput):
        plots.side_by_side(**arguments)


def test_a_bar_for_every_mechanism_that_applies(comparison, tmp_path):
    figure = plots.comparison_chart(comparison)
    shown = [row for row in comparison if not row.note]
    (panel,) = figure.axes
    assert [bar.get_width() for bar in panel.patches] == [row.expected_squared_error for row in shown]
    assert [label.get_text() for label in panel.get_yticklabels()] == [row.mechanism for row in shown]
    assert panel.get_xscale() == "log"
    low, high = panel.get_xlim()
    assert all(low < row.expected_squared_error < high for row in shown)
    plots.save(figure, tmp_path / "bars.png")
    width, height = figure.get_size_inches() * plots.RESOLUTION
    assert png_size(tmp_path / "bars.png") == (round(width), round(height))


def test_verdicts_differ_in_colour_and_in_grey(comparison):
    best = comparison.rows[0]
    verdicts = ["exact", "loose", "unproven", "violated"]
    figure = plots.comparison_chart(replace(comparison, rows=tuple(replace(best, verdict=v) for v in verdicts)))
    bars = figure.axes[0].patches
    assert len({bar.get_facecolor() for bar in bars}) == 4
    grey = [float(np.dot(bar.get_facecolor()[:3], [0.299, 0.587, 0.114])) for bar in bars]
    for i in range(4):
        for j in range(i):
            assert abs(grey[i] - grey[j]) > 0.25 or bars[i].get_hatch() != bars[j].get_hatch()
    assert len(figure.legends[0].get_texts()) == 4


def test_every_word_of_a_chart_is_inside_the_picture(comparison):
    figure = plots.comparison_chart(comparison, compare((64, 64), RankOne(1.0), Budget(0.628414, 1e-6)))
    figure.draw_without_rendering()
    words = [text for text in figure.findobj(Text) if text.get_text() and not text.get_text().startswith("$")]
    assert len(words) > 50
    for text in words:
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width, text.get_text()


def test_several_comparisons_get_a_panel_each(comparison):
    other = compare((4, 4), RankOne(1.0), Budget(1.0, 1e-6))
    assert len(plots.comparison_chart(comparison, other).axes) == 2


def test_bad_charts_and_paths(comparison, tmp_path):
    with pytest.raises(InvalidInput, match="empty"):
        plots.comparison_chart()
    nothing = replace(comparison, rows=tuple(replace(row, note="no") for row in comparison))
    with pytest.raises(InvalidInput, match="at least one mechanism"):
        plots.comparison_chart(comparison, nothing)
    with pytest.raises(InvalidInput, match=r"\.png"):
        plots.save(plots.comparison_chart(comparison), tmp_path / "bars.pdf")


def test_no_state_is_shared_with_pyplot(comparison):
    from matplotlib import pyplot

    plots.comparison_chart(comparison)
    assert pyplot.get_fignums() == []


def test_a_mechanism_has_its_colour_and_its_name_at_the_end_of_its_curve():
    figure = plots.lines([1, 2], {"analytic": [1.0, 2.0], "mine": [2.0, 3.0]}, names=("day", "error"))
    (panel,) = figure.axes
    assert [line.get_color() for line in panel.lines] == [plots.COLOURS["analytic"], plots.OTHER]
    assert [text.get_text() for text in panel.texts] == ["analytic", "mine"]
    assert set(plots.COLOURS) <= set(RECIPES)
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    with pytest.raises(InvalidInput, match="curves"):
        plots.lines([1], {}, names=("day", "error"))
