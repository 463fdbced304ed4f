"""The one entry: python run.py [list | plan | validate DIR] [--fresh] [sweep=NAME] [model=… dataset=…
memory=… system=…]

Results go to outputs/<sweep>-run; progress, tables and messages to stderr; the last line on stdout is one
JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parent / "conf"), config_name="config")
def app(composed: DictConfig) -> None:
    from specter_core.errors import exit_code

    raise SystemExit(exit_code(lambda: execute(composed), composed.output or "the output folder"))


def execute(composed: DictConfig) -> int:
    """Config -> dataclass -> plan -> run. Returns the exit code."""
    from omegaconf import OmegaConf

    from harness.config import run_config

    raw = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(raw, dict)
    config = run_config({str(key): value for key, value in raw.items()})
    from harness import listing
    from harness.catalogue import ROOT
    from harness.dataset_source import DatasetSource
    from harness.environment import check_device
    from harness.grid import plan_run, reference_system
    from specter_core.errors import UserError

    if config.sweep == "kernels" and composed.command == "run":
        from harness import kernel_sweep

        print(json.dumps(kernel_sweep.run(config)))
        return 0
    source = DatasetSource(prompts=config.prompts, seed=config.seed)
    try:
        plan = plan_run(config, source, named_models=bool(composed.named_models))
    except UserError:
        if composed.command == "plan":
            show(listing.shape_lines(config))
        raise
    if composed.command == "plan":
        show(listing.plan_lines(config, plan, ROOT / config.output / "records.csv"))
        return 0
    check_device(plan.device)
    if config.sweep == "routing":
        from harness.routing import sweep as routing_sweep

        print(json.dumps(routing_sweep.run(config, plan)))
        return 0
    from harness.runner import output_folder, run
    from harness.table import print_summary

    if config.launcher.name == "slurm":
        from hydra.core.hydra_config import HydraConfig

        from harness import slurm

        overrides = list(HydraConfig.get().overrides.task)
        outcome = slurm.run(config, plan, overrides, lambda text: print(text, file=sys.stderr, flush=True))
    else:
        outcome = run(config, plan, source, reference=reference_system())
    print_summary(output_folder(config) / "summary.csv", plan.device)
    print(json.dumps(outcome))
    return 0 if outcome["rows"] else 1


def show(lines: Iterable[str]) -> None:
    """Lines on stdout; a reader that leaves early (`| head`) is no error."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: list[str]) -> int:
    """Exit code: 0, 1 when nothing could be measured, 2 for bad input (one line on stderr)."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from harness import overrides, switches
    from harness.sweep_defaults import with_defaults
    from specter_core.errors import UserError

    try:
        match arguments:
            case ["list"]:
                from harness import listing
                from harness.dataset_source import DatasetSource

                show(listing.catalogue_lines(DatasetSource(prompts=1, seed=0)))
                return 0
            case ["validate", folder]:
                from harness.validate import validate

                found = validate(Path(folder))
                print("".join(f"{problem}\n" for problem in found.problems), end="", file=sys.stderr)
                print(json.dumps({"rows": found.rows, "problems": len(found.problems)}))
                return 1 if found.problems else 0
            case ["plan", *rest]:
                arguments = ["command=plan", *rest]
        arguments = ["fresh=true" if a == "--fresh" else a for a in arguments]
        if "PROFILE" in os.environ and not any(a.startswith("profile=") for a in arguments):
            arguments.append(f"profile={os.environ['PROFILE']}")
        overrides.check(arguments)
        arguments = switches.overrides(with_defaults(arguments))
        os.environ["HYDRA_FULL_ERROR"] = "1"
        sys.argv = [sys.argv[0], *arguments]
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        said, hint, _ = " ".join(str(error).split()).partition(" To append to your config use")
        remedy = "; it has no such key, python run.py --cfg job shows all" if hint else ""
        print(f"error: {said.removesuffix('.')}{remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what is recorded stays, the same command goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
