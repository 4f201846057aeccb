"""What private training costs: one step in multiples of a step of plain SGD, and memory. `python benchmarks/dpsgd.py`.

A step is forward, backward, clipping, noise and update: for LeNet, a Transformer and an LSTM at batch 256, and with
`--device cuda` also for ResNet-18 with group norms at batch 1024. "one at a time" is the path for models without rules.
Ours draws its noise from the secure engine, the others from torch's ordinary generator. Rows take turns of two steps:
the first fills the caches that another row has emptied, the second is timed; shown are medians. Memory is what a step
takes beyond model and batch at its peak: on CUDA what torch allocates, which leaves out the pool of a captured step, on
the CPU the growth of the resident set in a fresh process (Linux). Opacus is optional.

With `--alone`, every row runs in processes of its own, as a training does. Where all rows share a process, the memory
of the largest stays with the process; alone, a small step may ask the system for its memory again each time.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional

from matrixdp import Budget
from matrixdp.learn import ClippedGradients, PoissonBatch, PrivateSGD, make_private
from matrixdp.learn.sampling import Turn
from matrixdp_papers.networks import LeNet, ResNet18


class Transformer(nn.Module):
    """Reads an image line by line."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(28, 64), nn.Linear(64, 10)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    """Reads an image line by line."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


NETWORKS = {
    "LeNet": (LeNet, (1, 28, 28), 256),
    "Transformer": (Transformer, (28, 28), 256),
    "LSTM": (Recurrent, (28, 28), 256),
    "ResNet-18": (ResNet18, (3, 32, 32), 1024),
}
CLIP, NOISE_MULTIPLIER, RECORDS = 1.0, 1.0, 60_000
NOISES = {
    "analytic": {},
    "imgm": {},
    "mgm, by layer": {"by_layer": True},
    "analytic, captured": {"capture": True},  # on CUDA alone
    "toeplitz, 16 bands over time": {"bands": 16, "order": "fixed"},
    "inverse-banded, 16 bands over time": {"bands": 16, "order": "fixed"},
    "inverse-banded, 16 bands over time, redrawn": {"bands": 16, "order": "fixed", "memory": "redrawn"},
}


def each(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def plain(model, inputs, targets):
    optimizer = sgd(model)

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def without_noise(model, inputs, targets):
    gradients, optimizer = ClippedGradients(model, each, clip=CLIP, batch_size=len(inputs)), sgd(model)

    def step():
        gradients.zero()
        gradients.accumulate(inputs, targets)
        gradients.flat.div_(len(inputs))
        gradients.attach()
        optimizer.step()

    return step


def one_at_a_time(model, inputs, targets):
    model.register_forward_hook(lambda *_: None)  # a graph would not have it
    return without_noise(model, inputs, targets)


def made_private(model, inputs, targets):
    records = torch.zeros(()).expand(RECORDS, *inputs.shape[1:]), torch.arange(RECORDS) % 10
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records), batch_size=256)
    private = make_private(model, sgd(model), loader, loss=each, budget=Budget(3.0, 1e-5), clip=CLIP, steps=1_000)
    return lambda: private.step(PoissonBatch(inputs, targets, turn=Turn(private)))


def ours(noise):
    def make(model, inputs, targets):
        records = torch.zeros(()).expand(RECORDS, *inputs.shape[1:]), torch.arange(RECORDS) % 10
        trainer = PrivateSGD(
            model,
            sgd(model),
            torch.utils.data.TensorDataset(*records),
            each,
            budget=Budget(3.0, 1e-5),
            batch_size=256,  # decides the size of the noise, not the work
            clip=CLIP,
            steps=1_000,
            noise=noise.split(",")[0],
            **NOISES[noise],
        )

        # Batches of one size, so that all rows do the same work.
        def step():
            of = trainer.noise if "over time" in noise else None
            turn = Turn(trainer) if of is None else Turn(trainer, step=of.step, run=of.run)
            trainer.step(PoissonBatch(inputs, targets, turn=turn))

        return step

    return make


def opacus_hooks(model, inputs, targets):
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(model)
    optimizer = DPOptimizer(
        sgd(model), noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=len(inputs)
    )

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def opacus_ghost(model, inputs, targets):
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    optimizer = DPOptimizerFastGradientClipping(
        sgd(model), noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=len(inputs)
    )
    loss = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def torch_func(model, inputs, targets):
    optimizer = sgd(model)
    parameters = dict(model.named_parameters())

    def record_loss(parameters, x, y):
        return functional.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    per_sample = torch.func.vmap(torch.func.grad(record_loss), in_dims=(None, 0, 0))

    def step():
        detached = {name: p.detach() for name, p in parameters.items()}
        gradients = per_sample(detached, inputs, targets)
        norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
        weights = (CLIP / (norms + 1e-6)).clamp(max=1)
        for name, p in parameters.items():
            total = torch.einsum("b,b...->...", weights, gradients[name])
            p.grad = (total + NOISE_MULTIPLIER * CLIP * torch.randn_like(total)) / len(inputs)
        optimizer.step()

    return step


