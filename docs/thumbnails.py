"""A picture for each example of the gallery, drawn when the site is built: one function for each, by its name."""
# ruff: noqa: D103

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"


def draw(folder: Path) -> None:
    """Puts each picture in place of the thumbnail that sphinx-gallery made."""
    for paint in PICTURES:
        figure = Figure(figsize=(4, 2.8), layout="constrained")
        panel = figure.subplots()
        panel.set_axis_off()
        paint(panel, np.random.default_rng(0))
        figure.savefig(folder / f"sphx_glr_{paint.__name__}_thumb.png", dpi=100)


def audit_other_libraries(panel, rng):
    panel.bar([0, 1, 3, 4], [2, 2.236, 1, 2.2], color=[GREY, ORANGE, GREY, ORANGE])
    for place, word in ((0, "claimed"), (1, "found"), (3, "claimed"), (4, "found")):
        panel.annotate(word, (place, -0.15), ha="center", va="top", fontsize=13)
    panel.set_ylim(-0.5, 2.5)


def daily_counts(panel, rng):
    true = np.cumsum(rng.poisson(5, 30))
    panel.step(range(30), true, color="black", linewidth=2)
    panel.plot(true + 9 * np.cumsum(rng.normal(size=30)), color=ORANGE)  # fresh noise adds up
    panel.plot(true + 6 * rng.normal(size=30), color=BLUE)


def federated(panel, points, asked, noisy):
    angles = np.linspace(0, 2 * np.pi, points, endpoint=False)
    for angle, chosen in zip(angles, asked, strict=True):
        x, y = 2 * np.cos(angle), np.sin(angle)
        panel.plot([0, x], [0, y], color=BLUE if chosen else "#dddddd", linewidth=1)
        panel.plot(x, y, "o", color=BLUE if chosen else GREY, markersize=14 if points < 9 else 5)
    panel.plot(0, 0, "s", color=ORANGE if noisy else GREY, markersize=22)


def federated_adult(panel, rng):
    federated(panel, 5, [True] * 5, noisy=False)


def federated_clients(panel, rng):
    federated(panel, 60, rng.random(60) < 0.2, noisy=True)


def hospital_table(panel, rng):
    heights = np.array([34, 52, 21, 43, 12])
    panel.bar(range(5), heights, yerr=5, capsize=5, color=BLUE)


def huggingface_trainer(panel, rng):
    for place, word in enumerate(("a", "private", "record", "is", "one", "sentence")):
        style = {"ha": "center", "fontsize": 15, "bbox": {"boxstyle": "round", "fc": "#cfe3f1"}}
        panel.annotate(word, (place % 3, -(place // 3)), **style)
    panel.set(xlim=(-0.5, 2.5), ylim=(-1.6, 0.7))


def second_moments(panel, rng):
    true = np.cov(np.cumsum(rng.normal(size=(20, 200)), axis=0))
    panel.imshow(np.hstack([true, np.full((20, 2), np.nan), true + rng.normal(size=true.shape) * 2]), cmap="viridis")


def train_mnist(panel, rng):
    from sklearn.datasets import load_digits

    digits = load_digits().images[[3, 8, 5, 1]]
    panel.imshow(np.vstack([np.hstack(digits[:2]), np.hstack(digits[2:])]), cmap="gray_r")


def train_recipes(panel, rng):
    x, y = np.meshgrid(np.linspace(-3, 3, 60), np.linspace(-3, 3, 60))
    waves = [np.exp(-(x**2 + y**2) / 2) * np.cos(4 * (x * np.cos(a) + y * np.sin(a))) for a in (0, 0.8, 1.6)]
    panel.imshow(np.hstack(waves), cmap="RdBu")


def verify_certificate(panel, rng):
    for place, (word, colour) in enumerate((("verified", GREEN), ("NOT verified", ORANGE))):
        panel.add_patch(Rectangle((0.1 + place, 0.05), 0.8, 0.9, fill=False, edgecolor=colour, linewidth=3))
        for line in range(6):
            panel.plot([0.2 + place, (0.8 if line % 3 else 0.6) + place], [0.85 - line / 12] * 2, color=GREY)
        panel.annotate(word, (0.5 + place, 0.15), ha="center", color=colour, weight="bold", fontsize=13)
    panel.set(xlim=(0, 2), ylim=(0, 1))


PICTURES = (
    *(audit_other_libraries, daily_counts, federated_adult, federated_clients, hospital_table),
    *(huggingface_trainer, second_moments, train_mnist, train_recipes, verify_certificate),
)
