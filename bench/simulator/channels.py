"""The channels of a world: from a rank to each of its peers, one transfer after another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spbench.bench.simulator.costs import Costs
from spbench.bench.simulator.message_matching import World


class Channel(NamedTuple):
    """What a send finds; each an array by position of the program's simulated ranks.

    Attributes:
        latency: in seconds.
        seconds: of the bytes on the link.
        free: when the transfer before it to the same peer has ended; to be set in place.
    """

    latency: np.ndarray
    seconds: np.ndarray
    free: np.ndarray


class Channels:
    """The channels that the programs' sends use."""

    def __init__(self, world: World, costs: Costs):
        self._world, self._costs = world, costs
        self._found: dict[tuple[int, int, int, float], Channel] = {}
        self._free: dict[tuple[int, int], np.ndarray] = {}

    def of(self, number: int, step: int) -> Channel:
        """What the send finds that is this step of that program."""
        steps = self._world.steps[number]
        peer, at_once, nbytes = steps.partners[step], steps.at_once[step], steps.nbytes[step]
        key = (number, peer, at_once, nbytes)
        if key not in self._found:
            # ranks that are not simulated take their share of the network cards too
            latency, per_byte = self._costs.transfers(
                steps.all_ranks.tolist(), steps.peers(peer).tolist(), at_once
            )
            simulated = slice(len(steps.ranks))
            free = self._free.setdefault((number, peer), np.zeros(len(steps.ranks)))
            self._found[key] = Channel(latency[simulated], nbytes * per_byte[simulated], free)
        return self._found[key]
