"""Table 2: the models, computed from their configurations.

python -m figures.table2_models --models conf/model --out outputs/figures
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure

from figures import grids, style

NAME = "table2_models"
INT4_BITS = 4 + 16 / 128  # symmetric INT4, one FP16 scale per group of 128
ROUTED = ("mlp.experts.", "block_sparse_moe.experts.")


def models(conf: Path) -> pd.DataFrame:
    """One row per file of conf/model: model, family, hidden, layers, experts, top_k, expert_width, and the numbers of
    parameters total, routed, active (embeddings and head included) and of bytes of one expert, of the FP16/BF16 model
    and of the INT4 draft (routed experts in INT4, the rest shared with the target). Full-size models: from the file's
    `shape`; shipped ones: from config.json and the tensor shapes in the checkpoint."""
    rows = []
    for path in sorted(conf.glob("*.yaml")):
        raw = yaml.safe_load(path.read_text())
        shape = raw.get("shape") or _shape_of(conf.parent.parent, raw)
        if shape:
            rows.append({"model": path.stem, "family": raw["family"]} | _computed(shape))
    order = {m: i for i, m in enumerate(style.MODELS)}
    return pd.DataFrame(rows).sort_values("model", key=lambda c: c.map(order).fillna(99)).reset_index(drop=True)


def _computed(shape: dict[str, Any]) -> dict[str, Any]:
    expert = 3 * shape["hidden"] * shape["expert_width"]
    routed = shape["moe_layers"] * shape["experts"] * expert
    shared = shape["shared_params"]
    return {
        "hidden": shape["hidden"],
        "layers": shape["decoder_layers"],
        "moe_layers": shape["moe_layers"],
        "experts": shape["experts"],
        "top_k": shape["top_k"],
        "expert_width": shape["expert_width"],
        "total": shared + routed,
        "routed": routed,
        "active": shared + shape["moe_layers"] * shape["top_k"] * expert,
        "expert_bytes": 2 * expert,
        "model_bytes": 2 * (shared + routed),
        "draft_bytes": 2 * shared + round(routed * INT4_BITS / 8),
    }


def _shape_of(root: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    """Of a shipped checkpoint; None where it is not there."""
    folder = root / raw["weights"].get("reference", {}).get("path", "missing")
    if not (folder / "config.json").exists():
        return None
    config = json.loads((folder / "config.json").read_text())
    sizes = _tensor_sizes(folder)
    experts = next(config[k] for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in config)
    routed = {name: size for name, size in sizes.items() if any(part in name for part in ROUTED)}
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    layers = len({name.split(".layers.")[1].split(".")[0] for name in routed})
    return {
        "hidden": config["hidden_size"],
        "decoder_layers": config["num_hidden_layers"],
        "moe_layers": layers,
        "experts": experts,
        "top_k": config["num_experts_per_tok"],
        "expert_width": width,
        "shared_params": sum(sizes.values()) - sum(routed.values()),
    }


def _tensor_sizes(folder: Path) -> dict[str, int]:
    """Tensor name -> number of elements, from the headers of the safetensors files."""
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for extent in tensor["shape"]:
                    count *= extent
                sizes[name] = count
    return sizes


def figure(rows: pd.DataFrame) -> Figure:
    """rows: as `models` makes them."""
    head = ["model", "layers", "MoE", "experts", "hidden", "expert", "total", "active", "one expert", "FP16", "INT4"]
    units = ["", "", "layers", "(top-k)", "", "width", "params", "params", "FP16", "model", "draft"]
    body = [
        [
            style.model_label(r["model"]),
            str(r["layers"]),
            str(r["moe_layers"]),
            f"{r['experts']} ({r['top_k']})",
            str(r["hidden"]),
            str(r["expert_width"]),
            count(r["total"]),
            count(r["active"]),
            size(r["expert_bytes"]),
            size(r["model_bytes"]),
            size(r["draft_bytes"]),
        ]
        for r in rows.to_dict("records")
    ]
    with style.look():
        heads = [f"{a}\n{b}" if b else a for a, b in zip(head, units, strict=True)]
        fig = grids.drawn(heads, body)
        text = (
            "computed from the configurations; active: parameters that one token uses, embeddings and head included; "
            "INT4 draft: routed experts in symmetric INT4 with groups of 128, everything else shared in 16 bits; "
            "GiB = 2^30 bytes"
        )
        style.stamp(fig, text, cpu=False)
        return fig


def count(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def size(number: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number / 1024:.4g} KiB"


def main() -> int:
    import argparse

    from figures.io import exit_code, show

    parser = argparse.ArgumentParser(prog=f"python -m figures.{NAME}")
    parser.add_argument("--models", type=Path, default=Path("conf/model"))
    parser.add_argument("--out", type=Path, required=True, help="folder for PNG and PDF")
    options = parser.parse_args()

    def body() -> int:
        if not any(options.models.glob("*.yaml")):
            raise SystemExit(f"error: {options.models} holds no YAML file of a model; give conf/model")
        return show(figure(models(options.models)), options.out, NAME)

    return exit_code(body)


if __name__ == "__main__":
    raise SystemExit(main())
