"""The checks of a golden folder's primitives, ViT and VAE files, and of the manifest itself.

Each check takes (golden, implementation, report, file), compares what it knows by the tensors'
names and the file's cases, and leaves alone what it does not know: `parity.py` counts that as not
covered. Contexts, drawing and training have their own files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from umm_reflect.parity_golden import Case, Golden, compare_named, grid_of
from umm_reflect.parity_implementations import Implementation, SizeRule
from umm_reflect.parity_report import NotCovered, Report, as_tensor
from umm_reflect.reference_pictures import unpatchify

# --- the manifest ---------------------------------------------------------------------------------


def check_conventions(golden: Golden, impl: Implementation, report: Report) -> None:
    """The special ids that the manifest states, as "<|im_start|> = 1001", are the tokenizer's."""
    for key, text in golden.manifest["conventions"].get("special_ids", {}).items():
        name = f"conventions.special_ids.{key}"
        with report.guard("manifest.json", [name]):
            report.equal("manifest.json", name, int(text.split()[-1]), _special_id(impl, key))


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
    levels = golden.pillow_levels
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
        "bos": "start",
        "eos": "end",
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
            compare_named(golden, report, file, prefix, actual)
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
                compare_named(golden, report, file, prefix, moments)
            compare_named(golden, report, file, prefix, {"latent": impl.vae_encode(pixels)})
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
