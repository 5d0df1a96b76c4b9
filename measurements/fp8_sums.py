"""Are sums of FP8 products on this GPU those of oracles.truncated, which models Hopper? Needs FP8 tensor cores.

    python measurements/fp8_sums.py --out measurements/h200/fp8-sums.json
    python measurements/fp8_sums.py --dry                     the same with the emulator in the place of the GPU

One matrix product of e4m3 matrices, torch._scaled_mm with use_fast_accum, which leaves the sum over all K products in
the tensor cores. Against the exact product: the RMS error, and the mean error in the direction of the sum, on the GPU
and in the emulator, for terms of both signs and of one. And probes, single sums that tell which bits are kept: the
largest term 1, and 2^-n below it, n where it first has no effect; the same with a negative small term, which shows
whether what is cut off goes towards zero or down.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracles.truncated import add_products

E4M3 = torch.float8_e4m3fn
ROWS, COLUMNS = 64, 64
DEPTHS = (128, 1024, 4096, 16384)
Product = Callable[[Tensor, Tensor], Tensor]


def emulated(a: Tensor, b: Tensor) -> Tensor:
    """a (n, K) @ b (K, m), e4m3, as oracles.truncated sums."""
    return add_products(torch.zeros(a.shape[0], b.shape[1]), a.float(), b.float())


def on_the_gpu(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones((), device="cuda")
    columns = b.t().contiguous().t().cuda()  # cuBLAS wants b by columns
    out = torch._scaled_mm(a.cuda(), columns, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
    return out.cpu()


def drawn(depth: int, one_sign: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(depth)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((ROWS, depth), (depth, COLUMNS)))
    return ((a.abs() if one_sign else a).to(E4M3), (b.abs() if one_sign else b).to(E4M3))


def errors(product: Product, depth: int, one_sign: bool) -> dict[str, float]:
    """RMS error over the RMS of the sums, and the mean error along their sign over the mean size."""
    a, b = drawn(depth, one_sign)
    exact = a.double() @ b.double()
    off = product(a, b).double() - exact
    return {
        "rms": float((off.square().mean() / exact.square().mean()).sqrt()),
        "towards": float((off * exact.sign()).mean() / exact.abs().mean()),
    }


def probe(product: Product, small: float) -> int:
    """The first n for which small 2^-n next to 1 has no effect; 0 when each has. Powers of two have exact products."""
    for n in range(1, 17):
        a, b = torch.zeros(ROWS, 128), torch.zeros(128, COLUMNS)
        a[:, 0], b[0] = 1, 1
        a[:, 1], b[1] = small * 2.0 ** -(n // 2), 2.0 ** -(n - n // 2)
        if float(product(a.to(E4M3), b.to(E4M3))[0, 0]) == 1.0:
            return n
    return 0


def measure(product: Product) -> dict[str, Any]:
    return {
        "errors": {
            f"{depth}, {'one sign' if one_sign else 'both signs'}": errors(product, depth, one_sign)
            for depth in DEPTHS
            for one_sign in (False, True)
        },
        "lost above 1": probe(product, 1.0),
        "lost below 1": probe(product, -1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="emulator only: shows that the script runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "command": "python measurements/fp8_sums.py --out measurements/h200/fp8-sums.json",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "emulator": measure(emulated),
    }
    if not arguments.dry:
        document["device"] = torch.cuda.get_device_name()
        document["gpu"] = measure(on_the_gpu)
    text = json.dumps(document, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
