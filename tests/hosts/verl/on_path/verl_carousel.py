"""Agent-loop workers that build the methods of every step anew, as the trainer `carousel` does on the driver."""

from __future__ import annotations

import dataclasses

from verl_probes import plain

from rl_plugins.verl.workers import ProgramWorker


class CarouselWorker(ProgramWorker):
    def methods_of(self, prompt):
        places = self.config.carousel
        place = places[(int(prompt["global_steps"]) - 1) % len(places)]
        stacks = self.__dict__.setdefault("stacks", {})
        if place not in stacks:
            names = tuple(n for n in place.split("+") if n)
            everything = {**self._settings.method_params, **plain(self.config.get("carousel_params", {}))}
            params = {k: dict(v) for k, v in everything.items() if k in names}
            stacks[place] = dataclasses.replace(self._settings, methods=names, method_params=params).stack()
        return stacks[place]
