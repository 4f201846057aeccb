"""scikit-learn estimators that release a private statistic when they are fitted.

    pca = PrivatePCA(n_components=2, budget=Budget(1.0, 1e-6), norm=1.0).fit(records)
    pca.components_, pca.certificate_

Guarantee: what `fit` learns about the records (every attribute that ends in an underscore) is one release, or computed
from it, with the guarantee `certificate_`; the number of records counts as public under adjacency replace. Nothing
else is private:

- `transform(records)` is a function of the records given to it. The projection of the training records reveals them;
  only the axes are private.
- Every `fit` is another release. Cross-validation and grid search fit many times, and every fit counts; pass a ledger
  to `fit` to keep the total.
- `norm`, `center` and `edges` are public and must not come from the records.
- `random_state` is for tests: whoever knows it can remove the noise. Without one the noise is seeded by the operating
  system.
"""

from matrixdp import _extras

_extras.require("sklearn", "sklearn")

from matrixdp.sklearn.histogram import PrivateHistogram
from matrixdp.sklearn.moments import PrivateCovariance, PrivatePCA

__all__ = ["PrivateCovariance", "PrivateHistogram", "PrivatePCA"]
