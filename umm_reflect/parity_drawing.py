"""The checks of a golden folder's `gen_*` files: pictures drawn with and without guidance.

Every case with `num_timesteps` is a drawing. Velocities are compared at the recorded x of each
step, then x, the latent and the picture of the implementation's own run from the recorded noise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from umm_reflect.parity_contexts import check_context_case
from umm_reflect.parity_golden import Case, Golden, text_of_ids
from umm_reflect.parity_implementations import (
    Branches,
    Drawing,
    GoldenContext,
    Guidance,
    Implementation,
)
from umm_reflect.parity_report import NotCovered, Report
from umm_reflect.reference import Text, ViTImage

BRANCH_NAMES = {"conditional": "cond", "cfg_text": "text_uncond", "cfg_img": "image_uncond"}
SETTINGS = (
    "num_timesteps",
    "timestep_shift",
    "cfg_text_scale",
    "cfg_img_scale",
    "cfg_interval",
    "cfg_renorm_type",
    "cfg_renorm_min",
    "norm_over",
    "image_sizes_hw",
)
INPUTS = (*SETTINGS, "noise_seed", "description", "note", "contexts", *BRANCH_NAMES)

Segments = Sequence[Mapping[str, Any]]


def check_drawings(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    cases = golden.cases(file)
    for name, case in cases.items():
        if isinstance(case, Mapping) and "num_timesteps" in case:
            _check_drawing(golden, impl, report, file, name, case)
        elif name in ("contexts", "prompts") or name.endswith(("_contexts", "_texts")):
            _check_texts(impl, report, file, name, case)
        elif name.startswith("after_"):
            _check_prefix_values(golden, impl, report, file, name, case)
        else:
            check_context_case(golden, impl, report, file, name, case)
    _check_context_kv(golden, impl, report, file)
    for name in golden.tensors(file):
        if name.endswith(".uint8") and not report.has(file, name):
            with report.guard(file, [name]):
                _check_whole_pipeline(golden, impl, report, file, name)


# --- which contexts a case is drawn from ----------------------------------------------------------


def branch_segments(golden: Golden, file: str, name: str) -> list[dict[str, Segments]]:
    """For each picture of the case, the segment lists of the branches in BRANCH_NAMES.

    Taken from the case itself, from `NAME_contexts`, `NAME_texts` (system prompt, prompt, thought),
    the file's `contexts` or its `prompts`, whichever comes first.
    """
    cases = golden.cases(file)
    case = cases[name]
    pictures = len(case["image_sizes_hw"])
    found = (
        case.get("contexts")
        or ({key: case[key] for key in BRANCH_NAMES if key in case} or None)
        or cases.get(f"{name}_contexts")
    )
    if found is None and f"{name}_texts" in cases:
        texts = cases[f"{name}_texts"]
        system = [{"ids": texts["system_prompt_ids"]}]
        asked = [*system, {"text": texts["prompt"]}]
        thought = (
            {"ids": texts["thought_ids"]} if "thought_ids" in texts else {"text": texts["thought"]}
        )
        found = {"conditional": [*asked, thought], "cfg_text": system, "cfg_img": asked}
    if found is None:
        found = cases.get("contexts")
    if found is None and "prompts" in cases:
        listed = cases["prompts"]
        listed = listed["prompts"] if isinstance(listed, Mapping) else listed
        found = [{"conditional": [{"text": prompt}]} for prompt in listed]
    if found is None:
        raise NotCovered("the manifest holds no contexts for it")
    if isinstance(found, Mapping):
        found = _one_each(found, pictures)
    if len(found) != pictures:
        raise NotCovered(f"{len(found)} contexts for {pictures} pictures")
    return [_with_defaults(branches) for branches in found]


def _one_each(branches: Mapping[str, Any], pictures: int) -> list[dict[str, Segments]]:
    """Splits branch lists that hold a list per picture; a plain list serves all pictures."""

    def of(value: Sequence[Any], i: int) -> Segments:
        per_picture = bool(value) and not isinstance(value[0], Mapping)
        if per_picture and len(value) != pictures:
            raise NotCovered(f"{len(value)} contexts for {pictures} pictures")
        return value[i] if per_picture else value

    return [
        {key: of(branches[key], i) for key in BRANCH_NAMES if key in branches}
        for i in range(pictures)
    ]


def _with_defaults(branches: Mapping[str, Segments]) -> dict[str, Segments]:
    """Unnamed branches follow the rule: without the last text; all texts, no pictures."""
    cond = branches["conditional"]
    texts = [i for i, segment in enumerate(cond) if _is_text(segment)]
    return {
        "conditional": cond,
        "cfg_text": branches.get("cfg_text", cond[: texts[-1]] if texts else cond),
        "cfg_img": branches.get("cfg_img", [cond[i] for i in texts]),
    }


def _is_text(segment: Mapping[str, Any]) -> bool:
    return "text" in segment or "ids" in segment or "text_ids" in segment


# --- one drawing ----------------------------------------------------------------------------------


def _guidance(case: Case) -> Guidance:
    if case.get("cfg_renorm_type", "global") not in ("global", "channel", "text_channel"):
        raise NotCovered(f"an unknown renorm {case['cfg_renorm_type']!r}")
    if case.get("norm_over", "image") not in ("image", "call"):
        raise NotCovered(f"an unknown norm_over {case['norm_over']!r}")
    low, high = case["cfg_interval"]
    return Guidance(
        points=case["num_timesteps"],
        shift=case["timestep_shift"],
        text_scale=case["cfg_text_scale"],
        image_scale=case["cfg_img_scale"],
        interval=(low, high),
        renorm=case["cfg_renorm_type"],
        renorm_min=case["cfg_renorm_min"],
        norm_over=case.get("norm_over", "image"),
    )


def _grids(case: Case, impl: Implementation) -> list[tuple[int, int]]:
    stride = impl.latent_patch * impl.downsample
    return [(height // stride, width // stride) for height, width in case["image_sizes_hw"]]


def _draw(
    golden: Golden, impl: Implementation, file: str, name: str, *, raw: bool = False
) -> Drawing:
    case = golden.cases(file)[name]
    read = golden.raw_context if raw else golden.context
    branches = [
        Branches(**{BRANCH_NAMES[key]: read(segments, impl) for key, segments in one.items()})
        for one in branch_segments(golden, file, name)
    ]
    if f"{name}.x" not in golden.tensors(file):
        raise NotCovered(f"there is no {name}.x to start from")
    x = golden.tensors(file)[f"{name}.x"]
    return impl.draw(branches, _grids(case, impl), x, _guidance(case))


def _check_drawing(
    golden: Golden, impl: Implementation, report: Report, file: str, name: str, case: Case
) -> None:
    tensors = golden.tensors(file)
    unknown = [key for key in case if key not in (*INPUTS, *_stated(case))]
    for key in unknown:
        report.not_covered(file, f"cases.{name}.{key}", f"an unknown setting {case[key]!r:.40}")
    stated = [f"cases.{name}.{key}" for key in _stated(case)]
    kinds = ("timesteps", "v", "v_cond", "v_text_uncond", "v_img_uncond", "x", "latent", "image")
    recorded = [f"{name}.{kind}" for kind in (*kinds, "greedy") if f"{name}.{kind}" in tensors]
    if not recorded:
        report.not_covered(file, f"cases.{name}", "a case without recorded tensors")
    with report.guard(file, [*recorded, *stated]):
        _check_contexts(golden, impl, report, file, name, case)
        drawing = _draw(golden, impl, file, name)
        report.equal(
            file,
            f"cases.{name}.velocity_evaluations",
            case.get("velocity_evaluations", len(drawing.on)),
            len(drawing.on),
        )
        if "cfg_on_steps" in case:
            report.equal(file, f"cases.{name}.cfg_on_steps", list(case["cfg_on_steps"]), drawing.on)
        actual = {
            "timesteps": drawing.times,
            "v_cond": drawing.cond,
            "v_text_uncond": drawing.text_uncond,
            "v_img_uncond": drawing.image_uncond,
            "v": drawing.guided,
            "x": drawing.x,
        }
        for kind, value in actual.items():
            _compare(golden, report, file, f"{name}.{kind}", value, unknown)
        for kind, parts in (("latent", drawing.latents), ("image", drawing.images)):
            if f"{name}.{kind}" in tensors:
                if len({part.shape for part in parts}) > 1:
                    raise NotCovered("pictures of several sizes in one tensor")
                _compare(golden, report, file, f"{name}.{kind}", torch.stack(parts), unknown)


def _compare(
    golden: Golden, report: Report, file: str, name: str, actual: Tensor, unknown: Sequence[str]
) -> None:
    """Compares one tensor; with unknown settings around, a difference only means "not covered"."""
    tensors = golden.tensors(file)
    if name not in tensors:
        return
    if not unknown:
        report.compare(file, name, tensors[name], actual, noise=golden.noise(file, name))
        return
    trial = Report()
    trial.compare(file, name, tensors[name], actual, noise=golden.noise(file, name))
    if trial.exit_code:
        report.not_covered(file, name, f"the case has unknown settings: {', '.join(unknown)}")
    else:
        report.adopt(trial.records[0])


def _stated(case: Case) -> list[str]:
    """Keys of a case that state results, not settings."""
    lengths = [
        f"{branch}{what}"
        for branch in ("", "cfg_text_", "cfg_img_")
        for what in ("kv_lens", "ropes")
    ]
    return [key for key in case if key in ("velocity_evaluations", "cfg_on_steps", *lengths)]


def _check_contexts(
    golden: Golden, impl: Implementation, report: Report, file: str, name: str, case: Case
) -> None:
    """Lengths and positions of the three branches, and the greedy text before the last segment."""
    listed = branch_segments(golden, file, name)
    for branch, prefix in (("conditional", ""), ("cfg_text", "cfg_text_"), ("cfg_img", "cfg_img_")):
        filled = impl.prefill([golden.context(one[branch], impl) for one in listed])
        for key, actual in (
            (f"{prefix}kv_lens", [one.length for one in filled]),
            (f"{prefix}ropes", [one.position for one in filled]),
        ):
            if key in case:
                report.equal(file, f"cases.{name}.{key}", list(case[key]), actual)
    greedy = f"{name}.greedy"
    if greedy in golden.tensors(file):
        expected = golden.tensors(file)[greedy]
        asked = golden.context(listed[0]["conditional"][:-1], impl)
        words, _ = impl.greedy(asked, len(expected) - 1)
        actual = torch.tensor([impl.special_ids["start"], *words])
        report.compare(file, greedy, expected, actual)


# --- texts, context KV, the whole pipeline --------------------------------------------------------


def _check_texts(impl: Implementation, report: Report, file: str, name: str, case: object) -> None:
    """Ids in a list of texts: those of the text beside them, or of their own decoding."""
    if not isinstance(case, Mapping):
        return
    for key, value in case.items():
        if not key.endswith("_ids"):
            continue
        full = f"cases.{name}.{key}"
        with report.guard(file, [full]):
            ids = text_of_ids(value, impl).ids
            text = case.get(key.removesuffix("_ids"))
            text = impl.decode(ids) if text is None else text
            report.equal(file, full, ids, tuple(impl.encode(text)))


def _prefixes(golden: Golden, impl: Implementation, file: str) -> list[GoldenContext]:
    """All beginnings of the file's conditional context, the shortest first."""
    contexts = golden.cases(file).get("contexts")
    if not isinstance(contexts, Mapping) or "conditional" not in contexts:
        raise NotCovered("the file holds no `contexts` with a conditional one")
    whole = golden.context(contexts["conditional"], impl)
    return [whole[: i + 1] for i in range(len(whole))]


