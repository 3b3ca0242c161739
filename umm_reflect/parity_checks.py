"""The checks of a golden folder's primitives, texts, contexts, ViT and VAE files.

Each check takes (golden, implementation, report, file), compares what it knows by the tensors'
names and the file's cases, and leaves alone what it does not know: `parity.py` counts that as not
covered.
Drawing and training have their own files (parity_drawing.py, parity_training.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import PIL
import torch
from torch import Tensor

from umm_reflect.parity_golden import Case, Golden, grid_of, packed_kv, text_of_ids
from umm_reflect.parity_implementations import GoldenContext, Implementation, SizeRule
from umm_reflect.parity_report import NotCovered, Report, as_tensor
from umm_reflect.reference import Text, ViTImage
from umm_reflect.reference_pictures import unpatchify

Check = Callable[[Golden, Implementation, Report, str], None]


# --- misc: primitives -----------------------------------------------------------------------------


def check_misc(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors, cases = golden.tensors(file), golden.cases(file)

    def compare(name: str, make: Callable[[], Tensor], tolerance: float | None = None) -> None:
        if name in tensors:
            with report.guard(file, [name]):
                noise = golden.noise(file, name)
                report.compare(file, name, tensors[name], make(), noise=noise, tolerance=tolerance)

    def given(*names: str) -> None:
        for name in names:
            if name in tensors:
                report.given(file, name)

    for name in tensors:
        if name.startswith("pos_ids."):
            compare(name, lambda name=name: _named_position_ids(impl, name))
        elif match := re.fullmatch(r"image\.raw_(\w+)", name):
            given(name)
            _check_picture(golden, impl, compare, tensors, match[1])
    given("time.t", "rope.positions", "vit_patchify.in", "latent_patchify.in")
    compare(
        "vit_patchify.out",
        lambda: impl.patchify_pixels(tensors["vit_patchify.in"].float(), impl.vit_patch).int(),
    )
    compare(
        "latent_patchify.out",
        lambda: impl.patchify_latent(
            tensors["latent_patchify.in"].float(), impl.latent_patch
        ).int(),
    )

    def first_rows() -> Tensor:
        rows, width = tensors["latent_pos_embed.first_rows"].shape
        return impl.position_table(impl.latent_side, width)[:rows]

    compare("latent_pos_embed.first_rows", first_rows)
    compare("time.sinusoid", lambda: impl.time_features(tensors["time.t"]))
    compare("time.embed", lambda: impl.time_embedding(tensors["time.t"]))
    compare("rope.cos", lambda: impl.rope(tensors["rope.positions"])[0])
    compare("rope.sin", lambda: impl.rope(tensors["rope.positions"])[1])

    tables: Mapping[str, Callable[[int, Case], None]] = {
        "resize_table": lambda i, row: _check_resize(impl, report, file, i, row),
        "schedules": lambda i, row: _check_schedule(impl, report, file, i, row),
        "tokenizer": lambda i, row: _check_tokenizer(impl, report, file, i, row),
    }
    for case, rows in cases.items():
        if case in tables:
            for i, row in enumerate(rows):
                with report.guard(file, [f"cases.{case}.{i}"]):
                    tables[case](i, row)
        elif case == "special_ids":
            for key, value in rows.items():
                name = f"cases.special_ids.{key}"
                with report.guard(file, [name]):
                    report.equal(file, name, value, _special_id(impl, key))
        else:
            report.not_covered(file, f"cases.{case}", "an unknown case")


def _named_position_ids(impl: Implementation, name: str) -> Tensor:
    """From a name like pos_ids.extrapolate.latent_64x96_side16 (height x width in pixels)."""
    match = re.fullmatch(
        r"pos_ids\.(extrapolate|interpolate)\.(latent|vit)_(\d+)x(\d+)_side(\d+)", name
    )
    if match is None:
        raise NotCovered("its name does not say mode, kind, size and side")
    height, width, side = (int(match[i]) for i in (3, 4, 5))
    stride = impl.vit_patch if match[2] == "vit" else impl.latent_patch * impl.downsample
    return impl.position_ids(height // stride, width // stride, side, match[1] == "interpolate")


def _check_picture(
    golden: Golden,
    impl: Implementation,
    compare: Callable[..., None],
    tensors: Mapping[str, Tensor],
    which: str,
) -> None:
    """raw -> resized (VAE rule) -> vae tensor, and resized again (ViT rule) -> vit tensor."""
    raw, resized = tensors[f"image.raw_{which}"], tensors.get(f"image.{which}_resized")
    # Another Pillow may round a few pixels the other way: one level there, none with the same one.
    recorded_with = golden.manifest.get("produced_with", {}).get("pillow")
    levels = 0 if recorded_with == PIL.__version__ else 1
    vae, vit = golden.size_rule("vae"), golden.size_rule("vit")
    compare(
        f"image.{which}_resized",
        lambda: torch.from_numpy(impl.resize(raw.numpy(), vae)),
        tolerance=levels,
    )
    if resized is not None:
        compare(f"image.{which}_vae", lambda: impl.to_pixels(resized.numpy()))
        compare(
            f"image.{which}_vit",
            lambda: impl.to_pixels(impl.resize(resized.numpy(), vit)),
            tolerance=levels * 2 / 255 + 1e-6,
        )


def _check_resize(impl: Implementation, report: Report, file: str, i: int, row: Case) -> None:
    pixels = row["max_pixels"] / row["img_num"]
    rule = SizeRule(row["max_size"], row["min_size"], row["stride"], pixels)
    actual = impl.resized_size(rule, row["in_h"], row["in_w"])
    report.equal(file, f"cases.resize_table.{i}", (row["out_h"], row["out_w"]), tuple(actual))


def _check_schedule(impl: Implementation, report: Report, file: str, i: int, row: Case) -> None:
    name = f"cases.schedules.{i}"
    times = impl.schedule(row["num_timesteps"], row["timestep_shift"])
    report.compare(file, name, as_tensor(row["timesteps"]), times, tolerance=1e-6)
    counts = {}
    for text in row["evaluations_with_cfg"]:
        low, high = (float(number) for number in text.strip("([])").split(","))
        counts[text] = sum(impl.guided_at(float(t), (low, high)) for t in times[:-1])
    report.equal(file, f"{name}.evaluations_with_cfg", dict(row["evaluations_with_cfg"]), counts)
    report.equal(file, f"{name}.velocity_evaluations", row["velocity_evaluations"], len(times) - 1)


def _check_tokenizer(impl: Implementation, report: Report, file: str, i: int, row: Case) -> None:
    report.equal(file, f"cases.tokenizer.{i}", list(row["ids"]), list(impl.encode(row["text"])))


def _special_id(impl: Implementation, key: str) -> int:
    names = {
        "bos_token_id": "start",
        "eos_token_id": "end",
        "start_of_image": "image_start",
        "end_of_image": "image_end",
        "pad": "pad",
        "pad_token_id": "pad",
    }
    if key not in names:
        raise NotCovered(f"an unknown special id {key!r}")
    return impl.special_ids[names[key]]


# --- text: prefill in turns -----------------------------------------------------------------------


def check_text(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors, cases = golden.tensors(file), golden.cases(file)
    groups = [name.removesuffix(".ids") for name in tensors if name.endswith(".ids")]
    contexts: dict[str, list[GoldenContext]] = {}
    lengths: dict[str, list[int]] = {}
    last: list[tuple[int, int]] = []
    # A second turn says how long the contexts were before it: that finds the turn it continues.
    for group in sorted(groups, key=lambda g: int(tensors[f"{g}.kv_lens_before"].sum())):
        names = [name for name in tensors if name.startswith(f"{group}.")]
        with report.guard(file, names):
            ids = tensors[f"{group}.ids"].split(tensors[f"{group}.lens"].tolist())
            before = tensors[f"{group}.kv_lens_before"].tolist()
            contexts[group] = [[text_of_ids(part.tolist(), impl)] for part in ids]
            if any(before):
                earlier = [g for g, held in lengths.items() if held == before]
                if not earlier:
                    raise NotCovered("no recorded turn leaves contexts of its length")
                contexts[group] = [
                    [*old, *new]
                    for old, new in zip(contexts[earlier[-1]], contexts[group], strict=True)
                ]
            filled = impl.prefill(contexts[group])
            lengths[group] = [one.length for one in filled]
            last = [(one.length, one.position) for one in filled]
            new = [len(one.hidden) for one in filled]
            prompts = cases.get("prompts", {}).get(group)
            actual = {
                "lens": torch.tensor(new, dtype=torch.int32),
                "kv_lens_before": torch.tensor(
                    [one.length - n for one, n in zip(filled, new, strict=True)], dtype=torch.int32
                ),
                "position_ids": torch.cat(
                    [
                        torch.arange(one.position - n, one.position)
                        for one, n in zip(filled, new, strict=True)
                    ]
                ),
                "hidden": torch.cat([one.hidden for one in filled]),
                "logits": torch.cat([one.logits for one in filled]),
                "kv": packed_kv([one.kv for one in filled]),
            }
            if prompts is not None:
                start, end = impl.special_ids["start"], impl.special_ids["end"]
                framed = [i for text in prompts for i in (start, *impl.encode(text), end)]
                actual["ids"] = torch.tensor(framed)
            else:
                report.given(file, f"{group}.ids")
            _compare_named(golden, report, file, f"{group}.", actual)
    for case, content in cases.items():
        if case != "prompts":
            check_context_case(golden, impl, report, file, case, content)
            continue
        for key, value in content.items():
            name = f"cases.prompts.{key}"
            with report.guard(file, [name]):
                if key in ("kv_lens_after", "rope_after"):
                    axis = ("kv_lens_after", "rope_after").index(key)
                    report.equal(file, name, list(value), [pair[axis] for pair in last])
                elif key not in groups:
                    raise NotCovered("prompts without recorded tensors, or an unknown value")


def _compare_named(
    golden: Golden, report: Report, file: str, prefix: str, actual: Mapping[str, Tensor]
) -> None:
    """Compares each tensor `prefix + name` of the file that has an entry in `actual`."""
    tensors = golden.tensors(file)
    for name, value in actual.items():
        full = prefix + name
        if full in tensors and not report.has(file, full):
            noise = golden.noise(file, full)
            report.compare(file, full, tensors[full], value, noise=noise)


# --- contexts with greedy text --------------------------------------------------------------------


def check_context_case(
    golden: Golden, impl: Implementation, report: Report, file: str, case: str, content: object
) -> None:
    """A case with a `segments` list: its KV, lengths, positions, logits and greedy text."""
    if not isinstance(content, Mapping) or "segments" not in content:
        report.not_covered(file, f"cases.{case}", "an unknown case")
        return
    names = [name for name in golden.tensors(file) if name.startswith(f"{case}.")]
    with report.guard(file, names):
        context = golden.context(content["segments"], impl)
        compare_context(golden, impl, report, file, f"{case}.", context)
    with report.guard(file, _value_names(case, content)):
        context = golden.context(content["segments"], impl)
        check_context_values(golden, impl, report, file, case, content, context, f"{case}.")


def _value_names(case: str, content: Case) -> list[str]:
    return [f"cases.{case}.{key}" for key in content if key in CONTEXT_VALUES]


CONTEXT_VALUES = (
    "kv_lens",
    "ropes",
    "start_position",
    "min_top2_margin",
    "decoded",
    "question_ids",
)
CONTEXT_INPUTS = ("segments", "question", "max_length", "do_sample")


def compare_context(
    golden: Golden,
    impl: Implementation,
    report: Report,
    file: str,
    prefix: str,
    context: GoldenContext,
) -> None:
    """Everything that may be recorded of a context under `prefix`."""
    tensors = golden.tensors(file)
    if any(prefix + name in tensors for name in ("kv", "hidden", "logits")):
        filled = impl.prefill([context])[0]
        recorded = {"kv": filled.kv, "hidden": filled.hidden, "logits": filled.logits}
        _compare_named(golden, report, file, prefix, recorded)
    ids, logits = prefix + "generated", prefix + "step_logits"
    if ids in tensors or logits in tensors:
        steps = len(tensors[logits]) if logits in tensors else len(tensors[ids]) - 1
        words, rows = impl.greedy(context, steps)
        # The original's list starts with the start token and leaves out the last computed token.
        shown = [impl.special_ids["start"], *words][: len(tensors.get(ids, []))]
        actual = {"generated": torch.tensor(shown), "step_logits": rows}
        _compare_named(golden, report, file, prefix, actual)


def check_context_values(
    golden: Golden,
    impl: Implementation,
    report: Report,
    file: str,
    case: str,
    content: Case,
    context: GoldenContext,
    prefix: str,
) -> None:
    """The numbers and texts that a case states about a context."""
    filled = impl.prefill([context])[0]
    tensors = golden.tensors(file)
    for key, value in content.items():
        name = f"cases.{case}.{key}"
        if key in CONTEXT_INPUTS or report.has(file, name) or key in ("description", "note"):
            if key == "do_sample" and value:
                report.not_covered(file, name, "sampled text cannot be compared, only greedy")
            continue
        if key == "kv_lens":
            report.equal(file, name, list(value), [filled.length])
        elif key == "ropes":
            report.equal(file, name, list(value), [filled.position])
        elif key == "start_position":
            report.equal(file, name, value, filled.position)
        elif key == "question_ids":
            expected = [text_of_ids(value, impl).ids]
            report.equal(file, name, expected, [tuple(impl.encode(content["question"]))])
        elif key in ("min_top2_margin", "decoded") and prefix + "generated" in tensors:
            generated = tensors[prefix + "generated"]
            rows = tensors.get(prefix + "step_logits", generated)
            words, logits = impl.greedy(context, len(rows))
            if key == "decoded":
                shown = [impl.special_ids["start"], *words][: len(generated)]
                report.equal(file, name, value, impl.decode(shown))
            else:
                top = logits.topk(2, dim=-1).values
                margin = (top[:, 0] - top[:, 1]).min()
                noise = 2 * (golden.noise(file, prefix + "step_logits") or 0.0)
                report.compare(file, name, torch.tensor(value), margin, noise=noise)
        else:
            report.not_covered(file, name, "an unknown setting or value")


def check_und(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    """Cases with `segments`, and the plain layout: a looked-at picture, a question, greedy text."""
    cases = golden.cases(file)
    plain: dict[str, GoldenContext] = {}
    for case, content in cases.items():
        names = [f"cases.{case}"]
        with report.guard(file, names):
            if isinstance(content, Mapping) and "segments" in content:
                check_context_case(golden, impl, report, file, case, content)
                plain[case] = golden.context(content["segments"], impl)
            elif case == "after_image":
                plain[case] = [_looked_at_picture(golden, impl, content)]
            elif case == "after_text" and "after_image" in plain:
                question = text_of_ids(content["question_ids"], impl)
                plain[case] = [*plain["after_image"], question]
            elif case == "generate" and plain:
                plain[case] = plain.get("after_text", next(iter(plain.values())))
            else:
                raise NotCovered("an unknown case")
    for case, content in cases.items():
        if case not in plain or "segments" in content:
            continue
        with report.guard(file, _value_names(case, content)):
            context = plain[case]
            check_context_values(golden, impl, report, file, case, content, context, "")
    tensors = golden.tensors(file)
    for case in plain:
        name = f"kv_{case}"
        if name in tensors and not report.has(file, name):
            with report.guard(file, [name]):
                filled = impl.prefill([plain[case]])[0]
                noise = golden.noise(file, name)
                report.compare(file, name, tensors[name], filled.kv, noise=noise)
    if "generate" in plain:
        with report.guard(file, [n for n in ("generated", "step_logits") if n in tensors]):
            compare_context(golden, impl, report, file, "", plain["generate"])


def _looked_at_picture(golden: Golden, impl: Implementation, content: Case) -> ViTImage:
    """The stored picture whose ViT block is as long as the case says."""
    patches = content["kv_lens"][0] - 2
    for _, pixels in golden.pictures("vit"):
        if (pixels.shape[1] // impl.vit_patch) * (pixels.shape[2] // impl.vit_patch) == patches:
            return ViTImage(pixels)
    raise NotCovered(f"no stored picture has {patches} ViT patches")


# --- ViT and VAE ----------------------------------------------------------------------------------


def check_vit(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors = golden.tensors(file)
    for tokens_name in [name for name in tensors if name.endswith("tokens")]:
        prefix = tokens_name.removesuffix("tokens")
        with report.guard(file, [name for name in tensors if name.startswith(prefix)]):
            lengths = tensors[prefix + "seqlens"].tolist()
            pictures, recovered = [], False
            for ids, tokens in zip(
                tensors[prefix + "position_ids"].split(lengths),
                tensors[tokens_name].split(lengths),
                strict=True,
            ):
                grid = grid_of(ids, impl.vit_side)
                pixels = unpatchify(tokens, grid, impl.vit_patch)
                same = [p for _, p in golden.pictures("vit") if torch.equal(p, pixels)]
                recovered |= not same
                pictures.append(same[0] if same else pixels)
            if recovered:  # patches of a picture that is stored nowhere else: nothing to compare
                report.given(file, tokens_name)
            stages = impl.vit(pictures)
            actual = {
                "tokens": stages.patches,
                "position_ids": stages.position_ids,
                "tower": stages.tower,
                "connector": stages.connector,
                "embeds": stages.embeddings,
                "seqlens": torch.tensor(
                    [p.shape[1] * p.shape[2] // impl.vit_patch**2 for p in pictures],
                    dtype=torch.int32,
                ),
            }
            _compare_named(golden, report, file, prefix, actual)
    _unknown_cases(golden, report, file)


def check_vae(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors = golden.tensors(file)
    for pixels_name in [name for name in tensors if name.endswith("pixels")]:
        prefix = pixels_name.removesuffix("pixels")
        pixels = tensors[pixels_name]
        stored = [p for _, p in golden.pictures("vae") if torch.equal(p, pixels[0])]
        if len(pixels) == 1 and stored:
            report.compare(file, pixels_name, pixels, stored[0][None])
        else:
            report.given(file, pixels_name)
        names = [prefix + "moments", prefix + "latent"]
        with report.guard(file, [name for name in names if name in tensors]):
            if prefix + "moments" in tensors:
                moments = {"moments": impl.vae_moments(pixels)}
                _compare_named(golden, report, file, prefix, moments)
            _compare_named(golden, report, file, prefix, {"latent": impl.vae_encode(pixels)})
    for decoded in [name for name in tensors if re.fullmatch(r"(.*\.)?decoded(_\w+)?", name)]:
        latent = decoded.replace("decoded", "latent")
        with report.guard(file, [decoded]):
            if latent not in tensors:
                raise NotCovered(f"there is no {latent} to decode")
            if not report.has(file, latent):
                report.given(file, latent)
            actual = impl.vae_decode(tensors[latent])
            noise = golden.noise(file, decoded)
            report.compare(file, decoded, tensors[decoded], actual, noise=noise)
    _unknown_cases(golden, report, file)


def _unknown_cases(golden: Golden, report: Report, file: str) -> None:
    for case, content in golden.cases(file).items():
        report.not_covered(file, f"cases.{case}", f"an unknown case: {content!r:.60}")


def check_other(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    """A file of an unknown name: its `segments` cases are walked, the rest is not covered."""
    for case, content in golden.cases(file).items():
        check_context_case(golden, impl, report, file, case, content)


def contexts_of_prompts(prompts: Sequence[str], impl: Implementation) -> list[GoldenContext]:
    return [[Text(tuple(impl.encode(prompt)))] for prompt in prompts]
