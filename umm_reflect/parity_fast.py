"""The product's own path behind the operations that parity asks for.

Nothing is computed here: contexts go through `Engine`, text through `say`, pictures through `draw`
and its `Denoiser`, training through `packing`, so that parity holds what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from umm_reflect import checkpoint, draw, flow, images, model, packing, vit
from umm_reflect.cache import KVCache
from umm_reflect.config import BagelConfig
from umm_reflect.context import Context, ImageSegment, TextSegment
from umm_reflect.layout import grid_ids, latent_grid
from umm_reflect.model import Bagel
from umm_reflect.parity_implementations import (
    Branches,
    Drawing,
    GoldenContext,
    Guidance,
    SizeRule,
    Training,
    TrainPart,
    TrainText,
    VAEPicture,
)
from umm_reflect.parity_report import NotCovered
from umm_reflect.prefill import Engine
from umm_reflect.reference import Prefill, Text, ViTImage, ViTStages
from umm_reflect.say import say


class FastImplementation:
    """A loaded `Bagel` in fp32 on the CPU, as an `Implementation`."""

    name = "fast"

    def __init__(self, folder: Path) -> None:
        self.bagel = bagel = checkpoint.load(folder, device="cpu", dtype=torch.float32)
        tokens, config = bagel.tokens, bagel.config
        self.special_ids = {
            name: getattr(tokens, name)
            for name in ("start", "end", "image_start", "image_end", "pad")
        }
        self.vit_side, self.vit_patch = config.vit.grid_side, config.vit.patch_size
        self.latent_side, self.latent_patch = config.latent_grid_side, config.latent_patch_size
        self.downsample = config.vae.downsample
        self.encode, self.decode = tokens.encode, tokens.decode
        # Pictures that the golden folder names twice are one segment, as in the product. The pixels
        # are kept beside it, so that an id is not used again.
        self._segments: dict[tuple[int, ...], tuple[ImageSegment, tuple[Tensor, ...]]] = {}

    # -- pictures and tables ----------------------------------------------------------------

    patchify_pixels = staticmethod(images.patchify_pixels)
    patchify_latent = staticmethod(images.patchify_latent)
    position_table = staticmethod(vit.sincos_table)
    time_features = staticmethod(model.time_features)
    schedule = staticmethod(flow.schedule)
    guided_at = staticmethod(flow.in_interval)

    def position_ids(self, rows: int, columns: int, side: int, interpolate: bool) -> Tensor:
        if interpolate:
            return images.grid_positions(rows, columns, side, interpolate=True)
        return torch.from_numpy(grid_ids((rows, columns), side))

    def _rule(self, rule: SizeRule) -> images.ResizeRule:
        return images.ResizeRule(
            rule.max_size, rule.min_size, rule.stride, rule.max_pixels, root_area=False
        )

    def resized_size(self, rule: SizeRule, height: int, width: int) -> tuple[int, int]:
        return self._rule(rule).size(height, width)

    def resize(self, picture: np.ndarray, rule: SizeRule) -> np.ndarray:
        return np.array(self._rule(rule).resize(Image.fromarray(picture)))

    def to_pixels(self, picture: np.ndarray) -> Tensor:
        return images.to_tensor(Image.fromarray(picture))

    def to_uint8(self, pixels: Tensor) -> np.ndarray:
        return np.array(images.to_pil(pixels, truncate=True))

    @torch.inference_mode()
    def time_embedding(self, t: Tensor) -> Tensor:
        return self.bagel.time_embedder(t)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = model.rope_tables(positions, self.bagel.config.llm)
        return cos.squeeze(1), sin.squeeze(1)

    @torch.inference_mode()
    def vit(self, pictures: Sequence[Tensor]) -> ViTStages:
        bagel, patch = self.bagel, self.vit_patch
        patches = [images.patchify_pixels(picture, patch) for picture in pictures]
        ids = [
            self.position_ids(p.shape[1] // patch, p.shape[2] // patch, self.vit_side, False)
            for p in pictures
        ]
        packed, packed_ids = torch.cat(patches), torch.cat(ids)
        lengths = [len(one) for one in patches]
        tower = bagel.vit_model(packed, packed_ids, lengths, bagel.attn)
        embedded = bagel.embed_patches(packed, packed_ids, lengths)
        return ViTStages(packed, packed_ids, tower, bagel.connector(tower), embedded)

    @torch.inference_mode()
    def vae_moments(self, pixels: Tensor) -> Tensor:
        return torch.cat(self.bagel.vae.moments(pixels), dim=1)

    @torch.inference_mode()
    def vae_encode(self, pixels: Tensor) -> Tensor:
        return self.bagel.vae.encode(pixels)

    @torch.inference_mode()
    def vae_decode(self, latent: Tensor) -> Tensor:
        return self.bagel.vae.decode(latent)

    # -- contexts ---------------------------------------------------------------------------

    def _context(self, parts: GoldenContext) -> Context:
        """A VAE block followed by a ViT block becomes one segment that enters as both."""
        segments: list[TextSegment | ImageSegment] = []
        waiting: VAEPicture | None = None
        for part in [*parts, None]:
            if waiting is not None:
                both = isinstance(part, ViTImage)
                segments.append(self._image(waiting, part if both else None))
                waiting = None
                if both:
                    continue
            if isinstance(part, Text):
                segments.append(TextSegment(part.ids))
            elif isinstance(part, ViTImage):
                segments.append(self._image(None, part))
            elif part is not None:
                waiting = part
        return Context(tuple(segments))

    def _image(self, vae: VAEPicture | None, looked_at: ViTImage | None) -> ImageSegment:
        pixels = tuple(None if part is None else part.pixels for part in (vae, looked_at))
        key = tuple(id(one) for one in pixels)
        if key not in self._segments:
            self._segments[key] = (ImageSegment(*pixels), pixels)
        return self._segments[key][0]

    @torch.inference_mode()
    def prefill(self, contexts: Sequence[GoldenContext]) -> list[Prefill]:
        """All but the last segments of all contexts first, then the last ones on their caches."""
        bagel, engine = self.bagel, Engine(self.bagel)
        whole = [self._context(parts) for parts in contexts]
        if any(a != b and a == b.prefix(len(a)) for a in whole for b in whole):
            # One would be read as the beginning of another, without a forward of its own.
            return [self.prefill([parts])[0] for parts in contexts]
        engine.caches([context.prefix(len(context) - 1) for context in whole if len(context)])
        with _hidden_states(bagel) as states:
            caches = engine.caches(whole)
        unique = list(dict.fromkeys(context for context in whole if len(context)))
        links = dict(zip(whole, caches, strict=True))
        new = [links[context].links()[-1] for context in unique]
        rows = dict(zip(unique, _rows_of(states, unique, new, bagel.config), strict=True))
        width = bagel.config.llm.hidden_size
        out = []
        for context, cache in zip(whole, caches, strict=True):
            hidden = rows.get(context, torch.zeros(0, width))
            logits = bagel.logits(hidden)
            out.append(Prefill(hidden, logits, self._kv(cache), cache.length, cache.position))
        return out

    def _kv(self, cache: KVCache) -> Tensor:
        llm = self.bagel.config.llm
        empty = torch.zeros(llm.num_layers, 2, 0, llm.num_kv_heads, llm.head_dim)
        return torch.cat([empty, *(link.chunk for link in cache.links())], dim=2)

    def greedy(self, context: GoldenContext, steps: int) -> tuple[list[int], Tensor]:
        bagel, rows = self.bagel, []
        (said,) = say(
            bagel,
            Engine(bagel).caches([self._context(context)]),
            forced=[()],
            temperature=1.0,
            max_tokens=steps,
            generators=[torch.Generator()],
            greedy=True,
            # The original does not mask the rows that the tokenizer cannot spell.
            support=bagel.config.llm.vocab_size,
            on_logits=lambda logits: rows.append(logits[0].clone()),
        )
        return list(said.sampled_ids), torch.stack(rows)

    # -- drawing ----------------------------------------------------------------------------

    @torch.inference_mode()
    def draw(
        self,
        branches: Sequence[Branches],
        grids: Sequence[tuple[int, int]],
        x: Tensor,
        guidance: Guidance,
    ) -> Drawing:
        g, engine = guidance, Engine(self.bagel)
        stride = self.bagel.config.latent_stride
        sizes = [(rows * stride, columns * stride) for rows, columns in grids]
        requests = [
            draw.DrawRequest(
                self._context(branch.cond),
                self._context(branch.text_uncond),
                self._context(branch.image_uncond),
                size,
                torch.Generator(),
            )
            for branch, size in zip(branches, sizes, strict=True)
        ]
        settings = flow.DrawSettings(
            points=g.points,
            timestep_shift=g.shift,
            text_scale=g.text_scale,
            image_scale=g.image_scale,
            interval=g.interval,
            renorm=g.renorm,
            renorm_min=g.renorm_min,
            norm_over=g.norm_over,
        )
        times = settings.times
        on = [flow.in_interval(t, g.interval) for t in times[:-1]]
        lengths = [rows * columns for rows, columns in grids]

        # The branches, also those that the settings do not need or that are folded away.
        always = replace(settings, text_scale=2.0, image_scale=2.0)
        denoiser = draw.Denoiser(engine, requests, always)
        nothing = torch.zeros_like(x[0])
        recorded = []
        for step, state in enumerate(x[:-1]):
            cond, text, image = self._branches(denoiser, state.split(lengths), times[step])
            recorded.append(
                (
                    cond,
                    text if on[step] and g.text_scale > 1 else nothing,
                    image if on[step] and g.image_scale > 1 else nothing,
                )
            )
        product = draw.Denoiser(engine, requests, settings)
        guided = [
            torch.cat(product.velocity(state.split(lengths), times[step]))
            for step, state in enumerate(x[:-1])
        ]
        with _starting_from(x[0].split(lengths)) as states:
            drawn = draw.draw(engine, requests, settings)
        own = [torch.cat(parts) for parts in states] + [torch.cat([d.latent for d in drawn])]
        pixels = [d.pixels for d in drawn]
        latents = [
            images.unpatchify_latent(
                tokens, rows * self.latent_patch, columns * self.latent_patch, self.latent_patch
            )
            for tokens, (rows, columns) in zip(own[-1].split(lengths), grids, strict=True)
        ]
        stacked = [torch.stack(v) for v in zip(*recorded, strict=True)]
        return Drawing(times, on, *stacked, torch.stack(guided), torch.stack(own), latents, pixels)

    @staticmethod
    def _branches(
        denoiser: draw.Denoiser, x: Sequence[Tensor], t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Velocities of the three branches; one that was folded away is the conditional one."""
        rows = denoiser.branch_velocities(x, t, guided=True)

        def branch(which: int) -> Tensor:
            places = [of[0] if of[which] is None else of[which] for of in denoiser.row_of]
            return torch.cat([rows[place] for place in places])

        return branch(0), branch(1), branch(2)

    # -- training ---------------------------------------------------------------------------

    def train(self, samples: Sequence[Sequence[TrainPart]], shift: float) -> Training:
        """All samples in one packed row."""
        bagel, patch = self.bagel, self.latent_patch
        examples, times, noises = [], [], []
        for sample in samples:
            pieces = []
            for part in sample:
                if isinstance(part, TrainText):
                    pieces.append(self._text_piece(part))
                elif isinstance(part, ViTImage):
                    pieces.append(packing.Piece(ImageSegment(vit_pixels=part.pixels)))
                else:
                    height, width = (side * patch for side in part.grid)
                    latent = images.unpatchify_latent(part.tokens, height, width, patch)
                    pieces.append(packing.Piece(ImageSegment(latent=latent), learn=part.noised))
                    raw = torch.tensor(part.raw_time)
                    times.append(flow.shift_times(torch.sigmoid(raw), shift))
                    noises.append(part.noise)
            examples.append(pieces)
        row = packing.pack_row(examples, bagel.frame, bagel.config)
        batch = packing.collate(
            [row],
            [images.patchify_latent(image.latent, patch) for image in row.vae_images],
            [images.patchify_pixels(image.vit_pixels, self.vit_patch) for image in row.vit_images],
        )
        times_I, noise = torch.stack(times), torch.cat(noises)
        trained = dict(bagel.named_parameters())
        for parameter in trained.values():
            parameter.requires_grad_(True)
        out = packing.training_forward(bagel, batch, times_I, noise[None])
        noised = batch.noised_BG[0]
        velocity, clean = out.velocity_BGC[0][noised], batch.latent_BGC[0][noised]
        ce_mean = out.ce_S.mean()
        mse_mean = flow.flow_matching_loss(velocity, noise[noised], clean)
        total = ce_mean + mse_mean
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        order = batch.order_BL[0]
        mask = packing.dense_mask(batch)[0, 0].to(torch.uint8)
        return Training(
            position_ids=_in_sequence(batch.position_BL[0], order),
            attention_mask=_in_sequence(_in_sequence(mask, order).T, order).T,
            t=torch.where(noised, times_I[batch.image_BG[0]], 0.0),
            input_sequence=_in_sequence(torch.cat(out.embedded), order).detach(),
            hidden=_in_sequence(torch.cat(out.hidden), order).detach(),
            ce=out.ce_S.detach(),
            mse=(velocity - flow.velocity_target(clean, noise[noised])).square().detach(),
            loss=torch.stack([total, ce_mean, mse_mean]).detach(),
            gradients=dict(zip(trained, gradients, strict=True)),
        )

    def _text_piece(self, part: TrainText) -> packing.Piece:
        """A scored text predicts its next tokens; only the end's own label is free."""
        end = len(part.ids) + 1
        following = dict(enumerate((*part.ids, self.special_ids["end"])))
        scored = {offset: label for offset, label in part.labels.items() if offset != end}
        if scored and scored != following:
            raise NotCovered("a text whose labels are not all of its next tokens")
        segment = TextSegment(part.ids)
        return packing.Piece(segment, learn=bool(scored), end_label=part.labels.get(end))