ROWS = {
    "plain SGD": plain,
    "matrixdp, no noise": without_noise,
    "matrixdp, no noise, one at a time": one_at_a_time,
    "matrixdp, make_private": made_private,
    **{f"matrixdp, {noise}": ours(noise) for noise in NOISES},
    "Opacus, ghost clipping": opacus_ghost,
    "Opacus, hooks": opacus_hooks,
    "torch.func": torch_func,
}


def prepare(row, network, device, batch):
    """A step to be timed, after it ran twice, and the memory that model and batch hold on a CUDA device."""
    torch.manual_seed(0)
    make, shape, usual = NETWORKS[network]
    batch = batch or usual
    inputs, targets = torch.randn(batch, *shape, device=device), torch.randint(0, 10, (batch,), device=device)
    model = make().to(device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    step = ROWS[row](model, inputs, targets)
    step()
    step()
    return step, held


def resident_growth(row, network, batch):
    """MiB by which the resident set grows at most; a small batch has loaded the code before."""
    prepare(row, network, "cpu", 2)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    prepare(row, network, "cpu", batch)
    return resident("VmHWM") - before


def resident(field):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**10


def seconds(step, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(row, network, device, step, held, arguments):
    """MiB that a step takes at its peak."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    return in_a_process("--memory-of", row, network, arguments)


def in_a_process(option, row, network, arguments):
    """What this script prints for one row, as a number."""
    command = [sys.executable, __file__, option, row, network, "--threads", str(arguments.threads)]
    command += ["--device", arguments.device, *([] if arguments.batch is None else ["--batch", str(arguments.batch)])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(network, device, arguments):
    steps, memory, failed = {}, {}, {}
    for row in ROWS:
        if (device == "cpu" and "captured" in row) or not (
            row == "plain SGD" or any(text in row for text in arguments.rows)
        ):
            continue
        try:
            steps[row], held = prepare(row, network, device, arguments.batch)
            memory[row] = peak_memory(row, network, device, steps[row], held, arguments)
        except ImportError:
            failed[row] = "not installed"
        except torch.cuda.OutOfMemoryError:
            failed[row] = "out of memory"
            torch.cuda.empty_cache()
        except Exception as error:  # a rival that does not know a layer
            failed[row] = f"cannot: {type(error).__name__}"
    times, order = {row: [] for row in steps}, list(steps)
    for _ in track(range(arguments.rounds), transient=True):
        random.shuffle(order)
        for row in order:
            if arguments.alone:
                times[row].append(in_a_process("--time-of", row, network, arguments))
            else:
                steps[row]()  # not timed
                times[row].append(seconds(steps[row], device))

    batch = arguments.batch or NETWORKS[network][2]
    alone = ", each in processes of its own" if arguments.alone else ""
    table = Table(title=f"{network}, batch {batch}, {device}{alone}, median of {arguments.rounds}")
    table.add_column("one step")
    for heading in ("ms", "x plain SGD", "MiB at the peak"):
        table.add_column(heading, justify="right")
    medians = {row: statistics.median(found) for row, found in times.items()}
    # Rows that took turns met the same load, so ratios are taken within a round.
    ratios = {row: [t / p for t, p in zip(found, times["plain SGD"], strict=True)] for row, found in times.items()}
    for row, median in medians.items():
        peak = "" if "captured" in row else f"{memory[row]:,.0f}"
        table.add_row(row, f"{1e3 * median:.1f}", f"{statistics.median(ratios[row]):.2f}", peak)
    for row, why in failed.items():
        table.add_row(row, why)
    Console(width=110).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, help="in place of the usual batch of each network")
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows with one of these texts in their name")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="only these")
    parser.add_argument(
        "--alone", action="store_true", help="every row in processes of its own; five rounds are enough"
    )
    parser.add_argument("--time-of", nargs=2, metavar=("ROW", "NETWORK"), help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", nargs=2, metavar=("ROW", "NETWORK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        row, network = arguments.memory_of
        print(resident_growth(row, network, arguments.batch))
        return
    if arguments.time_of:
        step, _ = prepare(*arguments.time_of, arguments.device, arguments.batch)
        print(statistics.median([seconds(step, arguments.device) for _ in range(100)][20:]))
        return
    usual = NETWORKS if arguments.device == "cuda" else ["LeNet", "Transformer", "LSTM"]
    for network in arguments.networks or usual:
        measure(network, arguments.device, arguments)


if __name__ == "__main__":
    main()
