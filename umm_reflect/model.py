"""BAGEL: a Mixture-of-Transformers decoder over text, ViT patches and VAE latents. One forward for
everything.

Legend: U understanding tokens, G generation tokens (VAE latents), T = U + G in that order, D
hidden width, H heads, K key-value heads, C numbers per latent token. Module names are the
checkpoint's, so the state dict is the file.

Every layer holds two sets of weights; a token's kind picks one: latents use `*_moe_gen`, all
others the plain names. Tokens are kept apart by kind, so that picking costs nothing; only
attention sees both (`attention.Attend`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from umm_reflect.attention import Attend, Backend
from umm_reflect.config import BagelConfig, LLMConfig
from umm_reflect.vit import Connector, PositionTable, ViT

EXPERTS = ("", "_moe_gen")
TIME_FREQUENCIES = 128


class RMSNorm(nn.Module):
    """Root-mean-square norm, the mean in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _operations["norm"](x, self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self, config: LLMConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    """Projections and head norms of both experts."""

    def __init__(self, config: LLMConfig):
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        self.head_dim = d
        for expert in EXPERTS:
            self.add_module("q_proj" + expert, nn.Linear(width, config.num_heads * d))
            self.add_module("k_proj" + expert, nn.Linear(width, config.num_kv_heads * d))
            self.add_module("v_proj" + expert, nn.Linear(width, config.num_kv_heads * d))
            self.add_module("o_proj" + expert, nn.Linear(config.num_heads * d, width, bias=False))
            self.add_module("q_norm" + expert, RMSNorm(d, config.rms_norm_eps))
            self.add_module("k_norm" + expert, RMSNorm(d, config.rms_norm_eps))

    def qkv(
        self, x: Tensor, rope: tuple[Tensor, Tensor], expert: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T_e, D] → q [T_e, H, d], k and v [T_e, K, d]; q and k normed per head, then
        rotated.
        """
        q, k, v = (
            self.get_submodule(name + expert)(x).unflatten(-1, (-1, self.head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        norms = (self.get_submodule(name + expert) for name in ("q_norm", "k_norm"))
        q, k = (
            _operations["norm_rotate"](x, norm.weight, norm.eps, *rope)
            for x, norm in zip((q, k), norms, strict=True)
        )
        return q, k, v


class DecoderLayer(nn.Module):
    def __init__(self, config: LLMConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        for expert in EXPERTS:
            self.add_module("mlp" + expert, MLP(config))
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.add_module(name + expert, RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, parts: list[Tensor], ropes: list, attend: Attend, index: int) -> list[Tensor]:
        """parts: hidden states per expert [T_e, D]; a part may have no tokens and then costs
        nothing.
        """
        used = [
            (e, x, rope) for e, x, rope in zip(EXPERTS, parts, ropes, strict=True) if x.shape[0]
        ]
        qkv = [
            self.self_attn.qkv(self.get_submodule("input_layernorm" + e)(x), rope, e)
            for e, x, rope in used
        ]
        mixed = iter(attend(index, *(list(column) for column in zip(*qkv, strict=True))))
        out = []
        for expert, x in zip(EXPERTS, parts, strict=True):
            if x.shape[0]:
                x = x + self.self_attn.get_submodule("o_proj" + expert)(next(mixed))
                normed = self.get_submodule("post_attention_layernorm" + expert)(x)
                x = x + self.get_submodule("mlp" + expert)(normed)
            out.append(x)
        return out


class Decoder(nn.Module):
    def __init__(self, config: LLMConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        for expert in EXPERTS:
            self.add_module("norm" + expert, RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self,
        x_UD: Tensor,
        x_GD: Tensor,
        position_T: Tensor,
        attend: Attend,
        *,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norms of both experts: ([U, D], [G, D]).

        position_T: RoPE positions, understanding tokens first. recompute: save memory in training
        by running each layer again in the backward pass.
        """
        parts = [x_UD, x_GD]
        cos, sin = rope_tables(position_T, self.config)
        sizes = [x_UD.shape[0], x_GD.shape[0]]
        ropes = list(zip(cos.split(sizes), sin.split(sizes), strict=True))
        for index, layer in enumerate(self.layers):
            if recompute:
                parts = checkpoint(layer, parts, ropes, attend, index, use_reentrant=False)
            else:
                parts = layer(parts, ropes, attend, index)
        return self.norm(parts[0]), self.norm_moe_gen(parts[1])


class LanguageModel(nn.Module):
    def __init__(self, config: LLMConfig):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class TimeEmbedder(nn.Module):
    """Diffusion time in [0, 1] (not times 1000) → model width: [cos | sin] features through two
    layers.
    """

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(self, time_N: Tensor) -> Tensor:
        return self.mlp(time_features(time_N).to(self.mlp[0].weight.dtype))


class Bagel(nn.Module):
    """The whole unified model except the VAE, which hangs on `vae` outside of the state dict.

    `tokens` and `frame` are set by the loader; `attn` chooses the attention kernel, `capture`
    whether `say` captures its steps into CUDA graphs (None: where it pays, which is on a GPU for
    texts that may be long; False: never).
    """

    def __init__(self, config: BagelConfig):
        super().__init__()
        self.config = config
        width = config.llm.hidden_size
        self.language_model = LanguageModel(config.llm)
        self.time_embedder = TimeEmbedder(width)
        self.vae2llm = nn.Linear(config.latent_dim, width)
        self.llm2vae = nn.Linear(width, config.latent_dim)
        self.latent_pos_embed = PositionTable(config.latent_grid_side, width)
        self.vit_model = ViT(config.vit)
        self.connector = Connector(config.vit.hidden_size, width)
        self.vit_pos_embed = PositionTable(config.vit.grid_side, width)
        self.attn: Backend = "auto"
        self.capture: bool | None = None

    @classmethod
    def from_pretrained(cls, name: str, **options) -> Bagel:
        """Load a folder, a hub id or `id@revision`; see `umm_reflect.checkpoint.load` for the
        options.
        """
        from umm_reflect.checkpoint import load

        return load(name, **options)

    @property
    def device(self) -> torch.device:
        return self.vae2llm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vae2llm.weight.dtype

    def embed_ids(self, ids_U: Tensor) -> Tensor:
        """Token ids → [U, D]."""
        return self.language_model.model.embed_tokens(ids_U)

    def embed_latents(self, latent_GC: Tensor, time_G: Tensor, cell_G: Tensor) -> Tensor:
        """Latent tokens at diffusion times `time_G` and grid cells `cell_G` → [G, D].

        latent_GC: [G, C] (row in patch, column in patch, channel); time_G may be one value for
        all: [1].
        """
        time = self.time_embedder(time_G)
        table = self.latent_pos_embed(cell_G).to(time.dtype)
        return self.vae2llm(latent_GC.to(time.dtype)) + time + table

    def embed_patches(self, patches_NP: Tensor, ids_N: Tensor, lengths: list[int]) -> Tensor:
        """ViT patches of one or more images → what enters the language model: [N, D]."""
        features = self.connector(self.vit_model(patches_NP, ids_N, lengths, self.attn))
        return features + self.vit_pos_embed(ids_N).to(features.dtype)

    def forward(self, x_UD: Tensor, x_GD: Tensor, position_T: Tensor, attend: Attend, **options):
        """See `Decoder.forward`: ([U, D], [G, D])."""
        return self.language_model.model(x_UD, x_GD, position_T, attend, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of understanding tokens → [.., vocabulary]."""
        return self.language_model.lm_head(hidden)

    def velocity(self, hidden_GD: Tensor) -> Tensor:
        """Hidden states of latent tokens → velocity (noise - clean) [G, C]."""
        return self.llm2vae(hidden_GD)


def rope_tables(position_T: Tensor, config: LLMConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, head_dim] in fp32, each half the same (NeoX style)."""
    half = torch.arange(0, config.head_dim, 2, device=position_T.device, dtype=torch.float32)
    rates = 1.0 / config.rope_theta ** (half / config.head_dim)
    angles = position_T.float()[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_rotate(x_THD: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm of each head, then rotary positions in fp32, half-split (not interleaved)."""
    x = norm(x_THD, weight, eps).float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x_THD.dtype)


_operations = {"norm": norm, "norm_rotate": norm_rotate}


def compile_operations() -> None:
    """Fuse the norms and rotations of every model in this process, for training on a GPU.

    Torch's own norm backward takes a third of a nano step; everything works without this.
    """

    def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def plain_norm_rotate(x, weight, eps, cos, sin):
        normed = plain_norm(x, weight, eps).float()
        first, second = normed.chunk(2, dim=-1)
        return (normed * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

    _operations["norm"] = torch.compile(plain_norm, dynamic=True)
    _operations["norm_rotate"] = torch.compile(plain_norm_rotate, dynamic=True)


def time_features(time_N: Tensor) -> Tensor:
    """[N] → [N, 256] fp32: cosines, then sines, of time * exp(-ln(10000) k / 128)."""
    k = torch.arange(TIME_FREQUENCIES, device=time_N.device, dtype=torch.float32)
    rates = torch.exp(-torch.log(torch.tensor(10000.0)) * k / TIME_FREQUENCIES)
    angles = time_N.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
