"""The papers' experiments, one module a study, run by `matrixdp study NAME`."""

from matrixdp.studies import error, histogram, mvg, pca
from matrixdp.studies.base import Study

STUDIES: dict[str, Study] = {study.name: study for study in (error.STUDY, mvg.STUDY, histogram.STUDY, pca.STUDY)}
"""Every study by name."""
