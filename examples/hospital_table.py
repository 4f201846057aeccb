"""A hospital's table, from a CSV file to a page for readers
=========================================================

Generated visits of 3,000 patients. Some cells are missing or misspelt, and a patient may come several times. The domain
comes from the hospital's forms, never from the file. ``python examples/hospital_table.py``
"""

import csv
import random
import tempfile
from pathlib import Path

from matrixdp import Budget, Ledger
from matrixdp.tables import Categorical, Domain, Numeric, Table

folder = Path(tempfile.mkdtemp(prefix="hospital-"))
made = random.Random(0)
with (folder / "visits.csv").open("w", newline="") as file:
    lines = csv.writer(file)
    lines.writerow(["patient_id", "ward", "age"])
    for patient in range(3000):
        age = made.choice(["?", *range(1, 99)])
        for _ in range(made.choice([1, 1, 1, 2, 4])):
            lines.writerow([f"P{patient}", made.choice(["surgery", "surgery", "heart", "eyes", "eys", ""]), age])

# %%
# The domain says what each cell may hold. What is missing or unexpected has a place, so nothing depends on a cell.
domain = Domain(
    {
        "ward": Categorical(["surgery", "heart", "eyes"]),
        "age": Numeric(0, 110, bins=[0, 18, 40, 65, 110], missing_values=["?"]),
    }
)
visits = Table(folder / "visits.csv", domain, unit="patient_id", contributions=2)

# %%
# One release: charged to the ledger, then drawn. Each patient is protected with all visits.
ledger = Ledger(folder / "budget.db", Budget(2.0, 1e-6))
out = visits.counts("ward", "age").release(Budget(1.0, 1e-7), ledger=ledger, note="wards by age")
print(out.table().head(6).to_string(index=False))
print(out.certificate)

# %%
# A figure, a file and a page in plain language.
figure = out.plot()
out.to_csv(folder / "wards.csv")
(folder / "wards.html").write_text(out.statement("html"), encoding="utf-8")
print(f"left in the ledger: {ledger.remaining()}")
