"""An honest FP8 flash attention: the core for q, k and v in e4m3 or e5m2 with descales, forward only.

Products of stored values, fp32 everywhere else; a tile of scores gets the descales of its rows and keys, P is
multiplied by 2^8 and rounded to the input format, and what a tile adds to the accumulator gets the descale of its
values. Shapes as in `core`; a tile of keys lies within one block of rows that share a descale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pytest_flashattn.features import DESCALES
from pytest_flashattn.support import Support

from .core import Core, Problem

State = tuple[Tensor, Tensor, Tensor]
FEATURES = frozenset({"causal", "cross", "gqa", "dv", "scale", "lse", *(f"descale_{word}" for word in DESCALES)})
DTYPES = frozenset({"e4m3", "e5m2"})


@dataclass(frozen=True, eq=False)
class Fp8Problem(Problem):
    """descales: by "q", "k", "v", each (), (B, heads) or (B, heads, blocks)."""

    descales: dict[str, Tensor] = field(default_factory=dict)


class Fp8Core(Core):
    """attn(q, k, v, *, causal, scale, q_descale, k_descale, v_descale, return_lse) of the contract."""

    __flashattn__ = Support(features=FEATURES, dtypes=DTYPES, p_scale=256, q_block=64, kv_block=64)

    descale_rows = 64
    """Rows of a block that shares a descale."""

    p_scale = 256.0

    def __call__(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_descale: Tensor,
        k_descale: Tensor,
        v_descale: Tensor,
        causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        descales = {"q": q_descale, "k": k_descale, "v": v_descale}
        o, lse = self.forward(Fp8Problem(q, k, v, scale, causal, descales=descales))
        return (o, lse) if return_lse else o

    def forward(self, p: Fp8Problem) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        heads, (batch, h, lq, _) = self.head_map(p), p.q.shape
        o = p.q.new_empty(batch, h, lq, p.v.shape[3], dtype=torch.bfloat16)
        lse = torch.empty(batch, h, lq)
        for i in range(0, lq, self.block_q):
            q = self.load(p.q, i, self.block_q)  # (B, H, Bq, D)
            state = self.start(p, q)
            for j in self.key_tiles(p, i):
                s = self.scaled(p, q, self.load_k(p, j, heads)) * self.score_factor(p, i, j, heads)
                state = self.tile(p, state, self.masked(p, s, self.visible(p, i, j)), j, heads)
            self.store(p, o, lse, i, *self.epilogue(p, *state))
        return o, lse

    def descale(self, p: Fp8Problem, name: str, start: int, heads: Tensor) -> Tensor:
        """What the stored numbers of a tile that begins at row `start` count, broadcastable to (B, H, rows, columns).

        heads (H,): the head of tensor `name` that each query head reads.
        """
        found = p.descales[name]
        if not found.dim():
            return found
        return self.of_block(self.of_heads(found, name, heads), start)[..., None, None]

    def of_heads(self, x: Tensor, name: str, heads: Tensor) -> Tensor:
        """x (B, heads, ...) for each query head; with one for a group, q's are as many as kv heads."""
        shared = len(heads) // x.shape[1]
        return x[:, torch.arange(len(heads)) // shared] if name == "q" else x[:, heads]

    def of_block(self, x: Tensor, start: int) -> Tensor:
        """x (B, H) or (B, H, blocks), of the block in which row `start` lies."""
        return x if x.dim() == 2 else x[..., self.block_of(start, x.shape[2])]

    def block_of(self, start: int, blocks: int) -> int:
        return start // self.descale_rows

    def score_factor(self, p: Fp8Problem, i: int, j: int, heads: Tensor) -> Tensor:
        return self.descale(p, "q", i, heads) * self.descale(p, "k", j, heads)

    def tile(self, p: Fp8Problem, state: State, s: Tensor, j: int, heads: Tensor) -> State:
        """One tile of the online softmax: scores (B, H, Bq, Bk), values from key j on."""
        m, total, acc = state
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = self.base(m_new)
        prob, rescale = self.exp(s - base), self.exp(m - base)
        total = total * rescale + prob.sum(-1, keepdim=True)
        return m_new, total, self.add_values(p, acc * rescale, self.quantised(p, prob), j, heads)

    def quantised(self, p: Fp8Problem, prob: Tensor) -> Tensor:
        """P in [0, 1] as an operand of the tensor cores, p_scale times as large."""
        return (prob * self.p_scale).to(p.q.dtype).float()

    def add_values(self, p: Fp8Problem, acc: Tensor, prob: Tensor, j: int, heads: Tensor) -> Tensor:
        return acc + prob @ self.load_v(p, j, heads) * self.descale(p, "v", j, heads)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        return super().epilogue(p, m, total, acc / self.p_scale)
