"""What `import matrixdp` leaves for later, so that it stays quick."""

import subprocess
import sys

# Together they take more time than all else that is imported.
LATER = ("numba", "scipy.special", "scipy.linalg", "scipy.optimize", "scipy.stats", "scipy.signal", "dp_accounting")
EXTRAS = ("torch", "pandas", "dask", "sklearn", "matplotlib", "flwr", "rich", "typer")


def loaded(code):
    script = f"{code}; import sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_slow_modules_wait_until_they_are_needed():
    names = loaded("import matrixdp")
    assert "matrixdp.pipeline" in names
    assert not names.intersection(LATER + EXTRAS)
    assert "scipy.special" in loaded("import matrixdp; matrixdp.privacy.gaussian.mu(1.0, 1e-6)")
