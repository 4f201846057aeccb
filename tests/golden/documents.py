"""Documents of the present schemas: `python tests/golden/documents.py` writes one of each kind.

They are written once for each schema and never again: later versions must go on reading and verifying them.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from matrixdp import Accountant, Budget, Frobenius, Ledger, queries, release
from matrixdp.privacy.verification import SCHEMA

HERE = Path(__file__).parent


def main():
    records = np.random.default_rng(1).random((40, 3))
    answer = queries.second_moment(records, norm=1.0)
    moment = release(*answer, Budget(0.5, 1e-7), query=answer.query).certificate
    directed = release(records.T, Frobenius(1.0), Budget(0.5, 1e-7), "mvg", gamma=7.0).certificate
    (HERE / f"certificate-schema-{SCHEMA}.json").write_text(moment.to_json() + "\n")
    accountant = Accountant()
    accountant.add(moment, 3)
    accountant.add(directed, 10, sampling_rate=0.1)
    (HERE / f"composition-schema-{SCHEMA}.json").write_text(accountant.composition(Budget(2.0, 1e-6)).to_json() + "\n")
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder, "budget.db"), Budget(2.0, 1e-6))
        ledger.spend(moment, "moment", dataset="made up", analyst="ann", purpose="a test", key="first")
        ledger.spend(directed, "training", count=4, sampling_rate=0.1, series="training", planned=10)
        lines = "".join(f"{json.dumps(line)}\n" for line in ledger.export())
    (HERE / f"export-schema-{SCHEMA}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