def _after(
    golden: Golden, impl: Implementation, file: str, kind: str, length: int
) -> GoldenContext:
    """The beginning that ends with a segment "vae", "vit" or "text" (`kind`), `length` tokens long.

    A `kind` of another name is found by its length alone.
    """
    found = []
    for prefix in _prefixes(golden, impl, file):
        last = prefix[-1]
        is_kind = (
            "text" if isinstance(last, Text) else "vit" if isinstance(last, ViTImage) else "vae"
        )
        if is_kind == kind:
            found.append(prefix)
    candidates = found or _prefixes(golden, impl, file)
    fitting = [prefix for prefix in candidates if impl.prefill([prefix])[0].length == length]
    if not found and not fitting:
        raise NotCovered(f"no beginning of the conditional context is {length} tokens long")
    return (fitting or found)[0]


def _check_prefix_values(
    golden: Golden, impl: Implementation, report: Report, file: str, name: str, case: Case
) -> None:
    names = [f"cases.{name}.{key}" for key in case]
    with report.guard(file, names):
        context = _after(golden, impl, file, name.removeprefix("after_"), case["kv_lens"][0])
        filled = impl.prefill([context])[0]
        for key, actual in (("kv_lens", filled.length), ("ropes", filled.position)):
            if key in case:
                report.equal(file, f"cases.{name}.{key}", list(case[key]), [actual])
        for key in case:
            if not report.has(file, f"cases.{name}.{key}"):
                raise NotCovered("an unknown value")


