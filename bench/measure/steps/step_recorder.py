"""The recorder of a user's step: phases, kinds of tensors and the user's lines, without the user's help."""

import gc
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from spbench.bench.files import line_of
from spbench.bench.measure.trace import torch_internals
from spbench.bench.measure.trace.memory import PAGEABLE, ModuleCalls, tensors_in
from spbench.bench.measure.trace.meter import METERED, Call, communicates
from spbench.bench.measure.trace.recorder import BETWEEN_TWO, PRIM_DEVICE, FastRecorder, Recorder
from spbench.bench.measure.trace.torch_internals import HOST, local, on_host
from spbench.impls import OVER_HOST_LINK

#: phases that another forward of the step may follow
_AFTER_FORWARD = ("backward", "gradient_sync")
#: kinds of tensors that operators have as they are
_PLAIN = (torch_internals.FakeTensor, Tensor, nn.Parameter)
#: operators that pin memory, and that copy from their last tensor
_PIN = torch.ops.aten._pin_memory.default
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class UserPlaces(ModuleCalls):
    """Places that have the user's line next to the module: "layers.*.mlp at step.py:31". A storage of
    backward has the line that made the autograd node."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[tuple[int, str], int] = {}
        #: the first autograd node of each change of line, ascending; and the lines
        self._first, self._lines = [0], [""]

    def place(self) -> int:
        module, line = super().place(), self.line()
        if (module, line) not in self._numbers:
            name = " at ".join(filter(None, (self.names[module], line)))
            self.names.append(name)
            self._numbers[module, line] = self.names.index(name)
        return self._numbers[module, line]

    def line(self) -> str:
        """The user's line that runs, or that made the autograd node that runs."""
        node = torch_internals.backward_node()
        if node is None:
            return line_of(sys._getframe(1))
        return self._lines[bisect_right(self._first, node) - 1]

    def note_line(self) -> None:
        """Note the line in which forward makes autograd nodes."""
        node = torch_internals.next_node()
        if node > self._first[-1] and (line := line_of(sys._getframe(1))) != self._lines[-1]:
            # the operator that runs has made its node already
            self._first.append(node - 1)
            self._lines.append(line)


