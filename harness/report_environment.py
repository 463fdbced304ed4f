"""The machines of a report: every environment.json beside the paper's platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report_tables import Cells


def environment_lines(found: Mapping[str, Mapping[str, Any]], paper: Mapping[str, Any]) -> Cells:
    """The paper's platform in the first column, one column per environment.json."""
    names = list(found)
    stated = paper["packages"]
    body = [
        ["GPU", str(paper["gpu"]), *(_gpu(found[n]) for n in names)],
        ["GPU driver, power limit", "not stated", *(_driver(found[n]) for n in names)],
        ["GPU clocks", "not stated", *(_clocks(found[n]) for n in names)],
        ["CPU", str(paper["cpu"]), *(_cpu(found[n]) for n in names)],
        ["host memory", str(paper["memory"]), *(_memory(found[n]) for n in names)],
        ["NUMA nodes", "binding optional", *(_numa(found[n]) for n in names)],
        ["link", str(paper["link"]), *(_link(found[n]) for n in names)],
        ["weights", str(paper["weights"]), *(_weights(found[n]) for n in names)],
    ]
    for name, version in stated.items():
        ours = [_package(found[n], name) for n in names]
        body.append([name, "not stated" if version is None else str(version), *ours])
    body.append(["git commit", "c0325dc", *(str(found[n].get("git_commit", "")) for n in names)])
    return Cells(["", "paper", *(f"here: {n}" for n in names)], body)


def _gpu(env: Mapping[str, Any]) -> str:
    gpus = env.get("gpus") or []
    return ", ".join(f"{g['name']}, {g['memory_bytes'] / 1e9:.0f} GB" for g in gpus) or str(env.get("gpu") or "none")


def _driver(env: Mapping[str, Any]) -> str:
    gpus = env.get("gpus") or []
    listed = ", ".join(f"{g.get('driver', '')}, {_known(g.get('power_limit_w'))} W" for g in gpus)
    return listed or str(env.get("driver") or "none")


def _cpu(env: Mapping[str, Any]) -> str:
    cpu = env.get("cpu")
    if not isinstance(cpu, Mapping):
        return f"{cpu or 'not recorded'}, {env.get('cpu_cores', '?')} cores"
    return f"{cpu.get('name', 'unknown')}, {cpu.get('cores', '?')} cores, {cpu.get('threads', '?')} threads used"


def _memory(env: Mapping[str, Any]) -> str:
    return f"{env['memory_bytes'] / 1e9:.0f} GB" if env.get("memory_bytes") else "not recorded"


def _clocks(env: Mapping[str, Any]) -> str:
    """Highest and set clocks in MHz."""
    said = []
    for gpu in env.get("gpus") or []:
        clocks = gpu.get("clocks_mhz") or {}
        said += [
            f"{name} {_known(c.get('highest'))}, set {_known(c.get('applications'))} MHz" for name, c in clocks.items()
        ]
    return "; ".join(said) or "not recorded"


def _link(env: Mapping[str, Any]) -> str:
    rate, gpus = env.get("link_gb_per_s"), env.get("gpus") or []
    measured = f"{rate:.3g} GB/s measured" if rate else "not measured"
    pcie = [f"PCIe {p.get('highest_generation')} x{p.get('highest_width')}" for g in gpus if (p := g.get("pcie"))]
    return ", ".join([*dict.fromkeys(pcie), measured])


def _numa(env: Mapping[str, Any]) -> str:
    nodes = env.get("numa_nodes")
    if isinstance(nodes, Mapping):
        return "; ".join(f"{name}: CPUs {cpus}" for name, cpus in nodes.items()) or "none"
    return "not recorded" if nodes is None else str(nodes)


def _known(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _weights(env: Mapping[str, Any]) -> str:
    weights = env.get("weights") or {}
    if isinstance(weights, str):  # a bench names the kind; there is no checkpoint to hash
        return weights
    return ", ".join(f"{name} {digest}" for name, digest in weights.items()) or "not recorded"


def _package(env: Mapping[str, Any], name: str) -> str:
    if name == "python":
        return str(env.get("python", "not recorded"))
    if name == "cuda":
        _, _, build = str(env.get("torch", "")).partition("+cu")
        drivers = {str(g["cuda_driver"]) for g in env.get("gpus") or [] if g.get("cuda_driver")}
        of_driver = ", ".join(f"{version} (driver)" for version in sorted(drivers))
        return f"{build[:-1]}.{build[-1]} (torch)" if build.isdigit() else of_driver or "none"
    packages = {k.lower().replace("-", "_"): v for k, v in (env.get("packages") or {}).items()}
    return str(packages.get(name, env.get(name, "not installed" if packages else "not recorded")))
