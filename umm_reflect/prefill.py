"""Contexts → caches: what has been read before is not read again, and what is new is read in one
forward.

`Engine` belongs to one set of weights; after they change (training), call `engine.forget()`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from umm_reflect import batch as batching
from umm_reflect.cache import EMPTY, KVCache, assemble, extract
from umm_reflect.context import Context, ImageSegment, Segment
from umm_reflect.images import patchify_latent, patchify_pixels
from umm_reflect.layout import Row, grid_ids, segment_blocks
from umm_reflect.model import Bagel

# A forward over more new tokens than this is cut into several (rows are never cut).
MAX_NEW_TOKENS = 16384


class Engine:
    """A model with its memory: the KV of context prefixes and the encodings of images.

    keep_bytes: the prefix store forgets what was used longest ago beyond this size.
    """

    def __init__(self, bagel: Bagel, keep_bytes: int = 8 << 30):
        self.bagel = bagel
        self.keep_bytes = keep_bytes
        self.forget()

    def forget(self) -> None:
        """Drop everything remembered (the weights have changed)."""
        self._prefixes: OrderedDict[tuple[Segment, ...], KVCache] = OrderedDict()
        self._latents: WeakKeyDictionary[ImageSegment, Tensor] = WeakKeyDictionary()
        self._patches: WeakKeyDictionary[ImageSegment, Tensor] = WeakKeyDictionary()

    @torch.inference_mode()
    def caches(self, contexts: Sequence[Context], *, remember: bool = True) -> list[KVCache]:
        """The cache of each context; equal contexts are read once, shared prefixes too. remember:
        whether they are kept for contexts to come."""
        waiting = list(dict.fromkeys(context.segments for context in contexts))
        done: dict[tuple[Segment, ...], KVCache] = {(): EMPTY}
        while waiting:
            # two contexts that share an unread prefix: the shorter piece first, in a forward of
            # its own
            jobs: dict[tuple[Segment, ...], tuple[tuple[Segment, ...], KVCache]] = {}
            forks = _forks(waiting)
            for segments in waiting:
                known, cache = self._longest_prefix(segments, done)
                if known == len(segments):
                    done[segments] = cache
                    continue
                end = next((fork for fork in forks[segments] if fork > known), len(segments))
                jobs[segments[:end]] = (segments[known:end], cache)
            for prefix, cache in zip(jobs, self._read(list(jobs.values())), strict=True):
                done[prefix] = cache
            waiting = [segments for segments in waiting if segments not in done]
        if remember:
            self._remember({context.segments: done[context.segments] for context in contexts})
        return [done[context.segments] for context in contexts]

    def _longest_prefix(self, segments, done) -> tuple[int, KVCache]:
        for end in range(len(segments), -1, -1):
            cache = done.get(segments[:end]) or self._prefixes.get(segments[:end])
            if cache is not None:
                return end, cache
        raise AssertionError("the empty prefix is always known")

    def _remember(self, read: dict[tuple[Segment, ...], KVCache]) -> None:
        """Keep each cache under every prefix of its context; forget the oldest beyond
        `keep_bytes`.

        A prefix counts as used after whatever continues it: what goes first is the end of a chain,
        since a link in the middle would be kept alive by those after it.
        """
        for segments, cache in read.items():
            for end, link in zip(range(len(segments), 0, -1), cache.links()[::-1], strict=True):
                self._prefixes[segments[:end]] = link
                self._prefixes.move_to_end(segments[:end])
        links = {id(link): link for link in self._prefixes.values()}
        size = sum(link.chunk.nbytes for link in links.values())
        while size > self.keep_bytes and len(self._prefixes) > 1:
            _, link = self._prefixes.popitem(last=False)
            size -= link.chunk.nbytes

    def _read(self, jobs: list[tuple[tuple[Segment, ...], KVCache]]) -> list[KVCache]:
        """Prefill (segments, cache) jobs, in forwards of at most MAX_NEW_TOKENS."""
        out: list[KVCache] = []
        group: list[tuple[Row, list[int], KVCache]] = []
        total = 0
        for segments, cache in jobs:
            blocks, ends, position, length = [], [], cache.position, 0
            for segment in segments:
                for block in segment_blocks(segment, position, self.bagel.frame, self.bagel.config):
                    blocks.append(block)
                    position = block.next_position
                    length += block.length
                ends.append((length, position))
            if group and total + length > MAX_NEW_TOKENS:
                out += self._forward(group)
                group, total = [], 0
            group.append((Row(tuple(blocks), cache.length), ends, cache))
            total += length
        return out + (self._forward(group) if group else [])

    def _forward(self, group: list) -> list[KVCache]:
        bagel = self.bagel
        rows = [row for row, _, _ in group]
        caches = [cache for _, _, cache in group]
        workspace = assemble(
            caches,
            [row.length for row in rows],
            bagel.config.llm,
            device=bagel.device,
            dtype=bagel.dtype,
        )
        batch = batching.build(
            rows,
            latent_grid_side=bagel.config.latent_grid_side,
            device=bagel.device,
            workspace=workspace,
            backend=bagel.attn,
        )
        bagel(*self.embed(batch), batch.position_T, batch.attend)
        out = []
        for index, (row, ends, cache) in enumerate(group):
            link, start = cache, row.past
            for length, position in ends:
                end = row.past + length
                link = link.append(extract(workspace, index, start, end), position)
                start = end
            out.append(link)
        return out

    def embed(self, batch: batching.RowBatch) -> tuple[Tensor, Tensor]:
        """Embeddings of both experts' tokens of a clean batch (images at time 0): [U, D], [G,
        D].
        """
        bagel = self.bagel
        x_UD = bagel.embed_ids(batch.ids_U)
        if batch.vit_blocks:
            patches = torch.cat(self.patch_embeddings([b.image for b in batch.vit_blocks]))
            x_UD = x_UD.index_copy(0, batch.patch_U, patches.to(x_UD.dtype))
        if batch.vae_blocks:
            latents = torch.cat(self.latent_tokens([b.image for b in batch.vae_blocks]))
            now = torch.zeros(1, device=bagel.device)
            x_GD = bagel.embed_latents(latents, now, batch.cell_G)
        else:
            x_GD = x_UD.new_zeros(0, x_UD.shape[1])
        return x_UD, x_GD

    def latent_tokens(self, images: Sequence[ImageSegment]) -> list[Tensor]:
        """Clean latent tokens [n, C] of each image, from its latent or by the VAE (posterior
        mean), once an image.
        """
        bagel = self.bagel
        new = [image for image in dict.fromkeys(images) if image not in self._latents]
        pictures = [image for image in new if image.latent is None]
        encoded = bagel.vae.encode_images([image.vae_pixels.to(bagel.device) for image in pictures])
        for image, latent in zip(pictures, encoded, strict=True):
            self._latents[image] = patchify_latent(latent, bagel.config.latent_patch_size)
        for image in new:
            if image.latent is not None:
                latent = image.latent.to(bagel.device, torch.float32)
                self._latents[image] = patchify_latent(latent, bagel.config.latent_patch_size)
        return [self._latents[image] for image in images]

    def patch_embeddings(self, images: Sequence[ImageSegment]) -> list[Tensor]:
        """What the ViT block of each image puts into the sequence, [n, D], once an image."""
        bagel, vit = self.bagel, self.bagel.config.vit
        new = [image for image in dict.fromkeys(images) if image not in self._patches]
        if new:
            patches = [patchify_pixels(i.vit_pixels.to(bagel.device), vit.patch_size) for i in new]
            grids = [tuple(s // vit.patch_size for s in i.vit_pixels.shape[-2:]) for i in new]
            ids = np.concatenate([grid_ids(grid, vit.grid_side) for grid in grids])
            lengths = [len(p) for p in patches]
            embedded = bagel.embed_patches(
                torch.cat(patches), torch.from_numpy(ids).to(bagel.device), lengths
            )
            self._patches.update(zip(new, embedded.split(lengths), strict=True))
        return [self._patches[image] for image in images]


def _forks(contexts: Sequence[tuple[Segment, ...]]) -> dict[tuple[Segment, ...], list[int]]:
    """Of each context the lengths, short of its own, at which another one leaves it or ends."""
    # A node is a prefix: its number, by the number of the prefix before it and its last segment.
    node_of: dict[tuple[int, Segment], int] = {}
    paths: list[list[int]] = []
    for segments in contexts:
        path = [0]
        for segment in segments:
            path.append(node_of.setdefault((path[-1], segment), len(node_of) + 1))
        paths.append(path)
    ways = [0] * (len(node_of) + 1)  # how many segments follow a prefix; an end counts as one
    for before, _ in node_of:
        ways[before] += 1
    for path in paths:
        ways[path[-1]] += 1
    return {
        segments: [length for length in range(len(segments)) if ways[path[length]] > 1]
        for segments, path in zip(contexts, paths, strict=True)
    }
