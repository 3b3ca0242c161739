"""Log-likelihoods by transformers, in whatever environment runs this file.

python tests/spectra_reference.py MODEL_FOLDER OUT.json

OUT.json: for each case of `cases`, the log-probability of every token of its prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.rewards.selftest import shape_pairs
from eval.rewards.spectra import Settings
from eval.rewards.spectra_local import LocalSpectra


def cases() -> tuple[list, list[dict]]:
    """(images, rows): images of two sizes and shapes, prompts of different lengths.

    The large ones have 256 tokens, more than a block of vLLM's cache holds.
    """
    pairs = shape_pairs()
    large = [pair.good.resize((448, 448)) for pair in pairs]
    small = [pair.bad.resize((90, 60)) for pair in pairs]
    return large + small, [dict(pair.row) for pair in pairs] * 2


if __name__ == "__main__":
    reward = LocalSpectra(
        Settings("transformers", sys.argv[1], device="cpu", dtype="float32", batch_size=3)
    )
    verdicts = reward.score(*cases())
    Path(sys.argv[2]).write_text(json.dumps([v.evidence["logprobs"] for v in verdicts]))