def _check_context_kv(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors = golden.tensors(file)
    for name in [n for n in tensors if n.startswith("context.kv")]:
        with report.guard(file, [name]):
            which = name.removeprefix("context.kv").removeprefix("_")
            if which == "":
                context = _prefixes(golden, impl, file)[-1]
            elif which in BRANCH_NAMES:
                context = golden.context(golden.cases(file)["contexts"][which], impl)
            elif which.startswith("after_"):
                kind = which.removeprefix("after_")
                context = _after(golden, impl, file, kind, tensors[name].shape[2])
            else:
                raise NotCovered("an unknown context")
            kv = impl.prefill([context])[0].kv
            report.compare(file, name, tensors[name], kv, noise=golden.noise(file, name))


def _check_whole_pipeline(
    golden: Golden, impl: Implementation, report: Report, file: str, name: str
) -> None:
    """A final uint8 picture from raw texts and pictures, with another case's noise and settings."""
    own = name.removesuffix(".uint8")
    match = re.search(r"settings are those of (\S+) (\w+)", golden.meaning(file, name))
    if match is not None:
        source, case = f"{match[1]}.safetensors", match[2]
    elif own in golden.cases(file):
        source, case = file, own
    else:
        raise NotCovered("its meaning does not say whose noise and settings it has")
    if case not in golden.cases(source):
        raise NotCovered(f"there is no case {case} in {source}")
    image = _draw(golden, impl, source, case, raw=True).images[0]
    picture = torch.from_numpy(impl.to_uint8(image))
    levels = 1 + golden.pillow_levels  # truncation flips a level; another resize may flip one more
    report.compare(file, name, golden.tensors(file)[name], picture, tolerance=levels)
