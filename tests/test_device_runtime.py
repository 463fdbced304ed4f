"""What holds of the device runtime without a device."""

from __future__ import annotations

import gc
import weakref

import pytest

from specter_core.device_runtime import uncollected


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    """Cyclic garbage that holds graphs of a former engine must outlive a capture, whatever is allocated in it."""
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with uncollected():
            gone = weakref.ref(_Cycle())
            kept = [[] for _ in range(1000)]
            assert gone() is not None and len(kept) == 1000
        kept = [[] for _ in range(1000)]
        assert gone() is None
    finally:
        gc.set_threshold(*threshold)


def test_collection_is_as_it_was_after_an_error() -> None:
    with pytest.raises(RuntimeError), uncollected():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