def _in_sequence(values: Tensor, order: Tensor) -> Tensor:
    """Rows from the packed order (understanding tokens first) back into sequence order."""
    out = torch.empty_like(values)
    out[order] = values
    return out


@contextmanager
def _hidden_states(bagel: Bagel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects what every forward of the decoder returns, ([U, D], [G, D])."""
    states: list[tuple[Tensor, Tensor]] = []
    hook = bagel.language_model.model.register_forward_hook(lambda *call: states.append(call[2]))
    try:
        yield states
    finally:
        hook.remove()


def _rows_of(
    states: Sequence[tuple[Tensor, Tensor]],
    contexts: Sequence[Context],
    links: Sequence[KVCache],
    config: BagelConfig,
) -> list[Tensor]:
    """Hidden states of each context's last block, in token order, from one forward over all."""
    if not contexts:
        return []
    assert len(states) == 1, f"{len(states)} forwards for the last segments, expected one"
    und, gen = states[0]
    rows = []
    for context, link in zip(contexts, links, strict=True):
        last, length = context.segments[-1], link.chunk.shape[2]
        latents = 0
        if isinstance(last, ImageSegment) and last.has_vae:
            grid = latent_grid(last, config)
            latents = grid[0] * grid[1]
        block, und = und[: length - latents], und[length - latents :]
        inside, gen = gen[:latents], gen[latents:]
        if latents and last.has_vit:  # the ViT block comes last, after the latents' two markers
            rows.append(block[2:])
        elif latents:
            rows.append(torch.cat([block[:1], inside, block[1:]]))
        else:
            rows.append(block)
    assert len(und) == len(gen) == 0, "the forward held more than the last segments"
    return rows


@contextmanager
def _starting_from(noise: Sequence[Tensor]) -> Iterator[list[Sequence[Tensor]]]:
    """Makes `draw` start from given noise instead of its generators', and collects its states."""
    states: list[Sequence[Tensor]] = []

    class Recording(draw.Denoiser):
        def noise(self) -> list[Tensor]:
            return list(noise)

        def velocity(self, x: Sequence[Tensor], t: Tensor) -> list[Tensor]:
            states.append(list(x))
            return super().velocity(x, t)

    original = draw.Denoiser
    draw.Denoiser = Recording
    try:
        yield states
    finally:
        draw.Denoiser = original
