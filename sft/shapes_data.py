"""The shapes world as packed training rows: workers draw, lay out and pack; a store holds the rows.

Four kinds of rows, each of one fixed size, so that a training step has static shapes:

draw  one text-to-image example each, under the prompt alone (local view), under system prompt and
      prompt (full view), or under nothing (for guidance)
look  bins of whole trajectories (CE on every turn, flow matching on every faithful image, in the
      running context) and of single edits in the local view, some with a condition left out
own   bins of looks at the model's own images, which `eval.collect` drew and judged, with the edits
      that mend them (sft/shapes_own.py)
kept  one own first image each, that the judge found right and well drawn, as a target to draw

    shards = make_shards(plan, folder)            # on all cores
    store = load_store(shards, "look", vae, device)
    batch = store.batch(torch.randint(len(store), (32,)))
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from agent.types import Seen
from agent.views import edit_view, first_image_view, reflect_view
from sft.shapes import ShapesTrajectory, training_drawing, training_trajectory, turns
from sft.shapes_own import OwnLook, collected, is_well_drawn, own_looks
from umm_reflect.config import NANO
from umm_reflect.context import Context, ImageSegment, TextSegment
from umm_reflect.layout import Frame
from umm_reflect.packing import NO_LABEL, PackedBatch, Piece, fill_bins, pack_row, stack_rows
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import Scene
from umm_reflect.tokens import Tokens

SIZE, VIT_SIZE = 128, 112
IMAGE_TOKENS = 64
# Tokens a row: (understanding, generation, patches). One image is 64 latents and 64 patches.
DRAW_ROW = (48, 64, 0)
# A look row holds four looks: with less room, trajectories whose third look still asks for an edit
# would be left out, and a model learns that the third look says "done".
LOOK_ROW = (768, 512, 256)
# How often a condition is left out, so that guidance has something to steer away from.
NO_PROMPT, NO_TEXT, NO_IMAGE = 0.1, 0.08, 0.08
FULL_VIEW = 0.25  # of the draw rows
DRAWING = ("draw", "kept")  # kinds of rows that hold one picture to draw
OWN = ("own", "kept")  # those made of the model's own images
# Weights of a turn's tokens: what the loop writes is not learned, the decision counts more.
SCORE_WEIGHT, ACTION_WEIGHT = 4.0, 4.0


@dataclass(frozen=True)
class ShardPlan:
    """One worker's job: which rows to make, from which seed, with which tokenizer and system
    prompt.
    """

    kind: str
    seed: int
    count: int
    tokenizer: str
    system_prompt: str
    folder: str
    collected: str = ""

    @property
    def path(self) -> Path:
        name = f"{self.kind}-{Path(self.collected).name}" if self.collected else self.kind
        return Path(self.folder) / f"{name}-{self.seed:05d}.npz"


class _Layout:
    """Scenes and texts of one shard → pieces, with one entry in the image table per scene."""

    def __init__(self, plan: ShardPlan):
        self.tokens = Tokens.from_folder(plan.tokenizer)
        t = self.tokens
        self.frame = Frame(t.start, t.end, t.image_start, t.image_end)
        self.system = t.segment(plan.system_prompt) if plan.system_prompt else None
        self.scenes: list[Scene | np.ndarray] = []
        self.index_of: dict[int, int] = {}
        self.keep: list[ImageSegment] = []

    def image(self, scene: Scene | np.ndarray) -> ImageSegment:
        """A stand-in of the right size; the pixels (of a scene, or given) come from the table."""
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
        prompt, scene = training_drawing(rng)
        return self._drawing(prompt, self.image(scene), rng)

    def look_examples(self, rng: random.Random) -> list[list[Piece]]:
        """The examples of one trajectory: all of it in its running context, and each edit alone."""
        trajectory = training_trajectory(rng)
        editing = trajectory.source is not None
        seen = Seen(self.system, self.tokens.segment(trajectory.prompt), editing=editing)
        images = [self.image(scene) for scene in trajectory.looks]
        examples: list[list[Piece]] = []
        for k, text in enumerate(turns(trajectory)):
            seen = seen.with_image(images[k])
            reflection = trajectory.reflections[k]
            edit = self.tokens.segment(reflection.edit) if reflection.action == "edit" else None
            seen = seen.with_turn(TextSegment(tuple(self.tokens.encode(text))), edit)
            drawn = k + 1 - editing  # which of `scenes` the edit draws
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

    def own_examples(self, look: OwnLook, rng: random.Random) -> list[list[Piece]]:
        """A look at own images in its running context, and each mending edit alone."""
        seen = Seen(self.system, self.tokens.segment(look.prompt), editing=False)
        images = [self.image(pixels) for pixels in look.images]
        examples: list[list[Piece]] = []
        learned = set()
        for k, text in enumerate(look.turns):
            edit = self.tokens.segment(look.edits[k]) if look.edits[k] else None
            turn = TextSegment(tuple(self.tokens.encode(text)))
            seen = seen.with_image(images[k]).with_turn(turn, edit)
            if look.learned[k]:
                learned.add(id(turn))
            if k + 1 < len(images) and look.drawn[k + 1]:
                examples += self._edit_examples(seen, images[k + 1], rng)
        drawn = {id(image) for image, is_drawn in zip(images, look.drawn, strict=True) if is_drawn}
        return [self._in_context(seen, learned, drawn), *examples]

    def kept_example(
        self, record: dict, pixels: np.ndarray, rng: random.Random
    ) -> list[Piece] | None:
        """An own first image as a target for its prompt; None for a wrong or poorly drawn one."""
        if not is_well_drawn(record):
            return None
        return self._drawing(record["prompt"], self.image(pixels), rng)

    def _drawing(self, prompt: str, target: ImageSegment, rng: random.Random) -> list[Piece]:
        """A first image under its prompt, in one of the views, or (for guidance) under nothing."""
        view = "full" if rng.random() < FULL_VIEW else "local"
        seen = Seen(self.system, self.tokens.segment(prompt), editing=False)
        context = first_image_view(seen, view).conditional
        if rng.random() < NO_PROMPT:
            context = Context()
        return self.pieces(context, target)

    def _whole(self, trajectory: ShapesTrajectory, seen: Seen) -> list[Piece]:
        """Every turn scored and every faithful image drawn."""
        drawn_images = seen.images[trajectory.source is not None :]
        faithful = zip(drawn_images, trajectory.faithful, strict=True)
        drawn = {id(image) for image, is_faithful in faithful if is_faithful}
        return self._in_context(seen, {id(turn) for turn in seen.turns}, drawn)

    def _in_context(self, seen: Seen, learned: set[int], drawn: set[int]) -> list[Piece]:
        """The running context with some turns scored and, before each image to draw, its noised
        copy, hidden from what follows. learned, drawn: ids of segments.
        """
        pieces: list[Piece] = []
        for segment in reflect_view(seen):
            if isinstance(segment, ImageSegment):
                if id(segment) in drawn:
                    pieces.append(Piece(segment, learn=True))
                pieces.append(Piece(segment))
            elif id(segment) in learned:
                pieces.append(Piece(segment, learn=True, weights=self._weights(segment)))
            else:
                pieces.append(Piece(segment))
        return pieces

    def _weights(self, turn: TextSegment) -> tuple[float, ...]:
        """Nothing for the forced prefix, more for score and action, one for the rest and the
        end.
        """
        weights, text = [], ""
        for token in turn.ids:
            text += self.tokens.decode([token])
            if "[SCORE] " not in text or text.endswith("[SCORE] "):
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
    rng = random.Random(f"{plan.kind} {plan.seed} {plan.collected and plan.path.stem}")
    layout = _Layout(plan)
    size = DRAW_ROW if plan.kind in DRAWING else LOOK_ROW
    if plan.collected:
        examples = collected_examples(layout, plan, rng)
    elif plan.kind == "draw":
        examples = [layout.draw_example(rng) for _ in range(plan.count)]
    else:
        examples = [e for _ in range(plan.count) for e in layout.look_examples(rng)]
    packed = [pack_row([example], layout.frame, NANO).sizes for example in examples]
    fits = [i for i, p in enumerate(packed) if all(a <= b for a, b in zip(p, size, strict=True))]
    if plan.kind in DRAWING:
        bins = [[i] for i in fits]
    else:
        bins = [[fits[k] for k in b] for b in fill_bins([packed[i] for i in fits], size)]
    if not bins:  # none of these images teaches anything
        return _written(plan, {"left_out": np.zeros(1, np.int32)}, np.zeros((0, SIZE, SIZE, 3)))
    rows = [pack_row([examples[i] for i in members], layout.frame, NANO) for members in bins]
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
    arrays["left_out"] = np.full(len(rows), len(examples) - len(fits), np.int32)
    images = np.stack(
        [s if isinstance(s, np.ndarray) else np.asarray(render(s, SIZE)) for s in layout.scenes]
    )
    return _written(plan, arrays, images)


def _written(plan: ShardPlan, arrays: dict[str, np.ndarray], images: np.ndarray) -> Path:
    """The shard's files: images, and last (so that it is whole) the rows."""
    np.save(plan.path.with_suffix(".npy"), images)
    aside = plan.path.with_suffix(".writing.npz")
    np.savez(aside, **arrays)
    os.replace(aside, plan.path)
    return plan.path


