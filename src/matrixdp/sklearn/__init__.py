"""scikit-learn estimators that release a private statistic when they are fitted.

    pca = PrivatePCA(n_components=2, budget=Budget(1.0, 1e-6), norm=1.0).fit(records)
    pca.components_, pca.certificate_

Arguments of all estimators, by name:

- `budget`: the guarantee to keep; or `epsilon` and `delta` instead.
- `adjacency`: which data sets are neighbours; ADD_REMOVE, REPLACE or ZERO_OUT. Under the last two the number of records
  is public.
- `mechanism`: a mechanism's name; "auto" takes the least expected error.
- `random_state`: for tests only; whoever knows it can remove the noise. By default noise is seeded by the operating
  system.
- `ledger`: charged by every fit, unless `fit` is given another.

Guarantee: what `fit` learns from the records (every attribute that ends in an underscore) is released or computed from
releases under the guarantee `certificate_`. Exceptions, which are taken as public: the number and the names of the
features (`n_features_in_`, `feature_names_in_`), the labels in `classes_` if they are taken from y, and the number of
records under replace and zero-out. Nothing else is private:

- `transform(records)` is a function of the records given to it. The projection of the training records reveals them;
  only the axes are private.
- Every `fit` is another release. Cross-validation and grid search fit many times, and every fit counts; pass a ledger
  to track the total.
- `norm`, `center`, `low`, `high` and `edges` are public and must not come from the records.
"""

from matrixdp import _extras

_extras.require("sklearn", "sklearn")

from matrixdp.sklearn.classification import PrivateLogisticRegression
from matrixdp.sklearn.histogram import PrivateHistogram
from matrixdp.sklearn.moments import PrivateCovariance, PrivatePCA
from matrixdp.sklearn.preprocessing import PrivateKBins, PrivateStandardScaler
from matrixdp.sklearn.regression import PrivateLinearRegression, PrivateRidge

__all__ = [
    "PrivateCovariance",
    "PrivateHistogram",
    "PrivateKBins",
    "PrivateLinearRegression",
    "PrivateLogisticRegression",
    "PrivatePCA",
    "PrivateRidge",
    "PrivateStandardScaler",
]
