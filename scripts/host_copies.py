"""The seconds of copies between a GPU and the host, by kind of host memory, and of copies within the host.

    python scripts/host_copies.py FOLDER [--seconds S] [--largest BYTES] [--device cpu]

Writes host_copies.csv, a line for each copy. ``memory`` is "pinned"; "new", pageable memory that is allocated
for each copy, so that the copy faults its pages in as ``tensor.to("cpu")`` does; or "again", pageable memory
that is used again. Lines with the device "host" are copies within the host, by one process or by eight at
once, with one thread each, to pages that are advised to be huge ("new, huge") or small ("new, small"), or
have the system's setting ("new"). ``setting`` is that setting of transparent huge pages. Seconds are the
median over copies of all processes, with the least and the most. After S seconds (60) no further line begins.
"""

import argparse
import mmap
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import in_a_line, parsed, parser_of, table
from torch import Tensor

SIZES = tuple(2**n for n in (26, 28, 30, 32))
PROCESSES, COPIES = (1, 8), 5
#: the most bytes of a copy within the host, because eight processes have a source and a target each
LARGEST_OF_HOST = 2**30
COLUMNS = (
    *("device", "direction", "memory", "processes", "bytes", "seconds", "least_s", "most_s", "bytes_per_s"),
    *("setting", "error"),
)
ADVICE = {"new, huge": mmap.MADV_HUGEPAGE, "new, small": mmap.MADV_NOHUGEPAGE}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages() -> str:
    """The system's setting of transparent huge pages: the word in brackets in the system's file."""
    text = HUGE_PAGES.read_text(encoding="utf-8") if HUGE_PAGES.exists() else "[unknown]"
    return text.partition("[")[2].partition("]")[0]


def empty(memory: str, nbytes: int) -> Tensor:
    """Host memory of ``nbytes``, as a tensor of bytes; its pages do not exist yet unless it is pinned."""
    if memory in ADVICE:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(ADVICE[memory])
        return torch.frombuffer(pages, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=memory == "pinned")


def timed(copy: Callable[[], Any], wait: Callable[[], None]) -> float:
    wait()
    begin = time.perf_counter()
    kept = copy()  # a tensor that the copy has allocated is freed after the clock is read
    wait()
    seconds = time.perf_counter() - begin
    del kept
    return seconds


def device_copies(device: str, nbytes: int) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """The copies between device and host, each as (direction, kind of memory, function that copies)."""
    of_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
    yield "to the host", "new", lambda: of_device.to("cpu", copy=True)
    for memory in ("again", "pinned"):
        of_host = empty(memory if device == "cuda" else "again", nbytes).fill_(1)
        yield "to the host", memory, partial(of_host.copy_, of_device)
        yield "to the device", memory, partial(of_device.copy_, of_host)


def own_copies(memory: str, nbytes: int, start: Any = None) -> list[float]:
    """The seconds of copies within the host by one thread of this process; ``start``: a barrier before
    each."""
    torch.set_num_threads(1)
    source, again = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)

    def copy() -> Tensor:
        target = again if memory == "again" else empty(memory, nbytes)
        return target.copy_(source)

    wait = (lambda: None) if start is None else start.wait
    samples: list[float] = []
    for _ in range(COPIES):
        wait()
        samples.append(timed(copy, lambda: None))
    return samples


def _process(memory: str, nbytes: int, start: Any, results: Any) -> None:
    results.put(own_copies(memory, nbytes, start))


def by_processes(count: int, memory: str, nbytes: int) -> list[float]:
    """The seconds of all copies of ``count`` processes that copy at the same time."""
    if count == 1:
        return own_copies(memory, nbytes)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(count, timeout=30), context.Queue()
    processes = [
        context.Process(target=_process, args=(memory, nbytes, start, results)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        samples = [seconds for _ in processes for seconds in results.get(timeout=60)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return samples


def lines(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the file without their numbers; ``samples`` is the function that measures the seconds."""
    sizes = [n for n in SIZES if n <= asked.largest]
    wait = torch.cuda.synchronize if asked.device == "cuda" else lambda: None
    for nbytes in sizes:
        for direction, memory, copy in device_copies(asked.device, nbytes):
            yield {
                "device": asked.device, "direction": direction, "memory": memory, "processes": 1,
                "bytes": nbytes, "samples": lambda copy=copy: [timed(copy, wait) for _ in range(COPIES)],
            }  # fmt: skip
    for nbytes in (n for n in sizes[::2] if n <= LARGEST_OF_HOST):
        for count in PROCESSES:
            for memory in ("new", *ADVICE, "again"):
                yield {
                    "device": "host", "direction": "host to host", "memory": memory, "processes": count,
                    "bytes": nbytes, "samples": partial(by_processes, count, memory, nbytes),
                }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, 60)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    if (asked := parsed(parser)) is None:
        return 2
    end, setting = time.monotonic() + asked.seconds, huge_pages()
    with table(asked.folder / "host_copies.csv", COLUMNS) as add:
        for line in lines(asked):
            if time.monotonic() > end:
                break
            measure = line.pop("samples")
            try:
                samples = measure()
                seconds = statistics.median(samples)
                line |= {"seconds": f"{seconds:.4g}", "least_s": f"{min(samples):.4g}"}
                line |= {"most_s": f"{max(samples):.4g}", "bytes_per_s": f"{line['bytes'] / seconds:.4g}"}
            except Exception as error:  # no room, or a process that ended
                line["error"] = in_a_line(error)
            add(line | {"setting": setting})
    return 0


if __name__ == "__main__":
    sys.exit(main())
