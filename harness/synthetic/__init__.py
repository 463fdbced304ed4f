"""Synthetic checkpoints (`weights=synthetic`): full-size shapes, generated and calibrated weights.

Nothing about acceptance or routing is decided at run time: it all comes out of the weights. See vocabulary.py for the
tokens, source.py for what layers share, experts.py for the routed experts and spec.py for the knobs.
"""

from harness.synthetic.experts import Expert, expert, expert_layer
from harness.synthetic.model import build_decoder, open_synthetic, open_written, tensor_names, tensors
from harness.synthetic.spec import Knobs, SyntheticSpec, spec_for
from harness.synthetic.store import check_host_memory, create_store, draft_from_store, draft_layers, fill_store

__all__ = [
    "Expert",
    "Knobs",
    "SyntheticSpec",
    "build_decoder",
    "check_host_memory",
    "create_store",
    "draft_from_store",
    "draft_layers",
    "expert",
    "expert_layer",
    "fill_store",
    "open_synthetic",
    "open_written",
    "spec_for",
    "tensor_names",
    "tensors",
]
