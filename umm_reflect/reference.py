"""The whole of BAGEL, the slow and obvious way: the yardstick for the fast path.

No cache, no packing, no batching: every question is answered by one dense forward over one whole
sequence with an explicit [L, L] mask, computed from the plain state dict. Both experts are computed
for every token and one is picked. It shares nothing with the fast path but the file format, and
`umm-reflect parity GOLDEN_DIR --implementation reference` holds it to the recorded vectors.

    reference = Reference(Path("pretrained/bagel-nano-shapes"))
    prefill = reference.prefill([Text(tuple(reference.encode("two red circles")))])

Axes: L tokens of the sequence, H hidden size, h heads, d head size, N patches or latent tokens,
C latent channels. Everything is fp32 (or fp64 when asked), on the CPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from umm_reflect.reference_pictures import ReferenceVAE, count, patchify, position_ids


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids; `framed` puts <|im_start|> and <|im_end|> around them (all closed segments)."""

    ids: tuple[int, ...]
    framed: bool = True


@dataclass(frozen=True, eq=False)
class ViTImage:
    """A picture that is looked at: pixels [3, H, W] in [-1, 1], sides multiples of the patch."""

    pixels: Tensor


@dataclass(frozen=True, eq=False)
class VAEImage:
    """A picture as latent tokens [N, patch*patch*C] on `grid` (rows, columns).

    `time` is its flow time in [0, 1] (0 = clean). A `noised` one is a picture in the making: it
    does not advance the position and nothing after it may attend to it.
    """

    tokens: Tensor
    grid: tuple[int, int]
    time: float = 0.0
    noised: bool = False


Block = Text | ViTImage | VAEImage


@dataclass(frozen=True)
class LaidOut:
    """A laid out sequence: embeddings [L, H], positions [L], gen expert [L], allowed [L, L]."""

    embeddings: Tensor
    positions: Tensor
    gen: Tensor
    allowed: Tensor
    block_of: Tensor
    next_position: int


@dataclass(frozen=True)
class Prefill:
    """What a context leaves behind.

    `hidden` [n, H] (after the final norm) and `logits` [n, vocabulary] belong to the n tokens of
    the last segment; `kv` [layers, 2, L, kv heads, head size] to all (keys after norm and RoPE);
    `length` is L and `position` the next RoPE position.
    """

    hidden: Tensor
    logits: Tensor
    kv: Tensor
    length: int
    position: int


@dataclass(frozen=True)
class ViTStages:
    """One picture on its way in: patches [N, p*p*3], ids [N], tower [N, D], both [N, H]."""

    patches: Tensor
    position_ids: Tensor
    tower: Tensor
    connector: Tensor
    embeddings: Tensor


