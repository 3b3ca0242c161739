"""The SigLIP tower and its connector, over packed patches of any number of images.

Legend: N patches of all images together, W tower width, D model width. Names of the modules are
the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from umm_reflect.attention import Backend, packed_attention
from umm_reflect.config import ViTConfig


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_NW: Tensor, lengths: Sequence[int], backend: Backend) -> Tensor:
        q, k, v = (
            proj(x_NW).unflatten(-1, (self.heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(packed_attention(q, k, v, lengths, backend).flatten(1))


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class _EncoderLayer(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn = _SelfAttention(width, config.num_heads)
        self.layer_norm1 = nn.LayerNorm(width, eps=eps)
        self.mlp = _MLP(width, config.intermediate_size)
        self.layer_norm2 = nn.LayerNorm(width, eps=eps)

    def forward(self, x_NW: Tensor, lengths: Sequence[int], backend: Backend) -> Tensor:
        x_NW = x_NW + self.self_attn(self.layer_norm1(x_NW), lengths, backend)
        return x_NW + self.mlp(self.layer_norm2(x_NW))


class _Encoder(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.layers = nn.ModuleList(_EncoderLayer(config) for _ in range(config.num_layers))


class _Embeddings(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        # a linear over flattened patches, (row, column, channel) inside, as the checkpoint has it
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.grid_side**2, config.hidden_size)


class _VisionModel(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class ViT(nn.Module):
    """Patches → features: no class token, no pooling, full attention inside each image."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.vision_model = _VisionModel(config)

    def forward(
        self, patches_NP: Tensor, ids_N: Tensor, lengths: Sequence[int], backend: Backend = "auto"
    ) -> Tensor:
        """patches_NP: [N, 3 * patch²] in [-1, 1]; ids_N: grid cell row * side + column; lengths:
        patches per image.

        Returns [N, W] after the last layer norm.
        """
        model = self.vision_model
        dtype = model.embeddings.patch_embedding.weight.dtype
        x = model.embeddings.patch_embedding(patches_NP.to(dtype))
        x = x + model.embeddings.position_embedding(ids_N)
        for layer in model.encoder.layers:
            x = layer(x, lengths, backend)
        return model.post_layernorm(x)


class Connector(nn.Module):
    """Tower width → model width, two layers with a tanh GELU."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PositionTable(nn.Module):
    """A fixed 2-D sin-cos table, computed in fp32 (the stored copy differs only by rounding)."""

    def __init__(self, side: int, width: int):
        super().__init__()
        self.side, self.width = side, width
        self.register_buffer("pos_embed", sincos_table(side, width))

    def forward(self, ids_N: Tensor) -> Tensor:
        return self.pos_embed[ids_N]


def sincos_table(side: int, width: int) -> Tensor:
    """[side², width] fp32: the first half of the width encodes the column, the second the row.

    Each half holds sines, then cosines, of position * 10000^(-k / (width / 4)).
    """
    quarter = width // 4
    rates = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    column = line[None, :, :].expand(side, side, -1)
    row = line[:, None, :].expand(side, side, -1)
    return torch.cat([column, row], dim=-1).reshape(side * side, width).float()
