"""The shapes world as packed training rows: worker processes draw, lay out and pack; a store holds the rows.

Two kinds of rows, each of one fixed size, so that a training step has static shapes:
- `draw` rows: one text-to-image example each, under the prompt alone (local view), under system prompt and
  prompt (full view), or under nothing (for guidance).
- `look` rows: bins of whole trajectories (CE on every turn, flow matching on every faithful image, in the running
  context) and of single edits in the local view, some of them with a condition left out.

    shards = make_shards(plan, folder)            # on all cores
    store = load_store(shards, "look", vae, device)
    batch = store.batch(torch.randint(len(store), (32,)))
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from agent.types import Seen
from agent.views import edit_view, first_image_view, reflect_view
from sft.shapes import ShapesTrajectory, make_trajectory, turns
from umm_reflect.config import NANO
from umm_reflect.context import Context, ImageSegment, TextSegment
from umm_reflect.layout import Frame
from umm_reflect.packing import NO_LABEL, PackedBatch, Piece, fill_bins, pack_row, stack_rows
from umm_reflect.shapes.prompts import phrase
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import sample_row, scene_for
from umm_reflect.shapes.scene import Scene
from umm_reflect.tokens import Tokens

SIZE, VIT_SIZE = 128, 112
IMAGE_TOKENS = 64
# Tokens a row: (understanding, generation, patches). One image is 64 latents and 64 patches.
DRAW_ROW = (64, 64, 0)
LOOK_ROW = (512, 384, 256)
# How often a condition is left out, so that guidance has something to steer away from.
NO_PROMPT, NO_TEXT, NO_IMAGE = 0.1, 0.08, 0.08
FULL_VIEW = 0.5  # of the draw rows
HARD_DRAW, HARD_LOOK = 0.12, 0.2
EDITING = 0.2  # of the trajectories
# Weights of a turn's tokens: what the loop writes is not learned, the decision counts more.
SCORE_WEIGHT, ACTION_WEIGHT = 4.0, 4.0


@dataclass(frozen=True)
class ShardPlan:
    """One worker's job: which rows to make, from which seed, with which tokenizer and system prompt."""

    kind: str
    seed: int
    count: int
    tokenizer: str
    system_prompt: str
    folder: str

    @property
    def path(self) -> Path:
        return Path(self.folder) / f"{self.kind}-{self.seed:05d}.npz"


