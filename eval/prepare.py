"""What an evaluation runs, resolved before any weight is loaded: samplers, and facts to compare.

run = Run.prepare(config)            # everything that can be wrong with the settings
run.profiles["local"].edit           # how an edit is drawn
run.facts["model_sha256"]            # {file: hash}
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.config import loop_options
from eval.config import EvalConfig
from eval.profiles import repair_rng_step, sampling
from eval.sets import set_sha256, short_name
from umm_reflect.settings import to_mapping

if TYPE_CHECKING:
    from agent.types import EditView
    from umm_reflect.hub import ReflectionProfile


@dataclass(frozen=True)
class Run:
    """What is run, resolved: how each edit view samples, and the facts that identify the results.

    facts: JSON values, compared when a run is resumed and written to env.json.
    """

    folder: Path
    profiles: dict[EditView, ReflectionProfile]
    facts: dict[str, Any]

    @classmethod
    def prepare(cls, config: EvalConfig) -> Run:
        """Everything that can be wrong with the settings, found before the weights are loaded."""
        from umm_reflect import hub
        from umm_reflect.config import BagelConfig
        from umm_reflect.device import resolve_device, resolve_dtype
        from umm_reflect.images import check_drawn_size

        device = resolve_device(config.device)
        folder = hub.resolve(config.model)
        adapter = hub.resolve(config.adapter) if config.adapter else None
        own = hub.profile(folder, adapter)
        wanted = config.edit_view or own.edit_view
        views: tuple[EditView, ...] = ("local", "full") if wanted == "both" else (wanted,)
        model = BagelConfig.from_folder(folder)
        drawable = model.latent_grid_side * model.latent_stride
        profiles = {v: sampling(config, own, v, drawable) for v in views}
        for profile in profiles.values():
            check_drawn_size(*profile.size, model.latent_grid_side, model.latent_stride)
        facts = {
            "model_sha256": _sha256s(folder),
            "adapter_sha256": _sha256s(adapter) if adapter else None,
            "profiles": {view: _without_prompt(profile) for view, profile in profiles.items()},
            "loop": to_mapping(loop_options(config.reflect_config(0))),
            "sets_sha256": {short_name(name): set_sha256(name) for name in config.sets},
            "device": device.type,
            "dtype": str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        }
        if config.profile == "release":
            facts["repair_rng_step"] = repair_rng_step(config)
        return cls(folder, profiles, facts)


def _sha256s(folder: Path) -> dict[str, str]:
    from umm_reflect.hub import digest

    return {path.name: digest(path) for path in sorted(folder.glob("*.safetensors"))}


def _without_prompt(profile: ReflectionProfile) -> dict[str, Any]:
    """The profile, its system prompt (which may be long) as a hash."""
    record = to_mapping(profile)
    prompt = record.pop("system_prompt").encode()
    record["system_prompt_sha256"] = hashlib.sha256(prompt).hexdigest() if prompt else None
    return record
