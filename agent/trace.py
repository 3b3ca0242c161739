"""A trajectory on disk: a folder with trace.json and one lossless PNG an image, whole or not there.

    save(trajectory, "out/two-red-circles", About("pretrained/bagel-nano-shapes", sha, settings))
    trajectory == load("out/two-red-circles")                # images by pixels
    load("out/two-red-circles", policy)                      # with the contexts that each head saw

Each PNG carries prompt, seed, sample, round and settings in its text chunks, so that a single image
can be repeated: umm-reflect reflect --from out/two-red-circles/image_1.png
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from agent import views
from agent.types import (
    ProtocolError,
    Reflection,
    Seen,
    Step,
    StopReason,
    Trajectory,
    Transition,
    Turn,
    View,
    same_pixels,
)
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside

if TYPE_CHECKING:
    from agent.policy import Policy

SCHEMA = 1
TRACE = "trace.json"
WINDOW = ("latents", "times", "logprobs")  # what a noise window leaves, in a file beside its image


@dataclass(frozen=True)
class About:
    """Where a trajectory comes from. settings: the resolved ones of the program that made it."""

    model: str
    model_sha256: str | None = None
    adapter_sha256: str | None = None
    verb: str = "reflect"
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampler: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


# --- writing --------------------------------------------------------------------------------------


def save(
    trajectory: Trajectory, folder: str | Path, about: About, *, story: Image.Image | None = None
) -> Path:
    """Write the folder aside and rename it into place; a trace that lay there is replaced.

    story: a picture of the whole run, saved as story.png. Errors: OSError as the system gives it (a
    full disk); UserError if `folder` holds something other than a trace. Nothing is left then.
    """
    folder = Path(folder).absolute()
    if folder.exists() and any(folder.iterdir()) and not (folder / TRACE).exists():
        raise UserError(f"{folder} holds other files", "Choose another --output-dir.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        aside.chmod(folder.parent.stat().st_mode & 0o777)
        record = _record(trajectory, aside, about)
        if story is not None:
            _write_png(story, aside / "story.png", _chunks(trajectory, about, None))
        write_aside(aside / TRACE, _dumps(record) + "\n")
        _put_in_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


@dataclass(frozen=True)
class RunName:
    """Which run: what names its random draws, and the user's image if there is one."""

    prompt: str
    seed: int
    sample: int | str
    source: Image.Image | None


# Settings that say where a run happens, or that `RunName` says better.
PLACE_SETTINGS = ("output_dir", "batch_size", "device", "dtype", "attn", "model", "adapter")
PLACE_SETTINGS += ("prompt", "prompts_file", "sample", "image", "capture")


