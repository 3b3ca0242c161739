"""The verbs that draw: reflect (the loop), generate (one image), edit (one change of an image).

    umm-reflect reflect "two red circles and a blue square"
    umm-reflect reflect "make the circle blue" --image in.png --max-rounds 2
    umm-reflect generate "three stars" --seed 4
    umm-reflect edit "add a green ring" --image in.png
    umm-reflect reflect --from outputs/two-red-circles-seed0/image_1.png     # the same run again

Each run is a folder under --output-dir: trace.json, the images as PNG and, for reflect, story.png.
From a checkout without the console command: python -m agent.cli reflect ...
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from agent.config import (
    DrawConfig,
    EditConfig,
    GenerateConfig,
    ReflectConfig,
    loop_options,
    resolved_profile,
    vocabulary_note,
)
from agent.trace import read_settings
from umm_reflect.errors import UsageError, UserError
from umm_reflect.settings import parse, to_mapping

if TYPE_CHECKING:
    from agent.policy import Policy
    from agent.trace import About
    from agent.types import Trajectory
    from umm_reflect.model import Bagel

MAX_PROMPT_TOKENS = 2048


def reflect_main(argv: Sequence[str]) -> int:
    """umm-reflect reflect: returns 0; errors as in `umm_reflect.errors`."""
    return _main(ReflectConfig, argv, "reflect")


def generate_main(argv: Sequence[str]) -> int:
    """umm-reflect generate."""
    return _main(GenerateConfig, argv, "generate")


def edit_main(argv: Sequence[str]) -> int:
    """umm-reflect edit."""
    return _main(EditConfig, argv, "edit")


def _main(config_class: type[DrawConfig], argv: Sequence[str], verb: str) -> int:
    with _from_image(argv, verb) as words:
        config = parse(config_class, words, f"umm-reflect {verb}")
    prompts = _prompts(config)
    if verb == "edit" and config.image is None:
        raise UsageError("there is no image to edit", "Name one with --image in.png.")
    if verb == "generate" and config.image is not None:
        raise UsageError("generate starts from no image", "To change one: umm-reflect edit.")
    run = Run(config, verb, prompts)
    run.check()
    run.load()
    run.go()
    return 0


class Run:
    """One program run: checked on the CPU before the weights are loaded, then batch by batch."""

    def __init__(self, config: DrawConfig, verb: str, prompts: list[str]):
        self.config, self.verb, self.prompts = config, verb, prompts

    def check(self) -> None:
        """Everything that can be wrong with the input; sets source, folder, adapter, profile."""
        from umm_reflect.config import BagelConfig
        from umm_reflect.hub import profile, resolve
        from umm_reflect.images import check_drawn_size, load_image
        from umm_reflect.tokens import Tokens

        self.source = load_image(self.config.image) if self.config.image else None
        self.folder = resolve(self.config.model)
        self.adapter = resolve(self.config.adapter) if self.config.adapter else None
        model = BagelConfig.from_folder(self.folder)
        self.profile = resolved_profile(profile(self.folder, self.adapter), self.config)
        size = self.profile.size
        if self.source is not None:
            size = self.profile.transforms.drawn_size(self.source)
        check_drawn_size(*size, model.latent_grid_side, model.latent_stride)
        tokens = Tokens.from_folder(self.folder)
        for prompt in self.prompts:
            count = len(tokens.encode(prompt, allow_special=False))
            if count > MAX_PROMPT_TOKENS:
                raise UsageError(
                    f"the prompt '{prompt[:40]}…' has {count} tokens",
                    f"Give at most {MAX_PROMPT_TOKENS}.",
                )
        self.config.output_dir.mkdir(parents=True, exist_ok=True)
        if line := vocabulary_note(self.prompts, model, editing=self.source is not None):
            print(line, file=sys.stderr)

    def load(self) -> None:
        from umm_reflect import Bagel

        config, began = self.config, time.perf_counter()
        options = {"device": config.device, "dtype": config.dtype, "attn": config.attn}
        self.bagel = Bagel.from_pretrained(str(self.folder), adapter=self.adapter, **options)
        if isinstance(config, ReflectConfig) and not config.capture:
            self.bagel.capture = False
        self.about = self._about(self.bagel)
        place = f"{self.about.versions['device']} {self.about.versions['dtype']}"
        print(f"{self.folder.name} on {place}, loaded in {time.perf_counter() - began:.1f} s")

    def go(self) -> None:
        """Runs the batches; what is finished is saved before the next batch begins."""
        samples = _samples(self.config.sample, len(self.prompts))
        for start in range(0, len(self.prompts), self.config.batch_size):
            batch = slice(start, start + self.config.batch_size)
            prompts, named = self.prompts[batch], samples[batch]
            names = [self._name(*pair) for pair in zip(prompts, named, strict=True)]
            if len(names) == 1 < len(self.prompts):  # else each line names its prompt
                print(names[0])
            trajectories = self._batch(prompts, named, names)
            for name, trajectory in zip(names, trajectories, strict=True):
                self._save(name, trajectory)

    def _policy(self) -> Policy:
        """A new one for each batch: policies remember what they have read."""
        from agent.policy import BagelPolicy, ForcedTurns

        policy = BagelPolicy(self.bagel, self.profile)
        if isinstance(self.config, ReflectConfig) and self.config.forced_turns:
            return ForcedTurns(policy, self.config.forced_turns)
        return policy

    def _name(self, prompt: str, sample: int | str) -> str:
        """The folder of a prompt's run; a number is added where it holds another run."""
        from agent import trace

        first = _folder_name(prompt, sample, self.config.seed, len(self.prompts) > 1)
        run = trace.RunName(prompt, self.config.seed, sample, self.source)
        for number in itertools.count(1):
            name = first if number == 1 else f"{first}-{number}"
            if trace.may_take(self.config.output_dir / name, run, self.about):
                return name
        raise AssertionError("there is always a next number")

    def _batch(
        self, prompts: list[str], samples: list[int | str], names: list[str]
    ) -> list[Trajectory]:
        from agent.direct import draw_once
        from agent.loop import run_episodes
        from agent.show import Printer

        common = {
            "sources": [self.source] * len(prompts),
            "seed": self.config.seed,
            "samples": samples,
        }
        try:
            with Printer(names) as printer:
                if not isinstance(self.config, ReflectConfig):
                    return draw_once(self._policy(), prompts, watcher=printer, **common)
                return run_episodes(
                    self._policy(),
                    prompts,
                    max_rounds=self.profile.say.max_rounds,
                    max_tokens=self.profile.say.max_tokens,
                    options=loop_options(self.config),
                    watcher=printer,
                    **common,
                )
        except FloatingPointError as error:
            raise UserError(str(error), "Check the checkpoint.") from error

    def _save(self, name: str, trajectory: Trajectory) -> None:
        from agent import trace
        from agent.story import STOP_TEXTS, draw_story

        story = None
        if self.verb == "reflect":
            steps = self.profile.first.steps
            footer = f"{self.folder.name} · seed {self.config.seed} · {steps} steps"
            story = draw_story(trajectory, footer)
        folder = trace.save(trajectory, self.config.output_dir / name, self.about, story=story)
        if story is None:
            print(f"image: {_short(folder / f'image_{trajectory.kept}.png')}")
            return
        if len(self.prompts) == 1:
            print(timing_line(trajectory))
        places = f"trace: {_short(folder / trace.TRACE)}  story: {_short(folder / 'story.png')}"
        print(f"{STOP_TEXTS[trajectory.stop]}; {places}")

    def _about(self, bagel: Bagel) -> About:
        import torch

        from agent.trace import About
        from umm_reflect import __version__
        from umm_reflect.adapters import WEIGHTS as ADAPTER_WEIGHTS
        from umm_reflect.hub import WEIGHTS

        adapter = self.adapter and self.adapter / ADAPTER_WEIGHTS
        sampler = to_mapping(self.profile)
        prompt = sampler.pop("system_prompt").encode()
        sampler["system_prompt_sha256"] = hashlib.sha256(prompt).hexdigest() if prompt else None
        if isinstance(self.config, ReflectConfig):
            sampler["loop"] = to_mapping(loop_options(self.config))
        return About(
            model=self.config.model,
            model_sha256=_hash_of(self.folder / WEIGHTS),
            adapter_sha256=_hash_of(adapter) if adapter else None,
            verb=self.verb,
            settings=to_mapping(self.config),
            sampler=sampler,
            versions={
                "umm-reflect": __version__,
                "torch": torch.__version__,
                "device": str(bagel.device),
                "dtype": str(bagel.dtype).removeprefix("torch."),
            },
        )


