"""A context of 131072 tokens: sampled rows of the streaming oracle, in less than 2 GB and a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import resource, time
import torch
from oracles import AttentionSpec, streaming

start, length = time.perf_counter(), 131072
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 1, length, 128, generator=generator, dtype=torch.bfloat16) for _ in range(3))
rows = torch.randint(0, length, (64,), generator=generator)
o, lse = streaming.forward(q, k, v, AttentionSpec(causal=True), rows=rows)
seconds = time.perf_counter() - start

row = int(rows[0])
s = (k[0, 0, : row + 1].double() @ q[0, 0, row].double()) * 128**-0.5
assert abs(float(lse[0, 0, 0] - torch.logsumexp(s, 0))) < 1e-12
assert float((o[0, 0, 0] - torch.softmax(s, 0) @ v[0, 0, : row + 1].double()).abs().max()) < 1e-12
assert o.shape == (1, 1, 64, 128)
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def test_sampled_rows_of_a_long_context() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    seconds, gigabytes = map(float, run.stdout.split())
    assert seconds < 60
    assert gigabytes < 2
