"""Train Specter's reference models: prepare the corpus, train, sample, or train all three on one GPU.

python scripts/train_reference_moe.py prepare --work .work/reference --datasets DIR
python scripts/train_reference_moe.py train --config deepseek_v2_mini --work .work/reference --output DIR --minutes 4
python scripts/train_reference_moe.py all --work .work/reference --output DIR --minutes-total 9
python scripts/train_reference_moe.py sample --model DIR --prompt "def mean(values):"
"""

from __future__ import annotations

import sys

from reference_training.cli import main

if __name__ == "__main__":
    sys.exit(main())