class _Layout:
    """Scenes and texts of one shard → pieces, with one entry in the image table per scene."""

    def __init__(self, plan: ShardPlan):
        self.tokens = Tokens.from_folder(plan.tokenizer)
        t = self.tokens
        self.frame = Frame(t.start, t.end, t.image_start, t.image_end)
        self.system = t.segment(plan.system_prompt) if plan.system_prompt else None
        self.scenes: list[Scene] = []
        self.index_of: dict[int, int] = {}
        self.keep: list[ImageSegment] = []

    def image(self, scene: Scene) -> ImageSegment:
        """A stand-in of the right size; the pixels come from the table."""
        segment = ImageSegment(
            latent=torch.empty(16, SIZE // 8, SIZE // 8, device="meta"),
            vit_pixels=torch.empty(3, VIT_SIZE, VIT_SIZE, device="meta"),
        )
        self.index_of[id(segment)] = len(self.scenes)
        self.scenes.append(scene)
        self.keep.append(segment)
        return segment

    def pieces(self, context: Context, target: ImageSegment | None = None) -> list[Piece]:
        """Conditions that are not learned, then an image that is."""
        own = [Piece(segment) for segment in context]
        return own + ([Piece(target, learn=True)] if target is not None else [])

    def draw_example(self, rng: random.Random) -> list[Piece]:
        hard = rng.random() < HARD_DRAW
        row = sample_row(rng, hard=hard)
        scene = scene_for(row, rng, hard=hard and rng.random() < 0.3)
        request = self.tokens.segment(phrase(row, rng))
        view = "full" if rng.random() < FULL_VIEW else "local"
        seen = Seen(self.system, request, editing=False)
        context = first_image_view(seen, view).conditional
        if rng.random() < NO_PROMPT:
            context = Context()
        return self.pieces(context, self.image(scene))

    def look_examples(self, rng: random.Random) -> list[list[Piece]]:
        """The examples of one trajectory: all of it in its running context, and each edit alone."""
        task = "edit" if rng.random() < EDITING else "t2i"
        trajectory = make_trajectory(rng, hard=rng.random() < HARD_LOOK, task=task)
        seen = Seen(self.system, self.tokens.segment(trajectory.prompt), editing=task == "edit")
        images = [self.image(scene) for scene in trajectory.looks]
        examples: list[list[Piece]] = []
        for k, text in enumerate(turns(trajectory)):
            seen = seen.with_image(images[k])
            reflection = trajectory.reflections[k]
            edit = self.tokens.segment(reflection.edit) if reflection.action == "edit" else None
            seen = seen.with_turn(TextSegment(tuple(self.tokens.encode(text))), edit)
            drawn = k + 1 - (task == "edit")  # which of `scenes` the edit draws
            if edit is not None and trajectory.faithful[drawn]:
                examples += self._edit_examples(seen, images[k + 1], rng)
        return [self._whole(trajectory, seen), *examples]

    def _edit_examples(self, seen: Seen, target: ImageSegment, rng: random.Random):
        view = edit_view(seen, "local")
        left_out = rng.random()
        if left_out < NO_TEXT:
            yield self.pieces(view.text_uncond, target)
        elif left_out < NO_TEXT + NO_IMAGE:
            yield self.pieces(view.image_uncond, target)
        else:
            yield self.pieces(view.conditional, target)
        left_out = rng.random()
        if left_out < NO_TEXT / 2:
            yield self.pieces(edit_view(seen, "full").text_uncond, target)
        elif left_out < (NO_TEXT + NO_IMAGE) / 2:
            yield self.pieces(edit_view(seen, "full").image_uncond, target)

    def _whole(self, trajectory: ShapesTrajectory, seen: Seen) -> list[Piece]:
        """Every turn scored; before each faithful image its noised copy, hidden from what follows."""
        editing = trajectory.source is not None
        faithful = dict(zip(seen.images[editing:], trajectory.faithful, strict=True))
        spoken = {id(turn) for turn in seen.turns}
        pieces: list[Piece] = []
        for segment in reflect_view(seen):
            if isinstance(segment, ImageSegment):
                if faithful.get(segment, False):
                    pieces.append(Piece(segment, learn=True))
                pieces.append(Piece(segment))
            elif id(segment) in spoken:
                pieces.append(Piece(segment, learn=True, weights=self._weights(segment)))
            else:
                pieces.append(Piece(segment))
        return pieces

    def _weights(self, turn: TextSegment) -> tuple[float, ...]:
        """Nothing for the forced prefix, more for score and action, one for the rest and the end."""
        weights, text = [], ""
        for token in turn.ids:
            text += self.tokens.decode([token])
            if "[SCORE] " not in text:
                weights.append(0.0)
            elif text.endswith("[SCORE] "):
                weights.append(0.0)
            elif "\n[ACTION]" not in text:
                weights.append(SCORE_WEIGHT)
            elif "\n[THINKING]" not in text:
                weights.append(ACTION_WEIGHT)
            else:
                weights.append(1.0)
        return (*weights, 1.0)


def make_shard(plan: ShardPlan) -> Path:
    """Make one shard's rows and images, write them, return the file."""
    torch.set_num_threads(1)
    rng = random.Random(f"{plan.kind} {plan.seed}")
    layout = _Layout(plan)
    if plan.kind == "draw":
        bins, size = [[layout.draw_example(rng)] for _ in range(plan.count)], DRAW_ROW
    else:
        size = LOOK_ROW
        examples, sizes = [], []
        for _ in range(plan.count):
            for example in layout.look_examples(rng):
                packed = pack_row([example], layout.frame, NANO).sizes
                if all(p <= s for p, s in zip(packed, size, strict=True)):
                    examples.append(example)
                    sizes.append(packed)
        bins = [[examples[i] for i in members] for members in fill_bins(sizes, size)]
    rows = [pack_row(members, layout.frame, NANO) for members in bins]
    rows = [row for row in rows if all(a <= b for a, b in zip(row.sizes, size, strict=True))]
    arrays = {name: t.numpy() for name, t in stack_rows(rows, size[:2]).items()}
    scored = max(int((row.label_U != NO_LABEL).sum()) for row in rows)
    arrays["score_BS"] = _padded([np.flatnonzero(r.label_U != NO_LABEL) for r in rows], scored, -1)
    for name, attribute, slots in (
        ("vae_BI", "vae_images", size[1] // IMAGE_TOKENS),
        ("vit_BI", "vit_images", size[2] // IMAGE_TOKENS),
    ):
        ids = [[layout.index_of[id(i)] for i in getattr(row, attribute)] for row in rows]
        arrays[name] = _padded(ids, slots, -1)
    arrays["patch_BV"] = _padded([row.patch_U for row in rows], size[2], -1)
    images = np.stack([np.asarray(render(scene, SIZE)) for scene in layout.scenes])
    np.save(plan.path.with_suffix(".npy"), images)
    aside = plan.path.with_suffix(".writing.npz")
    np.savez(aside, **arrays)
    os.replace(aside, plan.path)
    return plan.path


def _padded(rows: Sequence, width: int, fill: int) -> np.ndarray:
    out = np.full((len(rows), width), fill, np.int32)
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out


def make_shards(plans: Sequence[ShardPlan], workers: int) -> list[Path]:
    """All shards, several at a time; those that exist are kept."""
    todo = [plan for plan in plans if not plan.path.exists()]
    for plan in todo:
        plan.path.parent.mkdir(parents=True, exist_ok=True)
    if workers <= 1:
        for plan in todo:
            make_shard(plan)
    else:
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(make_shard, todo))
    return [plan.path for plan in plans]


class RowStore:
    """Rows of one kind on the device, with the latents and patches that they refer to."""

    def __init__(self, kind: str, arrays: dict[str, Tensor], tables: dict[str, Tensor]):
        self.kind, self.arrays, self.tables = kind, arrays, tables
        self.size = DRAW_ROW if kind == "draw" else LOOK_ROW

    def __len__(self) -> int:
        return len(self.arrays["ids_BU"])

    def batch(self, pick_B: Tensor) -> PackedBatch:
        """Some rows as a batch; static shapes and no host synchronisation."""
        rows = {name: values[pick_B] for name, values in self.arrays.items()}
        count, device = len(pick_B), pick_B.device
        width, gen, patches = self.size
        base = torch.arange(count, device=device)[:, None]
        vae, vit = rows.pop("vae_BI").long(), rows.pop("vit_BI").long()
        slots = gen // IMAGE_TOKENS
        target = self.tables["latents"][vae.clamp(min=0)].flatten(1, 2)
        seen = self.tables["conditions"][vae.clamp(min=0)].flatten(1, 2)
        latent = torch.where(rows["noised_BG"][..., None], target, seen).float()
        place, score = rows.pop("patch_BV").long(), rows.pop("score_BS").long()
        label, weight = rows.pop("label_BU").long(), rows.pop("weight_BU")
        real = score >= 0
        score = score.clamp(min=0)
        rows["image_BG"] = rows["image_BG"].long() + base * slots
        if patches:
            pixels = self.tables["patches"][vit.clamp(min=0).flatten()].flatten(0, 1)
            pixels = pixels.float() / 127.5 - 1
            cell = torch.arange(IMAGE_TOKENS, device=device).repeat(vit.numel())
        else:
            pixels = torch.zeros(0, 1, device=device)
            cell = torch.zeros(0, dtype=torch.long, device=device)
        return PackedBatch(
            **{
                name: values if values.dtype == torch.bool else values.long()
                for name, values in rows.items()
            },
            score_S=(score + base * width).flatten(),
            label_S=torch.where(real, label.gather(1, score), 0).flatten(),
            weight_S=torch.where(real, weight.gather(1, score), 0).flatten(),
            patch_V=torch.where(place >= 0, place + base * width, count * width).flatten(),
            patch_cell_V=cell,
            patches_VP=pixels,
            patch_lengths=[IMAGE_TOKENS] * (vit.numel() if patches else 0),
            latent_BGC=latent,
            num_images=count * slots,
        )


@torch.inference_mode()
def load_store(
    paths: Sequence[Path], kind: str, vae, device: torch.device, *, own_pixels: float = 0.5
) -> RowStore:
    """Rows of several shards with their images encoded by `vae`.

    own_pixels: share of the images that are looked at after a round trip through the VAE, as drawn ones are.
    """
    arrays: dict[str, list[Tensor]] = {}
    latents, conditions, patches = [], [], []
    offset = 0
    generator = torch.Generator().manual_seed(0)
    for path in paths:
        images = torch.from_numpy(np.load(path.with_suffix(".npy"), mmap_mode="c"))
        with np.load(path) as shard:
            for name in shard.files:
                values = torch.from_numpy(shard[name])
                if name in ("vae_BI", "vit_BI"):
                    values = torch.where(values >= 0, values + offset, values)
                arrays.setdefault(name, []).append(values)
        offset += len(images)
        for some in images.split(512):
            pixels = rearrange(some.to(device), "n h w c -> n c h w").float() / 127.5 - 1
            latent = vae.encode(pixels)
            latents.append(_tokens(latent))
            if kind == "draw":
                continue
            again = (vae.decode(latent).clamp(-1, 1) * 127.5).round() / 127.5
            use = (torch.rand(len(some), generator=generator) < own_pixels).to(device)
            pixels = torch.where(use[:, None, None, None], again, pixels)
            conditions.append(_tokens(vae.encode(pixels)))
            small = F.interpolate(pixels, VIT_SIZE, mode="bicubic", antialias=True)
            levels = (small.clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
            patches.append(rearrange(levels, "n c (h p) (w q) -> n (h w) (p q c)", p=14, q=14))
    width = max(t.shape[1] for t in arrays["score_BS"])
    arrays["score_BS"] = [F.pad(t, (0, width - t.shape[1]), value=-1) for t in arrays["score_BS"]]
    tables = {"latents": torch.cat(latents)}
    tables["conditions"] = torch.cat(conditions) if conditions else tables["latents"]
    if patches:
        tables["patches"] = torch.cat(patches)
    return RowStore(kind, {n: torch.cat(t).to(device) for n, t in arrays.items()}, tables)


def _tokens(latent: Tensor) -> Tensor:
    """[B, 16, 16, 16] → [B, 64, 64] bf16 latent tokens."""
    patch = NANO.latent_patch_size
    folded = rearrange(latent, "n z (r p) (c q) -> n (r c) (p q z)", p=patch, q=patch)
    return folded.to(torch.bfloat16)