def position_table(side: int, width: int) -> Tensor:
    """Fixed 2-D sin-cos table [side*side, width], fp64: first half the column, second the row."""
    half = width // 2
    omega = 10000.0 ** (-torch.arange(half // 2, dtype=torch.float64) / (half // 2))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * omega
    one = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns = one[None].expand(side, side, half)
    rows = one[:, None].expand(side, side, half)
    return torch.cat([columns, rows], dim=2).reshape(side * side, width)


def time_features(t: Tensor, size: int = 256) -> Tensor:
    """Sinusoid of the flow time t [n] in [0, 1]: [n, size] as [cos | sin]."""
    frequencies = torch.exp(-math.log(10000) * torch.arange(size // 2) / (size // 2))
    angles = t[:, None] * frequencies.to(t.dtype)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def schedule(points: int, shift: float) -> Tensor:
    """Shifted flow times [points] from 1 to 0, fp32: N points are N - 1 steps."""
    t = torch.linspace(1, 0, points)
    return shift * t / (1 + (shift - 1) * t)


def guide(
    cond: Tensor,
    text_uncond: Tensor,
    image_uncond: Tensor,
    text_scale: float,
    image_scale: float,
    renorm: str,
    renorm_min: float,
) -> Tensor:
    """Guided velocity of one step from the three branches, each [N, D]; `renorm` over all N."""

    def fitted(u: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return u * (norm(cond) / (norm(u) + 1e-8)).clamp(renorm_min, 1.0)

    def over_channels(u: Tensor) -> Tensor:
        return u.norm(dim=-1, keepdim=True)

    if text_scale <= 1:
        return cond
    guided = text_uncond + text_scale * (cond - text_uncond)
    if renorm == "text_channel":
        guided = fitted(guided, over_channels)
    if image_scale > 1:
        guided = image_uncond + image_scale * (guided - image_uncond)
    if renorm == "text_channel":
        return guided
    if renorm == "channel":
        return fitted(guided, over_channels)
    if renorm == "global":
        return fitted(guided, torch.norm)
    raise ValueError(f"unknown renorm {renorm!r}: choose global, channel or text_channel")


class Reference:
    """BAGEL from a checkpoint folder (BAGEL layout), as plain tensors in `weights`.

    Raises FileNotFoundError when a file is missing and KeyError when a tensor is.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from tokenizers import Tokenizer

        folder = Path(folder)
        self.dtype = dtype
        self.weights = {
            name: tensor.to(dtype)
            for file in ("ema.safetensors", "ae.safetensors")
            for name, tensor in load_file(folder / file).items()
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.start, self.end, self.image_start, self.image_end, self.pad = (
            self.tokenizer.token_to_id(f"<|{name}|>")
            for name in ("im_start", "im_end", "vision_start", "vision_end", "endoftext")
        )
        config = json.loads((folder / "config.json").read_text())
        llm = json.loads((folder / "llm_config.json").read_text())
        vit = json.loads((folder / "vit_config.json").read_text())
        self.heads, self.kv_heads = llm["num_attention_heads"], llm["num_key_value_heads"]
        self.head_size = self.weights[
            "language_model.model.layers.0.self_attn.q_norm.weight"
        ].numel()
        self.eps, self.theta = llm.get("rms_norm_eps", 1e-6), llm["rope_theta"]
        self.vit_heads, self.patch = vit["num_attention_heads"], vit["patch_size"]
        self.vit_eps = vit.get("layer_norm_eps", 1e-6)
        self.latent_patch = config.get("latent_patch_size", 2)
        vae = config.get("vae_config", {})
        self.downsample = 2 ** (count(self.weights, "encoder.down.{}.block.0.norm1.weight") - 1)
        self.vae = ReferenceVAE(
            self.weights,
            scale=vae.get("scale_factor", 0.3611),
            shift=vae.get("shift_factor", 0.1159),
            groups=vae.get("num_groups", 32),
        )
        width = self.weights["language_model.model.norm.weight"].numel()
        self.side, self.vit_side = (
            math.isqrt(len(self.weights[name]))
            for name in ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")
        )
        # The formula is exact where the stored table may be rounded to bf16.
        self.latent_table = position_table(self.side, width).to(dtype)
        self.vit_table = position_table(self.vit_side, width).to(dtype)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    # -- words ------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    # -- what enters the language model -----------------------------------------------------

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.weights["language_model.model.embed_tokens.weight"][torch.tensor(list(ids))]

    def vit(self, pixels: Tensor) -> ViTStages:
        """One picture [3, H, W] through patches, tower, connector and the position table."""
        prefix = "vit_model.vision_model"
        patches = patchify(pixels.to(self.dtype), self.patch)
        rows, columns = (side // self.patch for side in pixels.shape[1:])
        ids = position_ids(rows, columns, self.vit_side)

        def norm(name: str, x: Tensor) -> Tensor:
            weight, bias = (self.weights[f"{prefix}.{name}.{end}"] for end in ("weight", "bias"))
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.vit_eps)

        x = self._linear(f"{prefix}.embeddings.patch_embedding", patches)
        x = x + self.weights[f"{prefix}.embeddings.position_embedding.weight"][ids]
        for i in range(count(self.weights, prefix + ".encoder.layers.{}.layer_norm1.weight")):
            layer = f"encoder.layers.{i}"
            h = norm(f"{layer}.layer_norm1", x)
            q, k, v = (
                self._linear(f"{prefix}.{layer}.self_attn.{name}_proj", h)
                .unflatten(-1, (self.vit_heads, -1))
                .transpose(0, 1)
                for name in "qkv"
            )
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
            mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + self._linear(f"{prefix}.{layer}.self_attn.out_proj", mixed)
            h = self._linear(f"{prefix}.{layer}.mlp.fc1", norm(f"{layer}.layer_norm2", x))
            x = x + self._linear(f"{prefix}.{layer}.mlp.fc2", F.gelu(h, approximate="tanh"))
        tower = norm("post_layernorm", x)
        h = F.gelu(self._linear("connector.fc1", tower), approximate="tanh")
        connector = self._linear("connector.fc2", h)
        return ViTStages(patches, ids, tower, connector, connector + self.vit_table[ids])

    def time_embedding(self, t: Tensor) -> Tensor:
        h = self._linear("time_embedder.mlp.0", time_features(t.to(self.dtype)))
        return self._linear("time_embedder.mlp.2", F.silu(h))

    def latent_embeddings(self, image: VAEImage) -> Tensor:
        ids = position_ids(*image.grid, self.side)
        time = self.time_embedding(torch.tensor([image.time], dtype=self.dtype))
        return self._linear("vae2llm", image.tokens.to(self.dtype)) + time + self.latent_table[ids]

    def clean_image(self, pixels: Tensor) -> VAEImage:
        """The clean VAE block of a picture [3, H, W] (posterior mean, time 0)."""
        latent = self.vae.encode(pixels[None].to(self.dtype))[0]
        grid = (latent.shape[1] // self.latent_patch, latent.shape[2] // self.latent_patch)
        return VAEImage(patchify(latent, self.latent_patch), grid)

    def lay_out(self, blocks: Sequence[Block]) -> LaidOut:
        """Tokens, positions, experts and the dense mask of one sequence (facts: the grammar)."""
        embeddings, positions, gen, block_of = [], [], [], []
        p = 0
        for number, block in enumerate(blocks):
            if isinstance(block, Text):
                ids = (self.start, *block.ids, self.end) if block.framed else block.ids
                rows, n = self.embed(ids), len(ids)
                positions += range(p, p + n)
                gen += [False] * n
                p += n
            else:
                is_vit = isinstance(block, ViTImage)
                inner = (
                    self.vit(block.pixels).embeddings if is_vit else self.latent_embeddings(block)
                )
                markers = self.embed([self.image_start, self.image_end])
                rows, n = torch.cat([markers[:1], inner, markers[1:]]), len(inner) + 2
                positions += [p] * n
                gen += [False] + [not is_vit] * len(inner) + [False]
                p += 0 if not is_vit and block.noised else 1
            embeddings.append(rows)
            block_of += [number] * n
        is_text = torch.tensor([isinstance(block, Text) for block in blocks])
        is_noised = torch.tensor([isinstance(b, VAEImage) and b.noised for b in blocks])
        owner = torch.tensor(block_of)
        q, k = torch.meshgrid(torch.arange(len(owner)), torch.arange(len(owner)), indexing="ij")
        same = owner[q] == owner[k]
        allowed = (k <= q) | (same & ~is_text[owner[k]])
        allowed &= same | ~is_noised[owner[k]]
        return LaidOut(
            torch.cat(embeddings), torch.tensor(positions), torch.tensor(gen), allowed, owner, p
        )

    # -- language model ---------------------------------------------------------------------

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [L, d], halves duplicated, computed in fp32."""
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        angles = positions.float()[:, None] * (1.0 / self.theta**exponent)
        angles = torch.cat([angles, angles], dim=1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weights[f"{name}.weight"]

    def forward(self, sequence: LaidOut) -> tuple[Tensor, Tensor]:
        """Final normed hidden states [L, H] and keys and values [layers, 2, L, kv heads, d]."""
        x = sequence.embeddings
        cos, sin = (table[:, None] for table in self.rope(sequence.positions))

        def routed(apply: Callable[[str], Tensor]) -> Tensor:
            und, gen = apply(""), apply("_moe_gen")
            return torch.where(sequence.gen.reshape(-1, *[1] * (und.ndim - 1)), gen, und)

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        def mlp(name: str, x: Tensor) -> Tensor:
            gate = F.silu(self._linear(f"{name}.gate_proj", x))
            return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", x))

        kv = []
        for i in range(
            count(self.weights, "language_model.model.layers.{}.input_layernorm.weight")
        ):
            layer = f"language_model.model.layers.{i}"
            h = routed(lambda g, n=f"{layer}.input_layernorm", x=x: self.rms_norm(n + g, x))
            q, k, v = (
                routed(
                    lambda g, n=f"{layer}.self_attn.{name}_proj", h=h: self._linear(n + g, h)
                ).unflatten(-1, (-1, self.head_size))
                for name in "qkv"
            )
            q, k = (
                rotated(
                    routed(lambda g, n=f"{layer}.self_attn.{name}", y=y: self.rms_norm(n + g, y))
                )
                for name, y in (("q_norm", q), ("k_norm", k))
            )
            kv.append(torch.stack([k, v]))
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_size)
            scores = scores.masked_fill(~sequence.allowed, float("-inf"))
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            x = x + routed(lambda g, n=f"{layer}.self_attn.o_proj", m=mixed: self._linear(n + g, m))
            h = routed(
                lambda g, n=f"{layer}.post_attention_layernorm", x=x: self.rms_norm(n + g, x)
            )
            x = x + routed(lambda g, n=f"{layer}.mlp", h=h: mlp(n + g, h))
        hidden = routed(lambda g: self.rms_norm("language_model.model.norm" + g, x))
        return hidden, torch.stack(kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._linear("language_model.lm_head", hidden)

    def prefill(self, blocks: Sequence[Block]) -> Prefill:
        """One forward over a whole context; `hidden` and `logits` are the last segment's."""
        if not blocks:
            layers = count(self.weights, "language_model.model.layers.{}.input_layernorm.weight")
            empty = torch.empty(layers, 2, 0, self.kv_heads, self.head_size, dtype=self.dtype)
            return Prefill(torch.empty(0, 0), torch.empty(0, 0), empty, 0, 0)
        sequence = self.lay_out(blocks)
        hidden, kv = self.forward(sequence)
        last = hidden[sequence.block_of == len(blocks) - 1]
        return Prefill(last, self.logits(last), kv, kv.shape[2], sequence.next_position)

    def greedy(self, blocks: Sequence[Block], steps: int) -> tuple[list[int], Tensor]:
        """`steps` argmax tokens after the start token, and the logits [steps, vocabulary] of each.

        Stops early when the end token is the choice; that token is the last one returned.
        """
        ids, rows = [self.start], []
        while len(rows) < steps:
            last = self.prefill([*blocks, Text(tuple(ids), framed=False)])
            rows.append(last.logits[-1])
            ids.append(int(rows[-1].argmax()))
            if ids[-1] == self.end:
                break
        return ids[1:], torch.stack(rows)

    def velocity(
        self, blocks: Sequence[Block], x: Tensor, grid: tuple[int, int], t: float
    ) -> Tensor:
        """Predicted velocity [N, D] at time t of the noised tokens x [N, D] after `blocks`."""
        sequence = self.lay_out([*blocks, VAEImage(x, grid, t, noised=True)])
        hidden, _ = self.forward(sequence)
        return self._linear("llm2vae", hidden[-len(x) - 1 : -1])
