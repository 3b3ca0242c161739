"""Draw: rectified flow from noise to pictures, all guidance branches of all samples in one forward
a step.

Legend: R requests, B branch rows (the conditional row of every request first, then those that
differ from it), n latent tokens a picture, C numbers a token.

A branch that equals another is not run twice: None, or an equal context, is folded (`flow.guide`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from umm_reflect import batch as batching
from umm_reflect.cache import KVCache, assemble
from umm_reflect.config import BagelConfig
from umm_reflect.context import Context, Segment
from umm_reflect.flow import DrawSettings, cps_step, guide, sde_step
from umm_reflect.images import check_drawn_size, to_pil, unpatchify_latent
from umm_reflect.layout import Row, segment_length, vae_block
from umm_reflect.prefill import Engine

# The VAE decodes at most this many pixels at once (16 pictures of 512²).
DECODE_PIXELS = 16 * 512 * 512
# Keys and values that a batch of drawings may hold, in bytes; more requests are drawn in parts. It
# is far more than what fills a GPU: parts cost no time.
DRAW_BYTES = 24 << 30


@dataclass(frozen=True)
class DrawRequest:
    """One picture to draw. A branch that is None equals the conditional one. size: (height, width)
    in pixels.

    `generator` gives the first noise [n, C], then one draw of that shape for each stochastic step.
    """

    conditional: Context
    text_uncond: Context | None
    image_uncond: Context | None
    size: tuple[int, int]
    generator: torch.Generator


@dataclass(frozen=True, eq=False)
class Drawn:
    """A picture and how it came about.

    pixels: [3, H, W] fp32 before clamping. latent: final tokens [n, C] fp32. latents: [w + 1, n,
    C], the states around the w stochastic steps, times: [w + 1], logprobs: [w]; all empty when
    every step was an Euler step.
    """

    pixels: Tensor
    image: Image.Image
    latent: Tensor
    latents: Tensor
    times: Tensor
    logprobs: Tensor


@torch.inference_mode()
def draw(
    engine: Engine,
    requests: Sequence[DrawRequest],
    settings: DrawSettings | Sequence[DrawSettings],
    *,
    on_step: Callable[[int, int], None] | None = None,
    truncate: bool = False,
) -> list[Drawn]:
    """Draw all requests together; each gets its own noise, so company never changes a picture.

    settings: for all, or one a request where only the noise window differs. on_step(done, steps)
    reports progress. truncate: 8-bit levels by truncation, as the original. Raises UsageError for
    a size that the grid cannot hold, FloatingPointError when a picture is not finite.
    """
    if not requests:
        return []
    per_request = (
        [settings] * len(requests) if isinstance(settings, DrawSettings) else list(settings)
    )
    parts = fitting_parts(engine.bagel.config, requests, engine.bagel.dtype.itemsize)
    if len(parts) > 1 and per_request[0].norm_over != "call":
        return _draw_parts(engine, parts, requests, per_request, on_step, truncate)
    flow = Denoiser(engine, requests, per_request[0])
    x = flow.noise()
    times = per_request[0].times
    for other in per_request:
        assert torch.equal(other.times, times), "requests of one call share their schedule"
    states: list[list[Tensor]] = [[] for _ in requests]
    stamps: list[list[float]] = [[] for _ in requests]
    logprobs: list[list[Tensor]] = [[] for _ in requests]
    none = torch.zeros(0, device=engine.bagel.device)
    steps = len(times) - 1
    for step in range(steps):
        t, t_next = times[step], times[step + 1]
        v = flow.velocity(x, t)
        noisy = [own.stochastic(step) for own in per_request]
        plain = [r for r, is_noisy in enumerate(noisy) if not is_noisy]
        for r, moved in zip(plain, euler_steps(x, v, plain, t, t_next), strict=True):
            x[r] = moved
        for own, members in _alike_steps(per_request, noisy, x):
            noise = [torch.randn(x[r].shape, generator=requests[r].generator) for r in members]
            ways = (torch.stack([of[r] for r in members]) for of in (x, v))
            z = torch.stack(noise).to(engine.bagel.device)
            taken = (
                cps_step(*ways, t, t_next, own.noise_level, z)
                if own.step_kind == "cps"
                else sde_step(*ways, t, t_next, own.noise_level, z, own.sigma)
            )
            for r, moved, logprob in zip(members, taken.x_next, taken.logprob, strict=True):
                if not states[r]:
                    states[r].append(x[r])
                    stamps[r].append(float(t))
                x[r] = moved
                states[r].append(moved)
                stamps[r].append(float(t_next))
                logprobs[r].append(logprob)
        if on_step is not None:
            on_step(step + 1, steps)
    pixels = decode(engine, x, [request.size for request in requests])
    latent = to_host(x)
    window = [
        to_host([torch.stack(seen) if seen else none for seen in of]) for of in (states, logprobs)
    ]
    return [
        Drawn(
            pixels=pixels[r],
            image=to_pil(pixels[r], truncate),
            latent=latent[r],
            latents=window[0][r],
            times=torch.tensor(stamps[r]),
            logprobs=window[1][r],
        )
        for r in range(len(requests))
    ]


def _draw_parts(engine, parts, requests, settings, on_step, truncate) -> list[Drawn]:
    drawn: list[Drawn] = []
    for part in parts:
        before, own = len(drawn), len(part)

        def shown(done: int, steps: int, before: int = before, own: int = own) -> None:
            if on_step is not None:
                on_step((before * steps + own * done) // len(requests), steps)

        mine = [requests[r] for r in part], [settings[r] for r in part]
        drawn += draw(engine, *mine, on_step=shown, truncate=truncate)
    return drawn


def fitting_parts(
    config: BagelConfig, requests: Sequence[DrawRequest], item: int
) -> list[list[int]]:
    """Neighbouring requests whose keys and values are at most DRAW_BYTES together, as they lie in a
    batch: every branch as long as the longest. item: bytes of a number. A large one is alone.
    """
    llm = config.llm
    known: dict[Segment, int] = {}
    token = 2 * llm.num_layers * llm.num_kv_heads * llm.head_dim * item

    def length(context: Context) -> int:
        for segment in context.segments:
            if segment not in known:
                known[segment] = segment_length(segment, config)
        return sum(known[segment] for segment in context.segments)

    parts: list[list[int]] = []
    rows = longest = 0
    for r, request in enumerate(requests):
        branches = (request.conditional, request.text_uncond, request.image_uncond)
        lengths = [length(branch) for branch in branches if branch is not None]
        height, width = (side // config.latent_stride for side in request.size)
        rows, longest = rows + len(lengths), max(longest, max(lengths) + height * width + 2)
        if not parts or rows * longest * token > DRAW_BYTES:
            parts.append([])
            rows, longest = len(lengths), max(lengths) + height * width + 2
        parts[-1].append(r)
    return parts


def _alike_steps(
    settings: Sequence[DrawSettings], noisy: Sequence[bool], x: Sequence[Tensor]
) -> list[tuple[DrawSettings, list[int]]]:
    """Requests whose stochastic step is one call: the same rule, equally many latent tokens."""
    groups: dict[tuple, tuple[DrawSettings, list[int]]] = {}
    for r, own in enumerate(settings):
        if noisy[r]:
            rule = (own.step_kind, own.noise_level, own.sigma, len(x[r]))
            groups.setdefault(rule, (own, []))[1].append(r)
    return list(groups.values())


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype and device on the CPU, by one transfer, each in memory of its own."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(t.shape).clone() for part, t in zip(parts, tensors, strict=True)]


def euler_steps(
    x: Sequence[Tensor], v: Sequence[Tensor], which: Sequence[int], t: Tensor, t_next: Tensor
) -> list[Tensor]:
    """`euler_step` of the requests `which`, in a few launches for all of them: [n, C] fp32 each."""
    if not which:
        return []
    moved = torch._foreach_mul([v[r] for r in which], float(t - t_next))
    return list(torch._foreach_sub([x[r] for r in which], moved))


def unconditional(
    conditional: Context,
    text_uncond: Context | None,
    image_uncond: Context | None,
    settings: DrawSettings,
) -> tuple[Context | None, Context | None]:
    """Of the branches without the text and without the images those that a guided step has to run;
    None where one is folded or off. Two that are equal are one run."""

    def differing(context: Context | None) -> Context | None:
        return None if context is None or context == conditional else context

    text = differing(text_uncond) if settings.text_scale > 1 else None
    both = min(settings.text_scale, settings.image_scale) > 1
    return text, differing(image_uncond) if both else None


class Denoiser:
    """The velocity of a batch of pictures under guidance, with all contexts read and their KV in
    place.
    """

    def __init__(self, engine: Engine, requests: Sequence[DrawRequest], settings: DrawSettings):
        bagel = engine.bagel
        self.engine, self.bagel, self.settings, self.requests = engine, bagel, settings, requests
        config = bagel.config
        for request in requests:
            check_drawn_size(*request.size, config.latent_grid_side, config.latent_stride)
        self.grids = [
            tuple(s // config.latent_stride for s in request.size) for request in requests
        ]
        self.branches = [
            unconditional(r.conditional, r.text_uncond, r.image_uncond, settings) for r in requests
        ]

        contexts, owner = [request.conditional for request in requests], list(range(len(requests)))
        rows: list[list[int | None]] = [[r, None, None] for r in owner]
        # branches of a kind are neighbours, since their contexts are often of one length
        for which in (0, 1):
            for r, both in enumerate(self.branches):
                if both[which] is None:
                    continue
                if which == 1 and both[1] == both[0]:
                    rows[r][2] = rows[r][1]
                    continue
                rows[r][1 + which] = len(contexts)
                contexts.append(both[which])
                owner.append(r)
        self.row_of: list[tuple[int, int | None, int | None]] = [tuple(row) for row in rows]
        caches = engine.caches(contexts)
        lengths = [self.grids[r][0] * self.grids[r][1] + 2 for r in owner]
        self.workspace = assemble(
            caches, lengths, config.llm, device=bagel.device, dtype=bagel.dtype
        )
        self.owner = owner
        self.all_rows = self._plan(caches, len(contexts))
        self.plain_rows = (
            self.all_rows if len(contexts) == len(requests) else self._plan(caches, len(requests))
        )

    def _plan(self, caches: Sequence[KVCache], count: int) -> batching.RowBatch:
        bagel = self.bagel
        rows = []
        for row in range(count):
            grid = self.grids[self.owner[row]]
            block = vae_block(None, grid, bagel.frame, caches[row].position, noised=True)
            rows.append(Row((block,), caches[row].length))
        return batching.build(
            rows,
            latent_grid_side=bagel.config.latent_grid_side,
            device=bagel.device,
            workspace=self.workspace.rows(slice(0, count)),
            backend=bagel.attn,
        )

    def noise(self) -> list[Tensor]:
        """The first state of every request from its own generator: [n, C] fp32."""
        channels, lengths = self.bagel.config.latent_dim, [rows * cols for rows, cols in self.grids]
        drawn = [
            torch.randn(length, channels, generator=request.generator)
            for length, request in zip(lengths, self.requests, strict=True)
        ]
        return list(torch.cat(drawn).to(self.bagel.device).split(lengths))

    def branch_velocities(self, x: Sequence[Tensor], t: Tensor, *, guided: bool) -> list[Tensor]:
        """Raw velocities [n, C] of every row of the batch (conditional rows only, unless
        `guided`).
        """
        bagel = self.bagel
        batch = self.all_rows if guided else self.plain_rows
        owner = self.owner[: batch.attend.rows]
        latents = torch.cat([x[r] for r in owner])
        x_GD = bagel.embed_latents(latents, t.reshape(1).to(bagel.device), batch.cell_G)
        x_UD = bagel.embed_ids(batch.ids_U)
        _, hidden_GD = bagel(x_UD, x_GD, batch.position_T, batch.attend)
        return list(bagel.velocity(hidden_GD).split([x[r].shape[0] for r in owner]))

    def velocity(self, x: Sequence[Tensor], t: Tensor) -> list[Tensor]:
        """The velocity to follow at time t, fp32 [n, C] a request; guidance is folded where
        branches are equal.
        """
        guided = self.settings.guided(t)
        rows = self.branch_velocities(x, t, guided=guided)
        if not guided:
            return list(torch.cat(rows).float().split([v.shape[0] for v in rows]))
        if self.settings.norm_over == "call":
            return self._guided_together(x, rows)
        out: list[Tensor | None] = [None] * len(x)
        for members in self._alike(x):
            stacked = (self._branch(rows, members, which) for which in range(3))
            branches = [None if v is None else torch.stack(v) for v in stacked]
            for r, v in zip(members, guide(*branches, self.settings), strict=True):
                out[r] = v
        return out

    def _guided_together(self, x: Sequence[Tensor], rows: list[Tensor]) -> list[Tensor]:
        """One norm over all pictures of the call, as the original has it: only to compare with
        it.
        """
        if len({(text is None, image is None) for _, text, image in self.row_of}) > 1:
            raise ValueError("a norm over the whole call needs requests with the same branches")
        members, lengths = list(range(len(x))), [state.shape[0] for state in x]
        parts = (self._branch(rows, members, which) for which in range(3))
        branches = [None if v is None else torch.cat(v) for v in parts]
        return list(guide(*branches, self.settings, lengths).split(lengths))

    def _branch(self, rows: list[Tensor], members: list[int], which: int) -> list[Tensor] | None:
        """The velocities of one branch (0 conditional, 1 without text, 2 without images), or
        None.
        """
        if self.row_of[members[0]][which] is None:
            return None
        return [rows[self.row_of[r][which]] for r in members]

    def _alike(self, x: Sequence[Tensor]) -> list[list[int]]:
        """Requests that have the same branches and size, so that guidance runs once for all."""
        groups: dict[tuple, list[int]] = {}
        for r, (_, text, image) in enumerate(self.row_of):
            groups.setdefault((text is None, image is None, x[r].shape[0]), []).append(r)
        return list(groups.values())


def decode(
    engine: Engine, latents: Sequence[Tensor], sizes: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Latent tokens [n, C] → pixels [3, H, W] fp32 on the CPU; each size is decoded as a batch of
    its own.
    """
    config = engine.bagel.config
    down, patch = config.vae.downsample, config.latent_patch_size
    folded = [
        unpatchify_latent(x, height // down, width // down, patch)
        for x, (height, width) in zip(latents, sizes, strict=True)
    ]
    most = max(1, DECODE_PIXELS // max(height * width for height, width in sizes))
    pixels = [p.cpu() for p in engine.bagel.vae.decode_latents(folded, batch_size=most)]
    if not all(p.isfinite().all() for p in pixels):
        raise FloatingPointError(
            "a drawn picture is not finite: the weights or the number type are broken; "
            "try --dtype float32"
        )
    return pixels
