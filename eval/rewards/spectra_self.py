"""SpectraReward with BAGEL's own weights: no other model is needed to train it.

    SelfSpectra.load(Settings(backend="self", model="ByteDance-Seed/BAGEL-7B-MoT"))
    SelfSpectra(bagel, transforms, settings)           # the weights under training, in process

The context holds the image as latents and as ViT patches, then the start token and the prompt; the
mean is over the prompt's tokens (the end token is no target), as in self_spectrareward of the
release. After the weights have changed call `forget()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from eval.rewards.registry import Row, facts, hashes
from eval.rewards.spectra import Likelihood, Settings, check, targets_of, verdict_of
from eval.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from umm_reflect.images import Transforms
    from umm_reflect.model import Bagel

KEPT_BYTES = 1 << 28  # each image is looked at once, so little of what was read is kept


class SelfSpectra:
    """Looks with a BAGEL that is in memory."""

    def __init__(
        self, bagel: Bagel, transforms: Transforms, settings: Settings, folder: Path | None = None
    ):
        from umm_reflect.generate import Engine

        self.settings = settings
        self.bagel, self.transforms = bagel, transforms
        self._folder = folder
        self._engine = Engine(bagel, KEPT_BYTES)

    @classmethod
    def load(cls, settings: Settings) -> SelfSpectra:
        """The model in a folder, or of a hub id."""
        from umm_reflect import Bagel, hub

        folder = hub.resolve(settings.model)
        bagel = Bagel.from_pretrained(str(folder), device=settings.device, dtype=settings.dtype)
        return cls(bagel, hub.profile(folder).transforms, settings, folder)

    def forget(self) -> None:
        """The weights have changed."""
        self._engine.forget()

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        targets = targets_of(self.settings, images, rows)
        size = self.settings.batch_size
        return [
            verdict_of(found)
            for start in range(0, len(images), size)
            for found in self.likelihoods(
                images[start : start + size], targets[start : start + size]
            )
        ]

    def likelihoods(self, images: Sequence[Image], targets: Sequence[str]) -> list[Likelihood]:
        """The log-probabilities of each text after its image, in one forward."""
        import torch

        from umm_reflect import batch as batching
        from umm_reflect.cache import assemble
        from umm_reflect.context import Context
        from umm_reflect.layout import Row as LayoutRow
        from umm_reflect.layout import text_block

        bagel = self.bagel
        ids = [tuple(bagel.tokens.encode(target)) for target in targets]
        contexts = [Context.of(self.transforms.segment(image.convert("RGB"))) for image in images]
        with torch.inference_mode():
            caches = self._engine.caches(contexts)
            rows = [
                LayoutRow((text_block((bagel.frame.start, *own), cache.position),), cache.length)
                for own, cache in zip(ids, caches, strict=True)
            ]
            place = {"device": bagel.device, "dtype": bagel.dtype}
            workspace = assemble(caches, [row.length for row in rows], bagel.config.llm, **place)
            batch = batching.build(
                rows,
                latent_grid_side=bagel.config.latent_grid_side,
                device=bagel.device,
                workspace=workspace,
                backend=bagel.attn,
            )
            x_UD = bagel.embed_ids(batch.ids_U)
            hidden_UD, _ = bagel(x_UD, x_UD[:0], batch.position_T, batch.attend)
            found = []
            for row_UD, own in zip(hidden_UD.split([r.length for r in rows]), ids, strict=True):
                logprobs_TV = bagel.logits(row_UD[:-1]).float().log_softmax(-1)
                target_T = torch.tensor(own, device=bagel.device)
                picked = logprobs_TV.gather(-1, target_T[:, None])[:, 0].tolist()
                words = tuple(bagel.tokens.decode([token]) for token in own)
                found.append(Likelihood(words, tuple(picked)))
        return found

    def manifest(self) -> dict[str, Any]:
        files = hashes(self._folder) if self._folder else {}
        return facts("spectra", self.settings, ["torch"], files)

    def check(self) -> None:
        check(self, self.settings)

    def close(self) -> None:
        self._engine.forget()
