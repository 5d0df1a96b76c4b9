"""Does the forward whose warps the compiler specialises give the same bits every time? Needs a Hopper GPU.

    python measurements/specialised_races.py --out measurements/h200/specialised-races.json

2000 calls of each problem in each tile that passes the suite: how many differ from the first in any bit; and how far
one more call is from SDPA, where both mean the same mask. A minute.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from contenders import forward_named
from hopper import repeated

TILES = (("specialised@128,128,4,2", 64), ("specialised@128,64,4,2", 128))
SHAPES = ((4, 8, 4, 1000, 1000), (8, 16, 16, 2048, 2048), (2, 8, 8, 333, 4000), (16, 16, 16, 128, 128))
"""B, Hq, Hkv, Lq, Lk."""
CALLS = 2000


def problem(name: str, d: int, shape: tuple[int, ...], causal: bool) -> dict[str, Any]:
    batch, heads, kv_heads, lq, lk = shape
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, heads, lq, d, **options)
    k, v = (torch.randn(batch, kv_heads, lk, d, **options) for _ in range(2))
    call = partial(forward_named(name), q, k, v, causal=causal)
    found = repeated(call, CALLS)
    off = None
    if not causal or lq == lk:
        attention = torch.nn.functional.scaled_dot_product_attention
        want = attention(q, k, v, is_causal=causal, enable_gqa=True)
        off = float((call()[0].float() - want.float()).abs().max())
    return {"kernel": name, "d": d, "shape": shape, "causal": causal, **found, "off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; the races need one")
    rows = [problem(*tile, shape, causal) for tile in TILES for shape in SHAPES for causal in (False, True)]
    report = {
        "command": "python measurements/specialised_races.py",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(str(row) for row in rows))


if __name__ == "__main__":
    main()