def collected_examples(layout: _Layout, plan: ShardPlan, rng: random.Random) -> list[list[Piece]]:
    """What this shard's part of the collected images teaches: looks (own) or targets (kept)."""
    examples: list[list[Piece]] = []
    for record, own in collected(Path(plan.collected), plan.seed * plan.count, plan.count):
        if plan.kind == "own":
            for look in own_looks(record, own, rng):
                examples += layout.own_examples(look, rng)
        elif (example := layout.kept_example(record, own[0], rng)) is not None:
            examples.append(example)
    return examples


def _padded(rows: Sequence, width: int, fill: int) -> np.ndarray:
    out = np.full((len(rows), width), fill, np.int32)
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out


def make_shards(plans: Sequence[ShardPlan], pool: Executor) -> Iterator[Path]:
    """All shards in order as they get done, several at a time; those that exist are kept."""
    for plan in plans:
        plan.path.parent.mkdir(parents=True, exist_ok=True)
    todo = [plan for plan in plans if not plan.path.exists()]
    waiting = pool.map(make_shard, todo)  # starts at once
    return (plan.path if plan not in todo else next(waiting) for plan in plans)


class RowStore:
    """Rows of one kind on the device, with the latents and patches that they refer to.

    own: how many rows at the end are made of the model's own images.
    """

    def __init__(
        self, kind: str, arrays: dict[str, Tensor], tables: dict[str, Tensor], own: int = 0
    ):
        self.kind, self.arrays, self.tables, self.own = kind, arrays, tables, own
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
    paths: Iterable[Path], kind: str, vae, device: torch.device, *, own_pixels: float = 0.5
) -> RowStore:
    """Rows of several shards with their images encoded by `vae`.

    own_pixels: share of the images that are looked at after a round trip through the VAE, as drawn
    ones are.
    """
    arrays: dict[str, list[Tensor]] = {}
    latents, conditions, patches = [], [], []
    offset, counts = 0, []
    generator = torch.Generator().manual_seed(0)
    for path in paths:
        images = torch.from_numpy(np.load(path.with_suffix(".npy"), mmap_mode="c"))
        with np.load(path) as shard:
            if "ids_BU" not in shard:
                continue
            for name in sorted(set(shard.files) - {"left_out"}):
                values = torch.from_numpy(shard[name])
                if name in ("vae_BI", "vit_BI"):
                    values = torch.where(values >= 0, values + offset, values)
                arrays.setdefault(name, []).append(values)
            counts.append((path.name, len(shard["ids_BU"]), int(shard["left_out"][0])))
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
    left_out = sum(n for _, _, n in counts)
    print(
        f"{kind}: {offset} images, {sum(n for _, n, _ in counts)} rows; "
        f"{left_out} examples longer than a row were left out"
    )
    width = max(t.shape[1] for t in arrays["score_BS"])
    arrays["score_BS"] = [F.pad(t, (0, width - t.shape[1]), value=-1) for t in arrays["score_BS"]]
    tables = {"latents": torch.cat(latents)}
    tables["conditions"] = torch.cat(conditions) if conditions else tables["latents"]
    if patches:
        tables["patches"] = torch.cat(patches)
    own = sum(rows for name, rows, _ in counts if name.startswith(OWN))
    return RowStore(kind, {n: torch.cat(t).to(device) for n, t in arrays.items()}, tables, own)


def _tokens(latent: Tensor) -> Tensor:
    """[B, 16, 16, 16] → [B, 64, 64] bf16 latent tokens."""
    patch = NANO.latent_patch_size
    folded = rearrange(latent, "n z (r p) (c q) -> n (r c) (p q z)", p=patch, q=patch)
    return folded.to(torch.bfloat16)