def _hash_of(weights: Path) -> str | None:
    """The sha256 of a file, None where there is none (shards); a large one is hashed only once."""
    from umm_reflect.files import sha256
    from umm_reflect.hub import digest

    if not weights.exists():
        return None
    return (sha256 if weights.stat().st_size < 1_000_000_000 else digest)(weights)


# --- what was typed -------------------------------------------------------------------------------


def _prompts(config: DrawConfig) -> list[str]:
    """What to draw: PROMPT, or the lines of the file. Errors: UsageError, UserError."""
    if config.prompts_file is None:
        if not config.prompt.strip():
            raise UsageError(
                "the prompt is empty", 'Say what to draw, for example "two red circles".'
            )
        _check_text(config.prompt)
        return [config.prompt.strip()]
    if config.prompt:
        raise UsageError("there is a prompt and a --prompts-file", "Give one of them.")
    try:
        lines = config.prompts_file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{config.prompts_file} is not UTF-8 text", "One prompt a line.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{config.prompts_file} holds no prompts", "One prompt a line.")
    return prompts


def _check_text(prompt: str) -> None:
    """UsageError for bytes that are no text in the terminal's encoding."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(
            "the prompt holds bytes that are no UTF-8 text", "Check the terminal's encoding."
        ) from None


def _samples(first: int | str, count: int) -> list[int | str]:
    if isinstance(first, int):
        return [first + i for i in range(count)]
    return [first] if count == 1 else [f"{first}/{i}" for i in range(count)]


@contextmanager
def _from_image(argv: Sequence[str], verb: str) -> Iterator[list[str]]:
    """The arguments, with --from IMAGE.png replaced by a --config file of that image's settings."""
    words, image = list(argv), None
    for place, word in enumerate(words):
        if word == "--":
            break
        if word == "--from" or word.startswith("--from="):
            image = word.partition("=")[2] or "".join(words[place + 1 : place + 2])
            del words[place : place + (1 if "=" in word else 2)]
            break
    if image is None:
        yield words
        return
    if not image or any(word.partition("=")[0] == "--config" for word in words):
        raise UsageError("--from needs an image, and no --config beside it", "--from image.png")
    made_by, settings = read_settings(image)
    if made_by != verb:
        raise UsageError(f"{image} was made by {made_by}", f"umm-reflect {made_by} --from {image}")
    settings["prompts_file"] = None
    source = Path(image).with_name("image_0.png")
    if settings.get("image") and source.exists():  # the very pixels, wherever the original is
        settings["image"] = str(source)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "from.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        yield ["--config", str(path), *words]


