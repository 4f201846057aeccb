"""Tensors in, tensors out; on a CUDA device with a kernel of our own, which is checked against a plain reference."""

import numpy as np
import pytest
import torch

from matrixdp import Budget, release
from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import Grid
from matrixdp.sensitivity import Counts, Frobenius, RankOne

BUDGET = Budget(1.0, 1e-6)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the Triton kernel is not tested here"
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("sensitivity", "mechanism"), [(Frobenius(1.0), "analytic"), (RankOne(1.0), "optimal"), (Counts(1), "l2")], ids=str
)
def test_a_tensor_comes_back_as_a_tensor(device, dtype, sensitivity, mechanism):
    value = torch.eye(20, dtype=dtype, device=device, requires_grad=True)
    out = release(value, sensitivity, BUDGET, mechanism, accept_violation=mechanism == "l2")
    assert isinstance(out.value, torch.Tensor)
    assert (out.value.dtype, out.value.device, out.value.shape) == (dtype, value.device, value.shape)
    assert not out.value.requires_grad
    noise = (out.value - value.detach()).double().cpu().numpy()
    assert 0.5 < np.sqrt(np.mean(noise**2)) / out.noise.root_mean_square < 1.5
    assert out.certificate.meets(BUDGET) == out.certificate.float_safe == (mechanism != "l2")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("budget", "mechanism"), [(BUDGET, "laplace"), (BUDGET, "discrete"), (Budget(1.0, 0), "laplace")], ids=str
)
def test_discrete_noise_on_a_tensor(device, dtype, budget, mechanism):
    """On a CUDA device it is drawn in main memory. The mean square of 10,000 entries is within a factor of two."""
    value = torch.full((100, 100), 0.5, dtype=dtype, device=device)
    out = release(value, Counts(4), budget, mechanism)
    assert (out.value.dtype, out.value.device, out.value.shape) == (dtype, value.device, value.shape)
    noise = out.value.double().cpu().numpy()  # the value was floored to 0
    assert np.array_equal(noise, np.round(noise))
    assert 0.5 < np.mean(noise**2) / out.noise.variance < 2.0
    assert out.certificate.meets(budget)


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([float("inf")]),
        torch.zeros(0),
        torch.zeros(2, 0, 2),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.bfloat16),
        torch.full((2, 2), 1e30),
    ],
    ids=lambda t: str(tuple(t.shape)) + str(t.dtype),
)
def test_bad_tensors_are_refused(bad):
    with pytest.raises(InvalidInput):
        release(bad, Frobenius(1.0), BUDGET, "analytic")


def test_single_precision_second_moments_are_averaged_in_double_precision():
    """Entries near 2^23 whose halves single precision cannot hold: the release keeps the half."""
    value = torch.tensor([[2.0**23, 2.0**23], [2.0**23 + 1, 2.0**23]], dtype=torch.float32)
    from matrixdp.backends.torch import checked

    averaged = checked(value, RankOne(1.0))
    assert averaged.dtype == torch.float64
    assert averaged[0, 1] == averaged[1, 0] == 2.0**23 + 0.5
    assert release(value, RankOne(1.0), BUDGET, "optimal").value.dtype == torch.float32


def test_a_tensor_changed_while_it_is_released_does_not_count():
    value = torch.zeros(2000, dtype=torch.float64)

    class Meddler:
        def spend(self, certificate, note=""):
            value.add_(1e6)

    assert release(value, Frobenius(1.0), BUDGET, "analytic", ledger=Meddler()).value.abs().max() < 1e4


def chacha20_block(secret, counter):
    words = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *np.frombuffer(secret, "<u4").tolist()]
    words += [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    x = list(words)

    def turn(v, bits):
        return ((v << bits) | (v >> (32 - bits))) & 0xFFFFFFFF

    def quarter(a, b, c, d):
        for p, q, r, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] = (x[p] + x[q]) & 0xFFFFFFFF
            x[r] = turn(x[r] ^ x[p], bits)

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) & 0xFFFFFFFF for a, b in zip(x, words, strict=True)]


def test_the_reference_is_chacha20():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    secret = bytes(range(32))
    stream = (
        Cipher(algorithms.ChaCha20(secret, (7).to_bytes(8, "little") + bytes(8)), None).encryptor().update(bytes(64))
    )
    assert chacha20_block(secret, 7) == np.frombuffer(stream, "<u4").tolist()


