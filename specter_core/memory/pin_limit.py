"""How much host memory may be page-locked; there is no pageable fallback."""

from __future__ import annotations

import os
from dataclasses import dataclass

from specter_core.errors import UserError

PIN_LIMIT = "SPECTER_PIN_LIMIT_GB"


@dataclass(frozen=True, slots=True)
class PinLimit:
    """How much host memory a process may page-lock. limit_bytes None: as much as the driver gives."""

    limit_bytes: int | None = None

    @staticmethod
    def of_process() -> PinLimit:
        """From the environment, where the harness puts its own option for its workers. UserError for no number."""
        text = os.environ.get(PIN_LIMIT, "")
        try:
            return PinLimit(round(float(text) * 1e9) if text else None)
        except ValueError:
            raise UserError(f"{PIN_LIMIT} is {text!r}, not a number of GB; give for example 64") from None

    def check(self, wanted_bytes: int, locked_bytes: int = 0) -> None:
        """Before anything is touched. UserError when wanted and already locked bytes exceed the limit."""
        if self.limit_bytes is not None and wanted_bytes + locked_bytes > self.limit_bytes:
            more = f" beside {locked_bytes / 1e9:.3g} GB" if locked_bytes else ""
            raise UserError(
                f"the host store needs {wanted_bytes / 1e9:.3g} GB of page-locked memory{more} and --pin-limit-gb "
                f"(launcher.pin_limit_gb) allows {self.limit_bytes / 1e9:.3g}; raise it or choose a smaller model: "
                "experts are never copied from pageable memory"
            )
