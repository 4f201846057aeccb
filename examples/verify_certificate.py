"""Check a certificate without the data
====================================

The holder of the data publishes a table and its certificate. Anyone can compute the guarantee again, and a changed
number shows. ``python examples/verify_certificate.py``
"""

import json

import numpy as np

from matrixdp import Accountant, Budget, Certificate, Counts, release

counts = np.array([[120, 31, 4], [77, 52, 9]])

# %%
# At the hospital:
out = release(counts, Counts(1), Budget(1.0, 1e-6))
published = out.certificate.to_json()
print(out.value)

# %%
# At home, from the document alone:
certificate = Certificate.from_json(published)
print(certificate.verify())
print("epsilon at delta 1e-9:", round(certificate.epsilon(1e-9), 4))

# %%
# Somebody states less noise than was certified:
document = json.loads(published)
document["law"]["scale"] = 0.5 * document["law"]["scale"]
print(Certificate.from_json(json.dumps(document)).verify())

# %%
# Ten such releases together, still without the data:
accountant = Accountant()
accountant.add(certificate, count=10)
print(accountant.composition())
