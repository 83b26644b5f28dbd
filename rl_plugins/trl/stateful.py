"""What every trainer with methods does around a checkpoint, a model card and an optimizer step, whichever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rl_plugins.runtime.ranks import on_driver
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.changes import changed, load_to_numbered_cpus
from rl_plugins.trl.config import as_names
from rl_plugins.trl.model_card import methods_section
from rl_plugins.trl.saved import check_saved, resume_from, wanted_of

_Host: Any = object  # for the type checker: whatever trainer the mixin is put before


class StatefulMixin(_Host):
    """State inside the checkpoint, methods in the model card, and a finite gradient. Without methods every override
    only calls `super()`, and a resume from a checkpoint that was made with methods looks at its files first."""

    methods = MethodStack([])
    _methods_callback: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        resume_from_checkpoint = wanted_of(resume_from_checkpoint)
        if resume_from_checkpoint:
            found = on_driver(self.accelerator, lambda: resume_from(self, resume_from_checkpoint))
            if found is not None:
                check_saved(self, found)
                if self.methods:
                    load_to_numbered_cpus()
                    self._methods_callback.resume_from = resume_from_checkpoint = found
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not self.methods:
            super().save_model(output_dir, *args, **kwargs)
            return
        checkpoint = output_dir if self._methods_callback.is_checkpoint(output_dir) else None
        if checkpoint is not None:
            self._methods_callback.save_begins(checkpoint)
        with changed(self.args, method_params=as_names(self.args.method_params)):  # the arguments are saved, too
            super().save_model(output_dir, *args, **kwargs)
        if checkpoint is not None and self.args.save_only_model:
            self._methods_callback.write_state(checkpoint)

    def create_model_card(self, *args: Any, **kwargs: Any) -> Any:
        found = super().create_model_card(*args, **kwargs)
        if self.methods.names and self.is_world_process_zero():
            with open(Path(self.args.output_dir) / "README.md", "a", encoding="utf-8") as card:
                card.write(f"\n{methods_section(self.methods)}")
        return found

    def _save_rng_state(self, output_dir: str) -> None:
        """The last of the host's files in a checkpoint, but for the one that says that it is whole."""
        super()._save_rng_state(output_dir)
        if self.methods and self._methods_callback.is_checkpoint(output_dir):
            self._methods_callback.write_state(output_dir)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().training_step(*args, **kwargs)
        if self.methods:
            self._methods_callback.check_gradient()
        return result