def may_take(folder: str | Path, run: RunName, about: About) -> bool:
    """Whether a run may be saved there: nothing is there, or this very run from before."""
    from umm_reflect.images import load_image

    folder = Path(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return True
    try:
        record = read_record(folder)
        before = record["about"]
        name = (record["prompt"], record["seed"], record["sample"])
        if name != (run.prompt, run.seed, run.sample):
            return False
        if _identity(before) != _identity(json.loads(json.dumps(asdict(about)))):
            return False
        if record["source"] is None or run.source is None:
            return record["source"] is None and run.source is None
        return same_pixels(load_image(folder / record["source"]), run.source)
    except (UserError, OSError, KeyError, TypeError):  # no trace, or a damaged one
        return False


def _identity(about: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = {k: v for k, v in about["settings"].items() if k not in PLACE_SETTINGS}
    hashes = about["model_sha256"], about["adapter_sha256"]
    return about["verb"], hashes, about["sampler"], settings


def _put_in_place(aside: Path, folder: Path) -> None:
    if not folder.exists():
        aside.rename(folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".old"))
    folder.rename(old / folder.name)
    try:
        aside.rename(folder)
    except BaseException:
        (old / folder.name).rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _record(trajectory: Trajectory, folder: Path, about: About) -> dict[str, Any]:
    """The JSON of a trajectory; its images and windows are written to `folder`."""

    def image(picture: Image.Image | None, number: int) -> str | None:
        if picture is None:
            return None
        name = f"image_{number}.png"
        _write_png(picture, folder / name, _chunks(trajectory, about, number))
        return name

    def transition(drawn: Transition | None, number: int) -> dict[str, Any] | None:
        if drawn is None:
            return None
        entry = {"image": image(drawn.image, number), "seconds": round(drawn.seconds, 4)}
        if drawn.latents is not None:
            from safetensors.torch import save as tensors_to_bytes

            entry["window"] = f"image_{number}.window.safetensors"
            window = {name: getattr(drawn, name).contiguous() for name in WINDOW}
            write_aside(folder / entry["window"], tensors_to_bytes(window))
        return entry

    return {
        "schema": SCHEMA,
        "prompt": trajectory.prompt,
        "seed": trajectory.seed,
        "sample": trajectory.sample,
        "stop": trajectory.stop,
        "kept": trajectory.kept,
        "about": asdict(about),
        "source": image(trajectory.source, 0),
        "plan": trajectory.plan and _turn_record(trajectory.plan),
        "plan_rejected": [_turn_record(turn) for turn in trajectory.plan_rejected],
        "first": transition(trajectory.first, int(trajectory.source is not None)),
        "steps": [
            {
                "turn": _turn_record(step.turn),
                "rejected": [_turn_record(turn) for turn in step.rejected],
                "transition": transition(step.transition, number),
            }
            for number, step in enumerate(trajectory.steps, start=1)
        ],
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    outcome = asdict(turn.reflection) if turn.reflection else {"error": turn.error}
    return {
        "round": turn.round,
        "outcome": outcome,
        "text": turn.text,
        "said": turn.said,
        "temperature": turn.temperature,
        "seconds": round(turn.seconds, 4),
        "forced_ids": turn.forced_ids,
        "sampled_ids": turn.sampled_ids,
        "chosen": [int(c) for c in turn.chosen],
        "allowed": {i: ids for i, ids in enumerate(turn.allowed) if ids is not None},
        "logprobs": turn.logprobs,
    }


def _chunks(trajectory: Trajectory, about: About, number: int | None) -> dict[str, str]:
    chunks = {
        "Software": "umm-reflect",
        "prompt": trajectory.prompt,
        "seed": str(trajectory.seed),
        "sample": json.dumps(trajectory.sample),
        "model": about.model,
        "model_sha256": about.model_sha256 or "",
        "verb": about.verb,
        "settings": json.dumps(about.settings),
        "sampler": json.dumps(about.sampler),
    }
    if number is None:
        return chunks
    chunks["round"] = str(number)
    steps = trajectory.steps[number - 1 : number] if number else ()
    made_by = steps[0].turn.reflection if steps else None
    if made_by:
        chunks["edit"] = made_by.edit
    return chunks


def _write_png(image: Image.Image, path: Path, chunks: Mapping[str, str]) -> None:
    info, data = PngInfo(), io.BytesIO()
    for name, text in chunks.items():
        info.add_itxt(name, text)
    image.save(data, "PNG", pnginfo=info)
    write_aside(path, data.getvalue())


def _dumps(value: Any, indent: str = "") -> str:
    """JSON with one line a field and one line a list of numbers."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(str(k))}: {_dumps(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "[" + ", ".join(_dumps(v, inner) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


# --- reading --------------------------------------------------------------------------------------


def load(folder: str | Path, policy: Policy | None = None) -> Trajectory:
    """The trajectory of a folder (or of its trace.json), equal to what was saved.

    policy: rebuild the contexts that each head saw, through `views`. Errors: UserError that names
    the file when one is missing, damaged or of another schema.
    """
    folder = Path(folder)
    folder = folder.parent if folder.name == TRACE else folder
    record = read_record(folder)
    try:
        trajectory = _trajectory(record, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / TRACE} is damaged ({type(error).__name__}: {error})", "Run it again."
        ) from error
    return with_contexts(trajectory, policy) if policy else trajectory


def read_record(folder: str | Path) -> dict[str, Any]:
    """The JSON of a trace, of the schema that this version reads."""
    path = Path(folder) / TRACE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "Name the folder of a finished run.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable as JSON ({error})", "Run it again.") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else None
        raise UserError(f"{path} has schema {found}", f"This version reads schema {SCHEMA}.")
    return record


def _trajectory(record: dict[str, Any], folder: Path) -> Trajectory:
    from umm_reflect.images import load_image

    def transition(entry: dict[str, Any] | None) -> Transition | None:
        if entry is None:
            return None
        window = {}
        if "window" in entry:
            from safetensors import SafetensorError
            from safetensors.torch import load as tensors_from_bytes

            path = folder / entry["window"]
            try:
                window = tensors_from_bytes(path.read_bytes())
            except SafetensorError as error:
                raise UserError(f"{path} is damaged ({error})", "Run it again.") from error
        return Transition(load_image(folder / entry["image"]), seconds=entry["seconds"], **window)

    steps = tuple(
        Step(
            _turn(entry["turn"]),
            transition(entry["transition"]),
            tuple(_turn(turn) for turn in entry["rejected"]),
        )
        for entry in record["steps"]
    )
    return Trajectory(
        prompt=record["prompt"],
        source=load_image(folder / record["source"]) if record["source"] else None,
        plan=record["plan"] and _turn(record["plan"]),
        first=transition(record["first"]),
        steps=steps,
        stop=StopReason(record["stop"]),
        kept=record["kept"],
        seed=record["seed"],
        sample=record["sample"],
        plan_rejected=tuple(_turn(turn) for turn in record["plan_rejected"]),
    )


def _turn(record: dict[str, Any]) -> Turn:
    outcome, ids = record["outcome"], tuple(record["sampled_ids"])
    allowed = {int(place): tuple(legal) for place, legal in record["allowed"].items()}
    return Turn(
        round=record["round"],
        forced_ids=tuple(record["forced_ids"]),
        sampled_ids=ids,
        chosen=tuple(bool(c) for c in record["chosen"]),
        allowed=tuple(allowed.get(place) for place in range(len(ids))),
        logprobs=tuple(record["logprobs"]),
        text=record["text"],
        outcome=ProtocolError(outcome["error"]) if "error" in outcome else Reflection(**outcome),
        said=record["said"],
        temperature=record["temperature"],
        seconds=record["seconds"],
    )


def with_contexts(trajectory: Trajectory, policy: Policy) -> Trajectory:
    """The same trajectory with every context that `views` gave when it was made."""
    seen = views.start(policy, trajectory.prompt, trajectory.source)

    def turns(tried: tuple[Turn, ...]) -> tuple[Turn, ...]:
        return tuple(replace(turn, context=views.reflect_view(seen)) for turn in tried)

    def after(turn: Turn) -> Seen:
        if turn.reflection is None:
            return seen
        edit = turn.reflection.edit
        return seen.with_turn(policy.text(turn.said), policy.text(edit) if edit else None)

    def drawn(transition: Transition, view: View) -> Transition:
        return replace(transition, view=view, segment=policy.image(transition.image))

    plan, plan_rejected = trajectory.plan, turns(trajectory.plan_rejected)
    if plan is not None:
        (plan,) = turns((plan,))
        seen = after(plan)
    first = trajectory.first
    if first is not None:
        direct = views.direct_edit_view(seen) if seen.editing else None
        first = drawn(first, direct or views.first_image_view(seen, policy.edit_view))
        seen = seen.with_image(first.segment)
    steps = []
    for step in trajectory.steps:
        (turn,), rejected, transition = turns((step.turn,)), turns(step.rejected), step.transition
        seen = after(turn)
        if transition is not None:
            transition = drawn(transition, views.edit_view(seen, policy.edit_view))
            seen = seen.with_image(transition.segment)
        steps.append(Step(turn, transition, rejected))
    return replace(
        trajectory, plan=plan, plan_rejected=plan_rejected, first=first, steps=tuple(steps)
    )


def read_settings(image: str | Path) -> tuple[str, dict[str, Any]]:
    """(verb, settings) from the text chunks of a PNG that a run wrote.

    The settings hold the image's own prompt and sample. Errors: UserError for any other file.
    """
    path = Path(image)
    try:
        with Image.open(path) as picture:
            chunks = {str(k): str(v) for k, v in getattr(picture, "text", {}).items()}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "Check the path after --from.") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Name a PNG of a run.") from None
    if chunks.get("Software") != "umm-reflect" or "settings" not in chunks:
        raise UserError(f"{path} carries no settings", "Name a PNG that umm-reflect wrote.")
    settings = json.loads(chunks["settings"])
    return chunks["verb"], {
        **settings,
        "prompt": chunks["prompt"],
        "sample": json.loads(chunks["sample"]),
    }
