"""The base classes of peers: strategies whose attention is the code of another package."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.discovery import INSTALL, absent
from spbench.impls.layout import Site, Unsupported
from spbench.impls.peers import flash_attn_stand_in
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacementOptions
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import HEADS, POSITIONS, Ulysses


class Peer(Strategy):
    """A strategy that calls the attention of another package on more than one rank.

    A derived class lists in ``requires`` the distributions that it needs, and imports from these in
    :meth:`load`, so that its module can be imported without them. Its gradients come from the other package,
    so a peer is measured only if its verification is green (:mod:`measure.verify.cases`).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.group is not None:
            assert self.place.mesh is not None
            if self.place.mesh.device_type != "cuda":
                flash_attn_stand_in.install()
            with _disable_current_modes():  # modules that compile or allocate as they are imported
                self.load()

    def load(self) -> None:
        """Import the code of the distributions in :attr:`requires`; called on each of several ranks, after
        their process groups are made."""
        raise NotImplementedError

    def _check_own(self, sites: Sequence[Site]) -> None:
        if missing := absent(self.requires):
            raise Unsupported(f"{self.name} needs {' and '.join(missing)}", INSTALL)
        super()._check_own(sites)


def imported(path: str) -> Any:
    """The value called ``name`` in a module, which is imported, from a path "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class RingPeer(Peer, RingAttention):
    """Ring Attention by functions of another package, which take q, k, v [B, L/N, Z, A], ``causal`` and
    ``group`` and return [B, L/N, Z, A]."""

    meets = frozenset({"attention", "causal_attention", "full_attention"})
    options_type = PlacementOptions  # type: ignore[assignment]  # fewer options than RingAttention's
    #: the path "module:function" for each placement
    functions: ClassVar[Mapping[str, str]]

    def heads_sent(self, dims: Mapping[str, int]) -> int:
        return dims.get("G", dims["Z"])

    def load(self) -> None:
        self._functions = {placement: imported(path) for placement, path in self.functions.items()}

    def attend(  # type: ignore[override]  # it heeds no sinks
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings
    ) -> Tensor:
        placement = meetings.placement
        # without a mask the placement makes no difference, and only the contiguous functions need no mask
        function = self._functions[placement or "contiguous"]
        by_position = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        o: Tensor = function(*by_position, causal=placement is not None, group=self.group)
        return o.transpose(1, 2)


class UlyssesPeer(Peer, Ulysses):
    """Ulysses by a layer of another package."""

    meets = frozenset({"causal_attention", "full_attention"})
    can_enclose = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The layer's attention, scores scaled by A**-0.5: q [B, L/N, Z, A], k, v [B, L/N, G, A] -> [B, L/N,
        Z, A]."""
        raise NotImplementedError

    def check_sizes(self, sites: Sequence[Site]) -> None:
        super().check_sizes(sites)
        if self.options.pad_heads:
            raise Unsupported(f"{self.name} does not pad heads", "leave the option pad_heads out")
        for site in sites:
            if (kv_heads := site.dims.get("G", self.size)) % self.size:
                raise Unsupported(
                    f"{self.name} does not repeat {kv_heads} heads of keys and values for {self.size} ranks",
                    "use ulysses",
                )

    def causal_attention(  # type: ignore[override]  # it heeds no sinks
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL
    ) -> Tensor:
        if self.size == 1:
            return super().causal_attention(q, k, v, attended)
        return self._by_position(q, k, v, causal=True)

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().full_attention(q, k, v)
        return self._by_position(q, k, v, causal=False)

    def _by_position(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        q, k, v = (x.transpose(HEADS, POSITIONS) for x in (q, k, v))
        return self.attend(q, k, v, causal).transpose(HEADS, POSITIONS)
