"""xformers as a subject, as far as it can be tested without it: how segments become blocks."""

from __future__ import annotations

import pytest

from ringtrue.subjects.xformers import block_lengths
from subjects.asking import call


def test_documents_are_blocks_of_one_long_sample() -> None:
    asked = call("segments")
    q_lengths, k_lengths = block_lengths(asked)
    assert q_lengths == k_lengths
    assert sum(q_lengths) == asked.query.shape[0] * asked.query.shape[1]


def test_segments_in_no_order_are_not() -> None:
    with pytest.raises(NotImplementedError, match="no diagonal of blocks"):
        block_lengths(call("segments-apart"))
