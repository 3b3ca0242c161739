"""The check of a golden folder's training files: one packed batch, losses, gradients, norms.

The batch is read back into samples of parts (texts with labels, looked-at pictures, latents), so
that an implementation packs it in its own way; what it then says about masks, positions, hidden
states, errors and gradients is compared with the recorded tensors. Groups of tensors `shiftK.*` are
the same batch with the timestep shift K.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umm_reflect.parity_golden import Case, Golden, grid_of
from umm_reflect.parity_implementations import (
    Implementation,
    Training,
    TrainLatents,
    TrainPart,
    TrainText,
)
from umm_reflect.parity_report import NOISE_FACTOR, TOLERANCE, NotCovered, Report
from umm_reflect.reference import ViTImage
from umm_reflect.reference_pictures import unpatchify

GIVEN = (
    "packed_text_ids",
    "packed_vit_tokens",
    "packed_timesteps",
    "ce_loss_indexes",
    "padded_images",
)
# A gradient norm that is zero but for rounding (a bias before a softmax) has no relative error.
NORM_FLOOR = 1e-6


@dataclass
class Batch:
    """The recorded batch, and what follows from its splits alone (`derived`, by the in.* name)."""

    samples: list[list[TrainPart]] = field(default_factory=list)
    derived: dict[str, Tensor] = field(default_factory=dict)


def check_training(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors, cases = golden.tensors(file), golden.cases(file)
    inputs = [name for name in tensors if name.startswith("in.")]
    case = cases.get("batch")
    with report.guard(file, [*inputs, "cases.batch.sequence_length"]):
        if case is None:
            raise NotCovered("the manifest has no case `batch` that says how it is packed")
        batch = read_batch(golden, impl, file, case, next(_noises(tensors)))
        for name in GIVEN:
            if f"in.{name}" in tensors:
                report.given(file, f"in.{name}")
        for name, actual in batch.derived.items():
            _compare(golden, report, file, f"in.{name}", actual)
        if "in.padded_latent" in tensors:
            _compare(
                golden,
                report,
                file,
                "in.padded_latent",
                impl.vae_encode(tensors["in.padded_images"]),
            )
        total = int(sum(case["sample_lens"]))
        report.equal(file, "cases.batch.sequence_length", case.get("sequence_length", total), total)
    known = ("sample_lens", "split_lens", "attn_modes", "patchified_vae_latent_shapes", "samples")
    for key in case or {}:
        if key not in known and not report.has(file, f"cases.batch.{key}"):
            report.not_covered(file, f"cases.batch.{key}", "an unknown value")
    for noise_name in [name for name in tensors if name.endswith(".noise")]:
        prefix = noise_name.removesuffix("noise")
        names = [name for name in tensors if name.startswith(prefix)]
        norms = cases.get(f"grad_norms_{prefix.removesuffix('.')}", {}).get("norms", {})
        norm_names = [f"cases.grad_norms.{prefix}{name}" for name in norms]
        own = [name for name in ("in.attention_mask", "in.packed_position_ids") if name in tensors]
        with report.guard(file, [*own, *names, *norm_names]):
            match = re.fullmatch(r"shift(\d+(?:\.\d+)?)\.", prefix)
            if match is None or case is None:
                raise NotCovered("its name does not say the timestep shift")
            batch = read_batch(golden, impl, file, case, tensors[noise_name])
            report.given(file, noise_name)
            result = impl.train(batch.samples, float(match[1]))
            _compare_result(golden, report, file, prefix, result)
            _compare_norms(report, file, prefix, norms, result)
    for name in cases:
        group = name.removeprefix("grad_norms_")
        if name != "batch" and f"{group}.noise" not in tensors:
            report.not_covered(file, f"cases.{name}", "an unknown case")


def _noises(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    return (tensor for name, tensor in tensors.items() if name.endswith(".noise"))


def read_batch(golden: Golden, impl: Implementation, file: str, case: Case, noise: Tensor) -> Batch:
    """Cuts the packed tensors into the parts of each sample; `noise` is [latent tokens, D]."""
    tensors = golden.tensors(file)
    text_ids = tensors["in.packed_text_ids"].tolist()
    table_of = dict(zip(tensors["in.packed_text_indexes"].tolist(), text_ids, strict=True))
    vit_at = set(tensors["in.packed_vit_token_indexes"].tolist())
    vae_at = set(tensors["in.packed_vae_token_indexes"].tolist())
    labels = dict(
        zip(
            tensors["in.ce_loss_indexes"].tolist(),
            tensors["in.packed_label_ids"].tolist(),
            strict=True,
        )
    )
    padded, shapes = tensors["in.padded_latent"], case["patchified_vae_latent_shapes"]
    raw_times = tensors["in.packed_timesteps"]
    batch = Batch()
    made = _Derived()
    ends = torch.tensor(case["sample_lens"]).cumsum(0).tolist()
    at = latents_seen = images_seen = patches_seen = 0
    for length, mode in zip(case["split_lens"], case["attn_modes"], strict=True):
        if at == 0 or at in ends:
            batch.samples.append([])
            made.new_sample()
        span = range(at, at + length)
        if mode == "causal":
            ids = [table_of[i] for i in span]
            framed = ids[0] == impl.special_ids["start"] and ids[-1] == impl.special_ids["end"]
            if not framed:
                raise NotCovered("a causal split that is not one framed text")
            part = TrainText(tuple(ids[1:-1]), {i - at: labels[i] for i in span if i in labels})
        elif at + 1 in vit_at:
            end = patches_seen + length - 2
            ids = tensors["in.packed_vit_position_ids"][patches_seen:end]
            grid = grid_of(ids, impl.vit_side)
            patches = tensors["in.packed_vit_tokens"][patches_seen:end]
            part = ViTImage(unpatchify(patches, grid, impl.vit_patch))
            made.vit_ids.append(impl.position_ids(*grid, impl.vit_side, False))
            made.vit_lengths.append(length - 2)
            patches_seen = end
        elif at + 1 in vae_at and mode in ("full", "noise"):
            rows, columns = shapes[images_seen]
            p = impl.latent_patch
            latent = padded[images_seen][:, : rows * p, : columns * p]
            end = latents_seen + length - 2
            part = TrainLatents(
                impl.patchify_latent(latent, p),
                (rows, columns),
                float(raw_times[latents_seen]),
                noise[latents_seen:end],
            )
            if part.noised != (mode == "noise"):
                raise NotCovered(f"a {mode} split with the raw time {part.raw_time}")
            made.latent_ids.append(impl.position_ids(rows, columns, impl.latent_side, False))
            latents_seen, images_seen = end, images_seen + 1
        else:
            raise NotCovered(f"a split of the mode {mode!r} that is neither text nor picture")
        made.split(part, span, table_of, labels)
        batch.samples[-1].append(part)
        at += length
    batch.derived = made.tensors()
    return batch


class _Derived:
    """The in.* tensors that the splits alone determine."""

    def __init__(self) -> None:
        self.text_at: list[int] = []
        self.vit_at: list[int] = []
        self.vae_at: list[int] = []
        self.mse_at: list[int] = []
        self.vit_ids: list[Tensor] = []
        self.latent_ids: list[Tensor] = []
        self.vit_lengths: list[int] = []
        self.next_ids: list[int] = []
        self.weights: list[float] = []
        self.positions: list[int] = []
        self.p = 0

    def new_sample(self) -> None:
        self.p = 0

    def split(
        self,
        part: TrainPart,
        span: range,
        ids: Mapping[int, int],
        labels: Mapping[int, int],
    ) -> None:
        inner = list(span)[1:-1]
        if isinstance(part, TrainText):
            self.text_at += span
            self.positions += range(self.p, self.p + len(span))
            self.p += len(span)
            # What a scored token must predict is the token after it, in the next split too.
            scored = [i for i in span if i in labels]
            self.next_ids += [ids[i + 1] for i in scored]
            # The end token's own label, where it has one, is a loss of its own: its weight is 1.
            plain = sum(i != span[-1] for i in scored)
            self.weights += [1.0 if i == span[-1] else 1 / math.sqrt(plain) for i in scored]
            return
        self.text_at += [span[0], span[-1]]
        (self.vit_at if isinstance(part, ViTImage) else self.vae_at).extend(inner)
        self.positions += [self.p] * len(span)
        if isinstance(part, TrainLatents) and part.noised:
            self.mse_at += inner
        else:
            self.p += 1

    def tensors(self) -> dict[str, Tensor]:
        def joined(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

        return {
            "packed_text_indexes": torch.tensor(self.text_at),
            "packed_vit_token_indexes": torch.tensor(self.vit_at, dtype=torch.int64),
            "packed_vae_token_indexes": torch.tensor(self.vae_at, dtype=torch.int64),
            "mse_loss_indexes": torch.tensor(self.mse_at, dtype=torch.int64),
            "packed_vit_position_ids": joined(self.vit_ids),
            "packed_latent_position_ids": joined(self.latent_ids),
            "vit_token_seqlens": torch.tensor(self.vit_lengths, dtype=torch.int64),
            "packed_label_ids": torch.tensor(self.next_ids, dtype=torch.int64),
            "ce_loss_weights": torch.tensor(self.weights),
        }


def _compare(golden: Golden, report: Report, file: str, name: str, actual: Tensor) -> None:
    tensors = golden.tensors(file)
    if name in tensors and not report.has(file, name):
        report.compare(file, name, tensors[name], actual, noise=golden.noise(file, name))


def _compare_result(
    golden: Golden, report: Report, file: str, prefix: str, result: Training
) -> None:
    tensors = golden.tensors(file)
    # The implementation's own mask and positions, once: they do not depend on the shift.
    _compare(golden, report, file, "in.attention_mask", result.attention_mask)
    _compare(golden, report, file, "in.packed_position_ids", result.position_ids)
    for kind in ("t", "input_sequence", "hidden", "ce", "mse", "loss"):
        _compare(golden, report, file, prefix + kind, getattr(result, kind))
    for name in [name for name in tensors if name.startswith(f"{prefix}grad.")]:
        parameter = name.removeprefix(f"{prefix}grad.")
        gradient = result.gradients.get(parameter)
        if gradient is None:
            report.failed(file, name, "the implementation gives no gradient for it")
            continue
        # Relative to the largest entry: gradients have no natural size of 1.
        largest = float(tensors[name].abs().max())
        floor = NOISE_FACTOR * (golden.noise(file, name) or 0.0)
        tolerance = max(TOLERANCE * largest, floor)
        report.compare(file, name, tensors[name], gradient, tolerance=tolerance)


def _compare_norms(
    report: Report,
    file: str,
    prefix: str,
    norms: Mapping[str, float | None],
    result: Training,
) -> None:
    """Norms of all gradients, relative; None means that the tensor is not trained."""
    for parameter, expected in norms.items():
        name = f"cases.grad_norms.{prefix}{parameter}"
        gradient = result.gradients.get(parameter)
        if expected is None or gradient is None:
            untrained = gradient is None or not gradient.any()
            if expected is None and untrained:
                report.difference(file, name, 0.0, 0.0)
            else:
                report.failed(file, name, f"gradient norm {expected}, gradient {gradient!r:.40}")
            continue
        gap = abs(float(gradient.double().norm()) - expected)
        report.difference(file, name, gap, max(TOLERANCE * abs(expected), NORM_FLOOR))
