"""DeepSpeed ZeRO-2 and ZeRO-3 behind the learner, through `accelerate`.

    learner = Learner(bagel, start("deepspeed"), "deepspeed", OptimizerSettings(...), ...)

`accelerate launch --config_file scripts/accelerate/zero3.yaml` chooses the stage and offloading;
without it stage 2. AdamW alone, no moving average. States that are saved hold whole tensors, each
from one process, under the names of every other strategy, which can read them.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from umm_reflect.errors import UsageError, UserError
from umm_reflect.training.masters import OptimizerSettings, StepReport
from umm_reflect.training.parts import empty_batch, with_all_parts
from umm_reflect.training.processes import Processes
from umm_reflect.training.sharding import without_hooks

# Our names of what AdamW keeps, and torch's.
MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


class _CheckedAdamW(torch.optim.AdamW):
    """Steps only when the engine has a finite gradient norm (ZeRO-3 looks at it in fp16 alone)."""

    engine = None
    applied = False

    def step(self, closure=None):
        norm = self.engine.optimizer._global_grad_norm  # -1 stands for nan and infinity
        self.applied = math.isfinite(norm) and norm >= 0
        return super().step(closure) if self.applied else None


class DeepSpeed:
    """A layout as those of `sharding.py`; the engine owns masters, moments and gradients."""

    def __init__(
        self,
        step: nn.Module,
        names: list[str],
        settings: OptimizerSettings,
        processes: Processes,
        dtype: torch.dtype,
        legacy_bf16: bool,
    ):
        if settings.name != "adamw" or settings.ema_decay is not None or legacy_bf16:
            raise UsageError(
                "deepspeed trains with adamw, without a moving average, with fp32 masters",
                "Choose the strategy fsdp2 for the others",
            )
        missing = [n for n in ("accelerate", "deepspeed") if importlib.util.find_spec(n) is None]
        if missing:
            raise UserError(
                f"{' and '.join(missing)} not installed", "pip install 'umm-reflect[deepspeed]'"
            )
        self.processes, self.names, self.settings = processes, names, settings
        named = dict(step.bagel.named_parameters())
        self.parameters = [named[name] for name in names]
        self.shapes = [p.shape for p in self.parameters]
        self.step_count = torch.zeros((), device=processes.device)
        self._build(step, dtype)

    def _build(self, step: nn.Module, dtype: torch.dtype) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        settings = self.settings
        os.environ.setdefault("LOCAL_RANK", str(self.processes.local_rank))
        plugin = DeepSpeedPlugin(gradient_clipping=settings.clip_norm or 0.0)
        self.stage = plugin.zero_stage
        if self.stage not in (2, 3):
            raise UsageError(f"deepspeed is set to ZeRO-{self.stage}", "Choose stage 2 or 3")
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": self.processes.world,  # accelerate counts none on a CPU
            "gradient_accumulation_steps": 1,  # `backward` says where an update ends
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # where the launch file offloads
        }
        mixed = {torch.bfloat16: "bf16", torch.float32: "no"}[dtype]
        groups = [g for g in settings.groups(self.names, self.shapes) if g.entries]
        self._rates = [group.lr for group in groups]
        self._adamw = _CheckedAdamW(
            [
                {
                    "params": [self.parameters[i] for i in group.entries],
                    "lr": group.lr,
                    "weight_decay": group.weight_decay,
                }
                for group in groups
            ],
            betas=settings.betas,
            eps=settings.eps,
        )
        accelerator = Accelerator(mixed_precision=mixed, deepspeed_plugin=plugin)
        self.module, _ = accelerator.prepare(step, self._adamw)
        self._adamw.engine = self.module
        self._first_step()

    def _first_step(self) -> None:
        """An update of nothing at rate zero, after which the moments exist and can be loaded."""
        config = self.module.module.bagel.config
        batch = empty_batch(config).to(self.processes.device)
        nothing = torch.zeros(0, device=self.processes.device), batch.latent_BGC
        of_words_S, *_, velocity_BGC = self.module(*with_all_parts(batch, *nothing, config))
        self.backward(0.0 * (of_words_S.sum() + velocity_BGC.sum()), last=True)
        self.step(0.0)
        self._count(0)
        if self.stage == 2:  # it looks for moments after the first of its groups has made some
            zero = self.module.optimizer
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _count(self, steps: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(steps)
        self.step_count.fill_(steps)

    # --- one update -------------------------------------------------------------------------------

    def backward(self, loss: Tensor, last: bool) -> None:
        self.module.set_gradient_accumulation_boundary(is_boundary=last)
        self.module.backward(loss)

    def step(self, lr_factor: float) -> StepReport:
        for group, lr in zip(self.module.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = lr * lr_factor
        self._adamw.applied = False
        self.module.step()
        applied = torch.tensor(self._adamw.applied, device=self.processes.device)
        self.step_count.add_(applied.float())
        norm = self.module.get_global_grad_norm()
        value = float(norm) if self._adamw.applied else math.inf
        return StepReport(torch.tensor(value, device=self.processes.device), applied)

    # --- weights ----------------------------------------------------------------------------------

    def trained(self, entry: int, averaged: bool) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if averaged:
            raise ValueError("there is no moving average under deepspeed")
        return safe_get_full_fp32_param(self.parameters[entry])

    def frozen(self, name: str, tensor: Tensor) -> Tensor:
        p = dict(self.module.module.bagel.named_parameters()).get(name)
        if p is None or self.stage < 3:
            return tensor
        with self._gather([p]):
            return p.detach().clone()

    def _gather(self, parameters: list[nn.Parameter]) -> AbstractContextManager:
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(parameters)

    @contextmanager
    def gathered(self, averaged: bool) -> Iterator[None]:
        if averaged:
            raise ValueError("there is no moving average under deepspeed")
        bagel = self.module.module.bagel
        with self._gather(list(bagel.parameters())), without_hooks(bagel.modules()):
            yield

    # --- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU, each on one process."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        state = {"step_count": self.step_count}
        for i, (name, p) in enumerate(zip(self.names, self.parameters, strict=True)):
            whole = {f"master/{name}": safe_get_full_fp32_param(p)}
            for ours, theirs in MOMENTS.items():
                whole[f"{ours}/{name}"] = safe_get_full_optimizer_state(p, theirs)
            if i % self.processes.world == self.processes.rank:
                state |= {key: tensor.cpu() for key, tensor in whole.items()}
        return state

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"step_count": ()}
        for name, shape in zip(self.names, self.shapes, strict=True):
            shapes |= {f"{part}/{name}": tuple(shape) for part in ("master", *MOMENTS)}
        return shapes

    def load(self, state: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        steps = int(state["step_count"])  # our own tensor, it may be
        for i, p in enumerate(self.parameters):
            safe_set_full_fp32_param(p, self._from_owner(i, "master", state))
        self._first_step()  # copies masters into the working weights
        for i, p in enumerate(self.parameters):
            for ours, theirs in MOMENTS.items():
                safe_set_full_optimizer_state(p, self._from_owner(i, ours, state), theirs)
        self._count(steps)

    def _from_owner(self, entry: int, part: str, state: dict[str, Tensor]) -> Tensor:
        whole = torch.empty(self.shapes[entry], device=self.processes.device)
        owner = entry % self.processes.world
        if owner == self.processes.rank:
            whole.copy_(state[f"{part}/{self.names[entry]}"])
        dist.broadcast(whole, owner)
        return whole
