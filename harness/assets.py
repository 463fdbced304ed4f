"""Where datasets, checkpoints and logs lie: in the workspace that SPECTER_WORK names, or in this checkout.

A workspace has downloads/ (what the download tools fetched), specter-assets/ (the extracted archives of the
release) and logs/. The checkout's own downloads/ is looked through last, so that nothing is fetched twice.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from harness import datasets
from harness.catalogue import ROOT
from specter_core.errors import UserError

VARIABLE = "SPECTER_WORK"
CHECKOUT_DOWNLOADS = ROOT / "downloads"


def workspace() -> Path | None:
    """The folder that SPECTER_WORK names, None where it is unset or empty. UserError when it is no folder."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{VARIABLE}={named} is no folder; make it with mkdir -p, or unset {VARIABLE}")
    return path


def downloads() -> Path:
    """The folder that downloads go to."""
    work = workspace()
    return CHECKOUT_DOWNLOADS if work is None else work / "downloads"


def output_option() -> str:
    """What a download command needs to fill `downloads()`; empty for the checkout's own folder."""
    return "" if downloads() == CHECKOUT_DOWNLOADS else f" --output {shlex.quote(str(downloads()))}"


def roots() -> tuple[Path, ...]:
    """The folders to look through, first one first."""
    work = workspace()
    return (CHECKOUT_DOWNLOADS,) if work is None else (work / "specter-assets", work / "downloads", CHECKOUT_DOWNLOADS)


def dataset_root(name: str) -> Path:
    """The first root that has dataset `name`; the folder that it would be fetched to where none has."""
    return next((root for root in roots() if datasets.dataset_files(name, root)), downloads())


def checkpoint_folder(path: str, archive: str | None = None) -> Path:
    """The folder of a checkpoint that conf/model gives as `path`, relative to the checkout.

    Paths below downloads/ are looked for below every root, in specter-assets/ under the release's name too:
    `archive` "dsv2" makes specter-assets/dsv2-target of …/target. The place to fetch it to where none has it.
    """
    if Path(path).parts[:1] != ("downloads",):
        return ROOT / path
    below = Path(*Path(path).parts[1:])
    places = [root / below for root in roots()]
    if archive is not None and (work := workspace()) is not None:
        places.insert(0, work / "specter-assets" / f"{archive}-{below.name}")
    return next((place for place in places if any(place.glob("*.safetensors"))), downloads() / below)


def worker_logs(output: Path) -> Path:
    """The folder of the workers' logs of a run that writes to `output`."""
    work = workspace()
    return output / "workers" if work is None else work / "logs" / output.name
