"""Relations that hold without a reference."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_key_permutation(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Keys and values permuted alike give the same output: every key is visited, none twice."""
    flashattn_check("metamorphic.key_permutation", flashattn_case)


def test_batch_slice(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The last batch element alone gives what it gives among others."""
    flashattn_check("metamorphic.batch_slice", flashattn_case)


def test_head_slice(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The last kv head with its query heads alone gives what it gives among others."""
    flashattn_check("metamorphic.head_slice", flashattn_case)


def test_ones_value(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """V = 1: the output is 1 within an ulp (fp32: within the noise of its own sums), 0 on rows without keys."""
    flashattn_check("metamorphic.ones_value", flashattn_case)


def test_onehot_value(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Column d of V is 1 at one key only: the output holds that key's probability, exactly 0 where it is masked."""
    flashattn_check("metamorphic.onehot_value", flashattn_case)


def test_split_and_merge(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Two parts of the keys, merged by their log-sum-exp, are the whole: output and log-sum-exp belong together."""
    flashattn_check("metamorphic.split_and_merge", flashattn_case)
