"""Checks of devices and ranks: NVIDIA's driver, GPUs and their links; torch on these GPUs; a step on virtual
ranks; and two real ranks on this machine's CPUs.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spbench.bench import measure
from spbench.bench.measure import Nvml, NvmlProblem
from spbench.bench.tools.doctor.diagnosis import Observation
from spbench.bench.units import GIB

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from spbench.bench.cell import Cell

#: the most NVLinks of a GPU
_LINKS = 36
#: the connection between two GPUs in words, by NVML's level
_PATHS = "one board, one PCIe switch, PCIe switches, a PCIe host bridge, one NUMA node, NUMA nodes"
_BETWEEN = {10 * number: path for number, path in enumerate(_PATHS.split(", "))}
_NO_PEERS = (
    "NCCL copies through host memory; see nvidia-smi topo -p2p r, and switch PCIe's ACS off on bare metal"
)


def driver() -> Iterator[Observation]:
    """Check NVIDIA's driver, its GPUs, and the links between GPUs, by the management library NVML."""
    try:
        with Nvml() as library:
            version, cuda = map(
                library.read, ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion")
            )
            newest = f", CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
            yield Observation("NVIDIA driver", "ok", f"{version or 'of unknown version'}{newest}")
            gpus = library.gpus()
            if not gpus:
                yield Observation("GPUs", "missing", "the driver sees none", "needed for GPUs alone")
            for index, gpu in enumerate(gpus):
                yield _gpu(library, index, gpu)
            for index in range(len(gpus)):
                yield from _peers(library, index, gpus)
    except NvmlProblem as problem:
        yield Observation("NVIDIA driver", "missing", problem.what, f"for GPUs: {problem.remedy}")


def _gpu(library: Nvml, index: int, gpu: Any) -> Observation:
    names = ("Name", "UUID", "MemoryInfo", "CudaComputeCapability")
    try:
        name, uuid, memory, capability = (library.read(f"nvmlDeviceGet{each}", gpu) for each in names)
        links = sum(bool(library.read("nvmlDeviceGetNvLinkState", gpu, link)) for link in range(_LINKS))
    except NvmlProblem as problem:
        return Observation(f"GPU {index}", "missing", problem.what, problem.remedy)
    parts = [name or "of unknown name", uuid]
    if memory is not None:
        parts.append(f"{memory.total / GIB:.1f} GiB, {memory.used / GIB:.1f} GiB in use")
    if capability is not None:
        parts.append(f"compute capability {capability[0]}.{capability[1]}")
    parts.append(f"{links} NVLinks active" if links else "no NVLink")
    return Observation(f"GPU {index}", "ok", ", ".join(filter(None, parts)))


def _peers(library: Nvml, index: int, gpus: list[Any]) -> Iterator[Observation]:
    """One observation on the connections of a GPU to each other GPU; none if there is only one GPU."""
    joined: dict[str, list[int]] = {}
    for other, peer in enumerate(gpus):
        if other != index:
            joined.setdefault(_path(library, gpus[index], peer), []).append(other)
    if not joined:
        return
    text = "; ".join(f"GPU {', '.join(map(str, others))}: {path}" for path, others in joined.items())
    blocked = any("no peer access" in path for path in joined)
    yield Observation.judged(f"peers of GPU {index}", not blocked, text, _NO_PEERS)


def _path(library: Nvml, gpu: Any, peer: Any) -> str:
    def possible(kind: str) -> bool:
        number = library.constant(kind)
        # a tuple in nvidia-ml-py, by a stray comma
        number = number[0] if isinstance(number, tuple) else number
        status = library.read("nvmlDeviceGetP2PStatus", gpu, peer, number)
        return bool(status == library.constant("NVML_P2P_STATUS_OK"))

    if possible("NVML_P2P_CAPS_INDEX_NVLINK"):
        return "peer access over NVLink"
    level = library.read("nvmlDeviceGetTopologyCommonAncestor", gpu, peer)
    across = f"across {_BETWEEN.get(level, 'an unknown path')}"
    return f"{'peer access' if possible('NVML_P2P_CAPS_INDEX_READ') else 'no peer access'} {across}"


