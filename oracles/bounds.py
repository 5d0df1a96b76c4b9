"""How wrong may a correct kernel be: the true outputs, and a bound on the error of each element.

A fixed tolerance is too wide for long rows, whose outputs are small, and too narrow for large inputs. Here the error a
flash-attention kernel makes is derived from where it rounds, element by element. Every output x^ must satisfy

    |x^ - x|  <=  lam * random + fixed

`random` adds errors of unknown sign that are independent of each other, as a root of a sum of squares, and, linearly,
those that a whole row shares. A rounding error is uniform on -u..u, so the unit is sqrt(3) standard deviations or more
and lam = 3 some five of them; `fixed` is what holds always, above all the rounding of the output itself.

Notation: u_out, u_p, u, u_op = unit roundoffs of Arithmetic (u = u_acc), u_chop what tensor cores cut off per term;
n = keys a row sees; x = scale * q.k; f = ds/dx = 1 - tanh(x/c)^2 with softcap c, else 1.

Scores. A product of length D, accumulated in any order, is wrong by about sqrt(D) u sum|q_d k_d|; 2 u more for scaling:
    delta_x  = (sqrt(D) + 2) u |scale| sum_d |q_d k_d| + 2 u |x|
             + u_op (sqrt(2) |scale| sqrt(sum_d (q_d k_d)^2) + |x|)
    delta    = f delta_x + 2 u |s_capped| + u c + 4 u (|slope * distance| + |bias|)
u c: tanh is commonly 1 - 2 / (e^2y + 1), right to an ulp of 1, not of itself. u_op: either operand is rounded, each d
independently; |x| on top, because tensor cores may truncate, which shrinks every product alike.

Probabilities, before P V: relative error
    rho      = u_p + u_op + delta + u (sqrt(n) + 4)
where 4 u is two ulps of exp in fp32 (ex2.approx: 2^-22), and sqrt(n) u, in front of p_j v_j, is the walk of an
accumulator through n additions whose size is that of a walk of p_j v_j itself. Absolute error: P~ = exp(s - m) too
small for the precision of p_dtype is wrong by tiny_p, never by more than itself: min(p, tiny_p exp(m - lse)).
    e        = rho p + min(p, tiny_p exp(m - lse))

Row sum and accumulator. Nothing is rounded to 16 bits there: sqrt(n) u for the sum, 4 u for rescaling and dividing,
sqrt(n) u once more for the drift of the accumulator towards o, n u_chop where tensor cores truncate it; a sink logit
less m is wrong by 4 u (1 + |sink| + |m|) and weighs p_sink:
    kappa    = u (2 sqrt(n) + 4 + |lse|) + n u_chop + u_op + 4 u (1 + |sink| + |m|) p_sink
u |lse|: a kernel may normalise first, P = exp(s - lse), and the rounding of lse is then in all of a row.
The accumulator rounds what it holds, not o: peak is its largest partial sum in the order of keys, seen at 8 points.

    o:    random = max(sqrt(sum_j (e v)^2), |sum_j (round(p) - p) v|) + kappa peak
                                                                           fixed = 1.05 u_out |o| + tiny_out
    lse:  random = sqrt(sum_j ((delta + 4 u) p)^2) + u sqrt(n) + 2 / (sqrt(D) + 2) sum_j (delta + 4 u) p
                                                                           fixed = 4 u max(1, |lse|, |m|, |sink|)
The maximum: P that are equal round alike, so that the errors of a kernel that normalises before it rounds add up; here
is what they come to. The last sum for lse: q, scaled and rounded once, is wrong in all scores of its row.
With u_op the sum for lse is linear: the error of q_i is in all its scores. 1.05: what is rounded is the computed o.

Backward. P is recomputed as exp(s - lse) from the stored fp32 lse, so a row shares the relative error
    eta      = random + fixed of lse
and dS = P o (dP + g), g = dlse - Delta, Delta = sum_d do o, is rounded to p_dtype:
    r        = rho + eta + u sqrt(rows)                                    (rows: sums over queries, for dk and dv)
    eps_dP   = (sqrt(Dv) + 2) u sum_d |do v| + u_op (sqrt(2) sqrt(sum_d (do v)^2) + |dP|)
    e_Delta  = sqrt(sum_j (e dP)^2 + sum_j (p eps_dP)^2 + sum_d (do (1.05 u_out |o| + tiny_out))^2)
             + kappa |Delta| + (sqrt(Dv) + 2) u sum_d |do o| + 2 u |dlse|
Delta uses the rounded o. An error of p_j moves o along v_j, hence Delta by do.v_j = dP_j: independent over j, not d.
The term with eps_dP is for kernels that compute Delta as sum_j p dP. dS has errors of its own and p e_Delta, which its
row shares:
    e_dS^2   = ((r p + min(p, tiny_p)) (dP + g))^2 + (u_p dS)^2 + (p eps_dP)^2
               then e_dS + min(|dS|, tiny_p max(1, 1/|scale|))
Twice u_p and tiny_p: the memory-efficient kernel multiplies P as rounded, others fp32. 1/|scale|: some fold it in.
Rows share the sign of some errors of Delta, those of truncation and, where attention is so flat that their outputs are
nearly the same, that of rounding o; over queries these are no random walk, but a sum with its sign:
    shift    = n u_chop Delta, and sum_d do (round(o) - o); either counts with its own absolute sum, |sum shift|
    e_dX     = f e_dS + |dS| (2 |tanh| (f delta_x / c + 2 u) + 2 u)        (the derivative of the cap has an error too)

    dv:   random = max(sqrt(sum_i ((r p + min(p, tiny_p)) do)^2), |sum_i (round(p) - p) do|) + w |dv|
    dq:   random = |scale| (max(sqrt(sum_j (e_dX k)^2), |sum_j (round(dX) - dX) k|) + e_Delta |sum_j p f k|)
                   + (w + eta) |dq|
    dk:   random = |scale| (max(sqrt(sum_i (e_dX^2 + (p f e_Delta)^2) q^2), |sum_i (round(dX) - dX) q|)
                   + |sum_i p f shift q|) + w |dk|
    each: w = u (sqrt(terms) + 4) + terms u_chop + u_op                    fixed = 1.05 u_out |.| + tiny_out
The maxima, with dX = f dS, as for o: rows that weigh their keys alike and get the same do, as in sum().backward(), have
P and dS that round alike; round is that of p_dtype, which takes from small P of fp16 and never adds (and from dS up to
tiny_p max(1, 1/|scale|)). Looked for where some row does weigh its keys alike, and in fp16.
With grouped heads dk and dv are sums over the G heads of a group, and a kernel may round each share to the input dtype
first, as PyTorch does: sqrt(sum_h (u_out dk_h + tiny_out)^2) more. Where they are added up in memory of u_sum, every
block of query rows rounds the sum so far, A_hb after block b of head h, that of earlier heads included:
    dk, dv: sqrt(sum_hb (u_sum A_hb + tiny_out)^2) more, with blocks of 32 rows (the smallest that PyTorch takes)
    dq:     the same over blocks of 512 keys
    dbias:  the errors of dS, reduced as dbias is: own errors and p e_Delta in squares, the latter first linearly over
            keys if the bias is broadcast along them; |sum p shift|; w |dbias|
    dsinks: sum of p_sink g: sqrt(sum (p_sink e_Delta)^2 + (p_sink g (eta + 4 u (1 + |sink|) + u sqrt(terms)))^2)
            + |sum p_sink shift| + w |dsinks|

FP8. Inputs are taken as quantised: q, k, v are stored numbers times descales, exact in float64; outputs are bf16. The
terms above hold with u_p of the FP8 format to which P is rounded, and
    delta_x  + 4 u |x| for the multiplications with scale and descales, + what oracles.truncated says of scores
    tiny_p   = half the smallest subnormal / p_scale: a kernel rounds p_scale exp(s - m), so that more of P is normal
    o        random + what oracles.truncated says of p v
The last two where Support declares that sums of FP8 products keep 14 bits. In the maximum of o it is exp(s - m), the
number that is rounded, whose roundings are added: with 3 bits a P that is normalised first would not do.

First order in the roundoffs: with scores so large that delta nears 1, nothing is promised by fp32 and nothing is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._tiles import Totals, backward_tile, forward_tile
from .arithmetic import Arithmetic
from .dense import check_upstream
from .spec import AttentionSpec

__all__ = ["Arithmetic", "Truth", "evaluate"]

SUMMED_ROWS = 32
"""Query rows between two roundings of a sum with u_sum: fewer rows than a kernel takes only widen the bound."""


@dataclass(frozen=True)
class Truth:
    """A true output and the two parts of its bound, all float64 in the shape of the output."""

    value: Tensor
    random: Tensor
    fixed: Tensor

    def limit(self, lam: float) -> Tensor:
        """The largest error allowed: lam * random + fixed."""
        return lam * self.random + self.fixed


@torch.no_grad()
def evaluate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    arithmetic: Arithmetic,
    rows_per_block: int | None = None,
) -> dict[str, Truth]:
    """The true "o" (B, Hq, Lq, Dv) and "lse" (B, Hq, Lq) with their bounds, as derived in the module docstring.

    Given do (B, Hq, Lq, Dv), and perhaps dlse (B, Hq, Lq), also "dq", "dk", "dv", and where the spec has them "dbias"
    and "dsinks", each in the shape of what it belongs to. Inputs: any floating dtype, taken as exact. A row without a
    key has value 0, and lse -inf with a finite bound: compare infinities apart.

    One pass over blocks of rows_per_block query rows (None: so many that a dozen temporaries are 50 MB on a CPU, 4 GB
    on a GPU); batches and key heads one by one where all together would be too much.
    Raises ValueError when shapes do not fit, or for dlse without do.
    """
    spec.check(q, k, v)
    if do is not None:
        check_upstream(q, v, do, dlse)
    elif dlse is not None:
        raise ValueError("dlse without do: pass do too, zeros if o has no gradient")
    total = Totals(q, k, v, spec, backward=do is not None)
    if do is not None and arithmetic.u_sum:
        rows_per_block = SUMMED_ROWS
    for batch, kv_heads, rows in _blocks(q, k, rows_per_block):
        group = q.shape[1] // k.shape[1]
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        part = spec.narrow(batch, heads)
        kt, vt = k[batch, kv_heads].double(), v[batch, kv_heads].double()
        qt = q[batch, heads, rows].double()
        fw = forward_tile(qt, kt, vt, part, arithmetic, rows, q.shape[2])
        total.add_forward(fw, (batch, heads, rows))
        if do is not None:
            dot = do[batch, heads, rows].double()
            dlt = None if dlse is None else dlse[batch, heads, rows].double()
            backward_tile(total, fw, qt, kt, vt, dot, dlt, part, arithmetic, (batch, heads, kv_heads, rows))
            if arithmetic.u_sum:
                total.add_sums(batch, heads, kv_heads)
    return {name: Truth(*parts) for name, parts in total.results(arithmetic).items()}


def _blocks(q: Tensor, k: Tensor, rows_per_block: int | None) -> Iterator[tuple[slice, slice, slice]]:
    """Batches, key heads and query rows that are evaluated together."""
    (b, hq, lq, _), (_, hkv, lk, _) = q.shape, k.shape
    elements = 2**19 if q.device.type == "cpu" else 2**25
    batches = elements // (32 * hq * max(lk, 1) or 1)  # how many of which 32 rows of all heads fit together
    if batches >= 1:
        batches = min(batches, b)
        heads_together = batches * hq
        groups = [(slice(i, min(i + batches, b)), slice(0, hkv)) for i in range(0, b, max(batches, 1))]
    else:
        heads_together = hq // hkv
        groups = [(slice(i, i + 1), slice(h, h + 1)) for i in range(b) for h in range(hkv)]
    rows = rows_per_block or max(16, elements // (heads_together * max(lk, 1) or 1))
    if rows < 1:
        raise ValueError(f"rows_per_block must be at least 1, got {rows_per_block}")
    for batch, heads in groups:
        for start in range(0, lq, rows):
            yield batch, heads, slice(start, min(start + rows, lq))
