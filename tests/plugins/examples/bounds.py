"""Answers of the kind "at most this many bytes": a number that a paper only says is not exceeded."""

import spbench


class Bound(spbench.Answer):
    """A published bound, and the peak memory of one cell beside it."""

    name = "bounds"

    claim: str
    published: spbench.PublishedPlace
    cell: spbench.Selector

    def numbers(self, folder):
        return [self.published.number(self.claim, "bound", folder)]

    def selected(self, declared):
        return self.cell.select(declared)

    def check(self, declared, folder):
        for message in self.cell.unclear(declared):
            yield ["cell"], message

    def compare(self, results):
        (bound,) = self.numbers(results.folder)
        for cell in self.selected(results.cells):
            peak = results.rows[cell.key]["measurement"]["peak_memory_bytes"]
            yield spbench.Comparison(
                claim=self.claim,
                published=bound.value,
                reproduced=peak,
                relative_error=None,
                role=results.role(self.claim, bound, "peak_memory_bytes", [cell]),
                note="exceeded" if peak > bound.value else "within",
                variant=cell.variant,
                numerator=cell.key,
                denominator="",
                source=bound.source,
            )
