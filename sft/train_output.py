"""What a run leaves: folders that every command loads, and curves.

save_model(learner, prepared, config, step)        # RUN/checkpoints/step-..., RUN/checkpoint
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sft.train_config import Config
from sft.train_data import Prepared
from umm_reflect.training import trainable
from umm_reflect.training.folders import Origin, save_folder
from umm_reflect.training.learner import Learner


def save_model(learner: Learner, prepared: Prepared, config: Config, step: int) -> None:
    """checkpoints/step-...; where weights are averaged, the averages are written."""
    save_folder(
        learner,
        Origin(config.model, prepared.folder, prepared.profile),
        config.output_dir,
        step,
        lora=config.parameters in trainable.LORA,
        averaged=config.optimizer.ema_decay is not None,
        keep=config.keep,
    )


def settings_text(config: Config) -> str:
    from umm_reflect.settings import to_yaml

    return to_yaml(replace(config, resume="auto", dry_run=False))


def curves(path: Path) -> dict[str, list[str]]:
    """Panels of curve.png from the names that a run has logged."""
    from umm_reflect.training.metrics import read_metrics

    names = dict.fromkeys(name for line in read_metrics(path) for name in line)
    panels = {"cross-entropy": ["ce", "held_out/ce"], "flow matching": ["mse", "held_out/mse"]}
    panels["right tokens"] = ["token_accuracy", "held_out/token_accuracy"]
    panels["held-out decisions"] = [
        n for n in names if n.endswith(("score_accuracy", "action_accuracy"))
    ]
    panels |= {"learning rate": ["lr"], "gradient norm": ["grad_norm"]}
    panels |= {"tokens a second": ["tokens_per_second"], "share of the peak": ["mfu"]}
    return panels
