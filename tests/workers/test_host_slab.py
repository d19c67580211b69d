from __future__ import annotations

import pytest
import torch

from placement.core import ExpertId
from placement.errors import MigrationError
from workers.host_slab import HostSlab, checksum


def test_a_blob_counts_only_once_it_is_published() -> None:
    slab = HostSlab(capacity=2, blob_bytes=256)
    slab.claim(ExpertId(0, 1)).fill_(7)
    assert slab.experts() == frozenset()
    slab.publish(ExpertId(0, 1))
    assert slab.experts() == {ExpertId(0, 1)}
    assert slab.blob(ExpertId(0, 1)).eq(7).all()


def test_a_full_slab_refuses_and_says_what_to_raise() -> None:
    slab = HostSlab(capacity=1, blob_bytes=256)
    slab.add(ExpertId(0, 0), torch.zeros(256, dtype=torch.uint8))
    with pytest.raises(MigrationError, match=r"1 rows and 1 experts; raise workers\.host_slab_rows"):
        slab.claim(ExpertId(0, 1))


def test_a_released_row_is_used_again() -> None:
    slab = HostSlab(capacity=1, blob_bytes=256)
    slab.add(ExpertId(0, 0), torch.zeros(256, dtype=torch.uint8))
    slab.release(ExpertId(0, 0))
    slab.add(ExpertId(3, 3), torch.ones(256, dtype=torch.uint8))
    assert slab.experts() == {ExpertId(3, 3)}
    assert slab.num_free == 0


def test_a_claim_that_is_given_back_leaves_nothing() -> None:
    slab = HostSlab(capacity=1, blob_bytes=256)
    slab.claim(ExpertId(0, 0))
    slab.release(ExpertId(0, 0))
    assert slab.num_free == 1


def test_one_flipped_bit_changes_the_checksum() -> None:
    blob = torch.arange(256).to(torch.uint8)
    other = blob.clone()
    other[17] ^= 1
    assert checksum(blob) != checksum(other)
    assert checksum(blob) == checksum(blob.clone())