class StepWatcher(Recorder):
    """A :class:`Recorder` of a step that declares nothing: forward begins with the step, and with the
    first autograd node or module after a backward; the optimizer's phase with the step of an optimizer;
    between backward and the optimizer is gradient_sync."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.places = self.memory.modules = UserPlaces()
        self.memory.log.place_names = self.places.names
        self._phase, self._node, self._builds = "", 0, False
        #: backwards that run, one within another
        self._depth = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor and its like do their work by further calls, which come here
        if self._builds and communicates(func) and torch_internals.schema_of(func).name not in METERED:
            return func(*args, **(kwargs or {}))  # such as the scatter of weights that have no values
        if not self._depth and not self._paused:
            self._after_backward(func)
            self.places.note_line()
        if communicates(func) and not self._paused and self.events is not None and self.events.running:
            # the event that is written next
            self.events.builder.lines[len(self.events.builder.rows)] = self.places.line()
            if any(map(on_host, tensors_in(args))):
                self.events.builder.unpriced.add(f"{func} on the host")
        if not self._paused and self._on_host(func, args, kwargs or {}):
            return self._run_on_host(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator reads or makes tensors in the host's memory."""
        made_there = func is _PIN or kwargs.get("pin_memory") or kwargs.get("device") == HOST
        used = self.host_memory.log.sizes and func is not PRIM_DEVICE and not communicates(func)
        return bool(made_there or (used and any(map(on_host, tensors_in(args)))))

    def _run_on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator on the host's memory: a copy over the host's link, or work of the host's cores."""
        if func is torch.ops.aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is _PIN:
            pinned = self._run_on_host(torch.ops.aten.empty_like.default, args[:1], {"pin_memory": True})
            return self._run_on_host(torch.ops.aten.copy_.default, (pinned, args[0]), {})
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "device": HOST}
        result, remembered = self._run(func, tuple(args), kwargs)
        there = [*tensors_in(result), *tensors_in(args)]
        call = Call(func, args, kwargs, result, None, remembered, on_host(there[0]))
        for meter in (self.memory, self.host_memory):
            meter.see(call)
        if self.events is None or self.events not in self.meters:
            return result
        if func not in _COPIES or on_host(x := there[-1]) == call.on_host:
            self.events.see(call)
            return result
        pinned = self._is_pinned(x if on_host(x) else result)
        name = OVER_HOST_LINK[2 * (not pinned) + on_host(x)]
        self.events.see(Call(getattr(torch.ops.spbench, name).default, (result, x), {}, None))
        if not pinned or True not in (kwargs.get("non_blocking"), *args[2:]):
            self.streams.join()  # the host waits for the copy
        return result

    def _is_pinned(self, x: Tensor) -> bool:
        """Whether a tensor in the host's memory is pinned."""
        number = self.host_memory.number(x.untyped_storage())
        return number is not None and self.host_memory.log.tags.get(number) != PAGEABLE

    def _enter_patches(self, patches: ExitStack) -> None:
        super()._enter_patches(patches)
        patches.enter_context(torch_internals.foreach_of_fakes())
        patches.enter_context(torch_internals.around_shapes_of_dtensors(self.paused()))
        patches.enter_context(torch_internals.around_backward(self._in_backward()))
        before_update = register_optimizer_step_pre_hook(self._updates)
        after_update = register_optimizer_step_post_hook(lambda *_: self._updated())
        patches.callback(before_update.remove)
        patches.callback(after_update.remove)

    def _call_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._phase in _AFTER_FORWARD and not self._depth:
            self.begin("forward")
        return super()._call_module(call, module, *args, **kwargs)

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        before, self._depth = self._phase, self._depth + 1
        self.begin("backward")
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth:
                self.begin(before)
            self._node = torch_internals.next_node()

    def _after_backward(self, func: Any) -> None:
        """Begin the phase of an operator that runs after a backward; a pipeline sends before it goes on."""
        if self._phase in _AFTER_FORWARD and torch_internals.next_node() > self._node:
            self.begin("forward")
        elif self._phase == "backward" and func not in BETWEEN_TWO:
            self.begin("gradient_sync")

    def _updates(self, optimizer: Optimizer, *_: Any) -> None:
        self.begin("optimizer")
        self._tag_update(optimizer)

    def _updated(self) -> None:
        if self._depth:  # an optimizer that runs within backward
            self.begin("backward")

    def begin(self, phase: str) -> None:
        """Begin a phase of the step, unless it is the present one; outside of steps there are no phases."""
        if self._phase and phase != self._phase:
            self._phase = phase
            for meter in self.meters:
                meter.phase(phase)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Within the context, which comes before the steps, only memory is metered."""
        with torch_internals.replaced(self, {"_builds": True}), self._metering_memory():
            yield

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        with super().step(last=last):
            self._phase = "step"
            self.begin("forward")
            yield
        self._phase = ""

    # -- kinds of tensors ------------------------------------------------------------------------------------

    def tag_built(self) -> int:
        """Tag the tensors of all modules and optimizers that exist, and what else exists as inputs; returns
        the number of parameters of all ranks together, as far as this rank can tell."""
        parameters: dict[int, int] = {}
        for module in living(nn.Module):
            own = [*module.parameters(recurse=False)]
            parameters |= {id(x): x.numel() for x in own if not local(x).is_meta}
            self._tag("parameters", *own, *module.buffers(recurse=False))
        self.tag_made()
        log = self.memory.log
        for number in {abs(event) - 1 for event in log.events} - {-event - 1 for event in log.events}:
            log.tags.setdefault(number, "inputs")
        return sum(parameters.values())

    def tag_made(self) -> None:
        """Tag the optimizers' tensors that the step has made."""
        for optimizer in living(Optimizer):
            self._tag_update(optimizer)

    def _tag_update(self, optimizer: Optimizer) -> None:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            self._tag("parameters", parameter)
            if parameter.grad is not None:
                self._tag("gradients", parameter.grad)
            state = optimizer.state.get(parameter, {})
            self._tag("optimizer_state", *(x for x in state.values() if isinstance(x, Tensor)))

    def _tag(self, category: str, *tensors: Tensor) -> None:
        self.memory.tag(map(local, tensors), category, keep=category == "optimizer_state")


class StepRecorder(StepWatcher, FastRecorder):
    """A :class:`StepWatcher` of fake tensors; its arguments are those of :class:`FastRecorder`."""


def living(kind: type) -> list[Any]:
    """The objects of a class that exist."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