def cuda() -> Iterator[Observation]:
    """Check torch on the GPUs: a matmul on each GPU, and a sum by NCCL on one rank."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if torch.version.cuda is None:
        remedy = "with NVIDIA GPUs: install a CUDA build of torch, see https://pytorch.org"
        yield Observation("CUDA in torch", "missing", "this is a CPU build of torch", remedy)
        return
    if not torch.cuda.is_available():
        remedy = f"the driver must allow CUDA {torch.version.cuda}; in a container, pass the GPUs on"
        yield Observation("CUDA in torch", "missing", f"torch sees no GPU{limited}", remedy)
        return
    count = torch.cuda.device_count()
    yield Observation("CUDA in torch", "ok", f"runtime {torch.version.cuda}, {count} GPUs{limited}")
    for index in range(count):
        yield _matmul(index)
    if not torch.distributed.is_nccl_available():
        yield Observation("NCCL", "missing", "not in this build of torch", "install a CUDA build for Linux")
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))
    store = torch.distributed.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(1, device="cuda:0"))
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    yield Observation("NCCL", "ok", f"{version}, one rank sums")


def _matmul(index: int) -> Observation:
    import torch

    subject, device = f"torch on GPU {index}", f"cuda:{index}"
    major, minor = torch.cuda.get_device_capability(index)
    built = torch.cuda.get_arch_list()
    try:
        ones = torch.ones(64, 64, device=device)
        right = bool((ones @ ones == 64).all())
    except RuntimeError as error:
        what = f"sm_{major}{minor}, torch is built for {', '.join(built)}: {str(error).splitlines()[0]}"
        return Observation(subject, "missing", what, "a build of torch for this GPU, or free its memory")
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    text = f"{name}, sm_{major}{minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    text += "" if right else "; a matmul is wrong"
    return Observation.judged(subject, right, text, "the GPU is broken: see dmesg", "missing")


_RANKS = 2
#: the request for an interface's address, and its place in the answer; Linux
_SIOCGIFADDR, _ADDRESS = 0x8915, slice(20, 24)


def virtual_ranks() -> Iterator[Observation]:
    """Check a training step of one of two virtual ranks, on fake tensors."""
    begin = time.perf_counter()
    outcome = measure.VirtualEngine().measure(_cell("virtual"))
    took = time.perf_counter() - begin
    works = outcome.status == "ok"
    text = f"{outcome.status}: {outcome.reason}"
    if works:
        text = f"a step of {_cell('virtual').model} in {took:.1f} s, peak {outcome.peak_memory_bytes:,} B"
    again = "spbench verify --strategy ring_self_attention, and report it"
    yield Observation.judged("virtual ranks", works, text, again, "missing", True)


def real_ranks() -> Iterator[Observation]:
    """Check that two processes, started like by the engine "distributed", form a Gloo group and sum in it."""
    begin = time.perf_counter()
    outcome = measure.launch(_cell("distributed"), _meet)
    took = time.perf_counter() - begin
    meeting = max(seconds for seconds, _ in outcome.values())
    total = sum(range(1, _RANKS + 1))
    if any(result != total for _, result in outcome.values()):
        again = "set GLOO_SOCKET_IFNAME to the interface to use"
        yield Observation("Gloo ranks", "missing", "a sum over two ranks is wrong", again, is_needed=True)
        return
    text = f"{_RANKS} ranks started in {took:.1f} s, a group in {meeting * 1e3:.0f} ms"
    name, address = gloo_interface()
    text += f", through {name} ({address})" if address else f", through {name}"
    others = [other for other, at in _interfaces().items() if not at.startswith("127.")]
    remedy = ""
    if others and address.startswith("127."):
        reach = f"as {name} reaches this machine alone"
        remedy = f"for several nodes: export GLOO_SOCKET_IFNAME={others[0]}, {reach}"
    yield Observation("Gloo ranks", "ok", text, remedy)


def _cell(engine: str) -> Cell:
    from spbench.bench.cell import Cell, Sizes

    return Cell(
        model="bert-tiny",
        strategy="ring_self_attention",
        sizes=Sizes(sp=_RANKS),
        batch=2,
        seq_len=16,
        engine=engine,
    )


def _meet(mesh: DeviceMesh, cell: Cell) -> tuple[float, int]:
    """(seconds to make a Gloo group of all ranks and sum in it, the sum of rank + 1 over all ranks)."""
    import torch

    torch.distributed.barrier()
    begin = time.perf_counter()
    group = torch.distributed.new_group(backend="gloo")
    value = torch.tensor(torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(value, group=group)
    return time.perf_counter() - begin, int(value)


def gloo_interface() -> tuple[str, str]:
    """The network interface that Gloo uses in this process and its address ("" if that is unknown).

    Torch chooses the interface that GLOO_SOCKET_IFNAME names, or else that of the host name's address if the
    address can be used, or else the loopback.
    """
    addresses = _interfaces()
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named, addresses.get(named, "")
    try:
        own = socket.gethostbyname(socket.gethostname())
        with socket.socket() as trial:
            trial.bind((own, 0))
    except OSError:
        own = "127.0.0.1"
    return next((name for name, address in addresses.items() if address == own), "the host name"), own


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            addresses[name] = socket.inet_ntoa(answer[_ADDRESS])
    return addresses
