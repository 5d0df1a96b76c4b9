"""The parts of the kernels: bands against their definition, configurations that stress tile edges, bfloat16 by hand."""

from __future__ import annotations

from interpreted import check


def test_bands_cover_what_is_visible_and_full_tiles_need_no_mask() -> None:
    check(
        """
import itertools, torch, triton, triton.language as tl
from reference_kernels.causal import bands

@triton.jit
def probe(out, own, other, before, after, OWN: tl.constexpr, STEP: tl.constexpr):
    start = tl.program_id(0) * OWN
    a, b, c, d = bands(start, own, other, before, after, OWN, STEP)
    tl.store(out + tl.program_id(0) * 4, a)
    tl.store(out + tl.program_id(0) * 4 + 1, b)
    tl.store(out + tl.program_id(0) * 4 + 2, c)
    tl.store(out + tl.program_id(0) * 4 + 3, d)

OWN, STEP = 8, 4
for own, other in ((16, 16), (13, 21), (21, 13), (1, 17), (17, 1), (30, 4)):
    for before, after in itertools.product((None, 0, 1, 5, 40), (None, 0, 3, 40)):
        blocks = -(-own // OWN)
        out = torch.zeros(blocks, 4, dtype=torch.int32)
        probe[(blocks,)](out, own, other, before, after, OWN=OWN, STEP=STEP)
        for block, (lo, full_lo, full_hi, hi) in enumerate(out.tolist()):
            mine = range(block * OWN, min(block * OWN + OWN, own))
            def sees(i, j):
                at = i + other - own
                return j < other and (before is None or j >= at - before) and (after is None or j <= at + after)
            masked = [*range(lo, full_lo, STEP), *range(full_hi, hi, STEP)]
            full = [*range(full_lo, full_hi, STEP)]
            visited = masked + full
            assert len(set(visited)) == len(visited)
            for n in range(0, other, STEP):
                seen = [sees(i, j) for i in mine for j in range(n, n + STEP)]
                assert n in visited or not any(seen), (own, other, before, after, block, n)
                assert n not in full or all(seen), (own, other, before, after, block, n)
"""
    )


def test_any_tile_shape_gives_right_results() -> None:
    check(
        """
import torch, oracles
from reference_kernels.backward import backward
from reference_kernels.configs import Config
from reference_kernels.forward import forward

torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 70, 24), torch.randn(1, 1, 90, 24), torch.randn(1, 1, 90, 40)
do, dlse = torch.randn(1, 2, 70, 40), torch.randn(1, 2, 70)
for left, right in ((None, None), (None, 0), (20, 3), (0, 0)):
    spec = oracles.AttentionSpec(scale=-0.3, window=(left, right))
    truth = oracles.evaluate(q, k, v, spec, do=do, dlse=dlse, arithmetic=oracles.Arithmetic.of(q.dtype))
    for m, n in ((16, 16), (16, 64), (64, 16), (128, 128)):
        config = Config(m, n, 1, 1)
        o, lse = forward(q, k, v, scale=-0.3, left=left, right=right, config=config)
        options = dict(scale=-0.3, left=left, right=right, kv_config=config, q_config=config)
        grads = backward(do, dlse, q, k, v, o, lse, **options)
        for name, got in {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}.items():
            wrong = (got - truth[name].value).abs() > truth[name].limit(3.0)
            assert not wrong.any(), (name, left, right, m, n)
"""
    )


def test_bfloat16_is_rounded_and_multiplied_as_on_a_gpu() -> None:
    check(
        """
import torch, triton, triton.language as tl
from reference_kernels.tiles import dot, rounded

@triton.jit
def both(x, y, z, out, product, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, rounded(tl.load(x + i), tl.bfloat16))
    tl.store(product + i, dot(tl.load(y + i), tl.load(z + i), None, "ieee"))

x = torch.randn(32, 32) * 2.0 ** torch.randint(-130, 120, (32, 32))
y, z = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
out, product = torch.empty(32, 32, dtype=torch.bfloat16), torch.empty(32, 32)
both[(1,)](x, y, z, out, product, N=32)
assert torch.equal(out, x.bfloat16())
assert torch.allclose(product, y.float() @ z.float(), rtol=1e-5, atol=1e-5)
"""
    )


def test_64_bit_offsets_give_the_same_bits() -> None:
    check(
        """
import torch
from reference_kernels import backward, forward

torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 70, 24), torch.randn(1, 1, 90, 24), torch.randn(1, 1, 90, 24)
do, bias, mask = torch.randn(1, 2, 70, 24), torch.randn(1, 1, 70, 90), torch.rand(1, 2, 1, 90) < 0.7
results = []
for wide in (False, True):
    for module in (forward, backward):
        module.spans_32_bits = lambda *_: wide
    options = {"scale": 0.2, "right": 0, "bias": bias, "mask": mask}
    o, lse = forward.forward(q, k, v, **options)
    grads = backward.backward(do, None, q, k, v, o, lse, want_bias=True, **options)
    results.append([o, lse, grads.dq, grads.dk, grads.dv, grads.dbias])
assert all(torch.equal(a, b) for a, b in zip(*results))
"""
    )
