"""Second moments, principal components and a regression
=====================================================

The 442 records of scikit-learn's public diabetes data, ten features each. ``python examples/second_moments.py``
"""

import numpy as np
from sklearn.datasets import load_diabetes

from matrixdp import Budget, compare, plots, release
from matrixdp.postprocess import nearest_psd
from matrixdp.queries import second_moment
from matrixdp.tables import release_moments

records, progression = load_diabetes(return_X_y=True, scaled=False)
# Bounds from public knowledge about such measurements, not from these records.
low = np.array([18, 1, 15, 60, 80, 30, 20, 1, 3, 50], dtype=float)
high = np.array([90, 2, 45, 140, 320, 250, 110, 10, 7, 130], dtype=float)
features = 2 * (np.clip(records, low, high) - low) / (high - low) - 1

# %%
# The matrix of second moments: every record is clipped to norm 2. Which mechanism has the least error?
answer = second_moment(features, norm=2.0)
print(compare(answer.value.shape, answer.sensitivity, Budget(1.0, 1e-6), mechanisms=["analytic", "optimal", "mgm"]))
out = release(*answer, Budget(1.0, 1e-6))
print(out.certificate)

# %%
# Second moments have no negative eigenvalues. Projecting on such matrices costs no privacy. The data are public; with
# private ones the true matrix is not drawn.
better = nearest_psd(out.value)
figure = plots.side_by_side(
    [[answer.value, out.value, better]],
    titles=["true (public data)", "released", "post-processed"],
    labels=["sum of products"],
    axes=[("feature", "feature")],
)
values, vectors = np.linalg.eigh(better)
print("share of the first two components:", (values[::-1][:2] / values.sum()).round(3))

# %%
# Progression on body mass index and blood pressure, with intervals for the noise.
columns = np.column_stack([records[:, [2, 3]], progression])
moments = release_moments(columns, low=[15, 60, 0], high=[45, 140, 350], budget=Budget(4.0, 1e-6))
fit = moments.regression(target=2)
for name, value, left, right in zip(["intercept", "bmi", "pressure"], fit.value, fit.low, fit.high, strict=True):
    print(f"{name:<10}{value:9.2f}   95 % interval {left:9.2f} to {right:9.2f}")
print("error bars hold:", moments.reliable(2))