def timing_line(trajectory: Trajectory) -> str:
    """'3 images in 2.1 s, 3 turns of 187 tokens in 1.4 s', rejected turns included."""
    drawn = [trajectory.first, *(step.transition for step in trajectory.steps)]
    seconds = [transition.seconds for transition in drawn if transition]
    rejected = (*trajectory.plan_rejected, *(t for s in trajectory.steps for t in s.rejected))
    turns = [*trajectory.turns, *rejected]
    tokens = sum(len(turn.sampled_ids) for turn in turns)
    said = sum(turn.seconds for turn in turns)
    images = f"{len(seconds)} image{'s' * (len(seconds) != 1)} in {sum(seconds):.1f} s"
    return (
        f"{images}, {len(turns)} turn{'s' * (len(turns) != 1)} of {tokens} tokens in {said:.1f} s"
    )


# --- names ----------------------------------------------------------------------------------------


def _folder_name(prompt: str, sample: int | str, seed: int, in_batch: bool) -> str:
    """'two-red-circles-seed0'; in a batch the sample comes first: '0003-two-red-circles-seed0'."""
    slug = "-".join(re.findall(r"[a-z0-9]+", prompt.lower())) or "image"
    if len(slug) > 48 or not prompt.isascii():
        slug = f"{slug[:40].rstrip('-')}-{hashlib.sha256(prompt.encode()).hexdigest()[:6]}"
    name = re.sub(r"[^\w.-]+", "-", f"{sample:04d}" if isinstance(sample, int) else sample)
    if in_batch:
        return f"{name}-{slug}-seed{seed}"
    return f"{slug}-seed{seed}" + (f"-sample{name}" if sample != 0 else "")


def _short(path: Path) -> str:
    """The path from here, if that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


VERBS = {"reflect": reflect_main, "generate": generate_main, "edit": edit_main}


def main(argv: Sequence[str]) -> int:
    """python -m agent.cli VERB ..."""
    if not argv or argv[0] not in VERBS:
        raise UsageError("which verb?", f"One of {', '.join(VERBS)}, for example: reflect --help")
    return VERBS[argv[0]](argv[1:])


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
