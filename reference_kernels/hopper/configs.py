"""Tiles, stages and registers of the Hopper forward, by head dimension: data, chosen by measurement on an H200.

What bounds a row: 227 KiB of shared memory, 64 Ki registers of an SM for the consumers (128 threads each) and the
producer, and that a consumer's S and O tiles and its P live in registers: 64 rows x (BLOCK_N + D) float32 and half of
BLOCK_N again, on 128 threads.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHARED = 226 << 10
"""What tiles may take: 1 KiB of a CTA's 227 is left for the barriers."""


@dataclass(frozen=True)
class Config:
    """One tile: 64 query rows for each of `consumers` warp groups, by block_n keys.

    kv_stages, q_stages: slots of the rings. ping_pong: consumers take turns at the tensor cores. pin: hold the softmax
    between the waits (ptx.before_next_wait), running maximum only. o_in_q: O leaves through Q's buffer, for lack of
    shared memory, of which a few keys beside whole blocks may leave too little as well (launch.constants).
    consumer_registers, producer_registers: of a thread (multiples of 8).
    """

    consumers: int
    block_n: int
    kv_stages: int
    q_stages: int
    ping_pong: bool
    pin: bool
    o_in_q: bool
    consumer_registers: int
    producer_registers: int

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    def shared_bytes(self, d: int, few: int) -> int:
        """What the tiles of head dimension d take of shared memory, with `few` rows of K and V beside whole blocks."""
        rows = 2 * (self.kv_stages * self.block_n + few) + self.block_m * (self.q_stages + (not self.o_in_q))
        return 2 * d * rows


_D64 = Config(2, 128, 3, 2, True, True, False, 240, 24)
# Three consumers read each K and V block for 192 rows: fewer reads of shared memory for a product, more of the diagonal
# block in vain. Pays off from the lengths below.
_D64_WIDE = Config(3, 128, 2, 2, True, False, False, 160, 32)
_D128 = Config(2, 128, 2, 2, True, True, False, 240, 24)
_D256 = Config(2, 64, 2, 1, False, False, True, 240, 24)

# D: {causal: [(shortest length, Config), …]}, longest first.
TABLE: dict[int, dict[bool, list[tuple[int, Config]]]] = {
    64: {False: [(2000, _D64_WIDE), (0, _D64)], True: [(8000, _D64_WIDE), (0, _D64)]},
    128: {False: [(0, _D128)], True: [(0, _D128)]},
    256: {False: [(0, _D256)], True: [(0, _D256)]},
}


def lookup(d: int, *, causal: bool, lq: int, lk: int) -> Config:
    """The tile for a head dimension of TABLE and these lengths; the shorter of the two counts."""
    return next(config for shortest, config in TABLE[d][causal] if min(lq, lk) >= shortest)
