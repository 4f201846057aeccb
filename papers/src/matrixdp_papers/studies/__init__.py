"""The papers' experiments, one module per study, run by `matrixdp study NAME`."""

from matrixdp_papers.studies import (
    directions,
    dpsgd,
    error,
    features,
    gradients,
    histogram,
    horizontal,
    mvg,
    pca,
    vertical,
)
from matrixdp_papers.studies.base import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        error.STUDY,
        mvg.STUDY,
        directions.STUDY,
        histogram.STUDY,
        pca.STUDY,
        dpsgd.STUDY,
        gradients.STUDY,
        features.STUDY,
        horizontal.STUDY,
        vertical.STUDY,
    )
}
"""Every study by name."""
