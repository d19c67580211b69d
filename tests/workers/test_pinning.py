from __future__ import annotations

from workers.pinning import host_memory


def test_host_memory_is_zeroed_and_of_the_asked_shape_even_if_empty() -> None:
    memory = host_memory(3, 5000, pin=False)
    assert memory.shape == (3, 5000)
    assert not memory.any()
    assert host_memory(0, 256, pin=False).shape == (0, 256)