@needs_cuda
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_the_reference(levels, dtype):
    from matrixdp.secure import cuda

    grid, seed = Grid(levels), bytes(range(32))
    values = torch.linspace(-5, 5, 3000, dtype=dtype, device="cuda")
    got = cuda.add_noise(values, 2.5, grid, Key.from_bytes(seed)).cpu().numpy()
    secret, unit = Key.from_bytes(seed).chacha_key(), 2.5 * grid.step
    for place in range(0, 3000, 61):
        program, rest = divmod(place, 8 * cuda.LANES)
        word_place, lane = divmod(rest, cuda.LANES)
        noise = 0.0
        for level, table in enumerate(grid.tables):
            words = chacha20_block(secret, (program * cuda.LANES + lane) * levels + level)
            word = words[2 * word_place] | words[2 * word_place + 1] << 32
            column = int(table.packed[word & 2047])
            chosen = word if word >> 12 < column >> 12 else column
            assert word >> 12 != column >> 12
            noise = noise * 128 + (-(chosen & 2047) if word >> 11 & 1 else chosen & 2047)
        value = float(values[place].double())
        assert got[place] == np.asarray(unit * (np.rint(value * (1 / unit)) + noise), dtype=got.dtype)


@needs_cuda
def test_the_kernel_breaks_ties(monkeypatch):
    """Tables in which the first word that falls into a column meets its threshold."""
    from matrixdp.secure import cuda

    size, levels, seed = 3 * 8 * cuda.LANES, 2, bytes(range(32))
    secret = Key.from_bytes(seed).chacha_key()
    columns = [np.full(2048, 9, np.uint64) for _ in range(levels)]
    ties = [np.full(2048, 2**63, np.uint64) for _ in range(levels)]
    expected, met = np.zeros(size), 0
    places = [divmod(place, 8 * cuda.LANES) for place in range(size)]
    blocks = {
        (lane, level, second): chacha20_block(secret, (lane * levels + level) | second << 63)
        for lane in range(3 * cuda.LANES)
        for level in range(levels)
        for second in (0, 1)
    }
    for level in range(levels):
        for first in (True, False):  # all thresholds, then all entries
            for place, (program, rest) in enumerate(places):
                index, lane = divmod(rest, cuda.LANES)
                lane += program * cuda.LANES
                word, more = (
                    blocks[lane, level, second][2 * index] | blocks[lane, level, second][2 * index + 1] << 32
                    for second in (0, 1)
                )
                column = word & 2047
                if first:
                    if columns[level][column] == 9:
                        columns[level][column] = (word >> 12 << 12) | 9
                    continue
                threshold = int(columns[level][column]) >> 12
                own = word >> 12 < threshold or (word >> 12 == threshold and more < 2**63)
                met += word >> 12 == threshold
                chosen = column if own else 9
                expected[place] = expected[place] * 128 + (-chosen if word >> 11 & 1 else chosen)
    assert met > levels * 1500
    packed, second_words = (torch.from_numpy(np.concatenate(parts).view(np.int64)).cuda() for parts in (columns, ties))
    monkeypatch.setattr(cuda, "_tables", lambda levels, device: (packed, second_words))
    zeros = torch.zeros(size, dtype=torch.float64, device="cuda")
    got = cuda.add_noise(zeros, 1.0, Grid(levels), Key.from_bytes(seed)) / Grid(levels).step
    assert np.array_equal(got.cpu().numpy(), expected)


@needs_cuda
def test_the_kernels_noise_is_standard_normal():
    """Mean, variance and fourth moment over 10^7 entries, at 1e-7; 0.5 % less noise is told apart."""
    from matrixdp.secure import cuda

    z = cuda.add_noise(torch.zeros(10_000_000, dtype=torch.float64, device="cuda"), 1.0, Grid(2))
    assert abs(float(z.mean())) < 5.5 / 10**3.5
    assert abs(float((z**2).mean()) - 1) < 5.5 * (2 / 1e7) ** 0.5
    assert abs(0.995**2 * float((z**2).mean()) - 1) > 5.5 * (2 / 1e7) ** 0.5
    assert abs(float((z**4).mean()) - 3) < 5.5 * (96 / 1e7) ** 0.5
