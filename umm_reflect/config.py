"""The shape of a BAGEL model: what `config.json`, `llm_config.json`, `vit_config.json` and the
tensors say.

Source of the numbers: the BAGEL-7B-MoT release. Sizes that the released files leave out (grid
sides, the VAE) are read from the tensors by `checkpoint.py`; the values here are then only the
fallback.

    python -m umm_reflect.config FOLDER        # prints what a checkpoint folder describes
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from umm_reflect.errors import CheckpointError


@dataclass(frozen=True)
class LLMConfig:
    """A Qwen2-shaped decoder, every layer of which holds two sets of weights (experts)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value "
                "heads: "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")


@dataclass(frozen=True)
class ViTConfig:
    """A SigLIP tower. `num_layers` counts the layers in the weights (the file's number minus
    one).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    grid_side: int
    layer_norm_eps: float


@dataclass(frozen=True)
class VAEConfig:
    """The FLUX autoencoder. `num_groups` is 32 in the release and is our own key in
    `vae_config`.
    """

    resolution: int
    in_channels: int
    out_ch: int
    ch: int
    ch_mult: tuple[int, ...]
    num_res_blocks: int
    z_channels: int
    downsample: int
    scale_factor: float
    shift_factor: float
    num_groups: int = 32

    def __post_init__(self) -> None:
        if self.downsample != 2 ** (len(self.ch_mult) - 1):
            raise ValueError(
                f"VAE downsample {self.downsample} does not fit {len(self.ch_mult)} levels: "
                f"expected {2 ** (len(self.ch_mult) - 1)}"
            )


@dataclass(frozen=True)
class BagelConfig:
    """Everything that is needed to build the modules of one model."""

    llm: LLMConfig
    vit: ViTConfig
    vae: VAEConfig
    latent_patch_size: int
    latent_grid_side: int

    @property
    def latent_dim(self) -> int:
        """Numbers per latent token: patch * patch * channels (64 in the release)."""
        return self.latent_patch_size**2 * self.vae.z_channels

    @property
    def latent_stride(self) -> int:
        """Pixels per latent token side (16 in the release)."""
        return self.vae.downsample * self.latent_patch_size

    @classmethod
    def from_folder(cls, folder: str | Path) -> BagelConfig:
        """Read the three config files of a BAGEL folder.

        Raises CheckpointError when a file or a key is missing; the forced values of the original
        loader (QK norm, untied head, one ViT layer dropped) are applied here. Grid sides and VAE
        sizes that `config.json` lacks get the values of the release and are corrected from the
        tensors by `checkpoint.py`.
        """
        folder = Path(folder)
        llm = _read_json(folder / "llm_config.json")
        vit = _read_json(folder / "vit_config.json")
        path = folder / "config.json"
        top = _read_json(path) if path.exists() else {}
        return cls(
            llm=_llm_config(llm, folder / "llm_config.json"),
            vit=_vit_config(vit, top, folder / "vit_config.json"),
            vae=_vae_config(top.get("vae_config") or {}),
            latent_patch_size=_count(top, "latent_patch_size", path, 2),
            latent_grid_side=_count(top, "max_latent_size", path, 64),
        )

    def to_files(self, folder: str | Path, *, bos_token_id: int, eos_token_id: int) -> None:
        """Write `config.json`, `llm_config.json` and `vit_config.json` in the layout of the
        release.
        """
        folder = Path(folder)
        llm = {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "head_dim": self.llm.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.llm.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.llm.intermediate_size,
            "max_position_embeddings": 32768,
            "model_type": "qwen2",
            "num_attention_heads": self.llm.num_heads,
            "num_hidden_layers": self.llm.num_layers,
            "num_key_value_heads": self.llm.num_kv_heads,
            "rms_norm_eps": self.llm.rms_norm_eps,
            "rope_theta": self.llm.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.llm.vocab_size,
        }
        vit = {
            "attention_dropout": 0.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": self.vit.hidden_size,
            "image_size": self.vit.grid_side * self.vit.patch_size,
            "intermediate_size": self.vit.intermediate_size,
            "layer_norm_eps": self.vit.layer_norm_eps,
            "model_type": "siglip_vision_model",
            "num_attention_heads": self.vit.num_heads,
            "num_channels": 3,
            "num_hidden_layers": self.vit.num_layers + 1,
            "patch_size": self.vit.patch_size,
        }
        top = {
            "architectures": ["BagelForConditionalGeneration"],
            "model_type": "bagel",
            "visual_gen": True,
            "visual_und": True,
            "latent_patch_size": self.latent_patch_size,
            "max_latent_size": self.latent_grid_side,
            "vit_max_num_patch_per_side": self.vit.grid_side,
            "connector_act": "gelu_pytorch_tanh",
            "interpolate_pos": False,
            "vae_config": {**asdict(self.vae), "ch_mult": list(self.vae.ch_mult)},
            "llm_config": llm,
            "vit_config": vit,
            "torch_dtype": "bfloat16",
        }
        files = {"config.json": top, "llm_config.json": llm, "vit_config.json": vit}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def with_sides(self, *, latent_grid_side: int, vit_grid_side: int) -> BagelConfig:
        """The same model with the grid sides that its tensors have."""
        vit = replace(self.vit, grid_side=vit_grid_side)
        return replace(self, vit=vit, latent_grid_side=latent_grid_side)


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} is not a BAGEL checkpoint folder: {path.name} is missing",
            "Name a folder with llm_config.json, vit_config.json, ema.safetensors, ae.safetensors",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not readable as JSON ({error})", "Fetch the file again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object", "Fetch the file again")
    return content


def _count(content: dict, key: str, path: Path, default: int | None = None) -> int:
    """A whole number above 0; CheckpointError that names the key for anything else."""
    value = content.get(key, default)
    if value is None:
        raise CheckpointError(
            f"{path} has no key {key!r}", "The file belongs to another kind of model"
        )
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{path}: {key} is {value!r}, which is no whole number above 0", "Fetch it again"
        )
    return value


def _llm_config(content: dict, path: Path) -> LLMConfig:
    heads = _count(content, "num_attention_heads", path)
    hidden = _count(content, "hidden_size", path)
    # transformers 5 nests the value; the original's class default (1e4) is wrong for every
    # released file
    nested = content.get("rope_parameters") or {}
    return LLMConfig(
        hidden_size=hidden,
        num_layers=_count(content, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=_count(content, "num_key_value_heads", path),
        head_dim=content.get("head_dim") or hidden // heads,
        intermediate_size=_count(content, "intermediate_size", path),
        vocab_size=_count(content, "vocab_size", path),
        rms_norm_eps=content.get("rms_norm_eps", 1e-6),
        rope_theta=float(content.get("rope_theta") or nested.get("rope_theta", 1e6)),
    )


def _vit_config(content: dict, top: dict, path: Path) -> ViTConfig:
    return ViTConfig(
        hidden_size=_count(content, "hidden_size", path),
        num_layers=_count(content, "num_hidden_layers", path) - 1,
        num_heads=_count(content, "num_attention_heads", path),
        intermediate_size=_count(content, "intermediate_size", path),
        patch_size=_count(content, "patch_size", path),
        grid_side=_count(top, "vit_max_num_patch_per_side", path.with_name("config.json"), 70),
        layer_norm_eps=content.get("layer_norm_eps", 1e-6),
    )


def _vae_config(content: dict) -> VAEConfig:
    flux = asdict(FLUX_VAE)
    known = {key: content.get(key, flux[key]) for key in flux}
    return VAEConfig(**{**known, "ch_mult": tuple(known["ch_mult"])})


FLUX_VAE = VAEConfig(
    resolution=256,
    in_channels=3,
    out_ch=3,
    ch=128,
    ch_mult=(1, 2, 4, 4),
    num_res_blocks=2,
    z_channels=16,
    downsample=8,
    scale_factor=0.3611,
    shift_factor=0.1159,
)

BAGEL_7B_MOT = BagelConfig(
    llm=LLMConfig(
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152064,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    ),
    vit=ViTConfig(
        hidden_size=1152,
        num_layers=26,
        num_heads=16,
        intermediate_size=4304,
        patch_size=14,
        grid_side=70,
        layer_norm_eps=1e-6,
    ),
    vae=FLUX_VAE,
    latent_patch_size=2,
    latent_grid_side=64,
)

# The model that is trained on the shapes world and shipped: 128 px, 64 latent and 64 ViT tokens an
# image.
NANO = BagelConfig(
    llm=LLMConfig(
        hidden_size=256,
        num_layers=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=704,
        vocab_size=1024,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    ),
    vit=ViTConfig(
        hidden_size=192,
        num_layers=4,
        num_heads=3,
        intermediate_size=512,
        patch_size=14,
        grid_side=8,
        layer_norm_eps=1e-6,
    ),
    vae=VAEConfig(
        resolution=128,
        in_channels=3,
        out_ch=3,
        ch=32,
        ch_mult=(1, 2, 2, 4),
        num_res_blocks=1,
        z_channels=16,
        downsample=8,
        scale_factor=1.0,
        shift_factor=0.0,
        num_groups=8,
    ),
    latent_patch_size=2,
    latent_grid_side=8,
)


if __name__ == "__main__":
    import sys
    from pprint import pprint

    pprint(BagelConfig.from_folder(sys.argv[1]))
